"""`fast` on a device: an update, a rollout's forward pass, and where the time goes.

One update is a minibatch of `--rows` segments of 64 steps that lie ready: replay, loss, backward, gradient
norm, optimizer step. A rollout's forward pass is one step of `--agents` agents with their live memories, from
observation to drawn action. Both eagerly and as CUDA graphs, with torch's kernels (blank steps, which cannot
be recorded over segments) and ours, in float32 and bfloat16, in turns; the class against the graph likewise.
`learner` is the trainer's whole update of that minibatch: advantages, order, checks and metrics too. Outside
of a recording stays what reads the device: the look whether loss and norm are finite, and the metrics.

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

from holdfast.bench.timing import interleaved, prepare
from holdfast.bench.where import name_of, versions
from holdfast.experience import Segments
from holdfast.learn import Learner
from holdfast.learn.objective import loss_of
from holdfast.learn.targets import Targets, normalised
from holdfast.memory import use_kernel
from holdfast.policies import POLICIES, ComponentPolicy, Thoughts
from holdfast.trainer_knobs import Trainer
from holdfast.worlds.tokens import shorten
from policies import SPEC, STARTS, T, some_obs

CLASS, GRAPH = "policy=fast", "component:fast"
BEFORE, AFTER = ("torch", "float32"), ("triton", "bfloat16")


@dataclass(frozen=True)
class Way:
    """Which policy, by which kernel, in which precision, called how."""

    policy: str = CLASS
    kernel: str = "torch"
    precision: str = "float32"
    how: str = "eager"

    def __str__(self) -> str:
        return f"{self.policy} {self.kernel} {self.precision} {self.how}"


def make(way: Way, device: torch.device):
    torch.manual_seed(0)
    policy = POLICIES["fast"](SPEC) if way.policy == CLASS else ComponentPolicy(SPEC, "fast")
    policy.bind(SPEC)
    policy.to(device)
    use_kernel(policy, way.kernel)
    policy.precision = way.precision
    return policy


def computing(way: Way, device: torch.device):
    """Compute in a way's precision where a part is called without its policy."""
    return torch.autocast(device.type, torch.bfloat16, enabled=way.precision == "bfloat16")


def lived(rows: int, device: torch.device) -> Segments:
    """Rows as a rollout leaves them."""
    drawn = torch.Generator().manual_seed(0)
    flag, size = torch.zeros(rows, T, dtype=torch.bool), (rows, T)
    number = partial(torch.randn, size, generator=drawn)
    first = torch.rand(size, generator=drawn) < STARTS
    steps = {"rewards": number(), "values": number(), "last_values": number(), "values_now": number()}
    steps |= {"dones": first, "truncateds": flag, "first": first, "valid": ~flag, "trial": flag}
    steps |= {"actions": torch.randint(len(SPEC.action_names), size, generator=drawn)}
    steps |= {"act_log_prob": torch.full(size, -3.0), "ratio": torch.ones(size)}
    td = TensorDict(steps, batch_size=size).to(device)
    td["env_obs"] = shorten(some_obs(rows * T, device.type)).unflatten(0, size)
    tail = td[:, 0].select("rewards", "dones", "truncateds", "values", "last_values")
    cell = POLICIES["fast"](SPEC).lstm.cell.to(device)
    return Segments(td, cell.initial(rows), tail, torch.zeros(rows, dtype=torch.long, device=device), rows)


class Update:
    """One gradient step on a minibatch that stays the same."""

    def __init__(self, policy, segments: Segments) -> None:
        self.policy, self.segments, self.ppo = policy, segments, Trainer().ppo
        self.targets = Targets(segments.steps["rewards"], segments.steps["last_values"])
        knobs = Trainer().optimizer
        on_gpu = segments.version.is_cuda
        self.optimizer = torch.optim.Adam(policy.parameters(), knobs.learning_rate, capturable=on_gpu)

    def __call__(self) -> None:
        """Take it."""
        goal = normalised(self.targets, self.segments, self.ppo, None)
        self.optimizer.zero_grad(set_to_none=True)
        loss_of(self.policy, self.segments, goal, self.ppo)[0].backward()
        self.step()

    def step(self) -> None:
        """Clip the gradients that are there and move the weights."""
        nn.utils.clip_grad_norm_(self.policy.parameters(), self.ppo.max_grad_norm)
        self.optimizer.step()


def learner(policy, segments: Segments):
    steps = segments.steps.numel()
    sizes = {"batch_size": steps, "minibatch_size": steps, "bptt_horizon": T, "update_epochs": 1}
    return partial(Learner(policy, Trainer(**sizes), seed=0).update, segments)


