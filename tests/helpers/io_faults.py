"""Errors of the disk: fail one call, or all from one on, below a folder; count what a verb makes of it.

`python tests/helpers/io_faults.py COUNT [SEED [VERB]]` prints outcomes by verb.
"""

import ast
import builtins
import collections
import contextlib
import errno
import io
import os
import random
import shutil
import sys
import tempfile
from pathlib import Path

import safetensors.torch
import torch

import holdfast
from helpers.forked import in_child
from helpers.fuzz import act, load_hub, make_run, print_cases, restore_memory, save
from helpers.small_runs import apart, words
from holdfast.checkpoint import serialization
from holdfast.checkpoint.format import open_checkpoint, set_symlink
from holdfast.checkpoint.run_dir import RunDir
from holdfast.checkpoint.serialization import CorruptFileError
from holdfast.cli import main
from holdfast.play import saved_memory

ERRORS = {
    "open": (errno.EMFILE, errno.EIO),
    "read": (errno.EIO,),
    "write": (errno.ENOSPC, errno.EIO),
    "fsync": (errno.EIO, errno.ENOSPC),
    "rename": (errno.EIO, errno.ENOSPC),
    "make": (errno.ENOSPC,),
    "list": (errno.EMFILE, errno.EIO),
    "remove": (errno.EIO,),
}
"""Kinds of calls, and how they may fail."""


