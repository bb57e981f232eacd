import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from helpers.small_policy import make_small
from holdfast.errors import ContractError
from holdfast.policies import RecurrentPolicy
from holdfast.policies.distributions import sample


def batch(*shape, **more):
    return TensorDict(
        {
            "env_obs": torch.randn(*shape, 5),
            "first": torch.rand(shape) < 0.2,
            "training_env_id_start": torch.zeros(shape, dtype=torch.long),
            **more,
        },
        batch_size=shape,
    )


def test_rollout_writes_tensordict_keys():
    td = make_small()(batch(4))
    assert {"actions", "act_log_prob", "values", "full_log_probs", "bptt", "batch"} <= set(td.keys())
    assert "entropy" not in td
    assert td["actions"].shape == td["values"].shape == (4,)
    assert td["full_log_probs"].shape == (4, 3)
    assert (td["bptt"] == 1).all()
    assert (td["batch"] == 4).all()


def test_a_column_of_flags_does_not_change_the_shape_of_outputs():
    flags = torch.zeros(4, 1, dtype=torch.bool)
    td = make_small()(batch(4, first=flags, valid=~flags))
    assert td["actions"].shape == td["values"].shape == (4,)


def test_update_writes_tensordict_keys():
    actions = torch.randint(3, (4, 6))
    td = make_small()(batch(4, 6), action=actions)
    assert {"act_log_prob", "values", "value", "entropy", "full_log_probs"} <= set(td.keys())
    assert "actions" not in td
    assert td["value"].equal(td["values"])
    assert td["act_log_prob"].equal(td["full_log_probs"].gather(-1, actions[..., None])[..., 0])
    torch.testing.assert_close(td["full_log_probs"].exp().sum(-1), torch.ones(4, 6))
    entropy = torch.distributions.Categorical(logits=td["full_log_probs"]).entropy()
    torch.testing.assert_close(td["entropy"], entropy)
    assert (td["bptt"] == 6).all()


@pytest.mark.parametrize("shape", [(4,), (4, 6)])
@pytest.mark.parametrize("clear_on", ["episode", "trial", "never"])
@pytest.mark.parametrize("acts", [True, False])
def test_dictionaries_and_tensordicts_give_the_same(shape, clear_on, acts):
    policy = make_small(clear_on=clear_on)
    valid, trial = torch.rand(2, *shape) < 0.6
    td = batch(*shape, valid=valid, trial=trial, draws=torch.rand(shape))
    action = None if acts else torch.randint(3, shape)
    inputs = dict(td.items()) | {"training_env_id_start": 0}
    outputs, states = [], []
    for call in (td, inputs):
        policy.reset_memory()
        outputs.append(policy(call, action=action))
        states.append(policy.store.snapshot().tree)
    assert outputs[1] is inputs
    for key in {"actions", "act_log_prob", "values", "entropy", "value", "full_log_probs"} & set(inputs):
        assert outputs[0][key].equal(outputs[1][key]), key
    assert ("actions" in inputs, "entropy" in inputs) == (acts, not acts)
    assert all(leaf.equal(states[1][key]) for key, leaf in states[0].items())


def test_existing_bptt_and_batch_are_kept():
    td = batch(4, bptt=torch.ones(4, dtype=torch.long), batch=torch.full((4,), 4))
    before = td["bptt"]
    assert make_small()(td)["bptt"] is before


def test_flat_batch_by_bptt_and_batch():
    policy = make_small()
    td = batch(4, 6)
    flat = td.reshape(24).clone()
    flat["bptt"], flat["batch"] = torch.full((24,), 6), torch.full((24,), 4)
    entry = policy.lstm.cell.initial(4)
    square, line = policy(td, state=entry), policy(flat, state=entry)
    assert line["values"].reshape(4, 6).equal(square["values"])
    assert line.batch_size == (24,)
    flat["bptt"] = torch.full((24,), 7)
    with pytest.raises(ContractError, match="not rows of bptt=7"):
        policy(flat, state=entry)


def test_forward_with_state_does_not_write_the_store():
    policy = make_small()
    entry = policy.lstm.cell.initial(4).apply(torch.ones_like)
    td = batch(4, first=torch.zeros(4, dtype=torch.bool))
    replayed = policy(td.clone(), state=entry)["values"]
    live = policy(td.clone())["values"]
    assert not torch.allclose(replayed, live)
    with policy.replay(entry):
        assert policy(td.clone())["values"].equal(replayed)


def test_forward_writes_the_store_for_steps_and_segments():
    policy = make_small()
    with torch.no_grad():
        policy(batch(4, 6))
        long = policy.lstm_h[0].clone()
        policy(batch(4))
    assert (long != 0).any()
    assert not policy.lstm_h[0].equal(long)


