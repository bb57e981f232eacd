"""What each part of each policy costs: token front, encoder, memory, heads; forward, and forward + backward.

The policies are timed as graphs, since these name their parts; classes do the same work. One minibatch of
`--rows` segments of 64 steps, 200 tokens of which a share is padding; medians, milliseconds:

    python benchmarks/policies.py [--device cuda] [--rows 256] [--json FILE]
"""

import argparse
import json
import statistics
import time

import torch

from holdfast.policies import POLICIES, ComponentPolicy
from holdfast.policies.component_policy import WORLD
from holdfast.policies.graph import CORE, OBS
from holdfast.worlds import Feature, WorldSpec
from holdfast.worlds.tokens import PADDING

T = 64
TOKENS = 200
SPEC = WorldSpec(
    (TOKENS, 3),
    tuple(f"action_{i}" for i in range(19)),
    tuple(Feature(f"feature_{i}", 100.0) for i in range(25)),
)
STARTS = 0.02


def some_obs(rows: int, device: str) -> torch.Tensor:
    """Rows of 60 to 120 tokens, then padding."""
    generator = torch.Generator().manual_seed(0)
    place = torch.randint(11, (rows, TOKENS, 2), generator=generator)
    feature = torch.randint(25, (rows, TOKENS), generator=generator)
    value = torch.randint(100, (rows, TOKENS), generator=generator)
    obs = torch.stack([place[..., 0] << 4 | place[..., 1], feature, value], -1)
    length = torch.randint(60, 121, (rows, 1), generator=generator)
    obs[torch.arange(TOKENS) >= length] = PADDING
    return obs.to(torch.uint8).to(device)


def seconds(run, device: str, repeats: int) -> float:
    """Median time of one call: device time on a GPU, CPU time elsewhere."""
    for _ in range(3):
        run()
    times = []
    for _ in range(repeats):
        if device == "cuda":
            begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begun.record()
            run()
            ended.record()
            torch.cuda.synchronize()
            times.append(begun.elapsed_time(ended) / 1e3)
        else:
            start = time.process_time()
            run()
            times.append(time.process_time() - start)
    return statistics.median(times)


def leaves_of(outputs):
    """All tensors of some outputs that gradients may flow through."""
    flat = [part for each in outputs for part in (each if isinstance(each, tuple) else (each,))]
    return [part for part in flat if part.requires_grad]


def parts_of(policy: ComponentPolicy, obs: torch.Tensor, rows: int) -> dict:
    """For each part a function of nothing that runs it on real inputs, and returns what it gives."""
    clear = torch.rand(rows, T, device=obs.device) < STARTS
    valid, state = torch.ones_like(clear), policy.lstm.cell.initial(rows)
    outputs = {WORLD: obs}
    with torch.no_grad():
        for name in policy.stages[0][0]:
            sources = [WORLD] if name == OBS else policy.graph.nodes[name].sources
            outputs[name] = policy.components[name](*(outputs[source] for source in sources))
        encoded = outputs[policy.graph.nodes[CORE].sources[0]].unflatten(0, (rows, T))
        said = policy.lstm.cell(encoded, state, clear, valid)[0].flatten(0, 1)
    # A box has no weights behind it, so nobody asks for its gradient.
    front = outputs[OBS]
    front = type(front)(*(asking(part) for part in front)) if isinstance(front, tuple) else front
    later, heads = [name for name in policy.stages[0][0] if name != OBS], policy.stages[1][0]
    return {
        "front": lambda: [policy.components[OBS](obs)],
        "encoder": lambda: run_nodes(policy, later, {OBS: front}),
        "memory": lambda: [policy.lstm.cell(asking(encoded), state, clear, valid)[0]],
        "heads": lambda: run_nodes(
            policy, heads, {CORE: asking(said), "_action_embeds_": outputs.get("_action_embeds_")}
        ),
    }


def asking(x: torch.Tensor) -> torch.Tensor:
    """The same numbers, with a gradient wanted."""
    return x.detach().requires_grad_() if x.is_floating_point() else x


def run_nodes(policy: ComponentPolicy, names, known: dict) -> list:
    known = dict(known)
    for name in names:
        known[name] = policy.components[name](*(known[s] for s in policy.graph.nodes[name].sources))
    return [known[name] for name in names]


def measure(name: str, device: str, rows: int, repeats: int) -> dict[str, list[float]]:
    """Milliseconds of each part: forward, and forward with backward."""
    policy = ComponentPolicy(SPEC, name).to(device)
    obs, found = some_obs(rows * T, device), {}
    for part, run in parts_of(policy, obs, rows).items():

        def forward(run=run):
            with torch.no_grad():
                run()

        def both(run=run):
            leaves = leaves_of(run())
            if leaves:
                torch.autograd.backward(leaves[-1:], [torch.ones_like(leaves[-1])])

        found[part] = [1e3 * seconds(each, device, repeats) for each in (forward, both)]
    found["all"] = [sum(times) for times in zip(*found.values(), strict=True)]
    return found


def main() -> None:
    """Print a table, and write it as JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--policy", action="append", choices=list(POLICIES))
    parser.add_argument("--json")
    asked = parser.parse_args()
    if asked.device == "cpu":
        torch.set_num_threads(1)
    else:
        torch.backends.cudnn.allow_tf32 = False
    found = {}
    size = f"{asked.rows} x {T} steps, {TOKENS} tokens"
    print(f"torch {torch.__version__}, {asked.device}, {size}; ms forward / forward + backward")
    for name in asked.policy or POLICIES:
        found[name] = measure(name, asked.device, asked.rows, asked.repeats)
        told = "  ".join(f"{part} {one:.1f}/{both:.1f}" for part, (one, both) in found[name].items())
        print(f"{name:<18} {told}", flush=True)
    if asked.json:
        with open(asked.json, "w") as file:
            json.dump(found, file, indent=2)


if __name__ == "__main__":
    main()