def forward_of(policy, agents: int, device: torch.device):
    """One step of every agent, with live memories."""
    policy.store.open({0: agents})
    flag = torch.zeros(agents, dtype=torch.bool, device=device)
    seen = {"env_obs": shorten(some_obs(agents, device.type)), "first": flag, "valid": ~flag, "trial": flag}
    seen |= {"draws": torch.rand(agents, device=device), "training_env_id_start": torch.zeros(agents).long()}

    @torch.no_grad()
    def run():
        return policy(TensorDict(seen, batch_size=[agents]))["actions"]

    return run


def ways_of(device: torch.device) -> list[Way]:
    """Before and after first."""
    if device.type == "cpu":
        return [Way(), Way(policy=GRAPH)]
    pairs = [BEFORE, AFTER, ("triton", "float32"), ("torch", "bfloat16")]
    found = [Way(CLASS, *pair, how) for how in ("eager", "graph") for pair in pairs]
    return found + [Way(GRAPH, *AFTER, how) for how in ("eager", "graph")]


def measure(
    what: str, make_run, ways: list[Way], steps: int, device: torch.device, rounds: int
) -> list[dict]:
    """Time all ways in turns, and tell them."""
    ready, found = {}, []
    for way in ways:
        ready[way] = prepare(make_run(make(way, device)), device, records=way.how == "graph")
        if ready[way].why_eager:
            print(f"{what} {way}: cannot be recorded, {ready[way].why_eager}", flush=True)
            del ready[way]
    for way, times in interleaved({way: each.run for way, each in ready.items()}, device, rounds).items():
        low, high = times.spread
        told = {"what": what, **vars(way), "ms": times.median, "ms_p10": low, "ms_p90": high}
        told |= {"steps_a_second": 1e3 * steps / times.median, "first_seconds": ready[way].first_seconds}
        speed = f"{told['steps_a_second'] / 1e6:.3g} M steps/s"
        print(f"{what:8} {way!s:44} {times.median:8.3f} ms [{low:.3f} - {high:.3f}]  {speed}", flush=True)
        found.append(told)
    return found


def compare(found: list[dict]) -> list[dict]:
    """The graph of components over the class, where both were measured."""
    told = []
    for each in found:
        same = [
            other
            for other in found
            if other["policy"] == CLASS
            and all(other[key] == each[key] for key in ("what", "kernel", "precision", "how"))
        ]
        if each["policy"] == GRAPH and same:
            ratio = each["ms"] / same[0]["ms"]
            print(
                f"{each['what']} {each['how']}: component:fast takes {ratio:.3f} of policy=fast", flush=True
            )
            told.append({"what": each["what"], "how": each["how"], "ratio": ratio})
    return told


def parts_of(way: Way, segments: Segments, device: torch.device) -> dict:
    """For each part a function that runs it forwards on real inputs, and whose gradients are asked for."""
    policy, steps = make(way, device), segments.steps
    obs = steps["env_obs"].flatten(0, 1)
    with torch.no_grad(), computing(way, device):
        encoded = policy.encode(obs).unflatten(0, steps.batch_size)
        said = policy.lstm.cell(encoded, segments.entry, steps["first"], steps["valid"])[0].flatten(0, 1)
        thoughts = policy.decode(said)
    encoded, said, *thoughts = (each.requires_grad_() for each in (encoded, said, *thoughts))
    judge = copy.deepcopy(policy)

    def unroll(obs, first, state, valid):
        # Shaped anew at every call: gradients go back where their forward pass was recorded.
        return Thoughts(*(each.unflatten(0, steps.batch_size) for each in thoughts)), state

    judge.unroll = unroll
    update = Update(judge, segments)

    def loss():
        goal = normalised(update.targets, segments, update.ppo, None)
        return [loss_of(judge, segments, goal, update.ppo)[0]]

    def inside(part):
        with computing(way, device):
            return part()

    flags = (segments.entry, steps["first"], steps["valid"])
    cell, heads = policy.lstm.cell, [*policy.actor.parameters(), *policy.critic.parameters()]
    return {
        "encoder": (partial(inside, lambda: [policy.encode(obs)]), list(policy.encoder.parameters())),
        "memory": (partial(inside, lambda: [cell(encoded, *flags)[0]]), [encoded, *cell.parameters()]),
        "heads": (partial(inside, lambda: list(policy.decode(said))), [said, *heads]),
        "loss": (loss, thoughts),
    }


