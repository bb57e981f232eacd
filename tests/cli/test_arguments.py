import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.cli.arguments import parse_overrides
from holdfast.config.run import all_keys
from holdfast.errors import ConfigError


def test_no_arguments_give_no_recipe_and_no_overrides():
    assert parse_overrides([]) == (None, {})


def test_an_argument_without_equals_is_the_recipe():
    assert parse_overrides(["recall", "seed=1"]) == ("recall", {"seed": "1"})
    assert parse_overrides(["seed=1", "recall"]) == ("recall", {"seed": "1"})


@given(
    st.dictionaries(
        st.sampled_from(sorted(all_keys())),
        st.text(min_size=1).filter(lambda value: value.strip()),
        max_size=6,
    )
)
def test_values_are_returned_unchanged(keys):
    assert parse_overrides([f"{key}={value}" for key, value in keys.items()]) == (None, keys)


def test_values_may_contain_equals_signs():
    assert parse_overrides(["runs_dir=/tmp/a=b"]) == (None, {"runs_dir": "/tmp/a=b"})


@pytest.mark.parametrize(
    ("arg", "key", "value"),
    [
        ("+seed=3", "seed", "3"),
        ("++trainer.batch_size=1e3", "trainer.batch_size", "1e3"),
    ],
)
def test_leading_plus_signs_are_stripped(arg, key, value):
    assert parse_overrides([arg]) == (None, {key: value})


def test_aliases_and_unknown_keys_are_left_to_the_config():
    args = ["world=recall", "py_agent=fast.py", "agent=x", "no.such=key"]
    keys = {"world": "recall", "py_agent": "fast.py", "agent": "x", "no.such": "key"}
    assert parse_overrides(args) == (None, keys)


@pytest.mark.parametrize("arg", ["seed=", "=1", "=", "", "+=1"])
def test_incomplete_overrides_are_refused(arg):
    with pytest.raises(ConfigError) as caught:
        parse_overrides(["recall", arg])
    assert str(caught.value) == f"{arg!r} is not key=value; write for example seed=1."


@pytest.mark.parametrize("arg", ["--fast", "-x", "--seed", "--seed=1", "-"])
def test_options_are_refused(arg):
    with pytest.raises(ConfigError, match=rf"There is no option '{arg}'; write keys as key=value"):
        parse_overrides([arg])


def test_a_misspelt_option_is_suggested():
    with pytest.raises(ConfigError, match=r"There is no option '--rsume'; did you mean --resume\?"):
        parse_overrides(["--rsume"])


def test_a_second_recipe_is_refused():
    with pytest.raises(ConfigError, match="'other' is neither key=value nor the recipe, which is 'recall'"):
        parse_overrides(["recall", "other"])


@pytest.mark.parametrize("duplicate", ["seed=2", "seed=1", "+seed=2"])
def test_duplicate_keys_are_refused(duplicate):
    value = duplicate[-1]
    with pytest.raises(ConfigError, match=rf"seed is given twice, as 1 and as {value}; keep one"):
        parse_overrides(["seed=1", "world=recall", duplicate])
