"""Bugs of updates and of returned states: each is named, with the part or the size that is known."""

import pytest
import torch
from torch import nn

from holdfast.check.adapters import Functions, RawModule
from holdfast.check.context import prepare
from holdfast.check.diagnose import CUT, Diagnosis, diagnose
from holdfast.check.laws import measure

pytestmark = pytest.mark.usefixtures("annotations_asleep")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.core, self.actor, self.critic = nn.GRUCell(5, 12), nn.Linear(12, 3), nn.Linear(12, 1)


def initial(net, rows):
    return torch.zeros(rows, 12, dtype=net.actor.weight.dtype)


def act(net, obs, state, first):
    state = net.core(obs, torch.where(first[:, None], 0.0, state))
    return (net.actor(state), net.critic(state)[:, 0]), state


def replay_with(
    obs=lambda x: x, entry=lambda s: s, first=lambda f: f, values=lambda v: v, between=lambda t, state, entry: state
):
    def replay(net, obs_BT, actions, state, first_BT):
        obs_BT, first_BT, outputs, start = obs(obs_BT), first(first_BT), [], entry(state)
        state = start
        for t in range(obs_BT.shape[1]):
            output, state = act(net, obs_BT[:, t], between(t, state, start), first_BT[:, t])
            outputs.append(output)
        logits, value = (torch.stack(column, 1) for column in zip(*outputs, strict=True))
        return logits, values(value)

    return replay


def later(x_BT):
    return torch.cat([x_BT[:, :1], x_BT[:, 1:] | x_BT[:, :-1]], 1)


def odd_steps_without(first_BT):
    return first_BT & (torch.arange(first_BT.shape[1]) % 2 == 0)


EVEN = torch.arange(8) % 2 == 0
UPDATES = {
    "observations late": ({"obs": lambda x: x.roll(1, 1)}, "observations of a segment are shifted", ""),
    "observations of others": ({"obs": lambda x: x.roll(1, 0)}, "observations of other rows", ""),
    "values early": ({"values": lambda v: v.roll(-1, 1)}, "outputs of a segment are shifted", ""),
    "values of others": ({"values": lambda v: v.roll(1, 0)}, "outputs of other rows", ""),
    "cleared twice": ({"first": later}, "state reset again one step later", ""),
    "entry scaled": ({"entry": lambda s: 0.7 * s}, "entry state is scaled", "by 0.7"),
    "entry to 2 decimals": ({"entry": lambda s: (s * 100).round() / 100}, "entry state is rounded", "to 2 decimals"),
    "entry of some agents": (
        {"entry": lambda s: s * EVEN.repeat(len(s))[: len(s), None]},
        "replay starts from zeros",
        "for agents 1, 3, 5, 7",
    ),
    "chunks from the entry": (
        {"between": lambda t, state, entry: entry if t % 3 == 0 else state},
        "segments are read in chunks of 3 from the entry state",
        "",
    ),
    "odd flags ignored": ({"first": odd_steps_without}, "some of a segment's flags are ignored", "1, 3, 5, 7"),
}


def diagnosis_of(adapter):
    context = prepare(adapter)
    return Diagnosis(context)


def functions(**changes):
    torch.manual_seed(0)
    return Functions(Net(), initial=initial, act=act, replay=replay_with(**changes), obs=5)


@pytest.mark.parametrize("name", UPDATES)
def test_bug_of_updates_is_named(name):
    changes, pattern, detail = UPDATES[name]
    diagnosis = diagnosis_of(functions(**changes))
    assert diagnosis.rollout_bug is None
    assert diagnosis.replay_bug.startswith(pattern)
    assert detail in diagnosis.details.get(diagnosis.replay_bug, "")


def test_right_updates_have_no_bug():
    assert diagnosis_of(functions()).replay_bug is None


class Returns(nn.Module):
    """An LSTM of two layers that returns its state changed."""

    def __init__(self, change, read=lambda y: y):
        super().__init__()
        self.core, self.head, self.change, self.read = nn.LSTM(5, 6, 2), nn.Linear(6, 3), change, read

    def forward(self, x, state=None, first=None):
        state = (x.new_zeros(2, x.shape[1], 6),) * 2 if state is None else state
        outputs, entry = [], state
        for t in range(len(x)):
            mask = torch.ones(x.shape[1], 1) if first is None else (~first[t].bool())[:, None]
            y, after = self.core(x[t : t + 1], tuple(part * mask for part in state))
            outputs.append(y)
            entry, state = state, after
        return self.head(self.read(torch.cat(outputs))), self.change(state, entry)


RETURNED = {
    "layers swapped": (lambda s, e: tuple(p.flip(0) for p in s), "parts of the returned state are swapped"),
    "rows rolled": (lambda s, e: tuple(p.roll(1, 1) for p in s), "the returned state is of other rows"),
    "rounded": (lambda s, e: tuple((p * 1000).round() / 1000 for p in s), "the returned state is rounded"),
    "cell lost": (lambda s, e: (s[0], 0 * s[1]), "part of the returned state is lost"),
    "decays": (lambda s, e: tuple(0.9 * p for p in s), "the state of a segment is not"),
}


@pytest.mark.parametrize("name", RETURNED)
def test_bug_of_returned_states_is_named(name):
    change, pattern = RETURNED[name]
    torch.manual_seed(0)
    assert diagnosis_of(RawModule(Returns(change))).replay_bug.startswith(pattern)


def test_state_that_a_step_does_not_change_is_named():
    torch.manual_seed(0)
    diagnosis = diagnosis_of(RawModule(Returns(lambda state, before: before)))
    assert (diagnosis.rollout_bug or diagnosis.replay_bug) == "the returned state is the one before the last step"


def test_outputs_that_depend_on_a_segments_length_are_named():
    torch.manual_seed(0)
    policy = Returns(lambda state, before: state, lambda y: y + 0.1 * y.cumsum(0))
    assert diagnosis_of(RawModule(policy)).replay_bug == "outputs of a segment are computed in another way"


def test_cut_graph_of_a_policy_that_never_clears_is_named_with_the_call():
    class Detaches(nn.GRU):
        def forward(self, x, state=None, first=None):
            outputs = []
            for step in x:
                y, state = super().forward(step[None], state)
                outputs.append(y)
                state = 0.5 * state + 0.5 * state.detach()
            return torch.cat(outputs), state

    torch.manual_seed(0)
    context = prepare(RawModule(Detaches(5, 6)))
    cut, clear = diagnose(context, list(measure(context, ["cut", "clear"])))
    assert (cut.pattern.name, cut.pattern.detail) == (CUT, "detach() is called in the segment")
    assert clear.pattern.name == "state never reset"