def test_unroll_is_pure():
    policy = make_small()
    obs, first = torch.randn(3, 5), torch.zeros(3, dtype=torch.bool)
    state = policy.lstm.cell.initial(3)
    a, after = policy.unroll(obs, first, state)
    b, _ = policy.unroll(obs, first, state)
    assert a.values.equal(b.values)
    assert not policy.store.slices
    assert (state["h"] == 0).all()
    assert not after["h"].requires_grad
    c, _ = policy.unroll(obs, first, after)
    assert not torch.allclose(c.values, a.values)


def test_recurrent_policy_is_abstract():
    with pytest.raises(TypeError, match="abstract"):
        RecurrentPolicy()


def test_batch_of_three_axes_raises():
    with pytest.raises(ContractError, match=r"\[B\] or \[B,T\]"):
        make_small()(batch(2, 3, 4))


def test_invalid_steps_leave_the_state_unchanged():
    policy = make_small()
    with torch.no_grad():
        policy(batch(3, first=torch.zeros(3, dtype=torch.bool)))
        before = policy.lstm_c[0].clone()
        valid = torch.tensor([True, False, True])
        policy(batch(3, first=torch.zeros(3, dtype=torch.bool), valid=valid))
    assert policy.lstm_c[0][:, 1].equal(before[:, 1])
    assert not policy.lstm_c[0][:, 0].equal(before[:, 0])


@settings(max_examples=50, deadline=None)
@given(
    logits=st.lists(st.floats(-20, 20, width=32), min_size=1, max_size=6),
    zero=st.integers(0, 5),
    u=st.floats(0, 1, exclude_max=True, width=32),
)
def test_sampled_actions_have_positive_probability(logits, zero, u):
    masked = torch.tensor(logits)
    if len(logits) > 1:
        masked[zero % len(logits)] = -torch.inf
    log_probs = torch.log_softmax(masked, -1)
    action = int(sample(log_probs[None], torch.tensor([u]))[0])
    assert log_probs[action] > -torch.inf


def test_sample_frequencies():
    log_probs = torch.tensor([0.1, 0.2, 0.3, 0.4]).log().expand(4000, 4)
    u = (torch.arange(4000) + 0.5) / 4000
    counts = torch.bincount(sample(log_probs, u), minlength=4)
    assert (counts - torch.tensor([400, 800, 1200, 1600])).abs().max() <= 1


def test_sampling_without_draws_uses_the_global_generator():
    policy = make_small()
    td = batch(4)
    torch.manual_seed(1)
    a = policy(td.clone(), state=policy.lstm.cell.initial(4))["actions"]
    torch.manual_seed(1)
    assert policy(td.clone(), state=policy.lstm.cell.initial(4))["actions"].equal(a)
    with_draws = td.clone()
    with_draws["draws"] = torch.full((4,), 0.999)
    assert (policy(with_draws, state=policy.lstm.cell.initial(4))["actions"] == 2).all()


def test_compile_parts_equals_eager(annotations_asleep):
    policy, compiled = make_small(), make_small()
    compiled.compile_parts(backend="aot_eager")
    td = batch(4, 6)
    entry = policy.lstm.cell.initial(4)
    eager, fast = policy(td.clone(), state=entry), compiled(td.clone(), state=entry)
    torch.testing.assert_close(eager["values"], fast["values"], atol=1e-6, rtol=0)
    for p in (policy, compiled):
        p(td.clone(), state=entry)["values"].sum().backward()
    for a, b in zip(policy.parameters(), compiled.parameters(), strict=True):
        if a.grad is not None:
            torch.testing.assert_close(a.grad, b.grad, atol=1e-5, rtol=1e-5)


def test_deepcopy_of_a_compiled_policy_uses_its_own_weights(annotations_asleep):
    policy = make_small()
    policy.compile_parts(backend="eager")
    td, entry = batch(4, 6), policy.lstm.cell.initial(4)
    before = policy(td.clone(), state=entry)["values"]
    copied = copy.deepcopy(policy)
    assert copied(td.clone(), state=entry)["values"].equal(before)
    with torch.no_grad():
        for weight in copied.parameters():
            weight.zero_()
    assert not copied(td.clone(), state=entry)["values"].any()
    assert policy(td.clone(), state=entry)["values"].equal(before)
    assert copied._compiled.keys() == policy._compiled.keys() == {"encode", "decode"}


@pytest.mark.parametrize(("key", "wrong"), [("batch", 3), ("bptt", 2)])
def test_wrong_batch_or_bptt_is_refused(key, wrong):
    td = batch(4)
    td[key] = torch.full((4,), wrong)
    if key == "bptt":
        td = td.reshape(2, 2)
        td["bptt"] = torch.full((2, 2), 7)
    with pytest.raises(ContractError, match=rf"td\['{key}'\] is {3 if key == 'batch' else 7}; this is a batch of"):
        make_small()(td)