def timed_parts(way: Way, segments: Segments, device: torch.device, rounds: int) -> dict:
    """Time each part forwards, and with backwards, the optimizer and the whole, in turns."""
    runs = {}
    for part, (forward, leaves) in parts_of(way, segments, device).items():

        def both(forward=forward, leaves=leaves):
            said = forward()
            grads = [torch.ones_like(each) for each in said]
            return torch.autograd.grad(said, leaves, grads, allow_unused=True)

        runs[part, "forward"], runs[part, "both"] = forward, both
    runs["whole", "both"] = Update(make(way, device), segments)
    stepping = Update(make(way, device), segments)
    stepping()
    runs["optimizer", "both"] = stepping.step
    ready = {key: prepare(run, device, records=way.how == "graph") for key, run in runs.items()}
    left = [f"{part} {which}: {each.why_eager}" for (part, which), each in ready.items() if each.why_eager]
    print("".join(f"  not recorded, in the rest: {line}\n" for line in left), end="", flush=True)
    times = interleaved({key: each.run for key, each in ready.items()}, device, rounds)
    # What could not be recorded says nothing about a recording.
    wanted = "cpu" if device.type == "cpu" else way.how
    return {key: times[key].median for key, each in ready.items() if each.how == wanted}


def where_time_goes(way: Way, segments: Segments, device: torch.device, rounds: int) -> list[dict]:
    """Each part forwards, and with backwards; the optimizer; and what is left of the whole."""
    print(f"where an update goes, {way}: ms forward, backward, share", flush=True)
    ms = timed_parts(way, segments, device, rounds)
    if ("whole", "both") not in ms:
        print("  it cannot be recorded", flush=True)
        return []
    parts = ("encoder", "memory", "heads", "loss", "optimizer", "whole")
    told = [
        {"part": part, "forward": ms.get((part, "forward"), ms[part, "both"]), "both": ms[part, "both"]}
        for part in parts
        if (part, "both") in ms
    ]
    whole = told[-1]["both"]
    told.insert(-1, {"part": "rest", "forward": 0.0, "both": whole - sum(each["both"] for each in told[:-1])})
    for each in told:
        backward, each["timed"] = each["both"] - each["forward"], way.how
        share = each["both"] / whole
        print(f"  {each['part']:10} {each['forward']:8.3f} {backward:8.3f} {share:8.1%}", flush=True)
    return [{**vars(way), **each} for each in told]


def main() -> None:
    """Measure, the most important first, and write it all as JSON after every part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rows", type=int, help="segments of a minibatch; 256 on a GPU, 8 elsewhere")
    parser.add_argument("--agents", type=int, help="agents of a rollout; 8192 on a GPU, 64 elsewhere")
    parser.add_argument("--quick", action="store_true", help="3 rounds instead of 30")
    parser.add_argument("--json")
    asked = parser.parse_args()
    device, on_gpu = torch.device(asked.device), asked.device != "cpu"
    torch.backends.cudnn.allow_tf32 = False
    torch.set_num_threads(1)
    rows, agents = asked.rows or (256 if on_gpu else 8), asked.agents or (8192 if on_gpu else 64)
    rounds, ways, segments = 3 if asked.quick else 30, ways_of(device), lived(rows, device)
    found = {"device": name_of(device), "versions": versions(), "rows": rows, "steps": T, "agents": agents}
    print(f"{found['device']}, torch {torch.__version__}, {rows} x {T} steps, {agents} agents", flush=True)

    def keep(name: str, told: list[dict]) -> None:
        found[name] = told
        if asked.json:
            with open(asked.json, "w") as file:
                json.dump(found, file, indent=2)

    time = partial(measure, device=device, rounds=rounds)
    keep("update", time("update", partial(Update, segments=segments), ways, rows * T))
    forward = partial(forward_of, agents=agents, device=device)
    keep("rollout", time("rollout", forward, ways, agents))
    keep("component_over_class", compare(found["update"] + found["rollout"]))
    first = Way(CLASS, *AFTER, "graph") if on_gpu else Way()
    for number, way in enumerate([first, Way(CLASS, *AFTER), Way(CLASS, *BEFORE)] if on_gpu else [first]):
        keep(f"parts_{number}", where_time_goes(way, segments, device, rounds))
    both = [way for way in ways if way.how == "eager" and way.policy == CLASS][:2]
    keep("learner", time("learner", partial(learner, segments=segments), both, rows * T))


if __name__ == "__main__":
    main()
