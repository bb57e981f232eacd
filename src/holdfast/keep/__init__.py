"""What survives: a run's folder, its checkpoints, and an orderly end."""

from holdfast.keep.checkpoint import Checkpoint, Moment, made_with, open_checkpoint
from holdfast.keep.folder import GRAPH, RunFolder, create_folder, described, load_weights
from holdfast.keep.kept import Kept
from holdfast.keep.packed import DamagedError, copied
from holdfast.keep.stop import StopRequest, listening_for_stop

__all__ = [
    "GRAPH",
    "Checkpoint",
    "DamagedError",
    "Kept",
    "Moment",
    "RunFolder",
    "StopRequest",
    "copied",
    "create_folder",
    "described",
    "listening_for_stop",
    "load_weights",
    "made_with",
    "open_checkpoint",
]
