"""Files beside a run that the fuzzer mutates, and the verbs that read them: recipe, seeds, sweep, rollout, models.

None of them has a checksum, so a verb may return anything, or refuse in one line.
"""

import contextlib
import io
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from safetensors.numpy import save_file

import holdfast
from helpers.small_runs import TINY
from holdfast.cli import main
from holdfast.errors import ConfigError
from holdfast.sweep import run_sweep, seeds
from holdfast.sweep.results import write_best
from holdfast.sweep.seed_results import SeedsPlan, run_result, write_results
from holdfast.sweep.settings import new_settings, write_settings
from holdfast.sweep.trials import COST, RUNS, SCORE, TrialStore

MORE = "more"
"""The folder of these files, in that of the run."""
RECIPE = """# Keys, dotted and nested.
recipe: recall
world: {name: recall, delay: 2..5, cues: 3}
policy: {name: fast, memory: gru}
trainer.optimizer.learning_rate: 3e-3
schedule.trainer.ppo.ent_coef: linear:0
"""
SPACE = ("trainer.optimizer.learning_rate=log:1e-4..1e-2", "policy.memory=lstm,gru")


def make_files(folder):
    """Write all files, into the folder of a run."""
    more = folder / MORE
    more.mkdir()
    (more / "recipe.yaml").write_text(RECIPE)
    _write_rollout(more / "rollout.safetensors")
    _write_rsl_rl(more / "rsl_rl")
    if has_sb3():
        _write_sb3(more / "sb3")
    _write_group(folder, more / "group")
    _write_sweep(more / "sweep")


def has_sb3():
    """Whether sb3-contrib is installed."""
    return find_spec("sb3_contrib") is not None


def _write_rollout(file):
    rng, T, E = np.random.default_rng(0), 8, 2
    arrays = {name: rng.normal(size=(T, E)).astype(np.float32) for name in ("values", "log_probs", "rewards")}
    arrays |= {f"replayed_{name}": arrays[name] for name in ("values", "log_probs")}
    flags = {name: np.zeros((T, E), bool) for name in ("first", "terminated", "truncated")}
    flags["first"][0] = flags["first"][4] = flags["terminated"][3] = True
    states = {"states": rng.normal(size=(T, E, 3)), "entry_states": rng.normal(size=(2, E, 3))}
    metadata = {"holdfast_rollout": '{"version": 1, "gamma": 0.9, "lambda": 0.8}'}
    save_file({**arrays, **flags, **states}, file, metadata=metadata)


