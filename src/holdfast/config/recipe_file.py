"""Recipe files: YAML with the keys of the command line, dotted or nested, on top of a named recipe."""

import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import yaml

from holdfast.config.base import SafeLoader
from holdfast.config.run import all_keys
from holdfast.errors import ConfigError, one_line, writing

RECIPE = "recipe"
"""The key that names the recipe below."""
SUFFIXES = (".yaml", ".yml")
PLAIN = re.compile(r"-?\w[\w.+/:-]*")
"""Values that need no quotes; all of them are read as text."""


def is_recipe_file(name: str) -> bool:
    """Return whether a recipe is a file."""
    return name.endswith(SUFFIXES)


def read_recipe_file(path: Path) -> tuple[str | None, dict[str, str]]:
    """Read a recipe file: the recipe that it changes, if it names one, and its keys with values as typed."""
    try:
        # Of a safe loader, with limits; values stay text, which the config parses as on the command line.
        root = yaml.compose(path.read_text(encoding="utf-8"), Loader=SafeLoader)
    except FileNotFoundError:
        raise ConfigError(f"There is no file {path}; give a recipe or a recipe file.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {one_line(error)}.") from None
    except (yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"{path} is not YAML: {one_line(error)}.") from None
    if root is None:
        return None, {}
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(f"{path} is not a recipe; write a line for each key, such as seed: 1.")
    worlds = [node.value for name, node in _scalars(root) if name in ("world", "world.name")]
    keys = dict[str, str]()
    for key, value, line in _flatten(root, "", frozenset(all_keys(worlds[0]) if worlds else all_keys())):
        if key in keys:
            raise ConfigError(f"{path}, line {line}: {key} is given twice; keep one.")
        keys[key] = value
    return keys.pop(RECIPE, None), keys


def write_recipe_file(path: Path, recipe: str, keys: Mapping[str, object], comment: str) -> None:
    """Write a recipe file whole or not at all."""
    lines = [f"# {line}" for line in comment.splitlines()]
    lines += [f"{key}: {_quoted(str(value))}" for key, value in {RECIPE: recipe, **keys}.items()]
    part = path.with_name(f".{path.name}.part")
    with writing(path):
        part.write_text("\n".join(lines) + "\n", encoding="utf-8")
        part.replace(path)


def _quoted(text: str) -> str:
    return text if PLAIN.fullmatch(text) and not text.endswith(":") else "'" + text.replace("'", "''") + "'"


def _scalars(root: yaml.MappingNode) -> Iterator[tuple[str, yaml.ScalarNode]]:
    """Yield the names of the outer two levels that have scalars."""
    for name, node in root.value:
        if isinstance(node, yaml.ScalarNode):
            yield name.value, node
        elif isinstance(node, yaml.MappingNode):
            yield from (
                (f"{name.value}.{key.value}", leaf) for key, leaf in node.value if isinstance(leaf, yaml.ScalarNode)
            )


def _flatten(node: yaml.MappingNode, prefix: str, keys: Collection[str]) -> Iterator[tuple[str, str, int]]:
    """Yield dotted keys, values as typed, and lines."""
    for name, value in node.value:
        key, line = f"{prefix}{name.value}", name.start_mark.line + 1
        if isinstance(value, yaml.ScalarNode):
            yield key, value.value, line
        elif isinstance(value, yaml.MappingNode) and key not in keys:
            yield from _flatten(value, f"{key}.", keys)
        elif isinstance(value, yaml.SequenceNode) and all(isinstance(item, yaml.ScalarNode) for item in value.value):
            yield key, ",".join(item.value for item in value.value) or "none", line
        else:
            # A mapping that is a value, such as world.options: as it is typed on the command line.
            value.flow_style = True
            yield key, yaml.serialize(value, width=float("inf")).strip(), line
