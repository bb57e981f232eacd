"""docs/guides/check_your_trainer.md: its writer writes what the check reads; it names all laws and arrays."""

import re
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from holdfast.check import rollout_file
from holdfast.check.rollout_file import check_rollout
from holdfast.check.trainer.environments import INTERFACES
from holdfast.check.trainer.run import NAMES
from holdfast.check.trainers import TRAINERS

GUIDE = (Path(__file__).parents[3] / "docs" / "guides" / "check_your_trainer.md").read_text()


def test_the_writer_writes_what_the_check_reads(tmp_path):
    (block,) = [text for text in re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL) if "def write_rollout" in text]
    names = {}
    exec(block, names)
    rng = np.random.default_rng(0)
    first = np.zeros((6, 2), bool)
    first[0] = True
    arrays = {
        "first": first,
        "terminated": np.zeros((6, 2), np.uint8),
        "truncated": np.zeros((6, 2), bool),
        "log_probs": rng.normal(size=(6, 2)).astype(np.float32),
        "values": np.asfortranarray(rng.normal(size=(6, 2))),
    }
    arrays |= {f"replayed_{name}": arrays[name] for name in ("log_probs", "values")}
    path = tmp_path / "r.safetensors"
    names["write_rollout"](path, arrays)
    assert {name: array.tolist() for name, array in load_file(path).items()} == {
        name: array.tolist() for name, array in arrays.items()
    }
    assert check_rollout(path).ok
    arrays["replayed_values"] = arrays["values"] + 1
    names["write_rollout"](path, arrays)
    assert not check_rollout(path)["replay"].ok


@pytest.mark.parametrize("name", [*NAMES, *rollout_file.NAMES, *rollout_file.ROLLOUT_LAWS, *INTERFACES, *TRAINERS])
def test_the_guide_names_every_law_array_interface_and_library(name):
    assert re.search(rf"\b{name}\b", GUIDE)
