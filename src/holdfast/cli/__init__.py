"""The verbs of the command line: thin, and every error is one line that says what to type."""

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

GOOD, NOT_GOOD, WRONG_CALL, UNHEARD = 0, 1, 2, 141

VERBS = {"train": run_train, "eval": run_eval, "check": run_check, "export": run_export, "bench": run_bench}

HELP = """usage: holdfast VERB ...

  train [RECIPE] key=value ...   train a policy that remembers
  train --resume runs/NAME       go on with a run that was interrupted
  eval runs/NAME                 play a run's policy in unseen episodes, with its memory and without
  check TARGET                   prove or disprove a policy's memory, or a world's contract
  export RUN --to onnx|torch     write a policy as one step that any program can run
  bench memory                   time memory cells against torch's dense call, and whether they are right

  --version                      print the version
  VERB --help                    tell more about a verb
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb and return the exit code: 0 good, 1 not good, 2 the call is wrong, 141 nobody reads it."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    # A policy or world of one's own is looked for where one stands, as `python` does.
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        code = _dispatch(words)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # Nobody reads any more; what Python still has to say goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return UNHEARD
    except ConfigError as error:
        print(f"holdfast: {error}", file=sys.stderr)
        return WRONG_CALL
    except (HoldfastError, OSError) as error:
        print(f"holdfast: {error}", file=sys.stderr)
        return NOT_GOOD
    except KeyboardInterrupt:
        print("holdfast: stopped.", file=sys.stderr)
        return NOT_GOOD


def _dispatch(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(HELP, end="")
        return GOOD
    if words[0] == "--version":
        print(f"holdfast {__version__}")
        return GOOD
    if words[0] in VERBS:
        return VERBS[words[0]](words[1:])
    hint = did_you_mean(words[0], VERBS, f"there is {', '.join(VERBS)}; see holdfast --help.")
    raise ConfigError(f"There is no verb {words[0]!r}; {hint}")
