"""Measure the nine laws on other libraries' policies, run by their own trainers: `make check-peers`.

Prints a table and writes docs/museum/peers.md. The exit code is 1 if a policy that was broken on purpose is
not caught.
"""

import math
import platform
import sys
import time
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from peers import BROKEN, LIBRARIES, Entry
from torch import nn

from holdfast.check.laws import LAWS
from holdfast.check.laws import check as measure_all
from holdfast.check.results import Law
from holdfast.report.check_report import bound

PAGE = Path(__file__).parent.parent / "docs" / "museum" / "peers.md"
PACKAGES = ("torch", "sb3-contrib", "stable-baselines3", "torchrl", "tensordict", "hoptorch", "gymnasium")

ABOUT = """\
The nine laws, measured on recurrent policies of other libraries. Each is run and trained by its own
library: sb3-contrib by `RecurrentPPO.learn` at learning rate 0 and by `evaluate_policy`, TorchRL by
`Collector` and recurrent mode; CleanRL is a script, so the check imitates how it calls an agent.
Only observations, episode ends and actions are scripted. Written by `make check-peers`."""
READING = """\
Each number is the measurement that comes closest to breaking its law; bold is broken. `carry` must be more
than 0; `replay` and `agree` at most 1e-9 in float64, 1e-5 in float32; all others exactly 0."""


@dataclass(frozen=True)
class Result:
    """The results of one policy."""

    entry: Entry
    laws: list[Law]
    notes: tuple[str, ...]
    seconds: float

    @property
    def broken(self) -> list[Law]:
        """The laws that do not hold."""
        return [law for law in self.laws if not law.ok]

    @property
    def missed(self) -> list[str]:
        """The laws that had to break and did not; one that could not be measured caught nothing."""
        caught = [law.name for law in self.broken if math.isfinite(law.measured)]
        return [name for name in self.entry.must if name not in caught]


def check(entry: Entry) -> Result:
    """Measure all laws on one policy; weights are the same every time."""
    torch.manual_seed(0)
    began = time.process_time()
    with entry.around():
        laws = measure_all(entry.make())
    return Result(entry, list(laws.values()), laws.notes, time.process_time() - began)


def rounding() -> dict[int, float]:
    """Permute the rows of a plain matrix product, and see how much they move: `{rows: difference}`."""
    torch.manual_seed(0)
    layer, errors = nn.Linear(64, 256, dtype=torch.float64), {}
    for rows in (8, 9, 16, 21):
        x, order = torch.randn(rows, 64, dtype=torch.float64), torch.arange(rows).roll(2)
        with torch.no_grad():
            errors[rows] = float((layer(x[order]) - layer(x)[order]).abs().max())
    return errors


# ---- the page --------------------------------------------------------------------------------------------
def summary(results: list[Result]) -> list[str]:
    """Return a table of all results; a broken law is bold."""
    rows = [f"| policy | {' | '.join(LAWS)} | CPU s |", f"|---|{'---|' * len(LAWS)}---:|"]
    for result in results:
        cells = [f"{law.measured:.1e}" if law.ok else f"**{law.measured:.1e}**" for law in result.laws]
        rows.append(f"| {result.entry.name} | {' | '.join(cells)} | {result.seconds:.0f} |")
    return rows


def section(result: Result) -> list[str]:
    """Return the section of one policy."""
    entry = result.entry
    lines = [
        f"### {entry.name}",
        "",
        entry.description,
        *[f"\n{note[:1].upper()}{note[1:]}" for note in result.notes],
        "",
    ]
    lines += [
        "| law | holds | measured | must be | the measurement that comes closest |",
        "|---|---|---:|---:|---|",
    ]
    for law in result.laws:
        holds = "yes" if law.ok else "**no**"
        part = law.worst
        lines.append(f"| {law.name} | {holds} | {part.measured:.1e} | {bound(part)} | {part.what} |")
    lines.append("")
    lines += [f"- **{law.name}**: {law.finding}" for law in result.broken]
    if entry.must:
        caught = "Not caught: " + ", ".join(result.missed) if result.missed else "Caught"
        lines.append(f"\n{caught}; had to break: {', '.join(entry.must)}.")
    return [*lines, ""]


def versions() -> str:
    """Return the versions of the packages."""
    names = [f"Python {platform.python_version()}"]
    for name in PACKAGES:
        try:
            names.append(f"{name} {version(name).partition('+')[0]}")
        except PackageNotFoundError:
            names.append(f"{name} absent")
    return ", ".join(names)


def page(good: list[Result], bad: list[Result]) -> str:
    """Write everything down."""
    moved = ", ".join(f"{rows} rows {size:.1e}" for rows, size in rounding().items())
    lines = [
        "# Other libraries under the laws of memory",
        "",
        *ABOUT.splitlines(),
        "",
        f"Measured on {datetime.now(timezone.utc).date().isoformat()}, on a CPU with one thread, one set of weights",
        f"each, with {versions()}.",
        "",
        "## All results",
        "",
        *READING.splitlines(),
        "",
        *summary(good),
        "",
        "Broken, and caught:",
        "",
        *summary(bad),
        "",
        "## The libraries",
        "",
        *[line for result in good for line in section(result)],
        "How much the rows of a plain float64 `nn.Linear` move when they change places, for comparison:",
        f"{moved}.",
        "",
        "## What must be caught",
        "",
        *[line for result in bad for line in section(result)],
    ]
    return "\n".join(lines).rstrip() + "\n"


def main() -> int:
    """Check all policies, print, and write the page."""
    torch.set_num_threads(1)
    good, bad = [], []
    for entries, results in ((LIBRARIES, good), (BROKEN, bad)):
        for entry in entries:
            results.append(check(entry))
            broken = ", ".join(law.name for law in results[-1].broken) or "nothing"
            print(f"{entry.name}: broken: {broken} ({results[-1].seconds:.0f} CPU s)", flush=True)
    print("\n".join(["", *summary(good + bad)]))
    PAGE.parent.mkdir(parents=True, exist_ok=True)
    PAGE.write_text(page(good, bad))
    away = [f"{result.entry.name} ({', '.join(result.missed)})" for result in bad if result.missed]
    if away:
        print(f"Not caught: {'; '.join(away)}.")
    return 1 if away else 0


if __name__ == "__main__":
    sys.exit(main())
