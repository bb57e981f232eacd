"""Random mutations of one file: its bytes, its JSON tree, or the header of its tensors."""

import contextlib
import gzip
import io
import json
import pickle
import random
import sqlite3
import struct
import tempfile
import zipfile
from pathlib import Path

NUMBERS = (0, 1, -1, 7, 2**31, 2**63, -(2**63), 10**30, 0.5, 1e308, -0.0, float("nan"), float("inf"))
TEXTS = (
    "",
    "none",
    "recall",
    "arena",
    "fuzz_payload:Payload",
    "fuzz_payload:Payload(1)",
    "gym:fuzz_payload:Payload",
    "component:fuzz.yaml",
    "../..",
    "\0",
    "é" * 300,
    "9" * 400,
)
OTHERS = (None, True, [], {}, [[]], {"name": "fuzz_payload:Payload"})


class Payload:
    """What a pickle would execute."""

    def __reduce__(self):
        return exec, ("open('executed', 'w').close()",)


def mutate(file: Path, generator: random.Random) -> str:
    """Change one file in place; return what was done."""
    data = file.read_bytes()
    choices = [_flip, _overwrite, _cut, _insert, _truncate, _zero, _replace]
    if file.suffix in (".json", ".jsonl"):
        choices += [_change_json] * 7
    if file.suffix == ".safetensors":
        choices += [_change_header] * 5 + [_change_tree] * 4 + [_change_numbers] * 2
    if file.suffix in (".zip", ".pt"):
        choices += [_change_archive] * 14
    if file.suffix == ".db":
        choices += [_change_table] * 28
    if file.suffix == ".gz":
        choices += [_change_packed_json] * 7
    if file.suffix in (".yaml", ".txt"):
        choices += [_change_words] * 4
    change = generator.choice(choices)
    try:
        data = change(data, generator)
    except (ValueError, KeyError, IndexError, sqlite3.Error):
        # Not of the form that this change needs.
        change, data = _flip, _flip(data, generator)
    file.write_bytes(data)
    return change.__name__.strip("_")


def _flip(data, generator):
    changed = bytearray(data or b"\0")
    changed[generator.randrange(len(changed))] ^= 1 << generator.randrange(8)
    return bytes(changed)


def _overwrite(data, generator):
    start = generator.randrange(len(data) + 1)
    noise = generator.randbytes(generator.randint(1, 64))
    return data[:start] + noise + data[start + len(noise) :]


def _cut(data, generator):
    start = generator.randrange(len(data) + 1)
    return data[:start] + data[start + generator.randint(1, 200) :]


def _insert(data, generator):
    start = generator.randrange(len(data) + 1)
    return data[:start] + generator.randbytes(generator.randint(1, 64)) + data[start:]


def _truncate(data, generator):
    return data[: generator.randrange(len(data) + 1)]


def _zero(data, generator):
    start = generator.randrange(len(data) + 1)
    length = min(512, len(data) - start)
    return data[:start] + bytes(length) + data[start + length :]


def _replace(data, generator):
    return generator.choice(
        [b"", pickle.dumps(Payload()), b"PK\x03\x04" + data, b"{}", b"[]", b"null", b"\xff\xfe", data * 2]
    )


def _change_words(data, generator):
    words = data.decode().split(" ")
    words[generator.randrange(len(words))] = str(generator.choice([*TEXTS, *NUMBERS]))
    return " ".join(words).encode()


def _change_json(data, generator):
    lines = data.decode().splitlines(keepends=True)
    try:
        return json.dumps(_changed(json.loads(data), generator), indent=2).encode()
    except ValueError:
        number = generator.randrange(len(lines))
        lines[number] = json.dumps(_changed(json.loads(lines[number]), generator)) + "\n"
        return "".join(lines).encode()


def _change_packed_json(data, generator):
    return gzip.compress(json.dumps(_changed(json.loads(gzip.decompress(data)), generator)).encode(), mtime=0)


def _change_archive(data, generator):
    """Change one entry of a zip, whose checksums are right again."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    name = generator.choice(sorted(entries))
    if generator.random() < 0.1:
        del entries[name]
    elif entries[name][:1] == b"{":
        entries[name] = _change_json(entries[name], generator)
    elif entries[name][:2] == b"PK":
        entries[name] = _change_archive(entries[name], generator)
    else:
        entries[name] = generator.choice([_flip, _flip, _flip, _insert, _truncate, _zero])(entries[name], generator)
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for name, entry in entries.items():
            archive.writestr(name, entry)
    return stream.getvalue()


def _change_table(data, generator):
    """Change one value of a row in a SQLite database, or remove the row."""
    with tempfile.NamedTemporaryFile() as file:
        Path(file.name).write_bytes(data)
        with contextlib.closing(sqlite3.connect(file.name)) as database:
            names = [row[0] for row in database.execute("SELECT name FROM sqlite_master WHERE type='table'")]
            rows = [(name, *row) for name in names for row in database.execute(f'SELECT rowid FROM "{name}"')]
            name, row = generator.choice(rows)
            columns = [column[1] for column in database.execute(f'PRAGMA table_info("{name}")')]
            column = generator.choice(columns)
            ((value,),) = database.execute(f'SELECT "{column}" FROM "{name}" WHERE rowid=?', (row,))
            if isinstance(value, str) and value[:1] in "{[" and generator.random() < 0.8:
                value = json.dumps(_changed(json.loads(value), generator))
            else:
                value = generator.choice([*TEXTS, None, 0, 1, -1, 7, 2**31, 2**62, 0.5, 1e308, "null", "[]", "{}"])
            if generator.random() < 0.1:
                database.execute(f'DELETE FROM "{name}" WHERE rowid=?', (row,))
            else:
                database.execute(f'UPDATE OR REPLACE "{name}" SET "{column}"=? WHERE rowid=?', (value, row))
            database.commit()
        return Path(file.name).read_bytes()


def _changed(tree, generator):
    """Change one value somewhere in a tree, remove it, or rename its key."""
    places = list(_places(tree))
    if not places:
        return generator.choice([*NUMBERS, *TEXTS, *OTHERS])
    branch, key = generator.choice(places)
    how = generator.randrange(6)
    if how == 0:
        del branch[key]
    elif how == 1 and isinstance(branch, dict):
        branch[f"{key}_"] = branch.pop(key)
    elif how == 2 and isinstance(branch[key], int | float) and not isinstance(branch[key], bool):
        branch[key] = generator.choice([branch[key] + 1, branch[key] * 2, -branch[key], branch[key] // 2])
    else:
        branch[key] = generator.choice([*NUMBERS, *TEXTS, *OTHERS])
    return tree


def _places(tree):
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ():
        yield tree, key
        yield from _places(value)


def _split(data):
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def _join(header, body):
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body


def _change_header(data, generator):
    header, body = _split(data)
    return _join(_changed(header, generator), body)


def _change_tree(data, generator):
    """Change the tree of a state file, which its header holds as JSON text."""
    header, body = _split(data)
    header["__metadata__"]["tree"] = json.dumps(_changed(json.loads(header["__metadata__"]["tree"]), generator))
    return _join(header, body)


def _change_numbers(data, generator):
    """Put NaN, infinity or noise into one tensor."""
    header, body = _split(data)
    name = generator.choice([name for name in header if name != "__metadata__"])
    start, end = header[name]["data_offsets"]
    pattern = generator.choice([b"\xff", b"\x7f", generator.randbytes(1)])
    return data[: len(data) - len(body)] + body[:start] + pattern * (end - start) + body[end:]
