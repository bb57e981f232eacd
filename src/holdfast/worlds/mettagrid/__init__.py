"""The door to mettagrid: many simulations in one process, with its features and actions known by name."""

from holdfast.worlds.mettagrid.world import MettaGridWorld

__all__ = ["MettaGridWorld"]
