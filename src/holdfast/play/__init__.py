"""`holdfast.load`: a policy to run in other programs, from a run, a checkpoint, the Hub, sb3-contrib or rsl_rl."""

import copy
from pathlib import Path
from types import ModuleType
from typing import Any
from warnings import warn

import torch

from holdfast.build import find_checkpoint, load_policy_from
from holdfast.checkpoint.run_dir import Log
from holdfast.config.run import Config
from holdfast.errors import ConfigError, ContractError
from holdfast.install import install_command
from holdfast.play.foreign import is_foreign, load_foreign
from holdfast.play.saved_memory import weights_hash
from holdfast.play.session import Session
from holdfast.policies import LSTMWrapper, PolicyLike
from holdfast.trust import trusting
from holdfast.worlds import WorldSpec
from holdfast.worlds.env_source import EnvLike

HUB = "hub:"


class Player:
    """A loaded policy, bound to its world; `start` returns a session with agents that act by it.

    The weights never change, and a player has no memory: each session has its own.
    """

    def __init__(self, policy: LSTMWrapper, config: Config | None = None, name: str = "") -> None:
        # A copy: training may continue with the original.
        self.policy = copy.deepcopy(policy).eval().requires_grad_(False)
        self.config = config
        """The config of its run; None for a policy that another library trained."""
        self.name = name if config is None else config.world.name
        """The world it was trained in, or the file it is from."""
        self.weights_hash = weights_hash(self.policy)

    def __repr__(self) -> str:
        """Name policy, world, weights and device."""
        device = next(self.policy.parameters()).device
        kind = type(self.policy).__name__
        place = "from" if self.config is None else "in"
        return f"Player({kind} {place} {self.name}, weights {self.weights_hash[:12]}, on {device})"

    @property
    def spec(self) -> WorldSpec:
        """Observations and actions of the world the policy is bound to."""
        assert self.policy.binding.spec is not None, "a loaded policy is bound to its world"
        return self.policy.binding.spec

    def start(self, agents: int = 1, seed: int = 0) -> Session:
        """Start a session of `agents` with empty memory; `seed` determines sampled actions."""
        return Session(self.policy, self.weights_hash, agents, seed)

    def export(self, file: str | Path) -> None:
        """Write the policy as one step to `NAME.onnx` or `NAME.pt2`, as `holdfast export` does, and check the file."""
        from holdfast.play.checked_export import BOUND, export_checked, require_output_file

        to = "torch" if Path(file).suffix == ".pt2" else "onnx"
        result = export_checked(self.policy, self.config, require_output_file(file, to), to, self.name)
        if not result.ok:
            raise ContractError(f"{file} was not written: it differs from the policy by more than {BOUND:.0e}.")

    def save_pretrained(self, save_directory: str | Path, **options: Any) -> str | None:
        """Write weights, config and a model card to a folder, in the format of the Hub."""
        try:
            return _hub().OnHub(self.policy, self._require_config()).save_pretrained(save_directory, **options)
        except OSError as error:
            if error.errno is None:
                # An error of the Hub, not of the disk.
                raise
            raise ConfigError(f"{save_directory} cannot be written: {error.strerror}.") from error

    def push_to_hub(self, repo_id: str, **options: Any) -> str:
        """Upload the same files to a repository of the Hub."""
        return _hub().OnHub(self.policy, self._require_config()).push_to_hub(repo_id, **options)

    def _require_config(self) -> Config:
        if self.config is None:
            raise ConfigError(f"{self.name} is a model of another library, without a Holdfast config; export it.")
        return self.config

    @classmethod
    def from_pretrained(
        cls, name: str | Path, *, device: str = "cpu", trust_code: bool = False, **options: Any
    ) -> "Player":
        """Load from a folder that `save_pretrained` wrote (`./folder` or a Path), or by `owner/name` from the Hub.

        A config that names code, which would be imported and run, is rejected without `trust_code`.
        """
        return cls(*_read(_hub().fetch(name, **options), device, warn, trust_code))


def load(
    name: str | Path,
    device: str = "cpu",
    *,
    env: EnvLike | None = None,
    policy: PolicyLike | None = None,
    log: Log = warn,
    trust_code: bool | None = None,
) -> Player:
    """Load a player from `runs/NAME`, a checkpoint, a folder saved for the Hub, or `hub:owner/name`.

    `sb3:model.zip` is a model of sb3-contrib's `RecurrentPPO`, `rsl_rl:model.pt` a recurrent one of rsl_rl, whose
    `?activation=NAME` is not in its weights.
    A run that was trained with an environment or a policy as an object needs it again: `env`, `policy`. Neither is
    changed; the weights go into a copy of the policy. A damaged checkpoint is skipped, with a message to `log`. Code
    that a config names is imported with `trust_code=True`, never with False; by default from installed packages only,
    for the Hub never.
    """
    if str(name).startswith(HUB):
        repo_id = str(name).removeprefix(HUB)
        return Player(*_read(_hub().fetch(repo_id), device, log, bool(trust_code), env, policy))
    if is_foreign(name):
        if env is not None or policy is not None:
            raise ConfigError(f"{name} has its policy and no environment; leave out env and policy.")
        return Player(load_foreign(str(name), _device(device), log, bool(trust_code)), name=str(name))
    folder = Path(name)
    if not folder.is_dir():
        raise ConfigError(
            f"{name} is not a folder; give runs/NAME, one of its checkpoints, {HUB}owner/name, sb3:model.zip or "
            "rsl_rl:model.pt."
        )
    if not (folder / "config.json").exists():
        raise ConfigError(f"{folder} has no config.json, so it is neither a run nor a checkpoint.")
    return Player(*_read(folder, device, log, trust_code, env, policy))


def _read(
    folder: Path,
    device: str,
    log: Log,
    trust_code: bool | None,
    env: EnvLike | None = None,
    policy: PolicyLike | None = None,
) -> tuple[LSTMWrapper, Config]:
    with trusting(trust_code):
        return load_policy_from(find_checkpoint(folder, log), _device(device), env=env, policy=policy)


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"device={name}: there is no such device; give cpu or cuda.") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device={name}, but torch finds no GPU here; give cpu.")
    return device


def _hub() -> ModuleType:
    """Import the Hub's client when it is used: it is slow to import, and optional."""
    try:
        import holdfast.play.hub as hub
    except ImportError as error:
        raise ConfigError(f"{error}; the Hub needs a package: {install_command('hub')}.") from error
    return hub
