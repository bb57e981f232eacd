"""Steps per CPU-second of Holdfast and rl_games: CartPole-v1, the same network and sizes, one core, in turns.

python benchmarks/peers_cpu.py --peer-python VENV/bin/python          # an interpreter that has rl_games

Linear 64, LSTM 128, linear heads: 100,035 weights. Rollouts and segments of 64 steps, 4 epochs of 4 minibatches. Start,
warm-up and final evaluation are not counted; checks, monitors, metrics and checkpoints are on.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

HORIZON, EPOCHS, MINIBATCHES, LEARNING_RATE = 64, 4, 4, 1e-3
WARM_UP = 4
"""Iterations before the clock starts."""


def run_holdfast(agents: int, iterations: int) -> tuple[list[float], float]:
    """Train; return the CPU time after each iteration, and the last mean return."""
    import torch
    from torch import nn

    import holdfast
    from holdfast.policies import PolicyOutput, RecurrentPolicy, distribution_for

    class Small(RecurrentPolicy):
        def __init__(self, spec: Any, hidden_size: int = 128, num_layers: int = 1, **memory: Any) -> None:
            super().__init__(64, hidden_size, num_layers, **memory)
            self.actions = distribution_for(spec)
            self.encoder = nn.Linear(spec.obs_shape[0], 64)
            self.actor = nn.Linear(hidden_size, len(spec.action_names))
            self.critic = nn.Linear(hidden_size, 1)

        def encode(self, obs: Any) -> Any:
            return torch.relu(self.encoder(obs))

        def decode(self, features: Any) -> Any:
            return PolicyOutput(self.actor(features), self.critic(features).squeeze(-1))

    times, returns = list[float](), [0.0]

    def on_iteration(iteration: Any) -> None:
        times.append(time.process_time())
        returns.append(iteration.metrics.get("charts/episodic_return", returns[-1]))
        if iteration.number == iteration.total:
            # Without the final evaluation.
            iteration.stop()

    batch = agents * HORIZON
    keys: dict[str, Any] = {"world.agents": agents, "policy.num_layers": 1, "policy.normalize_obs": False, "threads": 1}
    keys |= {
        "trainer.total_timesteps": iterations * batch,
        "trainer.batch_size": batch,
        "trainer.bptt_horizon": HORIZON,
    }
    keys |= {"trainer.minibatch_size": batch // MINIBATCHES, "trainer.update_epochs": EPOCHS}
    keys |= {"trainer.optimizer.learning_rate": LEARNING_RATE}
    with tempfile.TemporaryDirectory() as folder:
        keys |= {"runs_dir": folder, "run": "peers"}
        run = holdfast.train("general", keys, env="CartPole-v1", policy=Small, callbacks=[on_iteration], quiet=True)
    weights = sum(weight.numel() for weight in run.policy.parameters())
    assert weights == 100_035, f"Holdfast has {weights:,} weights"
    return times, returns[-1]


def rl_games_params(agents: int, iterations: int, folder: str) -> dict[str, Any]:
    """Return rl_games's config of the same run."""
    batch = agents * HORIZON
    network = {
        "name": "actor_critic",
        "separate": False,
        "space": {"discrete": {}},
        "mlp": {
            "units": [64],
            "activation": "relu",
            "initializer": {"name": "default"},
            "regularizer": {"name": "None"},
        },
        "rnn": {"name": "lstm", "units": 128, "layers": 1, "before_mlp": False},
    }
    config = {
        "name": "peers",
        "train_dir": folder,
        "env_name": "cartpole",
        "num_actors": agents,
        "horizon_length": HORIZON,
        "seq_length": HORIZON,
        "minibatch_size": batch // MINIBATCHES,
        "mini_epochs": EPOCHS,
        "max_epochs": iterations,
        "device": "cpu",
        "reward_shaper": {"scale_value": 0.1},
        "normalize_advantage": True,
        "normalize_input": False,
        "gamma": 0.99,
        "tau": 0.95,
        "learning_rate": LEARNING_RATE,
        "lr_schedule": None,
        "grad_norm": 0.5,
        "truncate_grads": True,
        "entropy_coef": 0.005,
        "e_clip": 0.2,
        "clip_value": False,
        "critic_coef": 1,
        "score_to_win": 1e9,
        "print_stats": False,
    }
    algo = {"algo": {"name": "a2c_discrete"}, "model": {"name": "discrete_a2c"}, "load_checkpoint": False}
    return {"seed": 0, "torch_threads": 1, **algo, "network": network, "config": config}


