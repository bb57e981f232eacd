"""Time `fast` on a device: an update, a rollout's forward pass, and the parts of an update.

One update is a gradient step on a fixed minibatch of `--rows` segments of 64 steps: replay, loss, backward,
gradient clipping, optimizer step. A rollout's forward pass is one step of `--agents` agents with their stored
states, from observation to sampled action. Both run eagerly and as CUDA graphs, with torch's kernels (blank
steps, which cannot be captured over segments) and ours, in float32 and bfloat16, interleaved; likewise the
class and the component graph. `learner` is the trainer's full update of that minibatch, with advantages,
shuffling, checks and metrics. Reads from the device stay outside of a captured graph: the check for a finite
loss and norm, and the metrics.

    python benchmarks/fast.py [--device cuda] [--rows 256] [--agents 8192] [--quick] [--json FILE]
"""

import argparse
import copy
import json
from dataclasses import dataclass
from functools import partial

import torch
from tensordict import TensorDict
from torch import nn

from holdfast.bench.timing import interleaved, name_of, prepare, versions
from holdfast.config.trainer import TrainerConfig
from holdfast.learn import Learner, replay
from holdfast.learn.advantage import Targets
from holdfast.learn.ppo import compute_loss, normalize_advantages
from holdfast.memory import use_kernel
from holdfast.policies import POLICIES, ComponentPolicy, PolicyOutput
from holdfast.rollout import Segments
from holdfast.worlds.tokens import shorten
from policies import SPEC, STARTS, T, some_obs

CLASS, GRAPH = "policy=fast", "component:fast"
BEFORE, AFTER = ("torch", "float32"), ("triton", "bfloat16")


@dataclass(frozen=True)
class Variant:
    """A variant to time: policy, kernel, precision, eager or CUDA graph."""

    policy: str = CLASS
    kernel: str = "torch"
    precision: str = "float32"
    how: str = "eager"

    def __str__(self) -> str:
        return f"{self.policy} {self.kernel} {self.precision} {self.how}"


def make(variant: Variant, device: torch.device):
    torch.manual_seed(0)
    policy = POLICIES["fast"](SPEC) if variant.policy == CLASS else ComponentPolicy(SPEC, "fast")
    policy.bind(SPEC)
    policy.to(device)
    use_kernel(policy, variant.kernel)
    policy.precision = variant.precision
    return policy


def computing(variant: Variant, device: torch.device):
    """Return the autocast context of a variant, for parts called without their policy."""
    return torch.autocast(device.type, torch.bfloat16, enabled=variant.precision == "bfloat16")


def random_segments(rows: int, device: torch.device) -> Segments:
    """Return random segments in the layout of a rollout."""
    generator = torch.Generator().manual_seed(0)
    flag, size = torch.zeros(rows, T, dtype=torch.bool), (rows, T)
    number = partial(torch.randn, size, generator=generator)
    first = torch.rand(size, generator=generator) < STARTS
    steps = {"rewards": number(), "values": number(), "last_values": number(), "values_now": number()}
    steps |= {"dones": first, "truncateds": flag, "first": first, "valid": ~flag, "trial": flag}
    steps |= {"actions": torch.randint(len(SPEC.action_names), size, generator=generator)}
    steps |= {"act_log_prob": torch.full(size, -3.0), "ratio": torch.ones(size)}
    td = TensorDict(steps, batch_size=size).to(device)
    td["env_obs"] = shorten(some_obs(rows * T, device.type)).unflatten(0, size)
    tail = td[:, 0].select("rewards", "dones", "truncateds", "values", "last_values")
    cell = POLICIES["fast"](SPEC).lstm.cell.to(device)
    return Segments(td, cell.initial(rows), tail, torch.zeros(rows, dtype=torch.long, device=device), rows)


class Update:
    """One gradient step on a fixed minibatch."""

    def __init__(self, policy, segments: Segments) -> None:
        self.policy, self.segments, self.ppo = policy, segments, TrainerConfig().ppo
        self.targets = Targets(segments.steps["rewards"], segments.steps["last_values"])
        config = TrainerConfig().optimizer
        on_gpu = segments.version.is_cuda
        self.optimizer = torch.optim.Adam(policy.parameters(), config.learning_rate, capturable=on_gpu)

    def __call__(self) -> None:
        """Run the gradient step."""
        targets = normalize_advantages(self.targets, self.segments, self.ppo, None)
        self.optimizer.zero_grad(set_to_none=True)
        outputs = replay(self.policy, self.segments)
        compute_loss(self.policy, outputs, self.segments, targets, ppo=self.ppo)[0].backward()
        self.step()

    def step(self) -> None:
        """Clip the current gradients and step the optimizer."""
        nn.utils.clip_grad_norm_(self.policy.parameters(), self.ppo.max_grad_norm)
        self.optimizer.step()


