"""The words of a configuration: what it calls features, tags and actions, and how its tokens are read."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from holdfast.errors import ConfigError
from holdfast.worlds.embedded import FULL
from holdfast.worlds.mettagrid import engine
from holdfast.worlds.step import Feature
from holdfast.worlds.tokens import PADDING

LEFT_OUT = ("last_reward", "goal")
"""The engine writes rewards after what is seen, so the first is always 0; the second is a number of the
configuration, and is written nowhere."""
UNKNOWN = 254
"""What the table calls a token that the configuration does not explain."""
WIDEST = 15


class Words:
    """Names everything that tokens of a configuration may say, and translates them.

    Numbers of the engine depend on the configuration, names do not. Some values are numbers of this kind too:
    a tag, an action, a vibe. Each of these becomes a feature of its own, `tag:NAME`, with a full value. Vibes
    stay numbers where the list of them is the engine's own: it is the same wherever it is used.

    `agent_id` is left out unless it is asked for: it lets a net learn every agent's answer by heart.
    """

    def __init__(self, game: Any, name: str, *, agent_id: bool) -> None:
        ids = game.id_map()
        self.features: list[Feature] = []
        self._table = np.full((256, 256), UNKNOWN << 8, np.uint16)
        self._table[PADDING] = PADDING << 8 | PADDING
        expanded = {
            "tag": ids.tag_names(),
            "last_action": action_names(game),
            "vibe": game.vibe_names if game.vibe_names != _all_vibes() else (),
        }
        off = _switched_off(game.obs.global_obs)
        for each in ids.features():
            if each.id >= UNKNOWN:
                raise ConfigError(f"{name} has {each.id + 1} features; tokens can name {UNKNOWN}.")
            if each.name in LEFT_OUT or (each.name == "agent_id" and not agent_id):
                self._table[each.id] = PADDING << 8 | PADDING
            elif each.name in off:
                continue
            elif expanded.get(each.name):
                self._expand(each.id, each.name, expanded[each.name])
            else:
                self._table[each.id] = len(self.features) << 8 | np.arange(256)
                self.features.append(Feature(each.name, float(each.normalization)))
        if len(self.features) > UNKNOWN:
            sizes = ", ".join(f"{len(names)} of {what}" for what, names in expanded.items())
            raise ConfigError(
                f"{name} has {len(self.features)} words with {sizes}; tokens can name {UNKNOWN}. Use fewer "
                "vibes (game.actions.change_vibe.vibes), or game.obs.global_obs.last_action=False."
            )

    def _expand(self, number: int, what: str, names: Sequence[str]) -> None:
        for value, each in enumerate(names[:256]):
            self._table[number, value] = len(self.features) % 256 << 8 | FULL
            self.features.append(Feature(f"{what}:{each}", float(FULL)))

    def read(self, raw: np.ndarray) -> np.ndarray:
        """Translate tokens `[N,M,3]`; what is left out becomes padding, and padding comes last."""
        seen = np.full_like(raw, PADDING)
        used = raw[..., 0] != PADDING
        longest = int(used.sum(1).max()) if used.any() else 0
        if not longest:
            return seen
        near = raw[:, :longest]
        word = self._table[near[..., 1], near[..., 2]]
        gone = (word >> 8 == PADDING) | ~used[:, :longest]
        place = near[..., 0].copy()
        place[gone], word[gone] = PADDING, PADDING << 8 | PADDING
        order = np.argsort(gone, axis=1, kind="stable")
        for byte, column in enumerate((place, word >> 8, word & 255)):
            seen[:, :longest, byte] = np.take_along_axis(column, order, 1)
        return seen

    def unknown(self, seen: np.ndarray) -> np.ndarray | None:
        """Say which row has a token that was not understood, `[row, token]`; None: all were."""
        odd = (seen[..., 1] == UNKNOWN) & (seen[..., 0] != PADDING)
        return np.argwhere(odd)[0] if odd.any() else None


def action_names(game: Any) -> tuple[str, ...]:
    """List the actions in the engine's order: the words, then the vibes."""
    return tuple(action.name for action in game.actions.actions())


def window_of(game: Any, name: str) -> tuple[int, int]:
    """Say how many rows and columns are seen; more than 15 have no location byte."""
    window = int(game.obs.height), int(game.obs.width)
    if max(window) > WIDEST:
        raise ConfigError(
            f"{name} sees {window[0]}x{window[1]} cells; set game.obs.height and width to {WIDEST} at most."
        )
    return window


def _switched_off(told: Any) -> set[str]:
    """List features that have a number and are never written, so that no net has to read them."""
    off = {name for name in ("episode_completion_pct", "last_action") if not getattr(told, name)}
    return off if told.local_position else off | {f"lp:{way}" for way in ("east", "west", "north", "south")}


def _all_vibes() -> list[str]:
    return [vibe.name for vibe in engine.part("mettagrid.config.vibes").VIBES]
