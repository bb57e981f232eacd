import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from handwritten import NewLSTMPolicy
from holdfast.errors import ContractError
from holdfast.keep.memories import fingerprint
from holdfast.keep.parity import some_seen
from holdfast.keep.playing import Playing
from holdfast.policies import make_policy
from small import SPEC, Small
from spaces_worlds import IMAGE_SPEC, TREE_SPEC

A = 4


def policy_of(kind=Small, seed=0, **options):
    torch.manual_seed(seed)
    policy = kind(SPEC, **options).eval()
    policy.bind(SPEC)
    return policy


def start(policy=None, agents=A, seed=0):
    policy = policy_of() if policy is None else policy
    return Playing(policy, fingerprint(policy), agents, seed)


def observations(steps, agents=A, seed=0):
    return torch.randn(steps, agents, 5, generator=torch.Generator().manual_seed(seed))


ALL = np.ones(A, dtype=bool)
NONE = ~ALL
KINDS = pytest.mark.parametrize("kind", [Small, NewLSTMPolicy])


def live(playing, obs, firsts=None, **how):
    firsts = [ALL, *[NONE] * (len(obs) - 1)] if firsts is None else firsts
    return [playing.answer(each, first, **how) for each, first in zip(obs, firsts, strict=True)]


@KINDS
def test_a_life_is_the_one_the_policy_lives_by_hand_whatever_starts(kind):
    policy = policy_of(kind)
    obs, firsts = observations(12), torch.rand(12, A) < 0.3
    firsts[0] = True
    said = live(start(policy), obs, firsts)
    for t in range(12):
        td = TensorDict({"env_obs": obs[t], "first": firsts[t]}, [A])
        td["training_env_id_start"] = torch.zeros(A, dtype=torch.long)
        if t == 0:
            policy.store.open({0: A})
        with torch.no_grad():
            policy(td)
        assert said[t].values.equal(td["values"])
        assert said[t].told.equal(td["full_log_probs"])
        assert said[t].actions.equal(td["full_log_probs"].argmax(-1))


@KINDS
def test_two_that_play_in_turns_live_as_if_alone(kind):
    policy = policy_of(kind)
    ours, theirs = observations(8, seed=1), observations(8, seed=2)
    alone = [live(start(policy), each) for each in (ours, theirs)]
    one, other = start(policy), start(policy)
    for t in range(8):
        first = ALL if t == 0 else NONE
        assert one.answer(ours[t], first).values.equal(alone[0][t].values)
        assert other.answer(theirs[t], first).values.equal(alone[1][t].values)


