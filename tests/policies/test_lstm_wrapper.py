import pytest
import torch
from tensordict import TensorDict

import holdfast
from helpers.manual_policy import NewLSTMPolicy
from helpers.small_policy import SPEC, OnlySpec
from holdfast.errors import ContractError


def batch(B, T=None, start=0, **more):
    shape = (B,) if T is None else (B, T)
    return TensorDict(
        {
            "env_obs": torch.randn(*shape, 5),
            "first": torch.zeros(shape, dtype=torch.bool),
            "training_env_id_start": torch.full(shape, start),
            **more,
        },
        batch_size=shape,
    )


@pytest.fixture
def policy():
    torch.manual_seed(0)
    return NewLSTMPolicy(SPEC)


def test_hand_written_policy_obeys_every_law(policy, annotations_asleep):
    laws = holdfast.check(policy, OnlySpec())
    assert laws.ok, {name: law.finding for name, law in laws.items() if not law.ok}


def test_default_sizes():
    wrapper = holdfast.LSTMWrapper()
    assert (wrapper.input_size, wrapper.hidden_size, wrapper.num_layers) == (128, 128, 2)
    assert sum(p.numel() for p in wrapper.lstm.parameters()) == 264_192
    assert wrapper.has_memory()


def test_lstm_h_and_lstm_c_are_mappings(policy):
    policy(batch(3, start=0))
    policy(batch(2, start=3))
    assert set(policy.lstm_h) == {0, 3}
    assert policy.lstm_h[0].shape == (2, 3, 16)
    assert policy.lstm_c[3].shape == (2, 2, 16)
    policy.lstm_h[3] = torch.ones(2, 2, 16)
    assert (policy.lstm_h[3] == 1).all()
    assert not (policy.lstm_c[3] == 1).any()
    with pytest.raises(KeyError):
        policy.lstm_h[1]


def test_get_memory_and_set_memory_copy(policy):
    policy(batch(3))
    memory = policy.get_memory()
    same = batch(3)
    now = policy(same.clone())["values"]
    assert not policy.lstm_h[0].equal(memory[0][0])
    policy.set_memory(memory)
    assert policy(same.clone())["values"].equal(now)
    policy.set_memory(memory)
    memory[0][0].fill_(5.0)
    assert not (policy.lstm_h[0] == 5).any()


def test_set_memory_on_an_unused_policy(policy):
    policy(batch(3, start=4))
    other = NewLSTMPolicy(SPEC)
    other.set_memory(policy.get_memory())
    assert other.lstm_c[4].equal(policy.lstm_c[4])


def test_reset_memory_and_reset_env_memory(policy):
    policy(batch(3, start=0))
    policy(batch(2, start=3))
    policy.reset_env_memory(0)
    assert (policy.lstm_h[0] == 0).all()
    assert (policy.lstm_h[3] != 0).any()
    policy.reset_env_memory(3, [1])
    assert (policy.lstm_h[3][:, 1] == 0).all()
    assert (policy.lstm_h[3][:, 0] != 0).any()
    policy.reset_memory()
    assert len(policy.lstm_h) == 0


def test_states_are_reset_like_entries_of_a_dict(policy):
    policy(batch(3, start=0))
    policy(batch(2, start=3))
    del policy.lstm_h[0]
    assert (policy.lstm_h[0] == 0).all()
    assert (policy.lstm_c[0] != 0).any()
    assert (policy.lstm_h[3] != 0).any()
    with pytest.raises(KeyError):
        del policy.lstm_h[1]
    policy.lstm_h.clear()
    policy.lstm_c.clear()
    assert all((view[start] == 0).all() for view in (policy.lstm_h, policy.lstm_c) for start in (0, 3))


def test_reset_of_a_slice_without_memory_is_ignored(policy):
    policy(batch(3, start=0))
    policy.reset_env_memory(7)
    assert set(policy.lstm_h) == {0}


@pytest.mark.parametrize("key", ["batch", "bptt"])
def test_wrong_batch_or_bptt_is_refused(policy, key):
    td = batch(3)
    td["batch"], td["bptt"] = torch.full((3,), 3), torch.full((3,), 1)
    policy(td)
    td[key] = torch.full((3,), 7)
    with pytest.raises(ContractError, match=rf"td\['{key}'\] is 7; this is a batch of 3 rows of 1 steps\. Set it to"):
        policy(td)


