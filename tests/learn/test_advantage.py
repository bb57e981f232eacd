import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.learn.advantage import gae, vtrace
from holdfast.rollout.segments import reverse_scan


def plain_gae(case, gamma, lam, rho_clip=1.0, c_clip=1.0):
    """GAE of one row after the other, backwards, with every case spelt out; with ratios V-trace."""
    B, T = case["values"].shape
    ratios = case.get("ratio", torch.ones(B, T))
    advantages = torch.zeros(B, T, dtype=case["values"].dtype)
    for b in range(B):
        worth, advantage = float(case["end_values"][b]), 0.0
        for t in reversed(range(T)):
            if case["next_terminated"][b, t]:
                worth, advantage = 0.0, 0.0
            elif case["next_truncated"][b, t]:
                worth, advantage = float(case["next_last_values"][b, t]), 0.0
            if not case["valid"][b, t]:
                continue
            value = float(case["values"][b, t])
            ratio = float(ratios[b, t])
            delta = min(ratio, rho_clip) * (float(case["next_rewards"][b, t]) + gamma * worth - value)
            advantage = delta + gamma * lam * min(ratio, c_clip) * advantage
            worth = value
            advantages[b, t] = advantage
    return advantages


def random_case(B, T, seed, ends=0.2, gone=0.2, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)

    def numbers(*size):
        return torch.randn(*size, generator=generator, dtype=dtype)

    def flags(share):
        return torch.rand(B, T, generator=generator) < share

    return {
        "values": numbers(B, T),
        "valid": ~flags(gone),
        "next_rewards": numbers(B, T),
        "next_terminated": flags(ends),
        "next_truncated": flags(ends),
        "next_last_values": numbers(B, T),
        "end_values": numbers(B),
    }


def row(values, rewards, *, terminated=(), truncated=(), gone=(), last=0.0, end=0.0):
    """One row of `gae`'s arguments; the flags are given by the steps they follow."""
    T = len(values)
    marks = torch.arange(T)
    return {
        "values": torch.tensor([values], dtype=torch.float64),
        "valid": ~torch.isin(marks, torch.tensor(gone, dtype=torch.long))[None],
        "next_rewards": torch.tensor([rewards], dtype=torch.float64),
        "next_terminated": torch.isin(marks, torch.tensor(terminated, dtype=torch.long))[None],
        "next_truncated": torch.isin(marks, torch.tensor(truncated, dtype=torch.long))[None],
        "next_last_values": torch.full((1, T), last, dtype=torch.float64),
        "end_values": torch.tensor([end], dtype=torch.float64),
    }


sizes = {"B": st.integers(1, 4), "T": st.integers(1, 70), "seed": st.integers(0, 10**6)}
shares = st.sampled_from([0.0, 0.1, 0.5, 1.0])


@given(**sizes, gamma=st.floats(0, 1), lam=st.floats(0, 1), ends=shares, gone=shares)
def test_gae_matches_loop(B, T, seed, gamma, lam, ends, gone):
    case = random_case(B, T, seed, ends, gone)
    advantages = gae(**case, gamma=gamma, lam=lam)
    torch.testing.assert_close(advantages, plain_gae(case, gamma, lam), rtol=1e-10, atol=1e-10)


@settings(max_examples=25)
@given(**sizes)
def test_gae_in_float32_is_near_the_loop_in_float64(B, T, seed):
    case = random_case(B, T, seed)
    single = {key: x.float() if x.is_floating_point() else x for key, x in case.items()}
    advantages = gae(**single, gamma=0.99, lam=0.95)
    assert advantages.dtype == torch.float32
    torch.testing.assert_close(advantages.double(), plain_gae(case, 0.99, 0.95), rtol=1e-4, atol=1e-4)


def test_gae_bootstrap_by_hand():
    # gamma = lam = 1/2. delta2 = 3 + 8/2 - 3 = 4;  delta1 = 2 + 3/2 - 2 = 1.5;  delta0 = 1 + 2/2 - 1 = 1
    # A2 = 4;  A1 = 1.5 + 4/4 = 2.5;  A0 = 1 + 2.5/4 = 1.625
    case = row([1, 2, 3], [1, 2, 3], end=8)
    assert gae(**case, gamma=0.5, lam=0.5).tolist() == [[1.625, 2.5, 4.0]]


def test_gae_termination_by_hand():
    # The episode ends after step 1: delta1 = 2 + 0 - 2 = 0, and nothing of step 2 comes back.
    # A2 = 4 as above;  A1 = 0;  A0 = 1 + 2/2 - 1 + 0 = 1
    case = row([1, 2, 3], [1, 2, 3], terminated=[1], last=100, end=8)
    assert gae(**case, gamma=0.5, lam=0.5).tolist() == [[1.0, 0.0, 4.0]]


