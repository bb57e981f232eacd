"""Summary and badge of `holdfast check --json`, for action.yml: python tools/check_summary.py REPORT.

Reads TARGET and BADGE, appends to the files that GITHUB_STEP_SUMMARY and GITHUB_OUTPUT name. Standard library only.
"""

import json
import os
import re
import sys
from pathlib import Path
from typing import Any


def escape(text: str) -> str:
    """Return a text as one cell of a Markdown table: what a policy says is not markup."""
    return re.sub(r"([\\`*_{}\[\]<>|#~&])", r"\\\1", " ".join(text.split()))


def row(name: str, law: dict[str, Any]) -> str:
    """Return a law's row of the table."""
    if law["measured"] is None and law["ok"]:
        result, size = "n/a", ""
    else:
        result, size = (
            ("✅", "❌")[not law["ok"]],
            "not finite" if law["measured"] is None else f"{law['measured']:.2g}",
        )
    return f"| {escape(name)} | {result} | {size} | {law['sense']} {law['bound']:.2g} | {escape(law['finding'])} |"


def summarize(report: dict[str, Any] | None, target: str) -> tuple[str, dict[str, Any]]:
    """Return the summary in Markdown, and the badge as shields.io reads it; without a report the check did not run."""
    title, badge = f"### holdfast check {escape(target)}\n\n", {"schemaVersion": 1, "label": "memory laws"}
    if report is None:
        text = "The check did not run; the log of this step says why.\n"
        return title + text, badge | {"message": "not measured", "color": "lightgrey"}
    laws = report["laws"]
    measured = {name: law for name, law in laws.items() if law["measured"] is not None or not law["ok"]}
    holding = sum(law["ok"] for law in measured.values())
    message = f"{holding} of {len(measured)} hold"
    rest = f", {len(laws) - len(measured)} n/a" if len(laws) > len(measured) else ""
    table = ["| law | | measured | must be | finding |", "|---|---|---|---|---|"]
    table += [row(name, law) for name, law in laws.items()]
    notes = [f"- {escape(note)}" for note in report["notes"]]
    text = "\n".join([f"{message}{rest}", "", *table, "", *notes]).rstrip()
    color = "brightgreen" if report["ok"] else "red"
    return f"{title}{text}\n", badge | {"message": message + rest, "color": color}


def main(report_file: Path) -> None:
    """Write summary, badge and outputs."""
    text = report_file.read_text(encoding="utf-8")
    report = json.loads(text) if text.strip() else None
    summary, badge = summarize(report, os.environ["TARGET"])
    with open(os.environ["GITHUB_STEP_SUMMARY"], "a", encoding="utf-8") as file:
        file.write(summary)
    if badge_file := os.environ["BADGE"]:
        Path(badge_file).parent.mkdir(parents=True, exist_ok=True)
        Path(badge_file).write_text(json.dumps(badge) + "\n", encoding="utf-8")
    with open(os.environ["GITHUB_OUTPUT"], "a", encoding="utf-8") as file:
        file.write(f"ok={str(report is not None and report['ok']).lower()}\nreport={report_file}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
