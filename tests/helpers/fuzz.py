"""A fuzzer: call a verb on a run with one mutated file; `python tests/helpers/fuzz.py COUNT [SEED]` prints outcomes.

In half of the cases the checksums are computed again after the mutation. The verb runs in a forked process.
"""

import collections
import contextlib
import io
import json
import os
import random
import shutil
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path

import torch

import holdfast
from helpers.mutations import mutate
from helpers.small_runs import TINY, lines_of, sign
from holdfast.cli import main
from holdfast.errors import HoldfastError

OUTCOMES = {
    "equal": "the result of the intact run",
    "refused": "one line of error",
    "reported": "another result, with a message",
    "signed": "another result, of a file whose checksum is right",
    "silent": "another result without a message",
    "raw": "an exception that is no error of ours",
    "hang": "no end",
    "executed": "code named by a file ran",
}
BAD = ("silent", "raw", "hang", "executed")
SECONDS = 120
MORE = 2 * TINY["trainer.batch_size"]
"""Steps by which a resumed run is trained longer."""


def make_run(folder):
    """Train a run with a teacher and a component graph; return its folder."""
    keys = {**TINY, "runs_dir": str(folder), "policy": "component:example", "trainer.keep_checkpoints": 2}
    teacher = holdfast.train("recall", {**keys, "run": "teacher", "trainer.total_timesteps": 64})
    run = holdfast.train("recall", {**keys, "run": "x", "trainer.teachers": str(teacher.folder)})
    player = holdfast.load(run.folder)
    player.save_pretrained(run.folder / "hub")
    session = player.start(2)
    session.act(*_observations(player, 0))
    session.save(run.folder / "memory.safetensors")
    return run.folder


def _observations(player, step):
    shape, generator = player.spec.obs_shape, torch.Generator().manual_seed(step)
    obs = torch.randint(0, 255, (2, *shape), dtype=torch.uint8, generator=generator)
    return obs.numpy(), torch.tensor([step == 0, step == 0]).numpy()


def act(player, memory=None):
    session = player.start(2)
    if memory is not None:
        session.restore(memory)
    first = 0 if memory is None else 1
    actions = [session.act(*_observations(player, step)).tolist() for step in range(first, 5)]
    return [player.weights_hash, actions]


def load(folder):
    return act(holdfast.load(folder, trust_code=False))


def load_hub(folder):
    return act(holdfast.Player.from_pretrained(folder / "hub"))


def restore_memory(folder):
    return act(holdfast.load(folder, trust_code=False), folder / "memory.safetensors")


def evaluate(folder):
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        code = main(["eval", str(folder), "--episodes", "4", "--seeds", "1", "--json"])
    if code:
        return None
    scores = json.loads(output.getvalue())
    return {key: value for key, value in scores.items() if key not in ("run", "checkpoint")}


def export(folder):
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        code = main(["export", str(folder), "--to", "torch"])
    print(output.getvalue())
    return None if code else holdfast.load(folder, log=lambda message: None).weights_hash


def resume(folder):
    steps = TINY["trainer.total_timesteps"] + MORE
    if main(["train", "--resume", str(folder), f"trainer.total_timesteps={steps}"]):
        return None
    weights = (folder / "checkpoints" / "latest" / "model.safetensors").read_bytes()
    try:
        metrics = repr(lines_of(folder))
    except (ValueError, KeyError, AttributeError):
        # The lines before those of the resumed run are damaged, which it must report.
        metrics = "damaged"
    return [hash(weights), metrics]


VERBS = {
    "load": (load, 5),
    "load_hub": (load_hub, 4),
    "restore_memory": (restore_memory, 1),
    "evaluate": (evaluate, 3),
    "resume": (resume, 5),
    "export": (export, 0.2),
}
"""Verbs and their shares of the cases."""
MESSAGES = ("damage", "missing", "differ", "lacks", "not used", "cannot be read", "no such", "unreadable")


