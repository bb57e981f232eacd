import math

import torch

from holdfast import Fast
from holdfast.worlds import Feature, WorldSpec

FEATURES = tuple(Feature(f"feature_{i}", float(i + 1)) for i in range(25))
ORIGINAL = WorldSpec(obs_shape=(200, 3), action_names=tuple(f"action_{i}" for i in range(19)), features=FEATURES)


def count(module):
    return sum(p.numel() for p in module.parameters())


def test_fast_parameter_counts():
    policy = Fast(ORIGINAL)
    # conv 25*64*5*5+64, conv 64*64*3*3+64, linear 64*128+128, linear 128*128+128
    assert count(policy.encoder) == 40_064 + 36_928 + 8_320 + 16_512 == 101_824
    # 2 layers of 4*128*(128+128) weights and 2*4*128 biases
    assert count(policy.lstm) == 2 * (131_072 + 1_024) == 264_192
    # linear 128*1024+1024, linear 1024+1
    assert count(policy.critic) == 132_096 + 1_025 == 133_121
    # linear 128*512+512, bilinear 512*16+1, embeddings 100*16
    assert count(policy.actor) == 66_048 + 8_193 + 1_600 == 75_841
    assert count(policy) == 574_978


def test_fast_initialization():
    policy = Fast(ORIGINAL)
    wide = policy.critic.fc1.weight
    torch.testing.assert_close(wide.T @ wide, 2 * torch.eye(128), atol=1e-4, rtol=0)
    narrow = policy.encoder.fc2.weight
    torch.testing.assert_close(narrow.T @ narrow, torch.eye(128), atol=1e-4, rtol=0)
    assert math.isclose(policy.actor.embeddings.table.weight.abs().max().item(), 0.1, rel_tol=1e-6)
    assert policy.actor.scores.weight.abs().max() <= 1 / math.sqrt(512)
    assert (policy.encoder.conv1.bias == 0).all()
