import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.cli.keys import parse_words
from holdfast.config import keys_of
from holdfast.errors import ConfigError


def test_no_words_mean_no_recipe_and_no_keys():
    assert parse_words([]) == (None, {})


def test_a_word_without_equals_is_the_recipe_wherever_it_stands():
    assert parse_words(["recall", "seed=1"]) == ("recall", {"seed": "1"})
    assert parse_words(["seed=1", "recall"]) == ("recall", {"seed": "1"})


@given(
    st.dictionaries(
        st.sampled_from(sorted(keys_of())),
        st.text(min_size=1).filter(lambda value: value.strip()),
        max_size=6,
    )
)
def test_every_key_comes_out_with_its_value_untouched(keys):
    assert parse_words([f"{key}={value}" for key, value in keys.items()]) == (None, keys)


def test_a_value_may_hold_equals_signs():
    assert parse_words(["runs_dir=/tmp/a=b"]) == (None, {"runs_dir": "/tmp/a=b"})


@pytest.mark.parametrize(
    ("word", "key", "value"),
    [
        ("world=recall", "world.name", "recall"),
        ("policy=fast", "policy.name", "fast"),
        ("py_agent=fast", "policy.name", "fast"),
        ("py_agent=fast.py", "policy.name", "fast"),
        ("policy=my.module:Policy", "policy.name", "my.module:Policy"),
        ("+seed=3", "seed", "3"),
        ("++trainer.batch_size=1e3", "trainer.batch_size", "1e3"),
    ],
)
def test_other_words_for_a_key_are_understood(word, key, value):
    assert parse_words([word]) == (None, {key: value})


@pytest.mark.parametrize("word", ["seed=", "=1", "="])
def test_half_a_key_is_refused_by_an_example(word):
    with pytest.raises(ConfigError, match=rf"'{word}' is not key=value; write for example seed=1"):
        parse_words([word])


@pytest.mark.parametrize("word", ["--fast", "-x", "--seed"])
def test_an_option_is_refused_and_told_how_keys_look(word):
    with pytest.raises(ConfigError, match=rf"There is no option '{word}'; keys are given as key=value"):
        parse_words([word])


def test_a_second_recipe_is_refused():
    with pytest.raises(ConfigError, match="'other' is neither key=value nor the one recipe"):
        parse_words(["recall", "other"])


def test_a_component_graph_is_refused_with_the_word_that_works():
    with pytest.raises(ConfigError, match="py_agent=fast is the policy as a class"):
        parse_words(["agent=fast"])