@pytest.mark.parametrize("flag", ["dones", "truncateds"])
def test_dones_or_truncateds_alone_clear(policy, flag):
    policy(batch(3))
    td = batch(3).exclude("first")
    td[flag] = torch.tensor([True, False, True])
    fresh = NewLSTMPolicy(SPEC)
    fresh.load_state_dict(policy.state_dict())
    expected = fresh(batch(3, env_obs=td["env_obs"]))["values"]
    values = policy(td)["values"]
    torch.testing.assert_close(values[[0, 2]], expected[[0, 2]])
    assert not torch.allclose(values[1], expected[1])


def test_missing_episode_flags_raise(policy):
    with pytest.raises(ContractError, match="none of first, dones, truncateds"):
        policy(batch(3).exclude("first"))


def test_missing_training_env_id_start_raises(policy):
    with pytest.raises(ContractError, match="training_env_id_start"):
        policy(batch(3).exclude("training_env_id_start"))


def test_missing_lstm_call_raises(policy):
    td = batch(3)
    h, c, env_id = policy._manage_lstm_state(td, 3, 1, "cpu")
    with pytest.raises(ContractError, match=r"before self\.lstm used"):
        policy._store_lstm_state(h, c, env_id)
    policy._manage_lstm_state(td, 3, 1, "cpu")
    with pytest.raises(ContractError, match="called twice"):
        policy._manage_lstm_state(td, 3, 1, "cpu")


def test_missing_store_raises_in_the_next_call(policy):
    h, c, _ = policy._manage_lstm_state(batch(3), 3, 1, "cpu")
    policy.lstm(torch.randn(1, 3, 12), (h, c))
    with pytest.raises(ContractError, match="never stored"):
        policy._manage_lstm_state(batch(3), 3, 1, "cpu")
    policy(batch(3))


def test_replay_rejects_changes_of_the_store(policy):
    policy(batch(3))
    live = policy.get_memory()
    with policy.replay(policy.lstm.cell.initial(5).apply(torch.ones_like)):
        assert policy.get_memory()[0][0].equal(live[0][0])
        for change in (policy.reset_memory, lambda: policy.set_memory(live)):
            with pytest.raises(ContractError, match="within a replay"):
                change()
    assert policy.lstm_h[0].equal(live[0][0])


def test_manage_lstm_state_returns_a_copy():
    policy = NewLSTMPolicy(SPEC, num_layers=1)
    with torch.no_grad():
        policy(batch(3))
        memory = policy.lstm_h[0].clone()
        h, c, env_id = policy._manage_lstm_state(batch(3), 3, 1, "cpu")
        h.fill_(7.0)
    assert policy.lstm_h[0].equal(memory)
    policy.lstm(torch.randn(1, 3, 12), (h, c))
    policy._store_lstm_state(h, c, env_id)


def test_second_lstm_call_raises(policy):
    x = torch.randn(1, 3, 12)
    h, c, _ = policy._manage_lstm_state(batch(3), 3, 1, "cpu")
    policy.lstm(x, (h, c))
    with pytest.raises(ContractError, match="without episode starts"):
        policy.lstm(x, (h, c))


def test_batch_first_input_raises(policy, annotations_asleep):
    h, c, _ = policy._manage_lstm_state(batch(3, 4), 3, 4, "cpu")
    with pytest.raises(ContractError, match="time-major"):
        policy.lstm(torch.randn(3, 4, 12), (h, c))


def test_stored_state_is_detached(policy):
    td = policy(batch(3, 4))
    assert td["values"].requires_grad
    assert not policy.lstm_h[0].requires_grad


def test_replay_does_not_write_the_store(policy):
    policy(batch(3))
    before = policy.get_memory()
    entry = policy.lstm.cell.initial(7)
    with policy.replay(entry):
        policy(batch(7, 4).exclude("training_env_id_start"))
    assert policy.get_memory()[0][0].equal(before[0][0])


def test_clear_on_trial_and_never():
    torch.manual_seed(0)
    by_trial, never = NewLSTMPolicy(SPEC, clear_on="trial"), NewLSTMPolicy(SPEC, clear_on="never")
    never.load_state_dict(by_trial.state_dict())
    for policy in (by_trial, never):
        with pytest.raises(ContractError) if policy is by_trial else torch.no_grad():
            policy(batch(2))
        policy.reset_memory()
    td = batch(2, trial=torch.tensor([False, False]))
    by_trial(td.clone())
    never(td.clone())
    again = batch(2, trial=torch.tensor([True, False]), first=torch.tensor([False, True]))
    a, b = by_trial(again.clone())["values"], never(again.clone())["values"]
    by_trial.reset_memory()
    fresh = by_trial(again.clone())["values"]
    assert a.equal(fresh)
    assert not torch.allclose(b, fresh)


def test_state_dict_has_no_memory(policy):
    policy(batch(3))
    assert not any("store" in key or "kept" in key for key in policy.state_dict())