def test_gae_truncation_by_hand():
    # As above, but step 1 is worth its last observation: delta1 = 2 + 10/2 - 2 = 5;  A0 = 1 + 5/4 = 2.25
    case = row([1, 2, 3], [1, 2, 3], truncated=[1], last=10, end=8)
    assert gae(**case, gamma=0.5, lam=0.5).tolist() == [[2.25, 5.0, 4.0]]


def test_both_flags_together_are_a_termination():
    both = row([1, 2, 3], [1, 2, 3], terminated=[1], truncated=[1], last=10, end=8)
    assert gae(**both, gamma=0.5, lam=0.5).tolist() == [[1.0, 0.0, 4.0]]


@pytest.mark.parametrize(("flag", "last"), [("terminated", 0.0), ("truncated", 6.0)])
def test_gae_end_in_the_tail_by_hand(flag, last):
    # The last step's flags are the tail's: delta2 = 3 + last/2 - 3 = last/2, and the end value 8 is not used.
    case = row([1, 2, 3], [1, 2, 3], **{flag: [2]}, last=6, end=8)
    advantages = gae(**case, gamma=0.5, lam=0.5)
    assert advantages[0, 2] == last / 2
    assert advantages[0, 1] == 1.5 + last / 8


def test_gae_skips_invalid_steps_by_hand():
    # Step 1 is nobody's. delta2 = 4; step 0 sees step 2 directly: delta0 = 1 + 3/2 - 1 = 1.5; A0 = 1.5 + 4/4
    case = row([1, 200, 3], [1, 200, 3], gone=[1], end=8)
    assert gae(**case, gamma=0.5, lam=0.5).tolist() == [[2.5, 0.0, 4.0]]


def test_gae_invalid_steps_at_the_end_use_end_value():
    # delta0 = 1 + 8/2 - 1 = 4
    case = row([1, 200, 300], [1, 200, 300], gone=[1, 2], end=8)
    assert gae(**case, gamma=0.5, lam=0.5).tolist() == [[4.0, 0.0, 0.0]]


def test_gae_episode_end_at_an_invalid_step():
    # delta0 = 1 + 0 - 1 = 0 by termination, 1 + 10/2 - 1 = 5 by truncation; step 2 begins anew.
    ended = row([1, 200, 3], [1, 200, 3], gone=[1], terminated=[1], last=10, end=8)
    assert gae(**ended, gamma=0.5, lam=0.5).tolist() == [[0.0, 0.0, 4.0]]
    cut = row([1, 200, 3], [1, 200, 3], gone=[1], truncated=[1], last=10, end=8)
    assert gae(**cut, gamma=0.5, lam=0.5).tolist() == [[5.0, 0.0, 4.0]]


@given(**sizes)
def test_gae_equals_gae_without_invalid_steps(B, T, seed):
    case = random_case(1, T, seed, gone=0.4)
    ended = case["next_terminated"] | case["next_truncated"]
    case["valid"] |= ended
    there = case["valid"][0]
    short = {key: x[:, there] if x.dim() == 2 else x for key, x in case.items()}
    long_way, short_way = (gae(**c, gamma=0.9, lam=0.8) for c in (case, short))
    torch.testing.assert_close(long_way[:, there], short_way, rtol=1e-12, atol=1e-12)
    assert not long_way[:, ~there].any()


@pytest.mark.parametrize("noise", [1e6, float("inf"), float("nan")])
@given(**sizes)
def test_gae_ignores_values_at_invalid_steps(noise, B, T, seed):
    case = random_case(B, T, seed, gone=0.5)
    disturbed = dict(case)
    for key in ("values", "next_rewards"):
        disturbed[key] = torch.where(case["valid"], case[key], noise)
    disturbed["next_last_values"] = torch.where(case["next_truncated"], case["next_last_values"], noise)
    assert torch.equal(gae(**disturbed, gamma=0.9, lam=0.8), gae(**case, gamma=0.9, lam=0.8))


@given(**sizes)
def test_gae_does_not_cross_episode_ends(B, T, seed):
    case = random_case(B, T + 3, seed, ends=0.0, gone=0.2)
    case["next_terminated"][:, 1] = True
    later = dict(case)
    for key in ("values", "next_rewards", "next_last_values"):
        later[key] = case[key].clone()
        later[key][:, 2:] += 100
    later["end_values"] = case["end_values"] + 100
    before, after = (gae(**c, gamma=0.9, lam=0.8)[:, :2] for c in (case, later))
    assert torch.equal(before, after)


