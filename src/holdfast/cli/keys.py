"""The grammar `key=value`, and the seeds' other words for some keys."""

from collections.abc import Sequence

from holdfast.errors import ConfigError

BRANCHES = ("world", "policy")
"""`world=X` means `world.name=X`."""


def parse_words(words: Sequence[str]) -> tuple[str | None, dict[str, str]]:
    """Split command-line words into a recipe, if one is named, and keys with their values."""
    recipe, keys = None, {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals:
            if word.startswith("-"):
                raise ConfigError(f"There is no option {word!r}; keys are given as key=value, see --help.")
            if recipe is not None:
                raise ConfigError(f"{word!r} is neither key=value nor the one recipe ({recipe!r} is).")
            recipe = word
        elif not key or not value:
            raise ConfigError(f"{word!r} is not key=value; write for example seed=1.")
        else:
            name, meant = _translate(key.lstrip("+"), value)
            keys[name] = meant
    return recipe, keys


def _translate(key: str, value: str) -> tuple[str, str]:
    if key in BRANCHES:
        return f"{key}.name", value
    if key == "py_agent":
        return "policy.name", value.removesuffix(".py")
    if key == "agent":
        raise ConfigError(
            f"agent={value} asks for a component graph, which this version does not build; "
            f"py_agent={value} is the policy as a class."
        )
    return key, value
