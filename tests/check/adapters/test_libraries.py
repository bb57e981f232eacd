"""The sb3-contrib and TorchRL adapters with their libraries, which `make slow` puts beside the oldest tensordict."""

import importlib
from pathlib import Path

import pytest
import tensordict
import torch

from holdfast.check import check

TOOLS = Path(__file__).parents[3] / "tools"
pytestmark = [
    pytest.mark.skipif(
        not tensordict.__version__.startswith("0.14."), reason="TorchRL needs tensordict 0.14: `make slow` has it"
    ),
    pytest.mark.usefixtures("annotations_asleep"),
    # The libraries' own.
    pytest.mark.filterwarnings("ignore"),
]


@pytest.mark.parametrize(
    ("name", "broken"), [("TorchRL GRUModule, pad", set()), ("sb3-contrib, never clears", {"clear"})]
)
def test_laws_of_a_library_policy(monkeypatch, name, broken):
    monkeypatch.syspath_prepend(str(TOOLS))
    peers = importlib.import_module("peers")
    (entry,) = [entry for entry in (*peers.LIBRARIES, *peers.BROKEN) if entry.name == name]
    torch.manual_seed(0)
    assert {law.name for law in check(entry.make()).values() if not law.ok} == broken
