"""Actors of rsl_rl, played and exported; `make slow` installs the library for the comparison with its own."""

import os

import numpy as np
import pytest
import torch
from tensordict import TensorDict

import holdfast
from holdfast.cli import main
from holdfast.errors import ConfigError

pytestmark = pytest.mark.usefixtures("annotations_asleep")
BOUND = 1e-5


def checkpoint(folder, *, gates=4, inputs=3, hidden=8, outputs=2, log_std=False, normalized=False):
    """Write a checkpoint as rsl_rl's runner does; return its weights and file."""
    torch.manual_seed(0)
    rnn = {4: torch.nn.LSTM, 3: torch.nn.GRU}[gates](inputs, hidden, 2)
    actor = {f"rnn.rnn.{name}": weight for name, weight in rnn.state_dict().items()}
    for number, layer in ((0, torch.nn.Linear(hidden, 6)), (2, torch.nn.Linear(6, outputs))):
        actor |= {f"mlp.{number}.{name}": 3 * weight for name, weight in layer.state_dict().items()}
    actor["distribution.log_std_param" if log_std else "distribution.std_param"] = torch.full((outputs,), 0.7)
    if normalized:
        mean, std = torch.randn(1, inputs), torch.rand(1, inputs) + 0.5
        actor |= {"obs_normalizer._mean": mean, "obs_normalizer._std": std, "obs_normalizer._var": std.square()}
        actor["obs_normalizer.count"] = torch.tensor(3)
    file = folder / "model_3.pt"
    torch.save({"actor_state_dict": actor, "critic_state_dict": {}, "iter": 3, "infos": None}, file)
    return actor, file


def reference(actor, config):
    """Build rsl_rl's own model with the weights."""
    models = pytest.importorskip("rsl_rl.models", reason="rsl-rl-lib is not installed; `make slow` installs it")
    inputs = actor["rnn.rnn.weight_ih_l0"].shape[1]
    std_type = "log" if "distribution.log_std_param" in actor else "scalar"
    model = models.RNNModel(
        TensorDict({"policy": torch.zeros(1, inputs)}, batch_size=[1]),
        {"actor": ["policy"]},
        "actor",
        len(actor["mlp.2.bias"]),
        hidden_dims=[6],
        rnn_hidden_dim=8,
        rnn_num_layers=2,
        distribution_cfg={"class_name": "GaussianDistribution", "std_type": std_type},
        **config,
    )
    model.load_state_dict(actor)
    return model.eval()


def differences(model, act, steps, rows=3):
    """Yield how far actions are from those of rsl_rl's model, which is reset where episodes end."""
    generator = torch.Generator().manual_seed(0)
    first = torch.ones(rows, dtype=torch.bool)
    for _ in range(steps):
        obs = torch.randn(rows, model.obs_dim, generator=generator)
        model.reset(first)
        with torch.no_grad():
            expected = model(TensorDict({"policy": obs}, batch_size=[rows]))
        yield float((torch.as_tensor(act(obs, first)) - expected).abs().max())
        first = torch.rand(rows, generator=generator) < 0.1


CASES = {
    "lstm": ({}, {}, ""),
    "gru": ({"gates": 3, "normalized": True}, {"rnn_type": "gru", "obs_normalization": True}, ""),
    "tanh": ({"log_std": True}, {"activation": "tanh"}, "?activation=tanh"),
}


@pytest.mark.parametrize("name", CASES)
def test_player_acts_as_rsl_rls_model(name, tmp_path):
    options, config, suffix = CASES[name]
    actor, file = checkpoint(tmp_path, **options)
    messages = []
    player = holdfast.load(f"rsl_rl:{file}{suffix}", log=messages.append)
    assert len(messages) == (0 if suffix else 1)
    session = player.start(agents=3)
    assert max(differences(reference(actor, config), session.act, 60)) <= BOUND
    result = session.step(torch.zeros(3, 3), torch.zeros(3, dtype=torch.bool))
    assert result.values.isnan().all()
    torch.testing.assert_close(result.distribution[0, 2:].exp(), actor_std(actor))


def actor_std(actor):
    log_std = actor.get("distribution.log_std_param")
    return actor["distribution.std_param"] if log_std is None else log_std.exp()


def test_exported_actor_plays_as_rsl_rls_model(tmp_path, capsys):
    onnxruntime = pytest.importorskip("onnxruntime")
    actor, file = checkpoint(tmp_path, gates=3, normalized=True)
    model = reference(actor, {"rnn_type": "gru", "obs_normalization": True})
    assert main(["export", f"rsl_rl:{file}?activation=elu", "--to", "onnx", "--out", str(tmp_path / "a.onnx")]) == 0
    assert "value" not in capsys.readouterr().out
    run = onnxruntime.InferenceSession(tmp_path / "a.onnx", providers=["CPUExecutionProvider"])
    state = {"h_in": np.zeros((3, 2, 8), np.float32)}

    def act(obs, first):
        names = [output.name for output in run.get_outputs()]
        outputs = dict(zip(names, run.run(names, {"obs": obs.numpy(), "first": first.numpy(), **state}), strict=True))
        state["h_in"] = outputs["h_out"]
        return outputs["action"]

    assert max(differences(model, act, 300)) <= BOUND


