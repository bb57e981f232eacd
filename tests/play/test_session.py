import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from helpers.manual_policy import NewLSTMPolicy
from helpers.small_policy import SPEC, Small
from helpers.space_worlds import IMAGE_SPEC, TREE_SPEC
from holdfast.errors import ContractError
from holdfast.play.export import random_obs
from holdfast.play.saved_memory import weights_hash
from holdfast.play.session import Session
from holdfast.policies import make_policy

A = 4


def policy_of(kind=Small, seed=0, **options):
    torch.manual_seed(seed)
    policy = kind(SPEC, **options).eval()
    policy.bind(SPEC)
    return policy


def start(policy=None, agents=A, seed=0):
    policy = policy_of() if policy is None else policy
    return Session(policy, weights_hash(policy), agents, seed)


def observations(steps, agents=A, seed=0):
    return torch.randn(steps, agents, 5, generator=torch.Generator().manual_seed(seed))


ALL = np.ones(A, dtype=bool)
NONE = ~ALL
KINDS = pytest.mark.parametrize("kind", [Small, NewLSTMPolicy])


def run_steps(session, obs, firsts=None, **options):
    firsts = [ALL, *[NONE] * (len(obs) - 1)] if firsts is None else firsts
    return [session.step(row, first, **options) for row, first in zip(obs, firsts, strict=True)]


@KINDS
def test_session_equals_calling_the_policy(kind):
    policy = policy_of(kind)
    obs, firsts = observations(12), torch.rand(12, A) < 0.3
    firsts[0] = True
    results = run_steps(start(policy), obs, firsts)
    for t in range(12):
        td = TensorDict({"env_obs": obs[t], "first": firsts[t]}, [A])
        td["training_env_id_start"] = torch.zeros(A, dtype=torch.long)
        if t == 0:
            policy.store.allocate({0: A})
        with torch.no_grad():
            policy(td)
        assert results[t].values.equal(td["values"])
        assert results[t].distribution.equal(td["full_log_probs"])
        assert results[t].actions.equal(td["full_log_probs"].argmax(-1))


@KINDS
def test_interleaved_sessions_are_independent(kind):
    policy = policy_of(kind)
    obs_a, obs_b = observations(8, seed=1), observations(8, seed=2)
    alone = [run_steps(start(policy), obs) for obs in (obs_a, obs_b)]
    a, b = start(policy), start(policy)
    for t in range(8):
        first = ALL if t == 0 else NONE
        assert a.step(obs_a[t], first).values.equal(alone[0][t].values)
        assert b.step(obs_b[t], first).values.equal(alone[1][t].values)


