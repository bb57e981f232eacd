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
from pathlib import Path

import torch

import holdfast
from helpers import fuzz_files
from helpers.forked import in_child
from helpers.mutations import mutate
from helpers.report_runs import Page
from helpers.small_runs import TINY, lines_of, sign
from holdfast.cli import main
from holdfast.play.record import record_replay
from holdfast.report.viewer import viewer_section

REPLAY = "replays/x.json.gz"
OUTCOMES = {
    "equal": "the result of the intact run",
    "refused": "one line of error",
    "reported": "another result, with a message",
    "signed": "another result, of a file whose checksum is right, or that has none",
    "silent": "another result without a message",
    "raw": "an exception that is no error of ours",
    "hang": "no end",
    "lost": "a checkpoint or file of before is gone, or the run resumes to another end",
    "executed": "code named by a file ran",
}
BAD = ("silent", "raw", "hang", "lost", "executed")
MORE = TINY["trainer.batch_size"]
"""Steps by which a resumed run is trained longer."""
SHORT = {
    "trainer.checkpoint_interval": 1,
    "trainer.keep_checkpoints": 2,
    "report": "off",
    "trainer.eval_episodes": 2,
    "trainer.update_epochs": 1,
}
GYM = {
    "world": "gym:CartPole-v1",
    "world.frame_stack": 2,
    "trainer.normalize_reward": True,
    "policy.normalize_obs": True,
    "policy.normalize_value": True,
}


def make_run(folder):
    """Train a run with a teacher and a component graph, and save its policy, a memory and a replay."""
    keys = {**TINY, **SHORT, "runs_dir": str(folder), "policy": "component:example"}
    teacher = holdfast.train("recall", {**keys, "run": "teacher", "trainer.total_timesteps": 64})
    run = holdfast.train("recall", {**keys, "run": "x", "trainer.teachers": str(teacher.folder)})
    save(run.folder, holdfast.load(run.folder))
    fuzz_files.make_files(run.folder)
    return run.folder


def make_gym_run(folder):
    """Train a run with a Gymnasium world and normalization, and save its policy, a memory and a replay."""
    keys = {key: value for key, value in TINY.items() if key != "world.delay"}
    run = holdfast.train(None, {**keys, **SHORT, **GYM, "runs_dir": str(folder), "run": "gym"})
    save(run.folder, holdfast.load(run.folder))
    fuzz_files.make_files(run.folder)
    return run.folder


def save(folder, player):
    """Save a policy, a memory and a replay into a run's folder, over those that exist."""
    player.save_pretrained(folder / "hub")
    record_replay(player, 8, agents=2).save(folder / REPLAY)
    session = player.start(2)
    session.act(*observations(player, 0))
    session.save(folder / "memory.safetensors")
    return True


def observations(player, step):
    space, generator = player.spec.observation_space, torch.Generator().manual_seed(step)
    obs = torch.randint(0, 255, (2, *space.shape), generator=generator)
    return obs.numpy().astype(space.dtype), torch.tensor([step == 0, step == 0]).numpy()


def act(player, memory=None):
    session = player.start(2)
    if memory is not None:
        session.restore(memory)
    first = 0 if memory is None else 1
    actions = [session.act(*observations(player, step)).tolist() for step in range(first, 5)]
    return [player.weights_hash, actions]


def load(folder):
    return act(holdfast.load(folder, trust_code=False))


def load_hub(folder):
    return act(holdfast.Player.from_pretrained(folder / "hub"))


def restore_memory(folder):
    return act(holdfast.load(folder, trust_code=False), folder / "memory.safetensors")


def show_replay(folder):
    """The page of a replay, whose names are of the file."""
    section = viewer_section(folder / REPLAY)
    assert section.count("<script") == 2
    return section


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
    # Typed, since a config with millions of episodes is right, but never ends.
    keys = [f"trainer.total_timesteps={steps}", "trainer.eval_episodes=2"]
    if main(["train", "--resume", str(folder), *keys]):
        return None
    weights = (folder / "checkpoints" / "latest" / "model.safetensors").read_bytes()
    try:
        metrics = repr(lines_of(folder))
    except (ValueError, KeyError, AttributeError):
        # The lines before those of the resumed run are damaged, which it must report.
        metrics = "damaged"
    return [hash(weights), metrics]


def report(folder):
    """Write the report; damaged numbers are shown as they are, but nothing of a file may run in the page."""
    if main(["report", str(folder)]):
        return None
    page = Page((folder / "report.html").read_text())
    assert (page.loads, page.handlers) == ([], [])
    # Data and code of the page, and of its viewer where the world has one.
    assert page.tags.count("script") in (2, 4)
    return "a page"


