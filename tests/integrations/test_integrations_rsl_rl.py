"""`OnPolicyRunner` with our model and with rsl_rl's; `make slow` installs the library."""

import copy

import pytest
import torch
from tensordict import TensorDict
from torch import nn

import holdfast
from helpers.pole_vec_env import PoleVecEnv
from holdfast.errors import ConfigError, ContractError

pytest.importorskip("rsl_rl", reason="rsl-rl-lib is not installed; `make slow` installs it")
from rsl_rl.models import RNNModel as ReferenceModel
from rsl_rl.runners import OnPolicyRunner
from rsl_rl.utils import split_and_pad_trajectories

OURS, REFERENCE = "holdfast.integrations.rsl_rl:RNNModel", "RNNModel"
GAUSSIAN = {"class_name": "GaussianDistribution", "init_std": 0.5}


def make_runner(model, env=None, seed=3, hidden=16, steps=24, algorithm=(), **options):
    torch.manual_seed(seed)
    network = {"hidden_dims": [16], "rnn_hidden_dim": hidden, **options}
    config = {
        "num_steps_per_env": steps,
        "save_interval": 1000,
        "obs_groups": {"actor": ["policy"], "critic": ["policy"]},
        "actor": {"class_name": model, "distribution_cfg": dict(GAUSSIAN), **network},
        "critic": {"class_name": model, **network},
        "algorithm": {"class_name": "PPO", "num_learning_epochs": 2, "num_mini_batches": 2, **dict(algorithm)},
    }
    return OnPolicyRunner(env or PoleVecEnv(8, length=10), config)


def random_segments(model, steps=7, rows=5, ends=None):
    """Return `[T,E]` observations with episode ends inside, or the given number of them, and the state before them."""
    obs = TensorDict({"policy": torch.randn(steps, rows, 2)}, batch_size=[steps, rows])
    dones = (torch.rand(steps, rows, 1) < 0.3).byte()
    if ends is not None:
        dones[:] = 0
        dones[2, :ends] = 1
    rnn = model.rnn.rnn
    leaves = [torch.randn(rnn.num_layers, rows, rnn.hidden_size) for _ in range(2 if rnn.mode == "LSTM" else 1)]
    return obs, dones, tuple(leaves)


def padded(obs, dones, leaves):
    """Return what the storage hands to a model: padded trajectories, masks and their states."""
    trajectories, masks = split_and_pad_trajectories(obs, dones)
    lengths = masks.sum(0)
    starts = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)[:-1]])
    states = [torch.zeros(leaf.shape[0], len(starts), leaf.shape[2]) for leaf in leaves]
    for state, leaf in zip(states, leaves, strict=True):
        state[:, starts % len(obs) == 0] = leaf
    return trajectories, masks, tuple(states) if len(states) == 2 else states[0]


@pytest.mark.parametrize("options", [{}, {"rnn_type": "gru"}, {"rnn_num_layers": 2, "obs_normalization": True}])
def test_training_gives_the_weights_of_rsl_rls_model(options):
    runners = [make_runner(model, **options) for model in (OURS, REFERENCE)]
    kind = holdfast.nn.GRU if options.get("rnn_type") else holdfast.nn.LSTM
    assert isinstance(runners[0].alg.actor.rnn.rnn, kind)
    start = {name: weight.clone() for name, weight in runners[0].alg.actor.state_dict().items()}
    for runner in runners:
        torch.manual_seed(0)
        runner.learn(3)
    for name in ("actor", "critic"):
        ours, reference = (getattr(runner.alg, name).state_dict() for runner in runners)
        assert list(ours) == list(reference)
        for key, weight in reference.items():
            torch.testing.assert_close(ours[key], weight, rtol=0, atol=5e-5, msg=f"{name} {key}")
    moved = runners[0].alg.actor.state_dict()["rnn.rnn.weight_hh_l0"] - start["rnn.rnn.weight_hh_l0"]
    assert moved.abs().max() > 1e-3


@pytest.mark.parametrize(("ends", "rows"), [(None, 5), (1, 6), (2, 5)])
@pytest.mark.parametrize("options", [{}, {"rnn_type": "gru", "rnn_num_layers": 2}])
def test_update_runs_segments_unless_few_trajectories_need_padding(options, ends, rows):
    ours, reference = (make_runner(model, **options).alg.actor for model in (OURS, REFERENCE))
    obs, dones, leaves = random_segments(ours, ends=ends)
    assert dones[:-1].any()
    trajectories, masks, state = padded(obs, dones, leaves)
    shapes, run = [], ours.rnn.rnn.forward
    ours.rnn.rnn.forward = lambda x, *rest: (shapes.append(x.shape), run(x, *rest))[1]
    actual, expected = (model(trajectories, masks=masks, hidden_state=state) for model in (ours, reference))
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-6)
    assert shapes == [(7, rows, 2)]
    assert trajectories.shape[1] > 5