def call(verb, folder, result_file):
    """Run in the child: call the verb, and write outcome, result and text to a file."""
    text, result, outcome = io.StringIO(), None, "done"
    os.chdir(folder.parent)
    with (
        contextlib.redirect_stdout(text),
        contextlib.redirect_stderr(text),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        try:
            result = VERBS[verb][0](folder)
            outcome = "refused" if result is None else "done"
        except (HoldfastError, OSError) as error:
            outcome = "refused"
            print(error)
        except BaseException:
            outcome = "raw"
            traceback.print_exc()
    messages = "\n".join([text.getvalue(), *(str(warning.message) for warning in caught)])
    result_file.write_text(json.dumps([outcome, repr(result), messages]))


def in_child(verb, folder):
    """Call a verb in a forked process; return its outcome, result and text."""
    result_file = folder.parent / "result.json"
    result_file.unlink(missing_ok=True)
    child = os.fork()
    if not child:
        try:
            call(verb, folder, result_file)
        finally:
            os._exit(0)
    deadline = time.monotonic() + SECONDS
    while os.waitpid(child, os.WNOHANG)[0] == 0:
        if time.monotonic() > deadline:
            os.kill(child, 9)
            os.waitpid(child, 0)
            return "hang", "", ""
        time.sleep(0.002)
    if not result_file.exists():
        return "raw", "", "the process died"
    return tuple(json.loads(result_file.read_text()))


def choose_file(folder, verb, generator):
    """Choose a file that the verb may read."""
    if verb == "load_hub":
        files = [file for file in (folder / "hub").iterdir() if file.suffix != ".md"]
    elif verb == "restore_memory":
        files = [folder / "memory.safetensors"]
    else:
        newest = list((folder / "checkpoints" / "latest").resolve().iterdir())
        others = [file for file in folder.rglob("*") if file.is_file() and "hub" not in file.parts]
        files = generator.choice([newest, newest, others])
    return generator.choice(sorted(files))


def sign_again(file):
    """Compute checksums again, where the file belongs to a folder that has them."""
    with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError, OSError):
        sign(file.parent)
        return True
    return False


def fuzz(folder, count, seed, verbs=None):
    """Yield for each case: its number, verb, file, mutation, outcome and text."""
    names = list(verbs or VERBS)
    shares = [VERBS[name][1] for name in names]
    expected = {}
    for number in range(count):
        generator = random.Random(f"{seed}/{number}")
        verb = generator.choices(names, shares)[0]
        with tempfile.TemporaryDirectory(prefix="fuzz-") as temporary:
            copy = Path(temporary) / "x"
            shutil.copytree(folder, copy, symlinks=True)
            if verb not in expected:
                expected[verb] = in_child(verb, copy)
                assert expected[verb][0] == "done", expected[verb]
                shutil.rmtree(copy)
                shutil.copytree(folder, copy, symlinks=True)
            (Path(temporary) / "fuzz_payload.py").write_text("open('executed', 'w').close()\nPayload = None\n")
            file = choose_file(copy, verb, generator)
            change = mutate(file, generator)
            signed = generator.random() < 0.5 and sign_again(file)
            outcome, result, text = in_child(verb, copy)
            if (Path(temporary) / "executed").exists():
                outcome = "executed"
            elif outcome == "done":
                same = result == expected[verb][1]
                reported = any(word in text for word in MESSAGES)
                outcome = "equal" if same else "reported" if reported else "signed" if signed else "silent"
            yield number, verb, str(file.relative_to(copy)), change + " signed" * signed, outcome, text


def table(cases):
    """Format counts of outcomes by verb."""
    counts = collections.Counter((verb, outcome) for _, verb, _, _, outcome, _ in cases)
    verbs = [verb for verb in VERBS if any(counts[verb, outcome] for outcome in OUTCOMES)]
    rows = [f"{verb:16}" + "".join(f"{counts[verb, outcome]:>10}" for outcome in OUTCOMES) for verb in verbs]
    return "\n".join([f"{'':16}" + "".join(f"{outcome:>10}" for outcome in OUTCOMES), *rows])


if __name__ == "__main__":
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        run = make_run(Path(folder))
        cases = list(fuzz(run, int(sys.argv[1]), seed=int(sys.argv[2]) if len(sys.argv) > 2 else 0))
    for case in cases:
        if case[4] in BAD:
            print(*case[:5], case[5][-1500:], sep=" | ")
    print(table(cases))
