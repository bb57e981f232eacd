"""Laws of memory and laws of worlds: measured on any policy or world, with the known bug behind a failure.

Names are imported when they are first used, so `import holdfast.check` imports neither the trainer nor environments.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast.check.laws import check, check_world
    from holdfast.check.results import Law, Laws, Measurement

__all__ = ["Law", "Laws", "Measurement", "check", "check_world"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"holdfast.check.{'laws' if name.startswith('check') else 'results'}"), name)
