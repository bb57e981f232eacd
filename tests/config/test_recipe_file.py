"""Recipe files: read as the command line is, written and read back."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.cli import main
from holdfast.config.recipe_file import read_recipe_file, write_recipe_file
from holdfast.config.run import override
from holdfast.errors import ConfigError
from holdfast.recipes import find_recipe

TEXT = """
recipe: tmaze
trainer.optimizer: {learning_rate: 1e-3}
trainer:
  eval_episodes: 5_000
  ppo.gamma: 0.9
wandb: off
policy: {memory: gru, hidden_size: none}
schedule.trainer.ppo.ent_coef: linear:0.001
"""


@pytest.fixture
def file(tmp_path):
    def write(text):
        path = tmp_path / "mine.yaml"
        path.write_text(text)
        return str(path)

    return write


def test_keys_may_be_dotted_or_nested_and_values_are_as_typed(file):
    keys = {
        "trainer.optimizer.learning_rate": "1e-3",
        "trainer.eval_episodes": "5_000",
        "trainer.ppo.gamma": "0.9",
        "wandb": "off",
        "policy.memory": "gru",
        "policy.hidden_size": "none",
        "schedule.trainer.ppo.ent_coef": "linear:0.001",
    }
    assert find_recipe(file(TEXT)) == override(find_recipe("tmaze"), keys)


def test_without_a_recipe_it_is_that_of_the_world(file):
    assert find_recipe(file("world: {name: parity, length: 6}")) == override(find_recipe("parity"), {"world.length": 6})
    assert find_recipe(file("")) == find_recipe("recall")


def test_arguments_of_an_environment_stay_yaml(file):
    config = find_recipe(
        file("world:\n  name: gym:CartPole-v1\n  options:\n    render_mode: null\n    size: {a: [1]}\n")
    )
    assert config.world.options == {"render_mode": None, "size": {"a": [1]}}


def test_lists_are_words_with_commas(file):
    assert find_recipe(file("world: gym:CartPole-v1\nworld.keep: [0, 2]\n")).world.keep == (0, 2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("trainer: {optimzer.learning_rate: 1}", "did you mean trainer.optimizer.learning_rate?"),
        ("trainer.ppo.gamma: 2", "trainer.ppo.gamma=2: input should be less than or equal to 1."),
        ("recipe: recal", "did you mean recall?"),
        ("recipe: other.yaml", "is a file too"),
        ("seed: 1\nseed: 2", "line 2: seed is given twice"),
        ("- seed", "is not a recipe"),
        ("a: [", "is not YAML"),
        ("trainer: 5", "it is a branch"),
        ("seed: !!python/object/apply:os.system ['true']", "seed=true"),
    ],
)
def test_errors_name_the_file_on_one_line(text, message, file, capsys):
    assert main(["train", file(text)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "mine.yaml" in error
    assert error.count("\n") == 1


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"There is no file .*x\.yaml"):
        find_recipe(str(tmp_path / "x.yaml"))


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    return tmp_path_factory.mktemp("recipes") / "x.yaml"


@settings(max_examples=50)
@given(
    st.dictionaries(
        st.from_regex(r"[a-z][a-z_.]{0,9}", fullmatch=True),
        st.text(st.characters(codec="ascii", categories=["L", "N", "P", "S"]), min_size=1),
        max_size=4,
    )
)
def test_what_is_written_is_read_back(written, keys):
    path = written
    keys = {f"k.{key.strip('.')}": value for key, value in keys.items()}
    write_recipe_file(path, "recall", keys, "a comment\nof two lines")
    assert read_recipe_file(path) == ("recall", keys)


def test_help_shows_a_recipe_file(file, capsys):
    assert main(["train", "--help", file(TEXT)]) == 0
    assert "mine.yaml" in capsys.readouterr().out
