"""On a GPU: worlds played from a recording tell what they tell step by step, bit for bit."""

import pytest
import torch

from holdfast.worlds import WORLDS, make_world
from lived import ALL

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")


@pytest.mark.parametrize("name", WORLDS)
@pytest.mark.parametrize("truncate", [False, True])
def test_a_recorded_world_is_the_world(name, truncate):
    options = {"truncate": True} if truncate else {}
    if truncate and name in ("tmaze", "forage"):
        options = {}
    here = make_world(name, agents=48, seed=3, **options)
    there = make_world(name, agents=48, seed=3, device="cuda", **options)
    dice = torch.Generator().manual_seed(0)
    for _ in range(2):
        told, recorded, kept = here.reset(), there.reset(), []
        for _ in range(120):
            for key in (*ALL, *(["last_obs"] if told.last_obs is not None else [])):
                assert torch.equal(getattr(told, key), getattr(recorded, key).cpu()), key
            kept.append((told, recorded))
            actions = torch.randint(len(here.spec.action_names), (48,), generator=dice)
            told, recorded = here.step(actions), there.step(actions.cuda())
        # What was told is not overwritten by what came after it.
        for one, other in kept:
            assert torch.equal(one.obs, other.obs.cpu())
            assert torch.equal(one.reward, other.reward.cpu())