def run_rl_games(agents: int, iterations: int) -> tuple[list[float], float]:
    """Train; return the CPU time after each iteration, and the last mean return."""
    import gymnasium
    from rl_games.common import env_configurations, vecenv
    from rl_games.common.algo_observer import DefaultAlgoObserver
    from rl_games.common.ivecenv import IVecEnv
    from rl_games.torch_runner import Runner

    class Sync(IVecEnv):
        """Gymnasium's SyncVectorEnv, because Ray would step the environments on other cores."""

        def __init__(self, _name: str, num_actors: int, **_: Any) -> None:
            mode = gymnasium.vector.AutoresetMode.SAME_STEP
            make = [lambda: gymnasium.make("CartPole-v1")] * num_actors
            self.env = gymnasium.vector.SyncVectorEnv(make, autoreset_mode=mode)

        def step(self, actions: Any) -> Any:
            obs, reward, terminated, truncated, _ = self.env.step(actions)
            return obs, reward.astype("float32"), terminated | truncated, {"time_outs": truncated}

        def reset(self) -> Any:
            return self.env.reset(seed=0)[0]

        def get_number_of_agents(self) -> int:
            return 1

        def get_env_info(self) -> dict[str, Any]:
            spaces = (self.env.single_observation_space, self.env.single_action_space)
            return dict(zip(("observation_space", "action_space"), spaces, strict=True))

    times: dict[int, float] = {}

    class Clock(DefaultAlgoObserver):
        def after_print_stats(self, frame: int, epoch_num: int, total_time: float) -> None:
            # Called twice an epoch.
            times[epoch_num] = time.process_time()

    vecenv.register("SYNC", Sync)
    env_configurations.register("cartpole", {"vecenv_type": "SYNC", "env_creator": lambda **_: None})
    with tempfile.TemporaryDirectory() as folder:
        runner = Runner(Clock())
        runner.load({"params": rl_games_params(agents, iterations, folder)})
        agent = runner.algo_factory.create(runner.algo_name, base_name="run", params=runner.params)
        weights = sum(weight.numel() for weight in agent.model.parameters())
        assert weights == 100_035, f"rl_games has {weights:,} weights"
        agent.train()
        return list(times.values()), float(agent.game_rewards.get_mean()[0])


def measure(library: str, agents: int, iterations: int) -> dict[str, float]:
    """Train once; return steps a CPU-second after the warm-up, and the last mean return."""
    times, last_return = {"holdfast": run_holdfast, "rl_games": run_rl_games}[library](agents, iterations)
    steps = (len(times) - WARM_UP) * agents * HORIZON
    return {"steps_per_cpu_s": steps / (times[-1] - times[WARM_UP - 1]), "return": last_return}


def measure_in_child(python: str, library: str, agents: int, iterations: int) -> dict[str, float]:
    """Measure in a process of its own, with one thread."""
    command = [python, __file__, "--measure", library, str(agents), str(iterations)]
    threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    output = subprocess.run(command, env=os.environ | threads, capture_output=True, text=True, check=False)
    if output.returncode:
        raise SystemExit(output.stderr)
    return json.loads(output.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer-python", default=sys.executable, help="interpreter with rl_games")
    parser.add_argument("--agents", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--iterations", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--measure", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        library, agents, iterations = args.measure
        print(json.dumps(measure(library, int(agents), int(iterations))))
        return
    pythons = {"holdfast": sys.executable, "rl_games": args.peer_python}
    for agents in args.agents:
        figures, medians = {library: [] for library in pythons}, {}
        for _ in range(args.rounds):
            for library, python in pythons.items():
                figures[library].append(measure_in_child(python, library, agents, args.iterations))
        for library, results in figures.items():
            speeds = sorted(result["steps_per_cpu_s"] for result in results)
            medians[library] = statistics.median(speeds)
            returns = ", ".join(f"{result['return']:.0f}" for result in results)
            print(
                f"{agents} environments, {library}: {medians[library]:,.0f} steps a CPU-second "
                f"({speeds[0]:,.0f} to {speeds[-1]:,.0f}), return at the end {returns}"
            )
        print(f"{agents} environments: {medians['holdfast'] / medians['rl_games']:.2f}x", flush=True)


if __name__ == "__main__":
    main()