def learner(policy, segments: Segments):
    steps = segments.steps.numel()
    sizes = {"batch_size": steps, "minibatch_size": steps, "bptt_horizon": T, "update_epochs": 1}
    return partial(Learner(policy, TrainerConfig(**sizes), seed=0).update, segments)


def forward_of(policy, agents: int, device: torch.device):
    """Return a function that runs one step of all agents with stored states."""
    policy.store.allocate({0: agents})
    flag = torch.zeros(agents, dtype=torch.bool, device=device)
    inputs = {"env_obs": shorten(some_obs(agents, device.type)), "first": flag, "valid": ~flag, "trial": flag}
    inputs |= {
        "draws": torch.rand(agents, device=device),
        "training_env_id_start": torch.zeros(agents).long(),
    }

    @torch.no_grad()
    def run():
        return policy(TensorDict(inputs, batch_size=[agents]))["actions"]

    return run


def variants_of(device: torch.device) -> list[Variant]:
    """Return the variants to time, BEFORE and AFTER first."""
    if device.type == "cpu":
        return [Variant(), Variant(policy=GRAPH)]
    pairs = [BEFORE, AFTER, ("triton", "float32"), ("torch", "bfloat16")]
    variants = [Variant(CLASS, *pair, how) for how in ("eager", "graph") for pair in pairs]
    return variants + [Variant(GRAPH, *AFTER, how) for how in ("eager", "graph")]


def measure(what: str, make_run, variants: list[Variant], steps: int, device: torch.device, rounds: int) -> list[dict]:
    """Time all variants, interleaved; print and return the results."""
    ready, results = {}, []
    for variant in variants:
        ready[variant] = prepare(make_run(make(variant, device)), device, records=variant.how == "graph")
        if ready[variant].why_eager:
            print(f"{what} {variant}: cannot be captured, {ready[variant].why_eager}", flush=True)
            del ready[variant]
    for variant, times in interleaved({variant: call.run for variant, call in ready.items()}, device, rounds).items():
        low, high = times.spread
        row = {"what": what, **vars(variant), "ms": times.median, "ms_p10": low, "ms_p90": high}
        row |= {"steps_a_second": 1e3 * steps / times.median, "first_seconds": ready[variant].first_seconds}
        speed = f"{row['steps_a_second'] / 1e6:.3g} M steps/s"
        print(f"{what:8} {variant!s:44} {times.median:8.3f} ms [{low:.3f} - {high:.3f}]  {speed}", flush=True)
        results.append(row)
    return results


def compare(results: list[dict]) -> list[dict]:
    """Return the time of the component graph over that of the class, where both were measured."""
    ratios = []
    for row in results:
        same = [
            other
            for other in results
            if other["policy"] == CLASS
            and all(other[key] == row[key] for key in ("what", "kernel", "precision", "how"))
        ]
        if row["policy"] == GRAPH and same:
            ratio = row["ms"] / same[0]["ms"]
            print(f"{row['what']} {row['how']}: component:fast takes {ratio:.3f} of policy=fast", flush=True)
            ratios.append({"what": row["what"], "how": row["how"], "ratio": ratio})
    return ratios


def parts_of(variant: Variant, segments: Segments, device: torch.device) -> dict:
    """Return for each part its forward function on real inputs, and the tensors whose gradients it needs."""
    policy, steps = make(variant, device), segments.steps
    obs = steps["env_obs"].flatten(0, 1)
    with torch.no_grad(), computing(variant, device):
        encoded = policy.encode(obs).unflatten(0, steps.batch_size)
        hidden = policy.lstm.cell(encoded, segments.entry_state, steps["first"], steps["valid"])[0].flatten(0, 1)
        outputs = policy.decode(hidden)
    encoded, hidden, *outputs = (leaf.requires_grad_() for leaf in (encoded, hidden, *outputs))
    policy_copy = copy.deepcopy(policy)

    def unroll(obs, first, state, valid):
        # Reshaped at every call: backward runs on the stream of its forward pass, which must be captured too.
        return PolicyOutput(*(leaf.unflatten(0, steps.batch_size) for leaf in outputs)), state

    policy_copy.unroll = unroll
    update = Update(policy_copy, segments)

    def loss():
        targets = normalize_advantages(update.targets, segments, update.ppo, None)
        return [compute_loss(policy_copy, replay(policy_copy, segments), segments, targets, ppo=update.ppo)[0]]

    def inside(part):
        with computing(variant, device):
            return part()

    flags = (segments.entry_state, steps["first"], steps["valid"])
    cell, heads = policy.lstm.cell, [*policy.actor.parameters(), *policy.critic.parameters()]
    return {
        "encoder": (partial(inside, lambda: [policy.encode(obs)]), list(policy.encoder.parameters())),
        "memory": (partial(inside, lambda: [cell(encoded, *flags)[0]]), [encoded, *cell.parameters()]),
        "heads": (partial(inside, lambda: list(policy.decode(hidden))), [hidden, *heads]),
        "loss": (loss, outputs),
    }