@given(**sizes)
def test_gae_lambda_one_is_the_discounted_return(B, T, seed):
    case = random_case(B, T, seed, ends=0.0, gone=0.0)
    value_targets = case["values"] + gae(**case, gamma=0.9, lam=1.0)
    returns = reverse_scan(case["next_rewards"], torch.full((B, T), 0.9, dtype=torch.float64), case["end_values"])
    torch.testing.assert_close(value_targets, returns, rtol=1e-9, atol=1e-9)


def test_gae_of_invalid_row_is_zero():
    case = row([1, 2, 3], [1, 2, 3], gone=[0, 1, 2], end=8)
    assert gae(**case, gamma=0.5, lam=0.5).tolist() == [[0.0, 0.0, 0.0]]


def with_ratios(case, seed):
    """Ratios from nearly 0 to 5, one in ten exactly 0."""
    generator = torch.Generator().manual_seed(seed)
    ratio = 5 * torch.rand(case["values"].shape, generator=generator, dtype=torch.float64)
    return case | {"ratio": torch.where(ratio < 0.5, 0.0, ratio)}


@given(
    **sizes,
    gamma=st.floats(0, 1),
    lam=st.floats(0, 1),
    rho_clip=st.floats(0.1, 4),
    c_clip=st.floats(0.1, 1.2),
    ends=shares,
    gone=shares,
)
def test_vtrace_matches_loop(B, T, seed, gamma, lam, rho_clip, c_clip, ends, gone):
    case = with_ratios(random_case(B, T, seed, ends, gone), seed)
    clips = {"rho_clip": rho_clip, "c_clip": c_clip}
    advantages = vtrace(**case, gamma=gamma, lam=lam, **clips)
    torch.testing.assert_close(advantages, plain_gae(case, gamma, lam, **clips), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@given(**sizes, clip=st.floats(1, 3))
def test_vtrace_with_ratio_one_is_gae(dtype, B, T, seed, clip):
    case = random_case(B, T, seed, dtype=dtype)
    advantages = vtrace(**case, ratio=torch.ones(B, T, dtype=dtype), gamma=0.99, lam=0.95, rho_clip=clip, c_clip=clip)
    assert torch.equal(advantages, gae(**case, gamma=0.99, lam=0.95))


def test_vtrace_by_hand():
    # gamma = lam = 1/2, rho = 2, c = 1. Surprises: 1 + 2/2 - 1 = 1;  2 + 3/2 - 2 = 1.5;  3 + 4/2 - 3 = 2 and
    # 4 + 8/2 - 4 = 4.  Ratios 4, 1/2, 1, 3 weigh them by 2, 1/2, 1, 2: deltas 2, 0.75, 2, 8.
    # A3 = 8;  A2 = 2 + 1/4 * 1 * 8 = 4;  A1 = 0.75 + 1/4 * 1/2 * 4 = 1.25;  A0 = 2 + 1/4 * 1 * 1.25 = 2.3125
    case = row([1, 2, 3, 4], [1, 2, 3, 4], end=8)
    case["ratio"] = torch.tensor([[4, 0.5, 1, 3]], dtype=torch.float64)
    advantages = vtrace(**case, gamma=0.5, lam=0.5, rho_clip=2.0, c_clip=1.0)
    assert advantages.tolist() == [[2.3125, 1.25, 4.0, 8.0]]


@given(**sizes)
def test_vtrace_rows_are_independent(B, T, seed):
    case = with_ratios(random_case(B, T, seed), seed)
    order = torch.randperm(B, generator=torch.Generator().manual_seed(seed))
    clips = {"gamma": 0.9, "lam": 0.8, "rho_clip": 1.5, "c_clip": 0.7}
    advantages = vtrace(**{key: x[order] for key, x in case.items()}, **clips)
    assert torch.equal(advantages, vtrace(**case, **clips)[order])


@pytest.mark.parametrize("noise", [1e6, float("inf"), float("nan")])
@given(**sizes)
def test_vtrace_ignores_ratios_of_invalid_steps(noise, B, T, seed):
    case = with_ratios(random_case(B, T, seed, gone=0.5), seed)
    loud = case | {"ratio": torch.where(case["valid"], case["ratio"], noise)}
    clips = {"gamma": 0.9, "lam": 0.8, "rho_clip": 1.5, "c_clip": 0.7}
    assert torch.equal(vtrace(**loud, **clips), vtrace(**case, **clips))
