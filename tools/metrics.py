"""Write docs/metrics.md: every number a run reports, from the metrics dictionary.

make docs
"""

from pathlib import Path

from holdfast.report import METRICS
from holdfast.report.metrics import WHERE

PAGE = Path(__file__).parent.parent / "docs" / "metrics.md"
HEAD = """# Every number a run reports

Written by `make docs` from the dictionary in `src/holdfast/report/metrics.py`.

A run writes them into `runs/NAME/metrics.jsonl`, one line an update and a last one for the evaluation;
trackers mirror it. `NAME@PART` is the same number of one of several: a world of a mixture, a module, a layer,
a key of the config. A number that was not measured is absent from its line; one that is not finite stops the
run.

*Decided by* says when two runs of one config and seed tell the same number: `run`: always, bit for bit on one
machine; `time`: a clock decides; `machine`: the machine does, and so these lie in `machine.jsonl` beside it.
"""


def page() -> str:
    """Write the page: a table for each group of names."""
    told = [HEAD]
    for group, title in WHERE.items():
        told += [
            f"## {title}",
            "",
            "| name | unit | meaning | healthy | decided by |",
            "|---|---|---|---|---|",
        ]
        for name, metric in METRICS.items():
            if name.rpartition("/")[0] == group:
                cells = (f"`{name}`", metric.unit, metric.meaning, metric.healthy, metric.kind)
                told.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
        told.append("")
    return "\n".join(told)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"wrote {PAGE}")
