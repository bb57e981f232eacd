"""What clearing inside a segment costs: our LSTM cell against one dense `nn.LSTM` call without clears.

Forward and backward, CPU-seconds, one thread, medians within a process, several fresh processes:

    python benchmarks/clearing.py [--processes 8] [--json FILE]
"""

import argparse
import json
import statistics
import subprocess
import sys
import time

import torch

from holdfast.memory import LSTM

T, H, L = 64, 128, 2
BATCHES, SHARES = (8, 32, 256), (0.0, 0.02, 0.10)


def seconds(run, repeats: int) -> float:
    run()
    times = []
    for _ in range(repeats):
        begun = time.process_time()
        run()
        times.append(time.process_time() - begun)
    return statistics.median(times)


def measure() -> dict[str, float]:
    """Time every case in this process; the ratio to the dense call of the same batch size."""
    torch.set_num_threads(1)
    found = {}
    for B in BATCHES:
        cell = LSTM(H, H, L)
        x = torch.randn(B, T, H, requires_grad=True)
        repeats = max(5, 256 // B)

        def dense(cell=cell, x=x):
            cell.rnn(x.transpose(0, 1))[0].sum().backward()

        base = seconds(dense, repeats)
        found[f"B={B} dense ms"] = 1e3 * base
        for share in SHARES:
            clear = torch.rand(B, T) < share

            def cleared(cell=cell, x=x, clear=clear, B=B):
                cell(x, cell.initial(B), clear, torch.ones_like(clear))[0].sum().backward()

            found[f"B={B} starts={share:.0%}"] = seconds(cleared, repeats) / base
    return found


def main() -> None:
    """Start fresh processes and print the median and the range of each ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--json", help="write all figures to this file")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.one:
        print(json.dumps(measure()))
        return
    runs = []
    for number in range(asked.processes):
        print(f"process {number + 1} of {asked.processes}", file=sys.stderr)
        told = subprocess.run([sys.executable, __file__, "--one"], capture_output=True, text=True, check=True)
        runs.append(json.loads(told.stdout))
    print(f"torch {torch.__version__}, T={T}, H={H}, L={L}, forward + backward, {asked.processes} processes")
    for case in runs[0]:
        values = sorted(run[case] for run in runs)
        print(f"{case:20} {statistics.median(values):8.2f}   [{values[0]:.2f} - {values[-1]:.2f}]")
    if asked.json:
        with open(asked.json, "w") as file:
            json.dump(runs, file, indent=2)


if __name__ == "__main__":
    main()