def _write_rsl_rl(folder):
    (folder / "params").mkdir(parents=True)
    (folder / "params" / "agent.yaml").write_text("actor:\n  activation: relu\n  hidden_dims: [6]\n")
    rnn, generator = torch.nn.LSTM(3, 4, 2), torch.Generator().manual_seed(0)
    actor = {f"rnn.rnn.{name}": weight.detach() for name, weight in rnn.state_dict().items()}
    shapes = {"mlp.0.weight": (6, 4), "mlp.0.bias": (6,), "mlp.2.weight": (2, 6), "mlp.2.bias": (2,)}
    actor |= {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    actor |= {"distribution.std_param": torch.ones(2), "obs_normalizer._mean": torch.zeros(1, 3)}
    actor["obs_normalizer._std"] = torch.ones(1, 3)
    torch.save({"actor_state_dict": actor, "critic_state_dict": {}, "iter": 3}, folder / "model.pt")


def _write_sb3(folder):
    import sb3_contrib

    folder.mkdir()
    options = {"lstm_hidden_size": 4, "net_arch": [4]}
    model = sb3_contrib.RecurrentPPO("MlpLstmPolicy", "CartPole-v1", n_steps=8, device="cpu", policy_kwargs=options)
    model.save(folder / "model.zip")


def _write_group(run, folder):
    """Write a folder of two seeds that are finished."""
    results = {}
    for seed in (0, 1):
        target = folder / f"seed{seed}"
        target.mkdir(parents=True)
        for name in ("config.json", "command.txt", "metrics.jsonl"):
            shutil.copy(run / name, target / name)
        results[seed] = run_result(target, "cpu_seconds", 1.5, "", finished=True)
    plan = SeedsPlan(["recall", *(f"{key}={value}" for key, value in TINY.items())], [0, 1], "cpu_seconds")
    write_results(folder, plan, results)


def _write_sweep(folder):
    """Write a sweep whose trials are finished."""
    folder.mkdir()
    settings = new_settings("recall", {"world.agents": "64"}, SPACE, trials=5)
    store = TrialStore(f"sqlite:///{folder / 'study.db'}", "sweep")
    store.create(settings)
    store.open()
    for number in range(5):
        trial = store.claim("other:1")
        for dimension in settings.dimensions:
            dimension.suggest(trial)
        trial.set_user_attr(RUNS, {f"trial-{number:03}-seed-0": {"return": number / 4, "seed": 0}})
        store.finish(trial, {SCORE: number / 4, COST: 1.0 + number})
    write_settings(folder, settings, "sweep", "")
    write_best(folder, settings, run_sweep.results_of(store.all(), run_sweep.GRID)[-1])


def _call(*words):
    """Call a command; return what it prints."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        code = main(list(words))
    return None if code not in (0, 1) else "an output"


def train_recipe(folder):
    """Train by the recipe file, for two iterations whatever it says."""
    keys = {**TINY, "trainer.total_timesteps": 128, "trainer.eval_episodes": 2, "trainer.num_workers": 0}
    keys |= {"trainer.update_epochs": 1, "world.agents": 8, "run": "y", "runs_dir": str(folder), "device": "cpu"}
    del keys["world.delay"]
    return _call("train", str(folder / MORE / "recipe.yaml"), *(f"{key}={value}" for key, value in keys.items()))


def check_rollout(folder):
    return _call("check", f"rollout:{folder / MORE / 'rollout.safetensors'}", "--json")


def list_runs(folder):
    return _call("runs", str(folder / MORE), "--sort", "return") and _call("runs", str(folder / MORE), "--json")


def play(folder):
    with mock.patch.object(sys, "stdin", io.StringIO("step 3\nagent 1\nclear\nswap 0\nsampled\nstep\nquit\n")):
        return _call("play", str(folder), "--terminal", "--agents", "2")


def check_run(folder):
    return _call("check", str(folder))


def train_with_teacher(folder):
    keys = {**TINY, "trainer.total_timesteps": 64, "trainer.eval_episodes": 2, "run": "y", "runs_dir": str(folder)}
    if not (folder / "agent.yaml").exists():
        del keys["world.delay"]
        keys |= {"world": "gym:CartPole-v1", "world.frame_stack": 2}
    teacher = f"trainer.teachers={folder} value=0"
    return _call("train", "recall", teacher, *(f"{key}={value}" for key, value in keys.items()))


def _do_not_train(*args):
    raise ConfigError("A process would start here.")


def resume_seeds(folder):
    with mock.patch.object(seeds, "_start", _do_not_train), mock.patch.object(seeds, "_write_report"):
        return _call("train", "--resume", str(folder / MORE / "group"))


def resume_sweep(folder):
    with mock.patch.object(run_sweep, "_start_worker", _do_not_train):
        return _call("sweep", "--resume", str(folder / MORE / "sweep"))


def train_best(folder):
    """Show the config of a sweep's best trial."""
    return _call("train", "--help", str(folder / MORE / "sweep" / "best.yaml"))


def _load(name):
    player = holdfast.load(name, log=lambda message: None)
    space = player.spec.observation_space
    obs = np.ones((2, *space.shape), space.dtype)
    session = player.start(2)
    actions = [session.act(obs, np.array([step == 0] * 2)) for step in range(3)]
    assert all(np.isfinite(np.asarray(action)).all() for action in actions), "actions are not finite"
    return "actions"


def load_rsl_rl(folder):
    return _load(f"rsl_rl:{folder / MORE / 'rsl_rl' / 'model.pt'}")


def load_sb3(folder):
    return _load(f"sb3:{folder / MORE / 'sb3' / 'model.zip'}")


VERBS = {
    "train_recipe": (train_recipe, 2, "recipe.yaml"),
    "check_rollout": (check_rollout, 2, "rollout.safetensors"),
    "list_runs": (list_runs, 2, "group/**/*"),
    "resume_seeds": (resume_seeds, 2, "group/seeds.json"),
    "resume_sweep": (resume_sweep, 2, "sweep/s*"),
    "train_best": (train_best, 0.3, "sweep/best.yaml"),
    "load_rsl_rl": (load_rsl_rl, 3, "rsl_rl/**/*"),
    **({"load_sb3": (load_sb3, 3, "sb3/*")} if has_sb3() else {}),
    "play": (play, 1, None),
    "check_run": (check_run, 0.1, None),
    "train_with_teacher": (train_with_teacher, 0.5, None),
}
"""Verbs, their shares of the cases, and the files that they read, below `more`; None: those of the run."""


def files_of(folder, verb):
    """Return the files that a verb reads, or None where they are those of the run."""
    pattern = VERBS[verb][2] if verb in VERBS else None
    if pattern is None:
        return None
    return [Path(file) for file in (folder / MORE).glob(pattern) if file.is_file() and not file.name.startswith(".")]