@torch.no_grad()
def test_rollout_resets_only_where_done_and_keeps_the_callers_state():
    ours, reference = (make_runner(model).alg.actor for model in (OURS, REFERENCE))
    obs, dones, leaves = random_segments(ours)
    for model in (ours, reference):
        model.reset(hidden_state=tuple(leaf.clone() for leaf in leaves))
    for t in range(len(obs)):
        before = copy.deepcopy(ours.get_hidden_state())
        state = ours.get_hidden_state()
        torch.testing.assert_close(ours(obs[t]), reference(obs[t]), rtol=0, atol=1e-6)
        for model in (ours, reference):
            model.reset(dones[t, :, 0])
        for a, b in zip(ours.get_hidden_state(), reference.get_hidden_state(), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-6)
        assert all(torch.equal(a, b) for a, b in zip(state, before, strict=True))
    ours.reset()
    assert ours.get_hidden_state() is None


def test_detach_of_all_or_of_ended_episodes():
    model = make_runner(OURS).alg.actor
    obs, _, _ = random_segments(model)
    model(obs[0])
    model.detach_hidden_state(torch.tensor([1, 0, 0, 0, 0]))
    (gradient,) = torch.autograd.grad(
        model.get_hidden_state()[0][0, 0].sum(), model.rnn.rnn.bias_hh_l0, retain_graph=True
    )
    assert not gradient.any()
    (gradient,) = torch.autograd.grad(model.get_hidden_state()[0][0, 1].sum(), model.rnn.rnn.bias_hh_l0)
    assert gradient.any()
    model.detach_hidden_state()
    assert not model.get_hidden_state()[0].requires_grad


def test_checkpoints_load_both_ways_and_exporters_of_rsl_rl_run(tmp_path):
    ours, reference = make_runner(OURS), make_runner(REFERENCE, seed=4)
    torch.save({**ours.alg.save(), "iter": 0, "infos": None}, tmp_path / "ours.pt")
    reference.load(str(tmp_path / "ours.pt"))
    obs = TensorDict({"policy": torch.randn(1, 2)}, batch_size=[1])
    jit = torch.jit.script(ours.alg.actor.as_jit())
    for _ in range(3):
        expected = reference.alg.actor(obs)
        torch.testing.assert_close(ours.alg.actor(obs), expected, rtol=0, atol=1e-6)
        torch.testing.assert_close(jit(obs["policy"]), expected, rtol=0, atol=1e-6)
    assert isinstance(ours.alg.actor.as_onnx().rnn, nn.LSTM)
    assert isinstance(ours.alg.actor.rnn.rnn, holdfast.nn.LSTM)


def test_errors():
    with pytest.raises(ConfigError, match="rnn_type='rnn': give one of lstm, gru"):
        make_runner(OURS, rnn_type="rnn")
    model = make_runner(OURS).alg.actor
    obs, dones, leaves = random_segments(model)
    trajectories, masks, _ = padded(obs, dones, leaves)
    with pytest.raises(ContractError, match="there are none"):
        model(trajectories, masks=masks)
    with pytest.raises(ContractError, match="give one of them"):
        model.reset(torch.ones(5), leaves)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "part", "options"),
    [(OURS, "actor", {}), (OURS, "critic", {"rnn_type": "gru"}), (REFERENCE, "actor", {"obs_normalization": True})],
)
def test_laws_hold(model, part, options):
    laws = holdfast.check(getattr(make_runner(model, **options).alg, part))
    assert laws.ok, laws


class NeverReset(ReferenceModel):
    def reset(self, dones=None, hidden_state=None):
        if dones is None:
            super().reset(hidden_state=hidden_state)


class ReplaysFromZeros(ReferenceModel):
    def forward(self, obs, masks=None, hidden_state=None, stochastic_output=False):
        if masks is not None:
            hidden_state = tuple(leaf * 0 for leaf in hidden_state)
        return super().forward(obs, masks, hidden_state, stochastic_output)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "law"), [(NeverReset, "clear"), (ReplaysFromZeros, "replay")])
def test_check_finds_broken_models(model, law):
    laws = holdfast.check(make_runner(model).alg.actor)
    assert not laws[law].ok


@pytest.mark.slow
def test_pole_without_velocities_is_learned():
    runner = make_runner(
        OURS, PoleVecEnv(64, 1), 1, hidden=32, steps=32, algorithm={"num_learning_epochs": 5, "num_mini_batches": 4}
    )
    runner.learn(80)
    env, act = PoleVecEnv(64, 101), runner.get_inference_policy()
    act.reset()
    with torch.inference_mode():
        for _ in range(200):
            _, _, dones, extras = env.step(act(env.get_observations()))
            act.reset(dones)
    # Every episode of 200 steps ends by its limit.
    assert extras["time_outs"].float().mean() > 0.9
