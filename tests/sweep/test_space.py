"""The space of a sweep: its grammar, its types, and errors before the first trial."""

import math
import string

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from holdfast.config.run import lookup, override
from holdfast.errors import ConfigError
from holdfast.recipes import find_recipe
from holdfast.sweep.space import Dimension, parse_space

RECALL = find_recipe("recall")
RATE = "trainer.optimizer.learning_rate"
RATES = st.floats(1e-6, 999)
WORDS = st.text(string.ascii_letters + string.digits + "._-+", min_size=1)


@settings(max_examples=50)
@given(RATES, RATES, st.booleans())
def test_a_range_of_a_number_keeps_its_ends(one, other, log):
    low, high = sorted((one, other))
    assume(low < high)
    (dimension,) = parse_space([f"{RATE}={'log:' if log else ''}{low!r}..{high!r}"], RECALL)
    assert (dimension.key, dimension.low, dimension.high, dimension.log) == (RATE, low, high, log)
    assert not dimension.is_integer
    assert list(dimension.values()) == [low, high]


@settings(max_examples=20)
@given(st.integers(1, 100), st.integers(1, 100))
def test_a_range_of_an_integer_key_is_of_integers(one, other):
    low, high = sorted((one, other))
    assume(low < high)
    (dimension,) = parse_space([f"trainer.update_epochs={low}..{high}"], RECALL)
    assert dimension.is_integer
    assert list(dimension.values()) == list(range(low, high + 1))


@given(st.lists(WORDS, min_size=2, max_size=5, unique=True))
def test_choices_stay_as_typed(words):
    # Any word is a name of a policy, as far as a config can tell.
    (dimension,) = parse_space([f"policy={','.join(words)}"], RECALL)
    assert dimension == Dimension("policy.name", ",".join(words), choices=tuple(words))


@given(st.text(max_size=30))
def test_text_that_is_no_space_is_refused(text):
    assume("=" not in text)
    with pytest.raises(ConfigError, match="write KEY=RANGE"):
        parse_space([text], RECALL)


@given(st.text("0123456789.,e-+:log ", max_size=12))
def test_any_range_is_parsed_or_refused_on_one_line(text):
    accepted = []
    try:
        accepted += parse_space([f"{RATE}={text}"], RECALL)
    except ConfigError as error:
        accepted.append(str(error))
    assert len(accepted) == 1
    assert "\n" not in str(accepted[0])


@pytest.mark.parametrize(
    ("text", "kind", "low"),
    [
        ("trainer.ppo.gamma=0..1", float, 0.0),
        ("trainer.update_epochs=1..1e1", int, 1),
        ("policy.hidden_size=log:8..64", int, 8),
        ("world.delay=2..6", int, 2),
        ("trainer.ppo.target_kl=0.01..0.1", float, 0.01),
    ],
)
def test_numbers_are_those_of_the_key(text, kind, low):
    (dimension,) = parse_space([text], RECALL)
    assert type(dimension.low) is kind
    assert dimension.low == low
    assert lookup(override(RECALL, {dimension.key: dimension.low}), dimension.key) == low


@pytest.mark.parametrize(
    ("space", "message"),
    [
        ([], "needs at least one key"),
        (["trainer.optimizer.learning_rat=1e-4..1e-2"], "did you mean trainer.optimizer.learning_rate?"),
        (["lr=1e-4..1e-2"], "did you mean trainer.optimizer.learning_rate?"),
        (["schedule.trainer.ppo.ent=linear:0,constant"], "did you mean"),
        ([RATE], "write KEY=RANGE"),
        ([f"{RATE}="], "write KEY=RANGE"),
        ([f"{RATE}=1e-3"], f"for a fixed value type {RATE}=1e-3 instead"),
        ([f"{RATE}=1e-2..1e-4"], "1e-2 is not below 1e-4"),
        ([f"{RATE}=1..1"], "1 is not below 1"),
        ([f"{RATE}=log:0..1e-2"], "lies above 0"),
        ([f"{RATE}=1e-4..nan"], "finite"),
        ([f"{RATE}=1e-4..x"], "write numbers"),
        ([f"{RATE}=1..2..3"], "write two numbers"),
        ([f"{RATE}=1e-4..2000"], "less than or equal to 1000"),
        (["trainer.update_epochs=1.5..3"], "give an integer"),
        (["trainer.update_epochs=0..3"], "greater than or equal to 1"),
        (["policy.kernel=torch,tritn"], "'auto', 'torch' or 'triton'"),
        (["policy.memory=lstm,"], "a choice is empty"),
        (["policy.memory=lstm,gru,lstm"], "there twice"),
        ([f"{RATE}=1e-4..1e-2", f"{RATE}=1e-4..1e-2"], "2 times"),
        (["seed=0..4"], "--seeds K"),
        (["run=a,b"], "names the sweep"),
        (["world=recall,tmaze"], "cannot be compared"),
        (["trainer.bptt_horizon=63..65"], "trainer.batch_size=4096 is not a multiple"),
        (["trainer.bptt_horizon=15..64"], "(valid are trainer.bptt_horizon=16,32,64)"),
    ],
)
def test_an_impossible_space_is_refused(space, message):
    with pytest.raises(ConfigError) as refused:
        parse_space(space, RECALL)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_values_that_do_not_go_together_are_named():
    space = ["trainer.batch_size=4096,8192", "trainer.minibatch_size=512,8192"]
    with pytest.raises(ConfigError, match=r"--space trainer.minibatch_size=512,8192: trainer.batch_size=4096"):
        parse_space(space, RECALL)


def test_of_many_combinations_each_value_is_checked():
    wide = [f"world.delay={','.join(map(str, range(1, 200)))}", "trainer.update_epochs=1..900"]
    assert math.prod(len(dimension.values()) for dimension in parse_space(wide, RECALL)) > 100_000
    with pytest.raises(ConfigError, match=r"trainer\.bptt_horizon"):
        parse_space([*wide, "trainer.bptt_horizon=16,32,48,64"], RECALL)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (f"{RATE}=log:1e-4..1e-2", 1e-3),
        (f"{RATE}=2e-3..1e-2", None),
        ("world.delay=4,8", "8"),
        ("world.delay=4,5", None),
    ],
)
def test_the_recipes_own_value_is_recognized(text, value):
    (dimension,) = parse_space([text], RECALL)
    assert dimension.value_in(RECALL) == value
