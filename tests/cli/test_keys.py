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
        ("+seed=3", "seed", "3"),
        ("++trainer.batch_size=1e3", "trainer.batch_size", "1e3"),
    ],
)
def test_a_plus_before_a_key_is_taken_off(word, key, value):
    assert parse_words([word]) == (None, {key: value})


def test_words_are_split_and_left_for_the_config_to_understand():
    words = ["world=recall", "py_agent=fast.py", "agent=x", "no.such=key"]
    keys = {"world": "recall", "py_agent": "fast.py", "agent": "x", "no.such": "key"}
    assert parse_words(words) == (None, keys)


@pytest.mark.parametrize("word", ["seed=", "=1", "=", "", "+=1"])
def test_half_a_key_is_refused_by_an_example(word):
    with pytest.raises(ConfigError) as caught:
        parse_words(["recall", word])
    assert str(caught.value) == f"{word!r} is not key=value; write for example seed=1."


@pytest.mark.parametrize("word", ["--fast", "-x", "--seed", "--seed=1", "-"])
def test_an_option_is_refused_and_told_how_keys_look(word):
    with pytest.raises(ConfigError, match=rf"There is no option '{word}'; keys are given as key=value"):
        parse_words([word])


def test_a_second_recipe_is_refused():
    with pytest.raises(ConfigError, match="'other' is neither key=value nor the one recipe"):
        parse_words(["recall", "other"])


@pytest.mark.parametrize("again", ["seed=2", "seed=1", "+seed=2"])
def test_a_key_given_twice_is_refused_with_both_values(again):
    value = again[-1]
    with pytest.raises(ConfigError, match=rf"seed is given twice, as 1 and as {value}; which one is meant\?"):
        parse_words(["seed=1", "world=recall", again])
