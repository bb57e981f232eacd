"""Scripts: observations, actions and flags drawn before the policy runs."""

import pytest
import torch

from holdfast.check.script import Script, write_script
from holdfast.errors import ConfigError


def normal(size, generator):
    return torch.randn(*size, 3, generator=generator)


def integers(size, generator):
    return torch.randint(2, size, generator=generator)


def make_script(draw=normal, *, agents=16, steps=64, share_of_starts=0.2, absences=True, seed=0):
    options = {"share_of_starts": share_of_starts, "absences": absences, "act": integers, "seed": seed}
    return write_script(draw, agents, steps, **options)


def test_script_is_a_function_of_its_seed():
    script, same, other = make_script(), make_script(), make_script(seed=1)
    assert script.obs.equal(same.obs)
    assert script.first.equal(same.first)
    assert not script.obs.equal(other.obs)
    assert (script.agents, script.steps, script.batch) == (16, 64, (16, 65))


def test_every_start_follows_one_end_except_the_first():
    script = make_script()
    assert script.first[:, 0].all()
    assert not (script.terminated | script.truncated)[:, 0].any()
    assert (script.terminated ^ script.truncated)[:, 1:].equal(script.first[:, 1:])
    assert script.terminated.any()
    assert script.truncated.any()
    assert make_script(share_of_starts=0.0).first.sum() == 16


def test_invalid_steps_need_absences():
    valid = make_script().valid
    assert valid[:, 0].all()
    assert 0 < (~valid).float().mean() < 0.2
    assert make_script(absences=False).valid.all()


def test_other_observations_differ_at_every_step():
    script = make_script(integers)
    assert (script.obs != script.other_obs).all()
    where = torch.zeros_like(script.first)
    where[2, 5] = True
    assert (script.changed(where).obs != script.obs).nonzero().tolist() == [[2, 5]]
    with pytest.raises(ConfigError, match="observation space has one element"):
        make_script(lambda size, generator: torch.zeros(size))


def test_steps_and_agents_are_selected():
    script = make_script(agents=4, steps=6)
    assert script.at(3).obs.equal(script.obs[:, 3])
    assert script.step_batches(2, 5).action.equal(script.action[:, 2:5])
    assert script[torch.tensor([3, 1])].first.equal(script.first[[3, 1]])
    script.at(3).obs.zero_()
    assert script.obs[:, 3].any()


def test_flags_are_removed_or_replaced():
    script = make_script()
    plain = script.without_flags()
    assert not (plain.first | plain.terminated | plain.truncated | plain.trial).any()
    assert plain.valid.equal(script.valid)
    start = torch.zeros_like(script.first)
    start[1, 4] = True
    batch = script.with_starts(start)
    assert batch.first.equal(start)
    assert batch.terminated.equal(start)
    assert not (batch.truncated | batch.trial).any()


def test_only_floating_point_observations_change_dtype():
    script = make_script().to(torch.float64)
    assert isinstance(script, Script)
    assert (script.obs.dtype, script.other_obs.dtype) == (torch.float64, torch.float64)
    assert script.action.dtype == make_script(integers).to(torch.float64).obs.dtype == torch.int64