def test_activation_of_the_configuration_beside_the_checkpoint(tmp_path):
    _, file = checkpoint(tmp_path)
    (tmp_path / "params").mkdir()
    for key in ("actor", "policy"):
        (tmp_path / "params" / "agent.yaml").write_text(f"{key}:\n  activation: relu\n")
        player = holdfast.load(f"rsl_rl:{file}")
        assert isinstance(player.policy.mlp[1], torch.nn.ReLU)
    (tmp_path / "params" / "agent.yaml").write_text("actor: !!python/object:os.system {}\n")
    with pytest.warns(UserWarning, match=r"taken to be elu.*\?activation=relu"):
        holdfast.load(f"rsl_rl:{file}")


def test_errors_say_what_is_wrong(tmp_path):
    actor, file = checkpoint(tmp_path)
    with pytest.raises(ConfigError, match="there is no such file"):
        holdfast.load("rsl_rl:none.pt")
    with pytest.raises(ConfigError, match="activation=reluu: there is no such activation; did you mean relu"):
        holdfast.load(f"rsl_rl:{file}?activation=reluu")
    for name, message in {
        "rnn.rnn.weight_ih_l0": "RNNModel is needed",
        "distribution.std_param": "are not played",
    }.items():
        torch.save({"actor_state_dict": {key: leaf for key, leaf in actor.items() if key != name}}, file)
        with pytest.raises(ConfigError, match=message):
            holdfast.load(f"rsl_rl:{file}?activation=elu")
    torch.save({"actor_state_dict": actor | {"rnn.rnn.bias_ih_l0": torch.zeros(5)}}, file)
    with pytest.raises(ConfigError, match="do not fit together"):
        holdfast.load(f"rsl_rl:{file}?activation=elu")
    torch.save({"model_state_dict": actor}, file)
    with pytest.raises(ConfigError, match="has model_state_dict; a checkpoint of rsl-rl-lib 5"):
        holdfast.load(f"rsl_rl:{file}")
    torch.save({"actor_state_dict": holdfast.Step}, file)
    with pytest.raises(ConfigError, match="not a file of tensors"):
        holdfast.load(f"rsl_rl:{file}")


WRONG = {
    "not a number": ("mlp.0.weight", torch.full((6, 8), torch.nan), "not finite, in mlp.0.weight"),
    "infinite deviation": ("distribution.std_param", torch.full((2,), torch.inf), "not finite, in distribution"),
    "negative deviation": ("obs_normalizer._std", torch.full((1, 3), -0.01), "no standard deviations"),
    "normalization of another size": ("obs_normalizer._mean", torch.zeros(1, 7), "do not fit together"),
    "deviations of other actions": ("distribution.std_param", torch.ones(5), "do not fit together"),
    "a matrix of deviations": ("distribution.std_param", torch.ones(2, 2), "do not fit together"),
    "a name that is no text": (3, torch.ones(1), "3 of the actor is not a dense tensor"),
    "sparse": ("mlp.0.weight", torch.ones(6, 8).to_sparse(), "not a dense tensor of real numbers"),
    "complex": ("mlp.0.weight", torch.ones(6, 8, dtype=torch.complex64), "not a dense tensor of real numbers"),
    "more numbers than the file": ("mlp.0.weight", torch.ones(1).expand(300_000, 8), "the file has fewer numbers"),
}


@pytest.mark.parametrize("name", WRONG)
def test_impossible_weights_are_one_line(name, tmp_path):
    key, leaf, message = WRONG[name]
    actor, file = checkpoint(tmp_path, normalized=True)
    torch.save({"actor_state_dict": actor | {key: leaf}}, file)
    with pytest.raises(ConfigError, match=message):
        holdfast.load(f"rsl_rl:{file}?activation=elu")


@pytest.mark.parametrize(
    "text",
    ["[" * 20_000, "actor: {when: 2020-13-45}", f"actor: {{n: {'9' * 5000}}}", "? [a]\n: b", "a: &a [*a]", "\xff"],
)
def test_configuration_that_cannot_be_read_is_none(text, tmp_path):
    _, file = checkpoint(tmp_path)
    (tmp_path / "params").mkdir()
    (tmp_path / "params" / "agent.yaml").write_bytes(text.encode("latin-1"))
    with pytest.warns(UserWarning, match="taken to be elu"):
        holdfast.load(f"rsl_rl:{file}")


def test_pipe_in_place_of_the_configuration_is_not_read(tmp_path):
    _, file = checkpoint(tmp_path)
    (tmp_path / "params").mkdir()
    os.mkfifo(tmp_path / "params" / "agent.yaml")
    with pytest.warns(UserWarning, match="taken to be elu"):
        holdfast.load(f"rsl_rl:{file}")
