"""Gymnasium environments as a world, in any of the three autoreset modes."""

from holdfast.worlds.gym.gym_world import GymWorld

__all__ = ["GymWorld"]
