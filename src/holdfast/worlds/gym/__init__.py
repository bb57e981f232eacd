"""The door to Gymnasium: any of its environments as a world, whatever its way to restart."""

from holdfast.worlds.gym.world import GymWorld

__all__ = ["GymWorld"]