VERBS = {
    "load": (load, 5),
    "load_hub": (load_hub, 4),
    "restore_memory": (restore_memory, 1),
    "show_replay": (show_replay, 2),
    "evaluate": (evaluate, 3),
    "resume": (resume, 5),
    "export": (export, 0.2),
    "report": (report, 0.2),
    **{name: (verb, share) for name, (verb, share, _) in fuzz_files.VERBS.items()},
}
"""Verbs and their shares of the cases."""
MESSAGES = ("damage", "missing", "differ", "lacks", "not used", "cannot be read", "no such", "unreadable")


def in_copy(verb, folder):
    """Call a verb from the folder above the run, where code that a file names is found."""
    os.chdir(folder.parent)
    return VERBS[verb][0](folder)


def choose_file(folder, verb, generator):
    """Choose a file that the verb may read."""
    files = fuzz_files.files_of(folder, verb)
    if files is not None:
        pass
    elif verb == "load_hub":
        files = [file for file in (folder / "hub").iterdir() if file.suffix != ".md"]
    elif verb == "restore_memory":
        files = [folder / "memory.safetensors"]
    elif verb == "show_replay":
        files = [folder / REPLAY]
    else:
        newest = list((folder / "checkpoints" / "latest").resolve().iterdir())
        apart = {"hub", fuzz_files.MORE}
        others = [file for file in folder.rglob("*") if file.is_file() and apart.isdisjoint(file.parts)]
        files = generator.choice([newest, newest, others])
    return generator.choice(sorted(files))


def sign_again(file):
    """Compute checksums again, where the file belongs to a folder that has them."""
    with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError, OSError):
        sign(file.parent)
        return True
    return False


def fuzz(folders, count, seed, verbs=None):
    """Yield for each case, in one of the runs: its number, verb, file, mutation, outcome and text."""
    names = list(verbs or VERBS)
    shares = [VERBS[name][1] for name in names]
    expected = {}
    for number in range(count):
        generator = random.Random(f"{seed}/{number}")
        verb, folder = generator.choices(names, shares)[0], generator.choice(folders)
        with tempfile.TemporaryDirectory(prefix="fuzz-") as temporary:
            copy = Path(temporary) / "x"
            shutil.copytree(folder, copy, symlinks=True)
            if (verb, folder) not in expected:
                # In this process, so that its forks have imported everything.
                expected[verb, folder] = repr(VERBS[verb][0](copy))
                assert expected[verb, folder] != "None"
                shutil.rmtree(copy)
                shutil.copytree(folder, copy, symlinks=True)
            (Path(temporary) / "fuzz_payload.py").write_text("open('executed', 'w').close()\nPayload = None\n")
            file = choose_file(copy, verb, generator)
            change = mutate(file, generator)
            # What is packed again has a right checksum.
            signed = change == "change_packed_json" or (generator.random() < 0.5 and sign_again(file))
            signed = signed or fuzz_files.MORE in file.parts
            outcome, result, text = in_child(in_copy, verb, copy)
            if (Path(temporary) / "executed").exists():
                outcome = "executed"
            elif outcome == "done":
                same = result == expected[verb, folder]
                reported = any(word in text for word in MESSAGES)
                outcome = "equal" if same else "reported" if reported else "signed" if signed else "silent"
            yield number, verb, str(file.relative_to(copy)), change + " signed" * signed, outcome, text


def table(cases):
    """Format counts of outcomes by verb."""
    counts = collections.Counter((verb, outcome) for _, verb, _, _, outcome, _ in cases)
    verbs = sorted({verb for verb, _ in counts})
    rows = [f"{verb:16}" + "".join(f"{counts[verb, outcome]:>10}" for outcome in OUTCOMES) for verb in verbs]
    return "\n".join([f"{'':16}" + "".join(f"{outcome:>10}" for outcome in OUTCOMES), *rows])


def print_cases(cases, count):
    """Print each bad case as it comes, and the table after every 100 cases and at the end."""
    counted = []
    for case in cases:
        counted.append(case)
        if case[4] in BAD:
            print(*case[:5], case[5][-1500:], sep=" | ", file=sys.stderr, flush=True)
        if len(counted) == count or len(counted) % 100 == 0:
            print(f"{len(counted)} of {count} cases", table(counted), sep="\n", file=sys.stderr, flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    number, seed = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        runs = [make_run(Path(folder)), make_gym_run(Path(folder))]
        print_cases(fuzz(runs, number, seed), number)
