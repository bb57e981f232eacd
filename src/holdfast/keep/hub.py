"""The door to the Hugging Face Hub: weights, config and a card in a folder that executes nothing."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import PyTorchModelHubMixin, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from safetensors.torch import save_file

from holdfast.config import Config, change
from holdfast.errors import ConfigError
from holdfast.keep.folder import GRAPH
from holdfast.policies import ComponentPolicy, LSTMWrapper
from holdfast.version import __version__

FILES = ("model.safetensors", "config.json", GRAPH)
"""All that is read of a repository: tensors and text."""
CARD = """---
{{ card_data }}
---

# A policy that remembers

Trained with Holdfast {{ version }} in the world `{{ world }}`.

- policy `{{ policy }}`, memory `{{ memory }}`
- actions: {{ actions }}

```python
import holdfast

player = holdfast.load("hub:OWNER/NAME")
playing = player.start(agents=4)          # owns the memories of four agents
actions = playing.act(obs, first)         # first: true where an observation opens an episode
```

`model.safetensors` holds the weights, `config.json` the config of the run; nothing is executed when they
are loaded. A policy of somebody's own class (`package.module:Class`) loads where that module can be imported.
"""


class OnHub(
    PyTorchModelHubMixin,
    library_name="holdfast",
    tags=["reinforcement-learning", "recurrent", "memory"],
    model_card_template=CARD,
):
    """A policy as the Hub knows it: what is saved, and where what was loaded lies."""

    def __init__(self, policy: LSTMWrapper | None = None, settings: Config | None = None) -> None:
        self.policy, self.settings = policy, settings
        self.folder: Path | None = None

    def card(self) -> Mapping[str, Any]:
        """Tell what the model card says."""
        assert self.policy is not None, "only what has a policy is saved"
        assert self.settings is not None, "only what has a config is saved"
        spec = self.policy.binding.spec
        named = spec.action_names if spec is not None else ()
        return {
            "version": __version__,
            "world": self.settings.world.name,
            "policy": self.settings.policy.name,
            "memory": type(self.policy.lstm.cell).__name__,
            "actions": ", ".join(f"`{name}`" for name in named) or f"`{self.policy.actions}`",
        }

    def generate_model_card(self, *arguments: Any, **told: Any) -> Any:
        """Fill in the card; whoever saves may say more."""
        return super().generate_model_card(*arguments, **{**self.card(), **told})

    def _save_pretrained(self, save_directory: Path) -> None:
        assert self.policy is not None, "only what has a policy is saved"
        assert self.settings is not None, "only what has a config is saved"
        weights = {name: tensor.contiguous().cpu() for name, tensor in self.policy.state_dict().items()}
        save_file(weights, save_directory / "model.safetensors", {"format": "pt"})
        # Where runs lie on this machine is nobody's business.
        settings = change(self.settings, {"runs_dir": "runs"})
        (save_directory / "config.json").write_text(settings.model_dump_json(indent=2) + "\n")
        if isinstance(self.policy, ComponentPolicy):
            (save_directory / GRAPH).write_text(self.policy.graph.text, encoding="utf-8")

    @classmethod
    def _from_pretrained(cls, *, model_id: str, **how: Any) -> "OnHub":
        found = cls()
        if Path(model_id).is_dir():
            found.folder = Path(model_id)
        else:
            asked = {name: value for name, value in how.items() if name in DOWNLOAD}
            found.folder = Path(snapshot_download(model_id, allow_patterns=list(FILES), **asked))
        return found


DOWNLOAD = ("revision", "cache_dir", "force_download", "local_files_only", "token")


def fetch(name: str, **how: Any) -> Path:
    """Bring a repository's files here, and say where they are; a folder is where it is."""
    try:
        folder = OnHub.from_pretrained(name, **how).folder
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"hub:{name} cannot be fetched: {reason}") from error
    assert folder is not None, "what was loaded lies somewhere"
    return folder
