"""What clearing inside a segment costs: our LSTM cell against one dense `nn.LSTM` call without clears.

Forward and backward, CPU-seconds, one thread, medians within a process, several fresh processes:

    python benchmarks/clearing.py [--processes 8] [--layers 1] [--batches 32 64 256 512 1024] [--json FILE]

Calls with and without clears alternate, so that what else the machine does falls on both.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from functools import partial

import torch

from holdfast.memory import LSTM

T, H = 64, 128
BATCHES, SHARES = (32, 64, 256, 512, 1024), (0.0, 0.02, 0.10)


def medians(runs, repeats: int) -> list[float]:
    """Time some calls in turns; the median of each."""
    times = [[] for _ in runs]
    for number in range(repeats + 1):
        for run, mine in zip(runs, times, strict=True):
            begun = time.process_time()
            run()
            if number:
                mine.append(time.process_time() - begun)
    return [statistics.median(mine) for mine in times]


def measure(layers: int, batches: list[int]) -> dict[str, float]:
    """Time every case in this process; the ratio to the dense call of the same batch size."""
    torch.set_num_threads(1)
    found = {}
    for B in batches:
        torch.manual_seed(B)
        cell = LSTM(H, H, layers)
        x = torch.randn(B, T, H, requires_grad=True)
        valid = torch.ones(B, T, dtype=torch.bool)

        def dense(cell=cell, x=x):
            cell.rnn(x.transpose(0, 1))[0].sum().backward()

        def cleared(clear, cell=cell, x=x, valid=valid):
            cell(x, cell.initial(len(x)), clear, valid)[0].sum().backward()

        runs = [dense, *(partial(cleared, torch.rand(B, T) < share) for share in SHARES)]
        base, *others = medians(runs, max(5, 512 // B))
        found[f"B={B} dense ms"] = 1e3 * base
        found |= {f"B={B} starts={share:.0%}": t / base for share, t in zip(SHARES, others, strict=True)}
    return found


def main() -> None:
    """Start fresh processes and print the median and the range of each ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES)
    parser.add_argument("--json", help="write all figures to this file")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.one:
        print(json.dumps(measure(asked.layers, asked.batches)))
        return
    runs = []
    for number in range(asked.processes):
        print(f"process {number + 1} of {asked.processes}", file=sys.stderr)
        command = [sys.executable, __file__, "--one", "--layers", str(asked.layers)]
        command += ["--batches", *map(str, asked.batches)]
        told = subprocess.run(command, capture_output=True, text=True, check=True)
        runs.append(json.loads(told.stdout))
    print(
        f"torch {torch.__version__}, T={T}, H={H}, L={asked.layers}, forward + backward, "
        f"{asked.processes} processes"
    )
    for case in runs[0]:
        values = sorted(run[case] for run in runs)
        print(f"{case:20} {statistics.median(values):8.2f}   [{values[0]:.2f} - {values[-1]:.2f}]")
    if asked.json:
        with open(asked.json, "w") as file:
            json.dump(runs, file, indent=2)


if __name__ == "__main__":
    main()
