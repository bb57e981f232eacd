"""The door to the Hugging Face Hub: weights, config and a card in a folder of tensors and text."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import PyTorchModelHubMixin, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from holdfast.config import Config, change
from holdfast.errors import ConfigError
from holdfast.keep.folder import GRAPH
from holdfast.keep.packed import pack_weights
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

`model.safetensors` holds the weights, `config.json` the config of the run: tensors and text, which execute
nothing. Classes that a config names (`package.module:Class`) are imported and run when a player is built; a
config of that kind is refused unless you say `trust_code=True`, and loads where the module can be imported.
"""


class OnHub(
    PyTorchModelHubMixin,
    library_name="holdfast",
    tags=["reinforcement-learning", "recurrent", "memory"],
    model_card_template=CARD,
):
    """A policy as the Hub knows it: what is saved and sent."""

    def __init__(self, policy: LSTMWrapper, settings: Config) -> None:
        self.policy, self.settings = policy, settings

    def card(self) -> Mapping[str, Any]:
        """Tell what the model card says."""
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
        (save_directory / "model.safetensors").write_bytes(pack_weights(self.policy.state_dict()))
        # Where runs lie on this machine is nobody's business.
        settings = change(self.settings, {"runs_dir": "runs"})
        (save_directory / "config.json").write_text(settings.model_dump_json(indent=2) + "\n")
        if isinstance(self.policy, ComponentPolicy):
            (save_directory / GRAPH).write_text(self.policy.graph.text, encoding="utf-8")


DOWNLOAD = ("revision", "cache_dir", "force_download", "local_files_only", "token")


def fetch(name: str, **how: Any) -> Path:
    """Bring a repository's files here, and say where they are; a folder is where it is."""
    for word in how:
        if word not in DOWNLOAD:
            raise ConfigError(f"hub:{name} knows no {word}=; what can be said is {', '.join(DOWNLOAD)}.")
    if Path(name).is_dir():
        return Path(name)
    try:
        return Path(snapshot_download(name, allow_patterns=list(FILES), **how))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"hub:{name} cannot be fetched: {reason}") from error
