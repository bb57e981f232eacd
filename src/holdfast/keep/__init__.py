"""What survives: a run's folder, its weights, and an orderly end."""

from holdfast.keep.folder import GRAPH, RunFolder, create_folder, load_weights
from holdfast.keep.kept import Kept
from holdfast.keep.stop import listening_for_stop
from holdfast.keep.trained import checkpoint_of, steps_trained

__all__ = [
    "GRAPH",
    "Kept",
    "RunFolder",
    "checkpoint_of",
    "create_folder",
    "listening_for_stop",
    "load_weights",
    "steps_trained",
]
