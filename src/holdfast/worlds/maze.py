"""Small mazes as tables: where each move leads from each cell, and which walls are seen around it."""

from collections.abc import Sequence

from holdfast.worlds.tokens import pack_location

Cell = tuple[int, int]
MOVES: dict[str, Cell] = {
    "move_north": (-1, 0),
    "move_south": (1, 0),
    "move_west": (0, -1),
    "move_east": (0, 1),
}
HERE = pack_location(5, 5)
"""The middle of the window: where the agent stands."""
AROUND = [(row, column) for row in (-1, 0, 1) for column in (-1, 0, 1) if (row, column) != (0, 0)]


def leads_to(cells: Sequence[Cell]) -> list[list[int]]:
    """Say for each open cell and each move which cell it leads to: into a wall, nowhere."""
    number = {cell: n for n, cell in enumerate(cells)}
    return [[number.get((r + dr, c + dc), number[r, c]) for dr, dc in MOVES.values()] for r, c in cells]


def walls_around(cells: Sequence[Cell], feature: int) -> list[list[list[int]]]:
    """List for each open cell the tokens of the walls among its eight neighbours."""
    return [
        [
            [pack_location(5 + dr, 5 + dc), feature, 1]
            for dr, dc in AROUND
            if (row + dr, column + dc) not in cells
        ]
        for row, column in cells
    ]
