"""Mutation testing: change a line of the source, and see whether a test of the same folder fails.

make mutants                              # 1000 mutants of all folders
make mutants ARGS="learn --number 100"    # a sample of one folder
make mutants ARGS="learn --number 0"      # every mutant of one folder

mutmut makes the mutants and runs each in a forked process, with the tests that call the function it changes.
It leaves out functions with a decorator other than staticmethod and classmethod.
"""

import argparse
import os
import random
import shutil
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from mutmut.__main__ import create_mutants, run_stats_collection
from mutmut.configuration import config
from mutmut.mutation.data import SourceFileMutationData
from mutmut.mutation.diff_apply import get_diff_for_mutant
from mutmut.state import state
from mutmut.stats import status_by_exit_code
from mutmut.utils.file_utils import copy_also_copy_files, copy_src_dir, setup_source_paths, walk_mutatable_files
from mutmut.utils.format_utils import mangled_name_from_mutant_name
from mutmut.workers.isolation import get_mutant_runner

FOLDERS = ["memory", "memory/kernels", "rollout", "learn", "checkpoint", "check"]
COPY = Path("mutants")
UNCHANGED = "holdfast.x_unchanged__mutmut_0"
"""The name of no mutant: with it the tests run on the source as it is."""
COLUMNS = {"killed": "killed", "survived": "survived", "no tests": "survived"}
"""The column of a status; every other status is a timeout or a crash."""


def generate(folders: list[str], processes: int) -> list[str]:
    """Write all mutants of some folders, and return their names: `holdfast.FOLDER.FILE.FUNCTION__mutmut_NUMBER`."""
    shutil.rmtree(COPY, ignore_errors=True)
    config().only_mutate = [f"src/holdfast/{folder}/*" for folder in folders]
    copy_src_dir()
    copy_also_copy_files()
    create_mutants(processes)
    names = []
    for path in sorted(walk_mutatable_files()):
        data = SourceFileMutationData(path=path)
        data.load()
        names += data.exit_code_by_key
    return names


def folder_of(mutant: str) -> str:
    """Return the innermost of the folders that a mutant lies in."""
    path = mutant.removeprefix("holdfast.").replace(".", "/")
    return max((folder for folder in FOLDERS if path.startswith(f"{folder}/")), key=len)


def run_folder(folder: str, names: list[str], processes: int) -> dict[str, str]:
    """Run the tests of a folder on each of its mutants; return the status by mutant."""
    inner = [f"--ignore=tests/{other}" for other in FOLDERS if other.startswith(f"{folder}/")]
    config().pytest_add_cli_args_test_selection = [f"tests/{folder}", *inner]
    setup_source_paths()
    os.environ["PYTHONPATH"] = os.pathsep.join(str(COPY.absolute() / part) for part in ("src", "tests"))
    runner = get_mutant_runner(processes)
    run_stats_collection(runner)
    durations, settings = state().duration_by_test, config()
    statuses: dict[str, str] = {}

    def wait() -> None:
        result = runner.wait_for_result()
        statuses[result.mutant_name] = status_by_exit_code[result.exit_code]
        print(f"{len(statuses)}/{len(names) + 1} {result.mutant_name}: {statuses[result.mutant_name]}", flush=True)

    runner.startup()
    for name in [UNCHANGED, *names]:
        tests = state().tests_by_mangled_function_name.get(mangled_name_from_mutant_name(name), set())
        tests = set(durations) if name == UNCHANGED else tests
        estimate = sum(durations[test] for test in tests)
        limit = int((estimate + settings.timeout_constant) * settings.timeout_multiplier)
        while not runner.has_capacity():
            wait()
        runner.submit(name, sorted(tests), limit, estimate)
    while runner.pending_count():
        wait()
    runner.shutdown()
    if (status := statuses.pop(UNCHANGED)) != "survived":
        sys.exit(f"tests/{folder} on the unchanged source: {status}; they must pass. Run `pytest tests/{folder}`.")
    return statuses


def table(statuses: dict[str, dict[str, str]]) -> str:
    """Return the counts by folder."""
    lines = [f"{'folder':15}{'mutants':>9}{'killed':>9}{'survived':>9}{'timeout':>9}"]
    for folder, each in statuses.items():
        columns = [COLUMNS.get(status, "timeout") for status in each.values()]
        counts = [len(columns), *(columns.count(column) for column in ("killed", "survived", "timeout"))]
        lines.append(f"{folder:15}" + "".join(f"{count:9}" for count in counts))
    return "\n".join(lines)


def main() -> None:
    """Draw the sample, run it folder by folder, print survivors and counts."""
    parser = argparse.ArgumentParser(prog="make mutants", description="Mutation testing, folder by folder.")
    parser.add_argument("folders", nargs="*", metavar="FOLDER", help=f"of {', '.join(FOLDERS)}; all of them if omitted")
    parser.add_argument("--number", type=int, default=1000, help="mutants in the sample; 0: all")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sample")
    parser.add_argument("--processes", type=int, default=2, help="mutants that run at a time")
    args = parser.parse_args()
    if unknown := set(args.folders) - set(FOLDERS):
        parser.error(f"unknown folder {', '.join(sorted(unknown))}; choose of {', '.join(FOLDERS)}")
    folders = args.folders or FOLDERS
    names = [name for name in generate(folders, args.processes) if folder_of(name) in folders]
    sample = random.Random(args.seed).sample(names, min(args.number, len(names)) or len(names))
    print(f"{len(sample)} of {len(names)} mutants, seed {args.seed}", flush=True)
    statuses = {}
    for folder in folders:
        # The mutants replace the source in the process that imports them: one process for each folder.
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            names = [name for name in sample if folder_of(name) == folder]
            statuses[folder] = pool.submit(run_folder, folder, names, args.processes).result()
    for each in statuses.values():
        for name, status in sorted(each.items()):
            if COLUMNS.get(status) != "killed":
                print(f"\n{name}: {status}\n{get_diff_for_mutant(name)}")
    print(table(statuses))


if __name__ == "__main__":
    main()