@KINDS
def test_those_that_play_in_threads_live_as_if_alone(kind):
    policy = policy_of(kind)
    lives = [observations(60, seed=number) for number in range(4)]
    alone = [live(start(policy), each)[-1].values for each in lives]
    said = {}

    def play(number):
        said[number] = live(start(policy), lives[number])[-1].values

    threads = [threading.Thread(target=play, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(said[number].equal(alone[number]) for number in range(4))


def test_they_share_the_weights_and_not_a_copy_of_them():
    policy = policy_of()
    pairs = zip(policy.parameters(), start(policy)._policy.parameters(), strict=True)
    assert all(mine is theirs for mine, theirs in pairs)


def test_the_live_memories_of_the_policy_itself_are_left_alone():
    policy = policy_of()
    policy.store.open({0: A})
    live(start(policy), observations(3))
    assert not policy.store.live(0)["h"].any()


@pytest.mark.parametrize("spec", [TREE_SPEC, IMAGE_SPEC], ids=["tree", "image"])
def test_numpy_in_is_numpy_out_and_the_same_numbers_whatever_is_seen(spec):
    policy = make_policy("fast", spec, seed=0, hidden_size=8).eval()
    obs = some_seen(spec.sight, A, torch.Generator().manual_seed(0))
    first = torch.ones(A, dtype=torch.bool)
    tensors = Playing(policy, "w", A).answer(obs, first)
    arrays = Playing(policy, "w", A).answer(_as_arrays(obs), first.numpy())
    assert all(isinstance(part, np.ndarray) for part in arrays)
    assert all(isinstance(part, torch.Tensor) for part in tensors)
    assert all((a == b.numpy()).all() for a, b in zip(arrays, tensors, strict=True))
    assert arrays.actions.shape == (A, *policy.actions.shape)


def _as_arrays(obs):
    """A Dict as a dictionary, and a Tuple as a tuple."""
    if isinstance(obs, torch.Tensor):
        return obs.numpy()
    parts = {key: _as_arrays(part) for key, part in obs.items()}
    return tuple(parts.values()) if set(parts) == {"0", "1", "2"} else parts


def test_draws_are_those_of_seed_agent_and_step():
    obs = observations(20)
    one, same, other = (live(start(seed=seed), obs, greedy=False) for seed in (3, 3, 4))
    drawn = [torch.stack([each.actions for each in said]) for said in (one, same, other)]
    assert drawn[0].equal(drawn[1])
    assert not drawn[0].equal(drawn[2])
    policy = policy_of()
    uniform = policy.actions.uniform(3, torch.arange(A), 7)
    assert one[7].actions.equal(policy.actions.sample(one[7].told, uniform))
    assert one[7].log_prob.equal(policy.actions.log_prob(one[7].told, one[7].actions))


@KINDS
def test_thinking_tells_what_acting_would_and_advances_nothing(kind):
    playing, obs = start(policy_of(kind)), observations(6)
    live(playing, obs[:4])
    before = playing.memory
    thought = playing.think(obs[4], NONE, greedy=False)
    assert playing.memory.clock == before.clock
    assert all(playing.memory[name].equal(before[name]) for name in before)
    said = playing.answer(obs[4], NONE, greedy=False)
    assert all(a.equal(b) for a, b in zip(thought, said, strict=True))


def test_a_memory_is_a_copy_to_look_at():
    playing = start()
    live(playing, observations(2))
    memory = playing.memory
    assert {name: tuple(leaf.shape) for name, leaf in memory.items()} == {"h": (A, 2, 16), "c": (A, 2, 16)}
    memory["h"].zero_()
    assert playing.memory["h"].any()


@settings(max_examples=15)
@given(
    kind=st.sampled_from([Small, NewLSTMPolicy]),
    cut=st.integers(1, 9),
    greedy=st.booleans(),
    seed=st.integers(0, 2**62),
)
def test_a_restored_life_goes_on_bit_for_bit(tmp_path_factory, kind, cut, greedy, seed):
    obs, file = observations(10), tmp_path_factory.mktemp("kept") / "memories.safetensors"
    playing = start(policy_of(kind), seed=seed)
    live(playing, obs[:cut])
    playing.save(file)
    rest = live(playing, obs[cut:], [NONE] * (10 - cut), greedy=greedy)
    again = start(policy_of(kind))
    again.restore(file)
    for a, b in zip(rest, live(again, obs[cut:], [NONE] * (10 - cut), greedy=greedy), strict=True):
        assert all(x.equal(y) for x, y in zip(a, b, strict=True))


def test_a_fork_goes_on_from_here_and_on_its_own():
    playing, obs = start(seed=5), observations(8)
    live(playing, obs[:4])
    twin, other = playing.fork(), playing.fork(seed=6)
    mine = live(playing, obs[4:], [NONE] * 4, greedy=False)
    theirs = live(twin, obs[4:], [NONE] * 4, greedy=False)
    assert all(a.actions.equal(b.actions) for a, b in zip(mine, theirs, strict=True))
    twin.forget()
    assert playing.memory["h"].any()
    drawn = live(other, obs[4:], [NONE] * 4, greedy=False)
    assert not torch.stack([a.actions for a in mine]).equal(torch.stack([a.actions for a in drawn]))


def test_an_edit_changes_these_agents_and_nobody_else():
    playing = start()
    live(playing, observations(3))
    before, given = playing.memory, torch.randn(2, 2, 16)
    playing.edit([3, 0], {"h": given})
    after = playing.memory
    assert after["h"][[3, 0]].equal(given)
    assert after["h"][[1, 2]].equal(before["h"][[1, 2]])
    assert after["c"].equal(before["c"])
    playing.edit(np.array([False, True, False, False]), {"c": torch.zeros(1, 2, 16)})
    assert not playing.memory["c"][1].any()
    assert playing.memory["c"][0].any()


def test_some_forget_or_all():
    playing = start()
    live(playing, observations(3))
    playing.forget([1])
    assert [bool(row.any()) for row in playing.memory["h"]] == [True, False, True, True]
    playing.forget()
    assert not playing.memory["c"].any()


@pytest.mark.parametrize("failure", [ValueError, KeyboardInterrupt])
def test_a_step_that_fails_or_is_interrupted_is_not_half_remembered(failure):
    class Fails(NewLSTMPolicy):
        broken = False

        def _store_lstm_state(self, *state):
            super()._store_lstm_state(*state)
            if Fails.broken:
                raise failure("out of order")

    playing, obs = start(policy_of(Fails)), observations(3)
    live(playing, obs[:2])
    before, Fails.broken = playing.memory, True
    with pytest.raises(failure, match="out of order"):
        playing.act(obs[2], NONE)
    assert playing.memory.clock == before.clock
    assert all(playing.memory[name].equal(before[name]) for name in before)


def test_an_interruption_when_all_was_thought_takes_the_step_back_too(monkeypatch):
    playing, obs = start(policy_of(NewLSTMPolicy)), observations(3)
    live(playing, obs[:2])
    before = playing.memory

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("holdfast.keep.playing._as_shown", interrupted)
        with pytest.raises(KeyboardInterrupt):
            playing.act(obs[2], NONE)
    assert playing.memory.clock == before.clock
    assert all(playing.memory[name].equal(before[name]) for name in before)


def test_memory_clears_on_trials_where_the_policy_does():
    playing, obs = start(policy_of(clear_on="trial")), observations(3)
    with pytest.raises(ContractError, match="say trial="):
        playing.act(obs[0], ALL)
    live(playing, obs[:2], trial=NONE)
    fresh = start(policy_of())
    said = playing.answer(obs[2], NONE, trial=ALL)
    assert said.values.equal(fresh.answer(obs[2], ALL).values)


def test_where_nobody_acts_memory_stands_still_and_anything_may_be_shown():
    playing, obs = start(), observations(2)
    live(playing, obs[:1])
    before = playing.memory["h"]
    obs[1, 2] = torch.nan
    playing.act(obs[1], NONE, valid=np.array([True, True, False, True]))
    same = [a.equal(b) for a, b in zip(before, playing.memory["h"], strict=True)]
    assert same == [False, False, True, False]


GOOD = np.zeros((A, 5), np.float32)


@pytest.mark.parametrize(
    ("obs", "first", "told"),
    [
        (GOOD, NONE, "first must be true for every agent in the first call"),
        (GOOD[:3], ALL, r"obs is \[3, 5\] float32; must be \[4, 5\] float32, a row for each of 4 agents"),
        (GOOD[:, :4], ALL, r"obs is \[4, 4\] float32; must be \[4, 5\]"),
        (GOOD, ALL[:3], r"first is \[3\] torch.bool; must be one True or False for each of 4 agents"),
        (GOOD, np.ones(A), "must be one True or False"),
        (GOOD, None, "first is None; must be one True or False"),
        (GOOD + np.nan, ALL, r"obs of agents \[0, 1, 2, 3\] is not finite"),
        ({"a": GOOD}, ALL, "obs is dict of object; must be"),
        (GOOD.astype(np.complex64), ALL, "obs is ndarray of complex64"),
    ],
)
def test_what_does_not_fit_is_told_and_nothing_is_remembered(obs, first, told):
    playing = start()
    with pytest.raises(ContractError, match=told):
        playing.act(obs, first)
    assert playing.memory.clock == 0


def test_what_is_seen_in_parts_is_told_by_part():
    policy = make_policy("fast", TREE_SPEC, seed=0, hidden_size=8)
    obs = some_seen(TREE_SPEC.sight, A, torch.Generator().manual_seed(0))
    playing = Playing(policy, "w", A)
    for change, told in [
        (
            {"picture": obs["picture"].float()},
            r"obs\['picture'\] is \[4, 8, 8, 3\] float32; must be .* uint8",
        ),
        ({"more": (obs["more", "0"] + 9, obs["more", "1"], obs["more", "2"])}, "a choice that there is not"),
        ({"more": (obs["more", "0"],)}, r"obs\['more'\] is 0; must have the parts 0, 1, 2"),
        ({"other": obs["vector"]}, "obs is more, other, picture, vector; must have the parts"),
    ]:
        with pytest.raises(ContractError, match=told):
            playing.act(dict(obs.items()) | change, ALL)
    playing.act(dict(obs.items()), ALL)


@pytest.mark.parametrize(
    ("agents", "leaves", "told"),
    [
        ([0], {"h": torch.zeros(2, 2, 16)}, r"'h' is \[2, 2, 16\] torch.float32; must be \[1, 2, 16\]"),
        ([0], {"h": torch.zeros(1, 2, 16).double()}, "must be .* torch.float32"),
        ([0], {"x": torch.zeros(1, 2, 16)}, "given are x; these are h, c"),
        ([0], {"h": torch.full((1, 2, 16), torch.inf)}, "'h' is not finite"),
        ([4], {"h": torch.zeros(1, 2, 16)}, "give numbers from 0 to 3"),
        ([-1], {"h": torch.zeros(1, 2, 16)}, "give numbers from 0 to 3"),
        ([1, 1], {"h": torch.zeros(2, 2, 16)}, "names one of them twice"),
        ([True, False], {"h": torch.zeros(1, 2, 16)}, "or a flag each"),
    ],
)
def test_an_edit_that_does_not_fit_changes_nothing(agents, leaves, told):
    playing = start()
    live(playing, observations(2))
    before = playing.memory
    with pytest.raises(ContractError, match=told):
        playing.edit(agents, leaves)
    assert all(playing.memory[name].equal(before[name]) for name in before)


def test_memories_of_other_weights_or_other_agents_are_refused_and_the_live_ones_stay(tmp_path):
    stranger, more = start(policy_of(seed=1)), start(agents=5)
    stranger.save(tmp_path / "strange")
    playing = start()
    live(playing, observations(2))
    before = playing.memory
    for memory, told in [
        (stranger.memory, "These memories belong to the weights"),
        (tmp_path / "strange", "strange belong to the weights"),
        (more.memory, r"those of 5 agents; here are 4. Call player.start\(agents=5\)"),
    ]:
        with pytest.raises(ContractError, match=told):
            playing.restore(memory)
        assert all(playing.memory[name].equal(before[name]) for name in before)
        assert playing.memory.clock == before.clock


@pytest.mark.parametrize("agents", [0, -1])
def test_somebody_must_play(agents):
    with pytest.raises(ContractError, match="somebody must play"):
        start(agents=agents)


@pytest.mark.parametrize(("memory", "leaves"), [("gru", {"h"}), ("none", set())])
def test_other_memories_are_kept_as_well(tmp_path, memory, leaves):
    policy = policy_of(memory=memory)
    playing, again = start(policy), start(policy)
    live(playing, observations(3))
    assert set(playing.memory) == leaves
    again.restore(playing.save(tmp_path / "kept"))
    obs = observations(1, seed=9)[0]
    assert again.answer(obs, NONE).values.equal(playing.answer(obs, NONE).values)
