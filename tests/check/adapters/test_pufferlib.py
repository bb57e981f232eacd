"""The adapter of PufferLib-style policies."""

import pytest
import torch
from torch import nn

from helpers.foreign_policies import Agent, PufferStyle
from holdfast.check.adapters import Puffer
from holdfast.check.script import write_script
from holdfast.errors import ConfigError

pytestmark = pytest.mark.usefixtures("annotations_asleep")


def make_adapter(clears=True, trainer="stored"):
    torch.manual_seed(0)
    return Puffer(PufferStyle(clears), obs=5, actions=3, trainer=trainer)


def make_script(adapter, share_of_starts=0.2):
    options = {"share_of_starts": share_of_starts, "absences": False, "act": adapter.random_actions}
    return write_script(adapter.random_obs, 4, 16, **options)


def test_fits_policies_with_both_methods():
    assert Puffer.fits(PufferStyle(True))
    assert not Puffer.fits(Agent())
    assert not Puffer.fits(PufferStyle)


def test_initial_state_has_the_size_and_dtype_of_the_lstm():
    adapter = make_adapter()
    adapter.module.double()
    state = adapter.initial(3)
    assert {key: (leaf.shape, leaf.dtype) for key, leaf in state.items()} == {
        "lstm_h": ((3, 16), torch.float64),
        "lstm_c": ((3, 16), torch.float64),
    }
    adapter.module.core = nn.Identity()
    with pytest.raises(ConfigError, match=r"needs an nn\.LSTM; this one has none"):
        adapter.initial(3)


def test_observations_are_as_wide_as_the_first_layer():
    adapter = Puffer(PufferStyle(True))
    assert adapter.random_obs((2, 3), torch.Generator()).shape == (2, 3, 5)


def test_act_returns_a_new_state_and_resets_after_both_kinds_of_end():
    adapter = make_adapter()
    script = make_script(adapter)
    state = {key: torch.ones(4, 16) for key in ("lstm_h", "lstm_c")}
    step = script.at(3)
    step.terminated[:], step.truncated[:] = torch.tensor([[1, 0, 0, 0], [0, 1, 0, 0]]).bool()
    outputs, after = adapter.act(step, state)
    assert {name: leaf.shape for name, leaf in outputs.items()} == {"values": (4,), "logits": (4, 3)}
    assert state["lstm_h"].equal(torch.ones(4, 16))
    assert not after["lstm_h"].equal(state["lstm_h"])
    from_zeros = adapter.act(script.at(3).without_flags(), adapter.initial(4))[0]["logits"]
    assert torch.isclose(outputs["logits"], from_zeros).all(1).tolist() == [True, True, False, False]


def test_replay_from_stored_states_gives_the_rollout():
    adapter = make_adapter()
    outputs = adapter.rollout_and_replay(make_script(adapter))
    assert outputs.rollout.shape == (4, 16, 4)
    assert outputs.replay.allclose(outputs.rollout, atol=1e-6)


def test_pufferlib_trainer_zeroes_states_before_each_rollout():
    adapter = make_adapter(clears=False, trainer="pufferlib")
    script = make_script(adapter, share_of_starts=0.0)
    outputs = adapter.rollout_and_replay(script)
    assert outputs.replay.allclose(outputs.rollout, atol=1e-6)
    carried = make_adapter(clears=False).rollout_and_replay(script).rollout
    close = torch.isclose(carried, outputs.rollout, atol=1e-6).all(-1).all(0)
    assert close.tolist() == [True] * 4 + [False] * 12
