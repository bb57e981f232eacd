"""The command line; every error is one line that says what to type."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from holdfast.cli.bench import run_bench
from holdfast.cli.check import run_check
from holdfast.cli.eval import run_eval
from holdfast.cli.export import run_export
from holdfast.cli.train import run_train
from holdfast.errors import ConfigError, HoldfastError, did_you_mean
from holdfast.version import __version__

__all__ = ["main"]

OK, FAILED, USAGE_ERROR, BROKEN_PIPE = 0, 1, 2, 141

VERBS = {"train": run_train, "eval": run_eval, "check": run_check, "export": run_export, "bench": run_bench}

HELP = """usage: holdfast VERB ...

  train [RECIPE] key=value ...   train a recurrent policy
  train --resume runs/NAME       resume an interrupted run
  eval runs/NAME                 evaluate a run's policy on held-out episodes, with memory or ablated
  check TARGET                   test a policy's memory, or a world's contract
  export RUN --to onnx|torch     export a policy as a single-step model
  bench memory                   time memory cells against torch's dense call, and check their results

  --version                      print the version
  VERB --help                    show the options of a verb
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb; return the exit code: 0 success, 1 failure, 2 usage error, 141 broken pipe."""
    args = list(sys.argv[1:] if arguments is None else arguments)
    # Import user code from the current directory, as `python` does.
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        code = _dispatch(args)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # Discard what Python still has to flush.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except ConfigError as error:
        print(f"holdfast: {error}", file=sys.stderr)
        return USAGE_ERROR
    except (HoldfastError, OSError) as error:
        print(f"holdfast: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print("holdfast: stopped.", file=sys.stderr)
        return FAILED


def _dispatch(args: list[str]) -> int:
    if not args or args[0] in ("-h", "--help", "help"):
        print(HELP, end="")
        return OK
    if args[0] == "--version":
        print(f"holdfast {__version__}")
        return OK
    if args[0] in VERBS:
        return VERBS[args[0]](args[1:])
    hint = did_you_mean(args[0], VERBS, f"choose from {', '.join(VERBS)}; see holdfast --help.")
    raise ConfigError(f"There is no verb {args[0]!r}; {hint}")
