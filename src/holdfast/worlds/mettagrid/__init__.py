"""mettagrid simulations as a world, with features and actions by name."""

from holdfast.errors import ConfigError
from holdfast.install import install_command

try:
    from holdfast.worlds.mettagrid.mettagrid_world import MettaGridWorld
except ImportError as error:
    if (error.name or "").partition(".")[0] != "mettagrid":
        raise
    raise ConfigError(
        f"world.name=mettagrid: {error}; {install_command('mettagrid')} (Python 3.11 or 3.12)."
    ) from error

__all__ = ["MettaGridWorld"]
