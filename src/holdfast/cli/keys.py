"""The grammar of `holdfast train`: perhaps a recipe, then `key=value` words."""

from collections.abc import Sequence

from holdfast.errors import ConfigError


def parse_words(words: Sequence[str]) -> tuple[str | None, dict[str, str]]:
    """Split command-line words into a recipe, if one is named, and keys with their values."""
    recipe, keys = None, {}
    for word in words:
        key, equals, value = word.partition("=")
        key = key.lstrip("+")
        if word.startswith("-"):
            raise ConfigError(f"There is no option {word!r}; keys are given as key=value, see --help.")
        if not equals and word:
            if recipe is not None:
                raise ConfigError(f"{word!r} is neither key=value nor the one recipe ({recipe!r} is).")
            recipe = word
        elif not key or not value:
            raise ConfigError(f"{word!r} is not key=value; write for example seed=1.")
        elif key in keys:
            raise ConfigError(f"{key} is given twice, as {keys[key]} and as {value}; which one is meant?")
        else:
            keys[key] = value
    return recipe, keys
