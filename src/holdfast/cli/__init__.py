"""The command line; every error is one line that says what to type."""

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from holdfast.errors import ConfigError, HoldfastError, RankError, did_you_mean
from holdfast.version import __version__

__all__ = ["main"]

OK, FAILED, USAGE_ERROR, BROKEN_PIPE = 0, 1, 2, 141

VERBS = ("train", "eval", "check", "export", "runs", "report", "sweep", "bench", "play")
"""Each is `run_VERB` in a module of its name, imported when it is called: torch takes seconds."""

HELP = """usage: holdfast VERB ...

  train [RECIPE] key=value ...   train a recurrent policy
  train [RECIPE] seeds=0..4 ...  train several seeds, and end with one table
  train --resume runs/NAME       resume an interrupted run
  train --gpus 8 key=value ...   train on several GPUs of this machine; --ranks 2: in several processes, also on the CPU
  train --help trainer.ppo       describe the keys of a section, or of a world: --help world=gym:CartPole-v1
  eval runs/NAME                 evaluate a run's policy on held-out episodes, with memory or ablated
  check TARGET                   test a policy's memory, or a world's contract
  export RUN --to onnx|torch     export a policy as a single-step model
  runs [FOLDER]                  list the runs of a folder: steps, return, finished or not
  sweep [RECIPE] --space ...     search the values of keys with Optuna, in parallel processes
  report runs/NAME ...           write one page about a run: did it learn, is its memory right, is it used
  play runs/NAME                 watch a policy act in a local page, or terminal, and change its memory
  bench memory                   time memory cells against torch's dense call, and check their results
  bench train|rollout|update     measure steps a second of a training, its rollouts or its updates

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
        print(f"holdfast: {_rank()}{error}", file=sys.stderr)
        return USAGE_ERROR
    except RankError as error:
        if error.prints:
            print(f"holdfast: {error}", file=sys.stderr)
        return FAILED
    except (HoldfastError, OSError) as error:
        print(f"holdfast: {_rank()}{error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print("holdfast: stopped.", file=sys.stderr)
        return FAILED


def _rank() -> str:
    """Name the rank that a launcher started, if it is not rank 0."""
    rank = os.environ.get("RANK", "0")
    return "" if rank == "0" else f"rank {rank}: "


def _dispatch(args: list[str]) -> int:
    if not args or args[0] in ("-h", "--help", "help"):
        print(HELP, end="")
        return OK
    if args[0] == "--version":
        print(f"holdfast {__version__}")
        return OK
    if args[0] in VERBS:
        return getattr(import_module(f"holdfast.cli.{args[0]}"), f"run_{args[0]}")(args[1:])
    hint = did_you_mean(
        args[0],
        ("--help", "--version") if args[0].startswith("-") else VERBS,
        f"choose from {', '.join(VERBS)}; see holdfast --help.",
    )
    raise ConfigError(f"There is no verb {args[0]!r}; {hint}")
