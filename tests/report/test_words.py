from io import StringIO

import torch
from rich.console import Console
from torch import nn

from holdfast.config import change
from holdfast.recipes import find_recipe
from holdfast.report import difference, lookup, title_of, typed

RECIPE = find_recipe("recall")


def test_only_what_differs_from_the_recipe_is_listed():
    screen = Console(file=StringIO(), width=100, highlight=False, soft_wrap=True, emoji=False)
    assert difference(RECIPE, RECIPE) is None
    table = difference(RECIPE, change(RECIPE, {"seed": 5, "world.delay": "2..9"}))
    assert table is not None
    screen.print(table)
    rows = [line.split(maxsplit=2) for line in screen.file.getvalue().splitlines()]
    assert [row[0] for row in rows] == ["key", "seed", "world.delay"]
    assert [cell.strip() for cell in rows[2]] == ["world.delay", "8", "(2, 9)"]


def test_a_dotted_key_is_looked_up():
    assert lookup(RECIPE, "trainer.ppo.gamma") == 0.9


def test_values_are_written_as_they_are_typed():
    config = change(RECIPE, {"world": "mixture", "world.parts": "recall delay=4..8 weight=3 + n_back"})
    assert typed(config.world.parts) == "recall(delay=4..8) weight=3 + n_back weight=1"
    assert typed(None) == typed(()) == "none"
    assert typed(0.5) == "0.5"


def test_the_title_says_what_the_run_is():
    told = title_of(RECIPE, "mine", nn.Linear(999, 2), torch.device("cpu"))
    assert list(told.values()) == ["mine", "recall, 64 agents", "fast, 2,000 parameters", "cpu", "seed 0"]
    assert told["run"] == "mine"
