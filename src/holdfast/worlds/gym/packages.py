"""Packages that register environments, and those that environments need."""

import importlib.util
import re

from holdfast.errors import ConfigError, one_line
from holdfast.install import pip_install
from holdfast.registry import import_named, import_object

PACKAGES = {
    r"ALE/|\w+NoFrameskip-v\d": ("ale_py", "ale-py opencv-python-headless"),
    r"(MiniGrid|BabyAI)-": ("minigrid", "minigrid"),
    r"MinAtar/": ("minatar", "minatar"),
    r"popgym-": ("popgym", "popgym"),
}
"""Modules that register environments when they are imported, with what to install, by how ids start."""
REGISTRARS = {"minatar": "minatar.gym:register_envs"}
"""Functions that register the environments of modules whose import does not."""


def import_package_of(env_id: str, name: str) -> None:
    """Import the package that registers an id, if it is a well-known one; `name` is the id in errors."""
    for pattern, (module, install) in PACKAGES.items():
        if not re.match(pattern, env_id):
            continue
        if importlib.util.find_spec(module) is None:
            raise ConfigError(f"gym:{name}: {module} is not installed; {pip_install(install)}.")
        import_named(name, module, "gym:")
        if module in REGISTRARS:
            import_object(REGISTRARS[module], "gym:")()


def missing_package(error: Exception) -> str:
    """Return what to install for an environment or a wrapper of Gymnasium, by its own error."""
    message = one_line(error)
    missing = re.match(r"[\w-]+", message)
    extra = re.search(r"gymnasium\[[\w,-]+\]", message)
    if "opencv" in message:
        # The extra of Gymnasium also installs packages for plots and videos.
        return f"OpenCV is not installed; {pip_install('opencv-python-headless')}."
    if missing is None or extra is None:
        return message
    command = pip_install(f"'{extra[0]}'")
    return f"{missing[0]} is not installed; {command}."
