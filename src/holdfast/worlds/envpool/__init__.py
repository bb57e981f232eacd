"""The door to envpool: environments that run in threads, answered all at once or in turns."""

from holdfast.worlds.envpool.world import EnvpoolTurns, EnvpoolWorld, envpool_world

__all__ = ["EnvpoolTurns", "EnvpoolWorld", "envpool_world"]
