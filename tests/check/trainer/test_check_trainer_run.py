"""The laws of a trainer: a right one holds all, and each way to break it is caught and named."""

import pytest
import torch
from torch import nn

from helpers import mini_trainer
from helpers.broken_trainers import BROKEN, NEXT_TRUNCATED, SOURCE, broken_trainer, changed_trainer
from holdfast.check.trainer import check_trainer
from holdfast.errors import ConfigError, ContractError
from holdfast.report.check_report import as_text

pytestmark = pytest.mark.usefixtures("annotations_asleep")
ONLY = {
    "clear": "never clears",
    "carry": "update writes the state",
    "pure": "value call writes the state",
    "replay": "other gates in the update",
    "advantage": "advantages off by one",
    "bootstrap": "truncation as termination",
    "once": "trains a step twice",
    "weights": "learns",
}
"""For each law a trainer that breaks this law alone; a wrong entry state changes what is replayed, too."""

VARIANTS = {
    *("clears on truncated only", "flags of the neighbouring environment", "clears before each call"),
    *("state of the neighbouring environment when acting", "entry state of the rollout before", "rewards off by one"),
    *("time and environments swapped in the update", "other heads in the update", "both flags bootstrapped"),
    *("value call ignores starts", "bootstrap 0 at the rollout's end", "termination bootstrapped"),
}
"""Variants of others, which `make slow` runs."""


def broken_laws(laws):
    return [name for name, law in laws.items() if not law.ok]


def test_a_right_trainer_holds_all_laws_and_all_are_measured():
    laws = check_trainer(mini_trainer.train)
    assert laws.ok, laws
    assert [law.name for law in laws.values() if law.worst.path == "n/a"] == []
    assert laws.notes == ("8 environments, 24 steps, 2 updates; 27 episodes ended, 10 by truncation alone",)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in VARIANTS else name for name in BROKEN]
)
def test_a_wrong_trainer_is_caught_and_named(name):
    _, law, words = BROKEN[name]
    laws = check_trainer(broken_trainer(name))
    assert not laws.ok
    assert words in laws[law].finding
    if name in ONLY.values():
        assert broken_laws(laws) == [law]


def test_findings_name_environment_and_step():
    finding = check_trainer(broken_trainer("never clears"))["clear"].finding
    assert "env 1, step 1: it is the last state of the episode before, must be the initial state" in finding


def test_what_was_not_measured_is_in_the_notes():
    laws = check_trainer(broken_trainer("learns"))
    assert "advantage: nothing, since weights changed: not measured, set the learning rate to 0" in laws.notes
    assert as_text(laws).count("✓") == 0


def test_gru_cell_without_batch_of_time_holds():
    source = (
        ("nn.LSTM(12, 10)", "nn.GRUCell(12, 10)"),
        ("y, state = self.lstm(x_t[None], state)", "y = self.lstm(x_t, state[0][0]); state = (y[None],)"),
        ("outputs.append(y[0])", "outputs.append(y)"),
        ("(torch.zeros(1, B, 10), torch.zeros(1, B, 10))", "(torch.zeros(1, B, 10),)"),
    )
    laws = check_trainer(edited(source))
    assert laws.ok, laws


def edited(lines):
    text = SOURCE
    for old, new in lines:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    namespace = {"__name__": "edited"}
    exec(compile(text, "<edited>", "exec"), namespace)
    return namespace["train"]


def test_dropout_is_named():
    lines = (("nn.Sequential(nn.Linear(8, 12), nn.Tanh())", "nn.Sequential(nn.Linear(8, 12), nn.Dropout(0.5))"),)
    laws = check_trainer(edited(lines))
    assert not laws["replay"].ok
    assert "Dropout drops inputs at random (p=0.5); train without dropout" in laws.notes


def idle(envs):
    envs.reset()


def no_memory(envs):
    net = nn.Linear(8, 3)
    obs, _ = envs.reset()
    net(torch.tensor(obs))
    envs.step([0] * 8)


def endless(envs):
    envs.reset()
    while True:
        envs.step([0] * 8)


def raises(envs):
    raise ValueError("three\nlines")


@pytest.mark.parametrize(
    ("train", "error", "words"),
    [
        (idle, ContractError, "took no step"),
        (no_memory, ContractError, "No recurrent module was called"),
        (endless, ContractError, "4096 steps"),
        (raises, ContractError, r"The trainer raised ValueError: three lines \(test_check_trainer_run.py:\d+\)"),
        (lambda: None, ConfigError, "takes no environments"),
        (lambda envs: envs.step([0] * 8), ContractError, "step before reset"),
        (lambda envs: (envs.reset(), envs.step([0])), ContractError, "1 actions for 8 environments"),
    ],
)
def test_a_trainer_that_cannot_be_measured_is_an_error_of_one_line(train, error, words):
    with pytest.raises(error, match=words) as caught:
        check_trainer(train)
    assert "\n" not in str(caught.value)


def test_an_unknown_interface_is_an_error():
    with pytest.raises(ConfigError, match="interface 'jax' is not known; choose one of gym, sb3, rsl_rl"):
        check_trainer(mini_trainer.train, interface="jax")


def test_gamma_and_lambda_can_be_named():
    assert check_trainer(broken_trainer("another lambda"), lam=0.9).ok


@pytest.mark.parametrize(("where", "ok"), [("truncated & ~terminated", True), ("truncated", False)])
def test_without_final_observations_the_value_before_may_stand_for_theirs_but_not_at_terminations(where, ok):
    line = f"                next_values[t] = torch.where({where}, values[t], 0.0)\n"
    laws = check_trainer(changed_trainer(where, [(NEXT_TRUNCATED, line)]), hands_over_final=False)
    assert broken_laws(laws) == ([] if ok else ["bootstrap"])
    assert ok or "values after terminations" in laws["bootstrap"].finding
