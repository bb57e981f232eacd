"""Time the parts of each policy: token front, encoder, memory, heads; forward, and forward + backward.

The policies are timed as component graphs, which name their parts; the classes do the same work. One
minibatch of `--rows` segments of 64 steps with 200 token slots, of which 60 to 120 are used. Slots that are
padding in all rows are dropped, as the collector does (`--whole` keeps them). Medians in milliseconds:

    python benchmarks/policies.py [--device cuda] [--rows 256] [--whole] [--json FILE]
"""

import argparse
import json
import statistics
import time

import torch

from holdfast.policies import POLICIES, ComponentPolicy
from holdfast.policies.components.component_policy import WORLD
from holdfast.policies.components.graph import CORE, OBS
from holdfast.worlds import Feature, WorldSpec
from holdfast.worlds.tokens import PADDING, shorten

T = 64
TOKENS = 200
SPEC = WorldSpec(
    (TOKENS, 3),
    tuple(f"action_{i}" for i in range(19)),
    tuple(Feature(f"feature_{i}", 100.0) for i in range(25)),
)
STARTS = 0.02


def some_obs(rows: int, device: str) -> torch.Tensor:
    """Return random observations of 60 to 120 tokens, then padding."""
    generator = torch.Generator().manual_seed(0)
    place = torch.randint(11, (rows, TOKENS, 2), generator=generator)
    feature = torch.randint(25, (rows, TOKENS), generator=generator)
    value = torch.randint(100, (rows, TOKENS), generator=generator)
    obs = torch.stack([place[..., 0] << 4 | place[..., 1], feature, value], -1)
    length = torch.randint(60, 121, (rows, 1), generator=generator)
    obs[torch.arange(TOKENS) >= length] = PADDING
    return obs.to(torch.uint8).to(device)


def seconds(run, device: str, repeats: int) -> float:
    """Return the median time of one call: device time on a GPU, CPU time elsewhere."""
    for _ in range(3):
        run()
    times = []
    for _ in range(repeats):
        if device == "cuda":
            started, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            started.record()
            run()
            ended.record()
            torch.cuda.synchronize()
            times.append(started.elapsed_time(ended) / 1e3)
        else:
            start = time.process_time()
            run()
            times.append(time.process_time() - start)
    return statistics.median(times)


def leaves_of(outputs):
    """Return all output tensors that require a gradient."""
    flat = [leaf for output in outputs for leaf in (output if isinstance(output, tuple) else (output,))]
    return [leaf for leaf in flat if leaf.requires_grad]


def parts_of(policy: ComponentPolicy, obs: torch.Tensor, rows: int) -> dict:
    """Return for each part a function without arguments that runs it on real inputs."""
    clear = torch.rand(rows, T, device=obs.device) < STARTS
    valid, state = torch.ones_like(clear), policy.lstm.cell.initial(rows)
    outputs = {WORLD: obs}
    with torch.no_grad():
        for name in policy.stages[0][0]:
            sources = [WORLD] if name == OBS else policy.graph.nodes[name].sources
            outputs[name] = policy.components[name](*(outputs[source] for source in sources))
        encoded = outputs[policy.graph.nodes[CORE].sources[0]].unflatten(0, (rows, T))
        hidden = policy.lstm.cell(encoded, state, clear, valid)[0].flatten(0, 1)
    # A box has no weights behind it, so it needs no gradient.
    front = outputs[OBS]
    front = type(front)(*(with_grad(field) for field in front)) if isinstance(front, tuple) else front
    later, heads = [name for name in policy.stages[0][0] if name != OBS], policy.stages[1][0]
    return {
        "front": lambda: [policy.components[OBS](obs)],
        "encoder": lambda: run_nodes(policy, later, {OBS: front}),
        "memory": lambda: [policy.lstm.cell(with_grad(encoded), state, clear, valid)[0]],
        "heads": lambda: run_nodes(
            policy, heads, {CORE: with_grad(hidden), "_action_embeds_": outputs.get("_action_embeds_")}
        ),
    }


def with_grad(x: torch.Tensor) -> torch.Tensor:
    """Return a copy that requires a gradient."""
    return x.detach().requires_grad_() if x.is_floating_point() else x


def run_nodes(policy: ComponentPolicy, names, inputs: dict) -> list:
    outputs = dict(inputs)
    for name in names:
        outputs[name] = policy.components[name](*(outputs[s] for s in policy.graph.nodes[name].sources))
    return [outputs[name] for name in names]


def measure(name: str, obs: torch.Tensor, repeats: int) -> dict[str, list[float]]:
    """Return the milliseconds of each part: forward, and forward with backward."""
    device, rows, results = obs.device.type, len(obs) // T, {}
    policy = ComponentPolicy(SPEC, name).to(device)
    for part, run in parts_of(policy, obs, rows).items():

        def forward(run=run):
            with torch.no_grad():
                run()

        def both(run=run):
            leaves = leaves_of(run())
            if leaves:
                torch.autograd.backward(leaves[-1:], [torch.ones_like(leaves[-1])])

        results[part] = [1e3 * seconds(call, device, repeats) for call in (forward, both)]
    results["all"] = [sum(times) for times in zip(*results.values(), strict=True)]
    return results


def main() -> None:
    """Print a table, and write it as JSON with --json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--policy", action="append", choices=list(POLICIES))
    parser.add_argument("--whole", dest="full", action="store_true", help="keep all padding slots")
    parser.add_argument("--json")
    args = parser.parse_args()
    if args.device == "cpu":
        torch.set_num_threads(1)
    else:
        torch.backends.cudnn.allow_tf32 = False
    results = {}
    obs = some_obs(args.rows * T, args.device)
    obs = obs if args.full else shorten(obs)
    size = f"{args.rows} x {T} steps, {obs.shape[1]} tokens"
    print(f"torch {torch.__version__}, {args.device}, {size}; ms forward / forward + backward")
    for name in args.policy or POLICIES:
        results[name] = measure(name, obs, args.repeats)
        text = "  ".join(f"{part} {one:.1f}/{both:.1f}" for part, (one, both) in results[name].items())
        print(f"{name:<18} {text}", flush=True)
    if args.json:
        with open(args.json, "w") as file:
            json.dump(results, file, indent=2)


if __name__ == "__main__":
    main()