@KINDS
def test_sessions_in_threads_are_independent(kind):
    policy = policy_of(kind)
    episodes = [observations(60, seed=number) for number in range(4)]
    alone = [run_steps(start(policy), obs)[-1].values for obs in episodes]
    results = {}

    def play(number):
        results[number] = run_steps(start(policy), episodes[number])[-1].values

    threads = [threading.Thread(target=play, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert all(results[number].equal(alone[number]) for number in range(4))


def test_session_shares_the_weights():
    policy = policy_of()
    pairs = zip(policy.parameters(), start(policy)._policy.parameters(), strict=True)
    assert all(original is shared for original, shared in pairs)


def test_session_does_not_write_the_policys_store():
    policy = policy_of()
    policy.store.allocate({0: A})
    run_steps(start(policy), observations(3))
    assert not policy.store.view(0)["h"].any()


@pytest.mark.parametrize("spec", [TREE_SPEC, IMAGE_SPEC], ids=["tree", "image"])
def test_numpy_and_tensor_inputs_give_equal_results(spec):
    policy = make_policy("fast", spec, seed=0, hidden_size=8).eval()
    obs = random_obs(spec.observation_space, A, torch.Generator().manual_seed(0))
    first = torch.ones(A, dtype=torch.bool)
    tensors = Session(policy, "w", A).step(obs, first)
    arrays = Session(policy, "w", A).step(_as_arrays(obs), first.numpy())
    assert all(isinstance(leaf, np.ndarray) for leaf in arrays)
    assert all(isinstance(leaf, torch.Tensor) for leaf in tensors)
    assert all((a == b.numpy()).all() for a, b in zip(arrays, tensors, strict=True))
    assert arrays.actions.shape == (A, *policy.actions.shape)


def _as_arrays(obs):
    """Arrays: a Dict as a dictionary, a Tuple as a tuple."""
    if isinstance(obs, torch.Tensor):
        return obs.numpy()
    fields = {key: _as_arrays(field) for key, field in obs.items()}
    return tuple(fields.values()) if set(fields) == {"0", "1", "2"} else fields


def test_sampled_actions_depend_on_seed_agent_and_step():
    obs = observations(20)
    one, same, reseeded = (run_steps(start(seed=seed), obs, greedy=False) for seed in (3, 3, 4))
    actions = [torch.stack([step.actions for step in steps]) for steps in (one, same, reseeded)]
    assert actions[0].equal(actions[1])
    assert not actions[0].equal(actions[2])
    policy = policy_of()
    uniform = policy.actions.draws_for(3, torch.arange(A), 7)
    assert one[7].actions.equal(policy.actions.sample(one[7].distribution, uniform))
    assert one[7].log_prob.equal(policy.actions.log_prob(one[7].distribution, one[7].actions))


@KINDS
def test_distribution_equals_step_without_side_effects(kind):
    session, obs = start(policy_of(kind)), observations(6)
    run_steps(session, obs[:4])
    before = session.memory
    preview = session.distribution(obs[4], NONE, greedy=False)
    assert session.memory.clock == before.clock
    assert all(session.memory[name].equal(before[name]) for name in before)
    results = session.step(obs[4], NONE, greedy=False)
    assert all(a.equal(b) for a, b in zip(preview, results, strict=True))


def test_memory_is_a_copy():
    session = start()
    run_steps(session, observations(2))
    memory = session.memory
    assert {name: tuple(leaf.shape) for name, leaf in memory.items()} == {"h": (A, 2, 16), "c": (A, 2, 16)}
    memory["h"].zero_()
    assert session.memory["h"].any()


@settings(max_examples=15)
@given(
    kind=st.sampled_from([Small, NewLSTMPolicy]),
    cut=st.integers(1, 9),
    greedy=st.booleans(),
    seed=st.integers(0, 2**62),
)
def test_restored_session_continues_bit_equal(tmp_path_factory, kind, cut, greedy, seed):
    obs, file = observations(10), tmp_path_factory.mktemp("saved") / "memories.safetensors"
    session = start(policy_of(kind), seed=seed)
    run_steps(session, obs[:cut])
    session.save(file)
    rest = run_steps(session, obs[cut:], [NONE] * (10 - cut), greedy=greedy)
    again = start(policy_of(kind))
    again.restore(file)
    for a, b in zip(rest, run_steps(again, obs[cut:], [NONE] * (10 - cut), greedy=greedy), strict=True):
        assert all(x.equal(y) for x, y in zip(a, b, strict=True))


def test_fork_continues_independently():
    session, obs = start(seed=5), observations(8)
    run_steps(session, obs[:4])
    fork, reseeded = session.fork(), session.fork(seed=6)
    results = run_steps(session, obs[4:], [NONE] * 4, greedy=False)
    forked = run_steps(fork, obs[4:], [NONE] * 4, greedy=False)
    assert all(a.actions.equal(b.actions) for a, b in zip(results, forked, strict=True))
    fork.reset()
    assert session.memory["h"].any()
    actions = run_steps(reseeded, obs[4:], [NONE] * 4, greedy=False)
    assert not torch.stack([a.actions for a in results]).equal(torch.stack([a.actions for a in actions]))


def test_edit_changes_only_the_given_agents():
    session = start()
    run_steps(session, observations(3))
    before, rows = session.memory, torch.randn(2, 2, 16)
    session.edit([3, 0], {"h": rows})
    after = session.memory
    assert after["h"][[3, 0]].equal(rows)
    assert after["h"][[1, 2]].equal(before["h"][[1, 2]])
    assert after["c"].equal(before["c"])
    session.edit(np.array([False, True, False, False]), {"c": torch.zeros(1, 2, 16)})
    assert not session.memory["c"][1].any()
    assert session.memory["c"][0].any()


def test_reset_some_or_all_agents():
    session = start()
    run_steps(session, observations(3))
    session.reset([1])
    assert [bool(row.any()) for row in session.memory["h"]] == [True, False, True, True]
    session.reset()
    assert not session.memory["c"].any()


@pytest.mark.parametrize("failure", [ValueError, KeyboardInterrupt])
def test_failed_or_interrupted_step_is_undone(failure):
    class Fails(NewLSTMPolicy):
        broken = False

        def _store_lstm_state(self, *state):
            super()._store_lstm_state(*state)
            if Fails.broken:
                raise failure("out of order")

    session, obs = start(policy_of(Fails)), observations(3)
    run_steps(session, obs[:2])
    before, Fails.broken = session.memory, True
    with pytest.raises(failure, match="out of order"):
        session.act(obs[2], NONE)
    assert session.memory.clock == before.clock
    assert all(session.memory[name].equal(before[name]) for name in before)


def test_interrupt_after_the_forward_pass_undoes_the_step(monkeypatch):
    session, obs = start(policy_of(NewLSTMPolicy)), observations(3)
    run_steps(session, obs[:2])
    before = session.memory

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("holdfast.play.session._to_caller", interrupted)
        with pytest.raises(KeyboardInterrupt):
            session.act(obs[2], NONE)
    assert session.memory.clock == before.clock
    assert all(session.memory[name].equal(before[name]) for name in before)


def test_memory_clears_on_trials():
    session, obs = start(policy_of(clear_on="trial")), observations(3)
    with pytest.raises(ContractError, match="pass trial="):
        session.act(obs[0], ALL)
    run_steps(session, obs[:2], trial=NONE)
    fresh = start(policy_of())
    results = session.step(obs[2], NONE, trial=ALL)
    assert results.values.equal(fresh.step(obs[2], ALL).values)


def test_invalid_agents_keep_their_state_and_may_have_nan():
    session, obs = start(), observations(2)
    run_steps(session, obs[:1])
    before = session.memory["h"]
    obs[1, 2] = torch.nan
    session.act(obs[1], NONE, valid=np.array([True, True, False, True]))
    same = [a.equal(b) for a, b in zip(before, session.memory["h"], strict=True)]
    assert same == [False, False, True, False]


GOOD = np.zeros((A, 5), np.float32)


@pytest.mark.parametrize(
    ("obs", "first", "message"),
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
def test_wrong_inputs_raise_and_change_nothing(obs, first, message):
    session = start()
    with pytest.raises(ContractError, match=message):
        session.act(obs, first)
    assert session.memory.clock == 0


def test_wrong_dict_observation_names_the_key():
    policy = make_policy("fast", TREE_SPEC, seed=0, hidden_size=8)
    obs = random_obs(TREE_SPEC.observation_space, A, torch.Generator().manual_seed(0))
    session = Session(policy, "w", A)
    for change, message in [
        (
            {"picture": obs["picture"].float()},
            r"obs\['picture'\] is \[4, 8, 8, 3\] float32; must be .* uint8",
        ),
        (
            {"more": (obs["more", "0"] + 9, obs["more", "1"], obs["more", "2"])},
            "is outside the observation space",
        ),
        ({"more": (obs["more", "0"],)}, r"obs\['more'\] is of keys 0; must have the keys 0, 1, 2"),
        ({"other": obs["vector"]}, "obs is of keys more, other, picture, vector; must have the keys"),
    ]:
        with pytest.raises(ContractError, match=message):
            session.act(dict(obs.items()) | change, ALL)
    session.act(dict(obs.items()), ALL)


@pytest.mark.parametrize(
    ("agents", "leaves", "message"),
    [
        ([0], {"h": torch.zeros(2, 2, 16)}, r"'h' is \[2, 2, 16\] torch.float32; must be \[1, 2, 16\]"),
        ([0], {"h": torch.zeros(1, 2, 16).double()}, "must be .* torch.float32"),
        ([0], {"x": torch.zeros(1, 2, 16)}, "state keys are x; must be h, c"),
        ([0], {"h": torch.full((1, 2, 16), torch.inf)}, "'h' is not finite"),
        ([4], {"h": torch.zeros(1, 2, 16)}, "give indices from 0 to 3"),
        ([-1], {"h": torch.zeros(1, 2, 16)}, "give indices from 0 to 3"),
        ([1, 1], {"h": torch.zeros(2, 2, 16)}, "contains duplicates"),
        ([True, False], {"h": torch.zeros(1, 2, 16)}, "or one flag per agent"),
    ],
)
def test_wrong_edit_raises_and_changes_nothing(agents, leaves, message):
    session = start()
    run_steps(session, observations(2))
    before = session.memory
    with pytest.raises(ContractError, match=message):
        session.edit(agents, leaves)
    assert all(session.memory[name].equal(before[name]) for name in before)


def test_restore_rejects_other_weights_or_agent_counts(tmp_path):
    foreign, more = start(policy_of(seed=1)), start(agents=5)
    foreign.save(tmp_path / "foreign")
    session = start()
    run_steps(session, observations(2))
    before = session.memory
    for memory, message in [
        (foreign.memory, "This memory belongs to the weights"),
        (tmp_path / "foreign", "foreign belongs to the weights"),
        (more.memory, r"that of 5 agents; this session has 4. Call player.start\(agents=5\)"),
    ]:
        with pytest.raises(ContractError, match=message):
            session.restore(memory)
        assert all(session.memory[name].equal(before[name]) for name in before)
        assert session.memory.clock == before.clock


@pytest.mark.parametrize("agents", [0, -1])
def test_session_without_agents_raises(agents):
    with pytest.raises(ContractError, match="must be 1 or more"):
        start(agents=agents)


@pytest.mark.parametrize(("memory", "leaves"), [("gru", {"h"}), ("none", set())])
def test_save_and_restore_of_other_cells(tmp_path, memory, leaves):
    policy = policy_of(memory=memory)
    session, again = start(policy), start(policy)
    run_steps(session, observations(3))
    assert set(session.memory) == leaves
    again.restore(session.save(tmp_path / "saved"))
    obs = observations(1, seed=9)[0]
    assert again.step(obs, NONE).values.equal(session.step(obs, NONE).values)
