"""On what it was measured: the machine's name, and the versions of all that matters."""

import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from holdfast.version import __version__

_CPUS = Path("/proc/cpuinfo")


def name_of(device: torch.device) -> str:
    """Say which GPU or CPU it is."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    told = _CPUS.read_text().splitlines() if _CPUS.exists() else []
    models = [line.partition(":")[2].strip() for line in told if line.startswith("model name")]
    return f"{models[0] if models else platform.machine()}"


def versions() -> dict[str, str | None]:
    """List versions; what is not there has none."""
    cudnn = torch.backends.cudnn.version() if torch.cuda.is_available() else None
    return {
        "holdfast": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": None if cudnn is None else str(cudnn),
        **{name: _version(name) for name in ("triton", "tensordict", "torchrl")},
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
