"""`holdfast report`: write the report of one run or of several."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from holdfast.cli.arguments import Parser, add_trust_code, output_file
from holdfast.cli.check import find_run, to_stderr
from holdfast.errors import ConfigError
from holdfast.trust import names_from, trusting


def run_report(args: Sequence[str]) -> int:
    """Write a report, and print its path."""
    parser = Parser(
        prog="holdfast report",
        usage="holdfast report runs/NAME [runs/OTHER ...] [--output FILE]",
        description="Write one HTML page about a run, or several side by side: learning, memory, time.",
    )
    add = parser.add_argument
    add("runs", nargs="+", metavar="runs/NAME", help="folders of runs; those that differ in their seed are one curve")
    add("--output", metavar="FILE", help="the page (runs/NAME/report.html; of several runs report.html)")
    add_trust_code(parser)
    options = parser.parse_args(args)
    folders = [find_run(name) for name in options.runs]
    if len(set(folders)) < len(folders):
        raise ConfigError("A run is named twice; name each run once.")
    default = folders[0] / "report.html" if len(folders) == 1 else Path("report.html")
    target = default if options.output is None else output_file(options.output, "--output")
    # Imported here, because matplotlib takes a while to import.
    from holdfast.report.policy_measurements import PolicyMeasurements, measure_run
    from holdfast.report.report_page import write_report
    from holdfast.report.run_data import RunData

    screen = Console(stderr=True, highlight=False, emoji=False)
    with trusting(options.trust_code), screen.status("reading") as status:

        def measure(run: RunData) -> PolicyMeasurements:
            status.update(f"measuring {run.folder}".replace("[", r"\["))
            with names_from(run.folder):
                return measure_run(run, to_stderr)

        write_report(folders, target, measure)
    print(f"report {target}")
    return 0
