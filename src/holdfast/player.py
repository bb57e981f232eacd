"""`holdfast.load`: a player for other people's programs, from a run, a checkpoint, or the Hub."""

import copy
from pathlib import Path
from types import ModuleType
from typing import Any
from warnings import warn

import torch

from holdfast.build import find_checkpoint, policy_of
from holdfast.config import Config
from holdfast.errors import ConfigError
from holdfast.keep.folder import Say
from holdfast.keep.memories import fingerprint
from holdfast.keep.playing import Playing
from holdfast.named_code import refuse_named_code
from holdfast.policies import LSTMWrapper
from holdfast.worlds import WorldSpec

HUB = "hub:"


class Player:
    """Weights, and the world they are bound to; `start` gives agents that play with them.

    Weights never change here, and a player remembers nothing: memories are those of the agents it starts.
    """

    def __init__(self, policy: LSTMWrapper, config: Config) -> None:
        # A copy: whoever goes on training must not change what remembers.
        self.policy = copy.deepcopy(policy).eval().requires_grad_(False)
        self.config = config
        self.fingerprint = fingerprint(self.policy)

    def __repr__(self) -> str:
        """Say what plays."""
        device = next(self.policy.parameters()).device
        kind = type(self.policy).__name__
        return f"Player({kind} in {self.config.world.name}, weights {self.fingerprint[:12]}, on {device})"

    @property
    def spec(self) -> WorldSpec:
        """What is seen and done in the world the weights are bound to."""
        assert self.policy.binding.spec is not None, "a policy that was loaded is bound to its world"
        return self.policy.binding.spec

    def start(self, agents: int = 1, seed: int = 0) -> Playing:
        """Start some agents that remember nothing yet; `seed` decides what they draw."""
        return Playing(self.policy, self.fingerprint, agents, seed)

    def save_pretrained(self, save_directory: str | Path, **how: Any) -> str | None:
        """Write weights, config and a model card to a folder, as users of the Hub know it."""
        return _hub().OnHub(self.policy, self.config).save_pretrained(save_directory, **how)

    def push_to_hub(self, repo_id: str, **how: Any) -> str:
        """Send the same files to a repository of the Hub."""
        return _hub().OnHub(self.policy, self.config).push_to_hub(repo_id, **how)

    @classmethod
    def from_pretrained(
        cls, name: str | Path, *, device: str = "cpu", trust_code: bool = False, **how: Any
    ) -> "Player":
        """Load from a folder that `save_pretrained` wrote, or by `owner/name` from the Hub.

        A config may name classes, which are imported and run: such a one is refused without `trust_code`.
        """
        return cls(*_read(_hub().fetch(str(name), **how), device, warn, trust_code))


def load(name: str | Path, device: str = "cpu", *, say: Say = warn, trust_code: bool | None = None) -> Player:
    """Load a player from `runs/NAME`, a checkpoint, a folder saved for the Hub, or `hub:owner/name`.

    A damaged checkpoint is not used; `say` is told of it. Classes that a config names are imported and run
    with `trust_code`; left out, folders are trusted, as runs of your own, and the Hub is not.
    """
    if str(name).startswith(HUB):
        hub = str(name).removeprefix(HUB)
        return Player.from_pretrained(hub, device=device, trust_code=bool(trust_code))
    folder = Path(name)
    if not folder.is_dir():
        raise ConfigError(f"{name} is no folder; give runs/NAME, one of its checkpoints, or {HUB}owner/name.")
    if not (folder / "config.json").exists():
        raise ConfigError(f"{folder} has no config.json, so it is no run and no checkpoint.")
    return Player(*_read(folder, device, say, trust_code is not False))


def _read(folder: Path, device: str, say: Say, trust_code: bool) -> tuple[LSTMWrapper, Config]:
    """Build the policy of a folder; of one that is not trusted only if it names no code."""
    saved = find_checkpoint(folder, say)
    if not trust_code:
        refuse_named_code(saved.path)
    return policy_of(saved, _device(device))


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"device={name}: there is no such device; give cpu or cuda.") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device={name}, but torch finds no GPU here; give cpu.")
    return device


def _hub() -> ModuleType:
    """Import the door to the Hub when it is used: it takes a while, and not everybody has it."""
    try:
        import holdfast.keep.hub as hub
    except ImportError as error:
        raise ConfigError(f"{error}; the Hub needs a package: pip install 'holdfast[hub]'.") from error
    return hub
