"""Value syntax of the config: integers, ranges, intervals, lists, YAML; branches are frozen."""

import pytest
from pydantic import ValidationError
from test_run import BASE, error_message

import holdfast
from holdfast.config.base import (
    ConfigBase,
    first_error_message,
    parse_list,
    parse_name,
    parse_named_list,
    parse_yaml,
)
from holdfast.config.run import Config, override
from holdfast.errors import ConfigError


@pytest.mark.parametrize(
    ("word", "number"),
    [
        ("5000", 5000),
        ("5_000", 5000),
        ("1e6", 1_000_000),
        ("1E3", 1000),
        ("2.5e3", 2500),
        ("64.0", 64),
        ("+7", 7),
        (12, 12),
        (12.0, 12),
    ],
)
def test_parse_int_spellings(word, number):
    steps = override(BASE, {"trainer.total_timesteps": word}).trainer.total_timesteps
    assert steps == number
    assert type(steps) is int


def test_parse_int_keeps_every_digit():
    for seed in (9007199254740993, 2**63 - 1):
        assert override(BASE, {"seed": str(seed)}).seed == seed


@pytest.mark.parametrize("word", ["1.5", "1e-3", "inf", "nan", "-inf", "1e999"])
def test_parse_int_rejects_fractions(word):
    message = error_message({"trainer.total_timesteps": word})
    assert message == f"trainer.total_timesteps={word}: give an integer."


@pytest.mark.parametrize("word", ["many", "", "5 000", "5,000", "0x10", "_5", "1__0", "1e", "True"])
def test_parse_int_rejects_words(word):
    message = error_message({"trainer.total_timesteps": word})
    assert message == f"trainer.total_timesteps={word}: give an integer such as 5000, 5_000 or 1e6."


@pytest.mark.parametrize(
    ("word", "delay"), [("8", 8), ("4..24", (4, 24)), ("2..1e1", (2, 10)), ((3, 5), (3, 5)), ([3, 5], (3, 5))]
)
def test_int_or_range(word, delay):
    assert override(BASE, {"world.delay": word}).world.delay == delay


@pytest.mark.parametrize("word", ["4..", "..4", "4..x", "..", "a", "1.5", "1..2..3"])
def test_int_or_range_rejects_others(word):
    assert error_message({"world.delay": word}).startswith(f"world.delay={word}: give an integer")


@pytest.mark.parametrize("word", [-1, "-1", "9..2", "-3..4", (9, 2), 1_000_001, "4..1000001"])
def test_int_or_range_bounds(word):
    line = error_message({"world.delay": word})
    assert line == f"world.delay={word}: give a number from 0 to 1000000, or a range such as 4..24."


@pytest.mark.parametrize("word", ["none", "None", "null", None])
def test_none_unsets_an_optional_value(word):
    assert override(BASE, {"trainer.ppo.target_kl": word}).trainer.ppo.target_kl is None
    assert override(BASE, {"run": word}).run is None


def test_config_is_frozen():
    config = Config()
    for branch, name in ((config, "seed"), (config.world, "agents"), (config.trainer.ppo, "gamma")):
        with pytest.raises(ValidationError, match="frozen"):
            setattr(branch, name, 1)
    assert config == Config()


@pytest.mark.parametrize("value", ["second", "every:0", "every:x", "every"])
def test_misspelt_interval_is_an_error(value):
    with pytest.raises(ConfigError, match="every:"):
        holdfast.train("recall", {"trainer.check": value})


def test_parse_list_splits_at_commas():
    assert parse_list("a, b,c") == ["a", "b", "c"]
    assert parse_list("none") == []
    assert parse_list(["a,b"]) == ["a,b"]


def test_parse_yaml_reads_exponents_as_numbers():
    assert parse_yaml("1e3") == 1000.0
    assert parse_yaml("{size: [1, 2], rate: 2.5e-4}") == {"size": [1, 2], "rate": 2.5e-4}
    assert parse_yaml("None") is None
    assert parse_yaml(7) == 7
    with pytest.raises(ValueError, match="write it as YAML"):
        parse_yaml("[1, 2")
    assert parse_yaml("[&a {b: 1}, *a]") == [{"b": 1}, {"b": 1}]


def test_parse_yaml_refuses_what_would_not_fit_into_memory():
    with pytest.raises(ValueError, match="nested too deeply"):
        parse_yaml("[" * 5000)
    doubled = "".join(f", &a{number + 1} [*a{number}, *a{number}]" for number in range(20))
    for text in (f"[&a0 [1]{doubled}]", "&a [*a]", "&a {b: *a}", "{? &a [1, *a] : 2}"):
        with pytest.raises(ValueError, match="write it as YAML"):
            parse_yaml(text)


def test_parse_named_list_reads_names_and_quoted_values():
    text = "recall delay=4..24 weight=2 + 'gym:A b' env='x y'"
    assert parse_named_list(text, "a + b") == [
        ("recall", {"delay": "4..24", "weight": "2"}),
        ("gym:A b", {"env": "x y"}),
    ]
    for wrong, message in (
        ("a +  + b", "on both sides"),
        ("a key", "'key' is not key=value"),
        ("a key=", "'key=' is not"),
        ("a 'b", "cannot be read: no closing quotation"),
    ):
        with pytest.raises(ValueError, match=message):
            parse_named_list(wrong, "a + b")


@pytest.mark.parametrize("name", ["../up", "a/b", ".hidden", "two words", ""])
def test_parse_name_rejects_more_than_one_path_component(name):
    assert parse_name("run-1.b_2+c") == "run-1.b_2+c"
    assert parse_name(None) is None
    with pytest.raises(ValueError, match="a name is one word"):
        parse_name(name)


class Branch(ConfigBase):
    """A branch with a required and an optional key."""

    size: int
    rate: float = 0.5


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "x.size must be given."),
        ({"size": "many"}, "x.size=many: input should be a valid integer, unable to parse"),
        ({"size": 1, "rate": float("nan")}, "x.rate=nan: input should be a finite number."),
        ({"size": 1, "sice": 2}, "x.sice=2: extra inputs are not permitted."),
    ],
)
def test_first_error_message_names_the_key(values, message):
    with pytest.raises(ValidationError) as caught:
        Branch(**values)
    assert first_error_message(caught.value, "x.").startswith(message)


def test_first_error_message_cuts_long_values():
    with pytest.raises(ValidationError) as caught:
        Branch(size="x" * 1000)
    assert first_error_message(caught.value).startswith(f"size={'x' * 200}…: ")
