"""Steps per CPU-second of Holdfast and rl_games: CartPole-v1, the same network and sizes, one core, in turns.

python benchmarks/peers_cpu.py --peer-python VENV/bin/python          # an interpreter that has rl_games

Linear 64, LSTM 128, linear heads: 100,035 weights. Rollouts and segments of 64 steps, 4 epochs of 4 minibatches.
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

HORIZON, EPOCHS, MINIBATCHES = 64, 4, 4
WARM_UP = 4
"""Iterations of a first run in the same process, which is not counted."""


def run_holdfast(agents: int, steps: int, horizon: int) -> float:
    """Train, and return the last mean return."""
    import holdfast

    sizes = {"batch_size": agents * HORIZON, "minibatch_size": agents * HORIZON // MINIBATCHES}
    trainer = {"total_timesteps": steps, "bptt_horizon": horizon, "update_epochs": EPOCHS, "eval_episodes": 1, **sizes}
    trainer["normalize_reward"] = False
    with tempfile.TemporaryDirectory() as folder:
        keys = {"world": "gym:CartPole-v1", "world.agents": agents, "policy": "peers_policy:Small"}
        keys |= {"run": "peers", "runs_dir": folder, "threads": 1, "policy.num_layers": 1}
        keys |= {"policy.normalize_obs": False, "policy.normalize_value": False}
        result = holdfast.train("general", keys | {f"trainer.{key}": value for key, value in trainer.items()})
    return float(result.summary["charts/episodic_return"])


def rl_games_params(agents: int, steps: int, horizon: int, folder: str) -> dict[str, Any]:
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
        "seq_length": horizon,
        "minibatch_size": batch // MINIBATCHES,
        "mini_epochs": EPOCHS,
        "max_epochs": steps // batch,
        "device": "cpu",
        "reward_shaper": {"scale_value": 1.0},
        "normalize_advantage": True,
        "normalize_input": False,
        "gamma": 0.99,
        "tau": 0.95,
        "learning_rate": 1e-3,
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


def run_rl_games(agents: int, steps: int, horizon: int) -> float:
    """Train, and return the last mean return."""
    import gymnasium
    from rl_games.common import env_configurations, vecenv
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

    vecenv.register("SYNC", Sync)
    env_configurations.register("cartpole", {"vecenv_type": "SYNC", "env_creator": lambda **_: None})
    with tempfile.TemporaryDirectory() as folder:
        runner = Runner()
        runner.load({"params": rl_games_params(agents, steps, horizon, folder)})
        agent = runner.algo_factory.create(runner.algo_name, base_name="run", params=runner.params)
        weights = sum(weight.numel() for weight in agent.model.parameters())
        assert weights == 100_035, f"rl_games has {weights:,} weights"
        agent.train()
        return float(agent.game_rewards.get_mean()[0])


def measure(library: str, agents: int, steps: int, horizon: int) -> dict[str, float]:
    """Train once to warm up and once for the figure: steps a CPU-second, start and end of the run included."""
    train = {"holdfast": run_holdfast, "rl_games": run_rl_games}[library]
    train(agents, WARM_UP * agents * HORIZON, horizon)
    start = time.process_time()
    final_return = train(agents, steps, horizon)
    return {"steps_per_cpu_s": steps / (time.process_time() - start), "return": final_return}


def measure_in_child(python: str, library: str, agents: int, steps: int, horizon: int) -> dict[str, float]:
    """Measure in a process of its own, with one thread."""
    command = [python, __file__, "--measure", library, str(agents), str(steps), str(horizon)]
    threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    output = subprocess.run(command, env=os.environ | threads, capture_output=True, text=True, check=False)
    if output.returncode:
        raise SystemExit(output.stderr)
    return json.loads(output.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer-python", default=sys.executable, help="interpreter with rl_games")
    parser.add_argument("--agents", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--iterations", type=int, default=100)
    parser.add_argument("--horizon", type=int, default=HORIZON, help="steps of a segment")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--measure", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        library, *sizes = args.measure
        print(json.dumps(measure(library, *map(int, sizes))))
        return
    pythons = {"holdfast": sys.executable, "rl_games": args.peer_python}
    for agents in args.agents:
        steps, figures = args.iterations * agents * HORIZON, {library: [] for library in pythons}
        for _ in range(args.rounds):
            for library, python in pythons.items():
                figures[library].append(measure_in_child(python, library, agents, steps, args.horizon))
        medians = {}
        for library, results in figures.items():
            speeds = sorted(result["steps_per_cpu_s"] for result in results)
            medians[library] = statistics.median(speeds)
            returns = ", ".join(f"{result['return']:.0f}" for result in results)
            print(
                f"{agents} environments, {library}: {medians[library]:,.0f} steps a CPU-second "
                f"({speeds[0]:,.0f} to {speeds[-1]:,.0f}), return after {steps:,} steps: {returns}"
            )
        print(f"{agents} environments: {medians['holdfast'] / medians['rl_games']:.2f}x", flush=True)


if __name__ == "__main__":
    main()