class Disk:
    """Counts calls on files below a folder; from the n-th call of a kind on, it fails them, once or each time."""

    def __init__(self, folder, kind="", number=0, error=0, lasting=False):
        self._folder, self._kind, self._number, self._error, self._lasting = str(folder), kind, number, error, lasting
        self.counts = collections.Counter()

    def fails(self, kind, path):
        """Count a call; return whether it fails."""
        if not str(path).startswith(self._folder):
            return False
        self.counts[kind] += 1
        late = self.counts[kind] - self._number
        return kind == self._kind and (late == 0 or (self._lasting and late > 0))

    def raise_for(self, kind, path):
        if self.fails(kind, path):
            raise OSError(self._error, os.strerror(self._error), str(path))

    def patch(self):
        """Replace the calls of this process, for good: it is a fork."""
        for module, name, kind in [
            (builtins, "open", "open"),
            (io, "open", "open"),
            (os, "open", "open"),
            (os, "rename", "rename"),
            (os, "replace", "rename"),
            (os, "mkdir", "make"),
            (os, "symlink", "make"),
            (os, "fsync", "fsync"),
            (os, "listdir", "list"),
            (os, "scandir", "list"),
            (os, "unlink", "remove"),
            (os, "rmdir", "remove"),
            (serialization, "safe_open", "read"),
            (saved_memory, "safe_open", "read"),
            (safetensors.torch, "safe_open", "read"),
        ]:
            setattr(module, name, self._wrap(getattr(module, name), kind))

    def _wrap(self, real, kind):
        def call(*args, **options):
            path = args[-1] if kind == "make" else args[0]
            if kind == "fsync":
                path = os.readlink(f"/proc/self/fd/{path}")
            self.raise_for(kind, path)
            result = real(*args, **options)
            return self._wrap_file(result, path) if isinstance(result, io.IOBase) else result

        return call

    def _wrap_file(self, file, path):
        if not str(path).startswith(self._folder):
            return file
        for name in ("read", "readinto", "readline"):
            if file.readable() and name in dir(file):
                setattr(file, name, self._wrap_read(getattr(file, name), path))
        if file.writable():
            real = file.write

            def write(data):
                if self.fails("write", path):
                    # The disk took a part of it.
                    real(data[: len(data) // 2])
                    file.flush()
                    # Without a name, as the system reports it.
                    raise OSError(self._error, os.strerror(self._error))
                return real(data)

            file.write = write
        return file

    def _wrap_read(self, real, path):
        def read(*args):
            if self.fails("read", path):
                raise OSError(self._error, os.strerror(self._error))
            return real(*args)

        return read


def train(folder):
    # The teacher was trained beside the run that the other verbs read.
    teacher = (folder.parent / "base").resolve().parent / "teacher"
    keys = {"policy": "component:example", "trainer__teachers": teacher, "trainer__keep_checkpoints": 1}
    keys |= {"trainer__total_timesteps": 192, "trainer__checkpoint_interval": 1, "trainer__eval_episodes": 4}
    args = words(folder.parent, folder.name, **keys)
    return None if main(args) else True


def resume(folder):
    return None if main(["train", "--resume", str(folder)]) else True


def load(folder):
    return act(holdfast.load(folder))


VERBS = {"train": train, "resume": resume, "load": load, "save": save}
SHARES = {"train": 1, "resume": 1, "load": 3, "save": 3}
"""Shares of the verbs in the cases: what is quick is done more often."""


def call(verb, folder, fault):
    """Call a verb while a fault is on; return its result and the calls it made."""
    disk = Disk(folder.parent, *fault)
    loaded = [holdfast.load(folder)] if verb == "save" else []
    disk.patch()
    result = VERBS[verb](folder, *loaded)
    return None if result is None else [result, dict(disk.counts)]


def prepare(base, verb, parent):
    """Make a folder as the verb expects it."""
    (parent / "base").symlink_to(base)
    if verb != "train":
        shutil.copytree(base, parent / "x", symlinks=True)
    if verb == "resume":
        # As if killed before the last checkpoint.
        last, previous, *_ = RunDir(parent / "x").numbered()
        shutil.rmtree(last)
        set_symlink(previous.with_name("latest"), previous.name)
    return parent / "x"


def newest(folder):
    """Return the highest iteration of all valid checkpoints, also of those that a resume set aside."""
    iterations = [-1]
    for path in (folder / "checkpoints").glob("[0-9]*"):
        with contextlib.suppress(CorruptFileError):
            iterations.append(open_checkpoint(path).iteration)
    return max(iterations)


def run_differences(one, other):
    """List differences between two finished runs, also in the names of their checkpoints."""
    try:
        names = [{path.name for path in RunDir(folder).numbered()} for folder in (one, other)]
        return apart(one, other) + [f"checkpoint {name}" for name in names[0] ^ names[1]]
    except (AssertionError, ValueError, KeyError, OSError) as error:
        return [repr(error)]


def judge_run(folder, reference, before, report):
    """Judge a run after a fault, then resume it without faults; return the outcome and text."""
    outcome, _, text = report
    if outcome == "done":
        differences = run_differences(reference, folder)
        outcome = "equal" if not differences else "reported" if is_reported(text) else "silent"
        text += f"\n{differences}"
    elif outcome == "refused":
        lines = [line for line in text.splitlines() if line.startswith("holdfast: ")]
        outcome = "refused" if len(lines) == 1 and str(folder.parent) in lines[0] else "raw"
    if newest(folder) < before:
        return "lost", f"{text}\n{newest(folder)} is the newest checkpoint, it was {before}"
    if RunDir(folder).numbered():
        again = in_child(resume, folder)
        try:
            differences = apart(reference, folder) if again[0] == "done" else [again]
        except (AssertionError, ValueError, KeyError, OSError) as error:
            differences = [repr(error)]
        # A line that a fault cut may be lost, if the resume says so.
        if differences and not (differences == ["metrics.jsonl"] and "metrics.jsonl lacks" in again[2]):
            return "lost", f"{text}\nresumed: {differences}"
    return outcome, text


def judge_files(verb, folder, expected, report):
    """Judge what a load returned; or load what a save has left: it is whole or refused."""
    outcome, result, text = report
    if outcome == "refused" and str(folder.parent) not in text:
        return "raw", text
    if verb == "load" and outcome == "done":
        same = ast.literal_eval(result)[0] == ast.literal_eval(expected["load"])
        outcome = "equal" if same else "reported" if is_reported(text) else "silent"
    if verb == "save" and outcome in ("done", "refused"):
        if in_child(restore_memory, folder)[1] != expected["memory"]:
            return "lost", text
        hub = in_child(load_hub, folder)
        if hub[:2] != ("done", expected["load"]) and not (outcome == hub[0] == "refused"):
            return "silent", f"{text}\n{hub}"
        outcome = "equal" if outcome == "done" else outcome
    return outcome, text


def is_reported(text):
    return any(os.strerror(error) in text for errors in ERRORS.values() for error in errors)


def inject(base, count, seed, verbs=tuple(SHARES)):
    """Yield for each case: its number, verb, kind of call, fault, outcome and text."""
    with tempfile.TemporaryDirectory(prefix="faults-") as temporary:
        references, counts = {}, {}
        for verb in VERBS:
            parent = Path(temporary) / verb
            parent.mkdir()
            references[verb] = prepare(base, verb, parent)
            outcome, result, text = in_child(call, verb, references[verb], ())
            assert outcome == "done", text
            counts[verb] = ast.literal_eval(result)[1]
        expected = {"load": in_child(load, base)[1], "memory": in_child(restore_memory, base)[1]}
        for number in range(count):
            generator = random.Random(f"{seed}/{number}")
            verb = generator.choices(verbs, [SHARES[verb] for verb in verbs])[0]
            kind = generator.choice([kind for kind in ERRORS if counts[verb].get(kind)])
            fault = (kind, generator.randint(1, counts[verb][kind]), generator.choice(ERRORS[kind]))
            fault = (*fault, generator.random() < 0.5)
            parent = Path(temporary) / "case"
            parent.mkdir()
            folder = prepare(base, verb, parent)
            before = newest(folder)
            report = in_child(call, verb, folder, fault)
            if verb in ("train", "resume"):
                outcome, text = judge_run(folder, references[verb], before, report)
            else:
                outcome, text = judge_files(verb, folder, expected, report)
            fault_text = f"call {fault[1]} {errno.errorcode[fault[2]]}{' lasting' * fault[3]}"
            yield number, verb, kind, fault_text, outcome, text
            shutil.rmtree(parent)


if __name__ == "__main__":
    torch.set_num_threads(1)
    number, seed = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        print_cases(inject(make_run(Path(folder)), number, seed, sys.argv[3:] or tuple(SHARES)), number)
