"""Hugging Face Hub: weights, config and model card, saved as tensors and text."""

from pathlib import Path
from typing import Any

from huggingface_hub import PyTorchModelHubMixin, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from holdfast.checkpoint.format import CONFIG, MANIFEST, WEIGHTS, policy_manifest
from holdfast.checkpoint.run_dir import GRAPH, policy_files
from holdfast.checkpoint.serialization import pack_weights
from holdfast.config.run import Config, override
from holdfast.errors import ConfigError, one_line
from holdfast.policies import LSTMWrapper
from holdfast.version import __version__

FILES = (WEIGHTS, CONFIG, GRAPH, MANIFEST)
"""The files read from a repository: tensors and text only."""
CARD = """---
{{ card_data }}
---

# Recurrent policy for `{{ world }}`

Trained with Holdfast {{ version }} on the world `{{ world }}`.

- policy `{{ policy }}`, memory `{{ memory }}`
- actions: {{ actions }}

```python
import holdfast

player = holdfast.load("hub:OWNER/NAME")
session = player.start(agents=4)          # holds the hidden states of four agents
actions = session.act(obs, first)         # first: true where an observation starts an episode
```

`model.safetensors` holds the weights and `config.json` the training config: tensors and text, which execute
nothing. A config may name classes (`package.module:Class`), which are imported and run when the policy is
built. Such a config is rejected unless you pass `trust_code=True`, and needs the module to be importable.
"""
LOCAL = (".", "/", "~")
"""What a path starts with, and no repository does."""
DOWNLOAD = ("revision", "cache_dir", "force_download", "local_files_only", "token")


class OnHub(
    PyTorchModelHubMixin,
    library_name="holdfast",
    tags=["reinforcement-learning", "recurrent", "memory"],
    model_card_template=CARD,
):
    """A policy with the save and upload methods of the Hub."""

    def __init__(self, policy: LSTMWrapper, settings: Config) -> None:
        self.policy, self.settings = policy, settings

    def generate_model_card(self, *args: Any, **fields: Any) -> Any:
        """Fill in the model card; `fields` of the caller take precedence."""
        spec = self.policy.binding.spec
        names = spec.action_names if spec is not None else ()
        card = {
            "version": __version__,
            "world": self.settings.world.name,
            "policy": self.settings.policy.name,
            "memory": type(self.policy.lstm.cell).__name__,
            "actions": ", ".join(f"`{name}`" for name in names) or f"`{self.policy.actions}`",
        }
        return super().generate_model_card(*args, **{**card, **fields})

    def _save_pretrained(self, save_directory: Path) -> None:
        # Do not publish this machine's path of runs.
        files = policy_files(override(self.settings, {"runs_dir": "runs"}), self.policy)
        files[WEIGHTS] = pack_weights(self.policy.state_dict())
        for name, data in {**files, MANIFEST: policy_manifest(files)}.items():
            (save_directory / name).write_bytes(data)


def fetch(name: str | Path, **options: Any) -> Path:
    """Download a repository's files, and return their folder; a local folder, as a path, is returned as it is.

    `owner/name` is never a folder, whatever is in the working directory; a path starts with `.` or `/`.
    """
    for option in options:
        if option not in DOWNLOAD:
            raise ConfigError(f"hub:{name} has no option {option}=; choose from {', '.join(DOWNLOAD)}.")
    if isinstance(name, Path) or name.startswith(LOCAL):
        return Path(name).expanduser()
    try:
        return Path(snapshot_download(name, allow_patterns=list(FILES), **options))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        hint = f" For the folder, write ./{name}." if Path(name).is_dir() else ""
        raise ConfigError(f"hub:{name} cannot be fetched: {one_line(error)}{hint}") from error
