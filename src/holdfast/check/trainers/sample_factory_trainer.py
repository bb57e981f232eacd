"""APPO of Sample Factory with an LSTM: its serial runner, where sampler and learner share the process."""

import logging
import os
import tempfile
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import gymnasium
from sample_factory.algo.runners import runner  # pyright: ignore[reportMissingImports]
from sample_factory.algo.utils.env_info import extract_env_info  # pyright: ignore[reportMissingImports]
from sample_factory.algo.utils.make_env import (  # pyright: ignore[reportMissingImports]
    BatchedListToDictWrapper,
    make_env_func_batched,
)
from sample_factory.algo.utils.misc import ExperimentStatus  # pyright: ignore[reportMissingImports]
from sample_factory.cfg.arguments import parse_full_cfg, parse_sf_args  # pyright: ignore[reportMissingImports]
from sample_factory.envs.env_utils import register_env  # pyright: ignore[reportMissingImports]
from sample_factory.train import run_rl  # pyright: ignore[reportMissingImports]

STEPS, UPDATES = 16, 3
OPTIONS = {
    "env": "scripted",
    "seed": 0,
    "device": "cpu",
    "serial_mode": True,
    "async_rl": False,
    "batched_sampling": True,
    "num_workers": 1,
    "num_envs_per_worker": 1,
    "worker_num_splits": 1,
    "rollout": STEPS,
    "recurrence": STEPS,
    "num_batches_per_epoch": 2,
    "shuffle_minibatches": True,
    "num_epochs": 2,
    "learning_rate": 0.0,
    "gamma": 0.99,
    "gae_lambda": 0.95,
    "value_bootstrap": True,
    "normalize_input": False,
    "normalize_returns": False,
    "exploration_loss_coeff": 0.0,
    "encoder_mlp_layers": 16,
    "rnn_type": "lstm",
    "rnn_size": 16,
    "log_to_file": False,
}


class ScriptedSampleFactory(gymnasium.Env):
    """The Gymnasium environments, as Sample Factory calls them: one environment of many agents, which resets itself."""

    def __init__(self, envs: Any) -> None:
        self.envs, self.num_agents, self.is_multiagent = envs, envs.num_envs, True
        self.observation_space, self.action_space = envs.single_observation_space, envs.single_action_space

    def reset(self, **options: Any) -> Any:
        """Start all environments."""
        return self.envs.reset()

    def step(self, action: Any) -> Any:
        """Take one step in all environments."""
        return self.envs.step(action)


def train(envs: Any) -> None:
    """Train with learning rate 0."""
    logging.getLogger("rl").setLevel(logging.ERROR)
    register_env("scripted", lambda *args: ScriptedSampleFactory(envs))
    sizes = {"batch_size": STEPS * envs.num_envs // 2, "train_for_env_steps": STEPS * envs.num_envs * (UPDATES - 1) - 1}
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        stack.enter_context(patch.dict(os.environ))
        stack.enter_context(patch("torch.multiprocessing.set_sharing_strategy"))
        # Gymnasium's wrappers no longer hand on attributes; Sample Factory reads these.
        agents = {"num_agents": envs.num_envs, "is_multiagent": True}
        stack.enter_context(patch.multiple(BatchedListToDictWrapper, create=True, **agents))
        # It reads the spaces in another process, where the script is not.
        stack.enter_context(patch.object(runner, "obtain_env_info_in_a_separate_process", _env_info))
        arguments = [f"--{name}={value}" for name, value in {**OPTIONS, **sizes, "train_dir": folder}.items()]
        parser, _ = parse_sf_args(arguments)
        if run_rl(parse_full_cfg(parser, arguments)) != ExperimentStatus.SUCCESS:
            raise RuntimeError("Sample Factory did not train; its log says why")


def _env_info(cfg: Any) -> Any:
    return extract_env_info(make_env_func_batched(cfg, None), cfg)