def timed_parts(variant: Variant, segments: Segments, device: torch.device, rounds: int) -> dict:
    """Time each part forward and with backward, the optimizer and the full update, interleaved."""
    runs = {}
    for part, (forward, leaves) in parts_of(variant, segments, device).items():

        def both(forward=forward, leaves=leaves):
            outputs = forward()
            grads = [torch.ones_like(output) for output in outputs]
            return torch.autograd.grad(outputs, leaves, grads, allow_unused=True)

        runs[part, "forward"], runs[part, "both"] = forward, both
    runs["whole", "both"] = Update(make(variant, device), segments)
    stepping = Update(make(variant, device), segments)
    stepping()
    runs["optimizer", "both"] = stepping.step
    ready = {key: prepare(run, device, records=variant.how == "graph") for key, run in runs.items()}
    eager = [f"{part} {which}: {call.why_eager}" for (part, which), call in ready.items() if call.why_eager]
    print("".join(f"  not captured, counted in the rest: {line}\n" for line in eager), end="", flush=True)
    times = interleaved({key: call.run for key, call in ready.items()}, device, rounds)
    # An eager time is not comparable with the times of captured graphs.
    wanted = "cpu" if device.type == "cpu" else variant.how
    return {key: times[key].median for key, call in ready.items() if call.how == wanted}


def where_time_goes(variant: Variant, segments: Segments, device: torch.device, rounds: int) -> list[dict]:
    """Print and return the times of the parts, of the optimizer, and of the rest of the update."""
    print(f"where an update goes, {variant}: ms forward, backward, share", flush=True)
    ms = timed_parts(variant, segments, device, rounds)
    if ("whole", "both") not in ms:
        print("  it cannot be captured", flush=True)
        return []
    parts = ("encoder", "memory", "heads", "loss", "optimizer", "whole")
    rows = [
        {"part": part, "forward": ms.get((part, "forward"), ms[part, "both"]), "both": ms[part, "both"]}
        for part in parts
        if (part, "both") in ms
    ]
    total = rows[-1]["both"]
    rows.insert(-1, {"part": "rest", "forward": 0.0, "both": total - sum(row["both"] for row in rows[:-1])})
    for row in rows:
        backward, row["timed"] = row["both"] - row["forward"], variant.how
        share = row["both"] / total
        print(f"  {row['part']:10} {row['forward']:8.3f} {backward:8.3f} {share:8.1%}", flush=True)
    return [{**vars(variant), **row} for row in rows]


def main() -> None:
    """Measure, and write all results as JSON after every part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rows", type=int, help="segments of a minibatch; 256 on a GPU, 8 elsewhere")
    parser.add_argument("--agents", type=int, help="agents of a rollout; 8192 on a GPU, 64 elsewhere")
    parser.add_argument("--quick", action="store_true", help="3 rounds instead of 30")
    parser.add_argument("--json")
    args = parser.parse_args()
    device, on_gpu = torch.device(args.device), args.device != "cpu"
    torch.backends.cudnn.allow_tf32 = False
    torch.set_num_threads(1)
    rows, agents = args.rows or (256 if on_gpu else 8), args.agents or (8192 if on_gpu else 64)
    rounds, variants, segments = 3 if args.quick else 30, variants_of(device), random_segments(rows, device)
    results = {"device": name_of(device), "versions": versions(), "rows": rows, "steps": T, "agents": agents}
    print(f"{results['device']}, torch {torch.__version__}, {rows} x {T} steps, {agents} agents", flush=True)

    def save(name: str, values: list[dict]) -> None:
        results[name] = values
        if args.json:
            with open(args.json, "w") as file:
                json.dump(results, file, indent=2)

    time = partial(measure, device=device, rounds=rounds)
    save("update", time("update", partial(Update, segments=segments), variants, rows * T))
    forward = partial(forward_of, agents=agents, device=device)
    save("rollout", time("rollout", forward, variants, agents))
    save("component_over_class", compare(results["update"] + results["rollout"]))
    first = Variant(CLASS, *AFTER, "graph") if on_gpu else Variant()
    for number, variant in enumerate([first, Variant(CLASS, *AFTER), Variant(CLASS, *BEFORE)] if on_gpu else [first]):
        save(f"parts_{number}", where_time_goes(variant, segments, device, rounds))
    both = [variant for variant in variants if variant.how == "eager" and variant.policy == CLASS][:2]
    save("learner", time("learner", partial(learner, segments=segments), both, rows * T))


if __name__ == "__main__":
    main()
