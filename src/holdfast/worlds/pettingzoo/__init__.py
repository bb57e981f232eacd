"""The door to PettingZoo: its parallel environments as a world, with agents that leave and join."""

from holdfast.worlds.pettingzoo.world import PettingZooWorld

__all__ = ["PettingZooWorld"]
