"""ConfigBase, its keys, and the value syntax: 1e6 and 5_000 are integers, 4..24 is a range, none is None."""

import re
import shlex
from collections.abc import Iterable
from typing import Annotated, Any, get_origin

import yaml
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, ValidationError
from pydantic.fields import FieldInfo

from holdfast.errors import did_you_mean

LONGEST_DELAY = 1_000_000
MOST_NODES = 100_000
"""Values in one YAML text."""
MOST_SHOWN = 200
"""Characters of a wrong value in an error."""
OTHER_NAMES = {
    "trainer.optimizer.learning_rate": ("lr",),
    "world.agents": ("n_envs", "num_envs", "num_agents", "n_agents", "envs"),
    "trainer.batch_size (steps of all agents)": ("n_steps", "num_steps", "rollout_length", "train_batch_size"),
    "trainer.minibatch_size": ("mini_batch_size", "minibatch", "sgd_minibatch_size"),
    "trainer.update_epochs": ("n_epochs", "num_epochs", "epochs", "num_sgd_iter"),
    "trainer.total_timesteps": ("timesteps", "total_steps", "n_timesteps", "steps"),
    "trainer.bptt_horizon": ("seq_len", "sequence_length", "horizon"),
    "trainer.ppo.gamma": ("discount", "discount_factor"),
    "trainer.ppo.gae_lambda": ("lam", "lambda", "gae"),
    "trainer.ppo.ent_coef": ("entropy_coef", "entropy_coeff", "ent"),
    "trainer.ppo.vf_coef": ("value_coef", "vf_loss_coeff"),
    "trainer.ppo.clip_coef": ("clip_range", "clip_param", "clip_ratio", "clip"),
    "trainer.num_workers": ("workers", "n_workers"),
    "policy.hidden_size": ("lstm_hidden_size", "hidden_dim", "lstm_hidden_dim"),
    "world=gym:ID": ("env", "env_id", "env_name", "environment"),
    "run": ("run_name", "exp_name"),
}
"""Keys, as a hint writes them, and their names in other libraries."""


class ConfigBase(BaseModel):
    """A branch of the config: frozen, without unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)


def keys_of(model: type[BaseModel], prefix: str = "", **branches: type[BaseModel]) -> dict[str, FieldInfo]:
    """Return the fields of a config class by dotted keys; `branches` are classes used instead of those declared."""
    keys: dict[str, FieldInfo] = {}
    for name, field in sorted(model.model_fields.items(), key=lambda item: item[0] != "name"):
        kind = branches.get(prefix + name, field.annotation)
        if field.exclude:
            # In no file and on no command line.
            continue
        # In Python 3.10 list[int] is an instance of type, too.
        if get_origin(kind) is None and isinstance(kind, type) and issubclass(kind, BaseModel):
            keys |= keys_of(kind, f"{prefix}{name}.")
        else:
            keys[prefix + name] = field
    return keys


def parse_int(value: Any) -> Any:
    """Parse an integer; 1e6 and 5_000 are accepted."""
    if not isinstance(value, str):
        return value
    try:
        number = float(value)
    except ValueError:
        raise ValueError("give an integer such as 5000, 5_000 or 1e6") from None
    if not number.is_integer():
        raise ValueError("give an integer")
    digits = value.replace("_", "")
    return int(digits) if digits.lstrip("+-").isdigit() else int(number)


def parse_int_or_range(value: Any) -> Any:
    """Parse an integer or a range such as 4..24."""
    if isinstance(value, str) and ".." in value:
        low, _, high = value.partition("..")
        return parse_int(low), parse_int(high)
    return parse_int(value)


def check_range(value: int | tuple[int, int]) -> int | tuple[int, int]:
    """Require 0 <= low <= high <= LONGEST_DELAY."""
    low, high = (value, value) if isinstance(value, int) else value
    if not 0 <= low <= high <= LONGEST_DELAY:
        raise ValueError(f"give a number from 0 to {LONGEST_DELAY}, or a range such as 4..24")
    return value


def parse_name(value: str | None) -> str | None:
    """Require a name that is a single path component."""
    if value is not None and not re.fullmatch(r"\w[\w.+-]*", value):
        raise ValueError("a name is one word of letters, digits and . _ + -; runs_dir=DIR sets the folder")
    return value


def parse_optional(value: Any) -> Any:
    """Parse none and null as None."""
    return None if isinstance(value, str) and value.lower() in ("none", "null") else value


def parse_interval(value: Any) -> Any:
    """Parse first, off or every:N."""
    if isinstance(value, str) and value in ("first", "off"):
        return value
    kind, _, number = str(value).partition(":")
    if kind != "every" or not number:
        raise ValueError("give first, off, or every:N such as every:10")
    count = parse_int(number)
    if count < 1:
        raise ValueError("every:N needs an N of at least 1")
    return f"every:{count}"


def parse_list(value: Any) -> Any:
    """Parse a,b,c as a list."""
    if isinstance(value, str):
        return [] if parse_optional(value) is None else [word.strip() for word in value.split(",")]
    return value


class SafeLoader(yaml.SafeLoader):
    """A safe loader that also refuses aliases which expand to more than MOST_NODES: lists of lists of lists."""

    def get_single_node(self) -> yaml.Node | None:
        """Return the root of the document."""
        node = super().get_single_node()
        if node is not None and _expanded_size(node, {}) > MOST_NODES:
            raise yaml.YAMLError(f"its aliases expand to more than {MOST_NODES:,} values")
        return node


def _expanded_size(node: yaml.Node, sizes: dict[yaml.Node, int]) -> int:
    """Count a node and the nodes below it, those of an alias each time; a node that contains itself has too many."""
    if node not in sizes:
        sizes[node] = MOST_NODES
        children = node.value if isinstance(node, yaml.CollectionNode) else ()
        parts = [part for child in children for part in (child if isinstance(child, tuple) else (child,))]
        sizes[node] = 1 + sum(_expanded_size(part, sizes) for part in parts)
    return sizes[node]


class _Loader(SafeLoader):
    """YAML that reads 1e3 as a number."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?\d[\d_]*(\.\d*)?[eE][-+]?\d+"), list("-+0123456789")
)


def parse_yaml(value: Any) -> Any:
    """Parse a string as YAML; none is None."""
    if not isinstance(value, str) or parse_optional(value) is None:
        return parse_optional(value)
    try:
        # A subclass of the safe loader.
        return yaml.load(value, Loader=_Loader)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except yaml.YAMLError:
        raise ValueError("write it as YAML, for example 8, true, [1, 2] or '{size: 5}'") from None


def parse_named_list(text: str, example: str) -> list[tuple[str, dict[str, str]]]:
    """Parse `NAME key=value ... + NAME ...` as names with their keys."""
    items = []
    for item in text.split(" + "):
        try:
            words = shlex.split(item)
        except ValueError as error:
            raise ValueError(f"{item!r} cannot be read: {str(error).lower()}") from None
        if not words:
            raise ValueError(f"name something on both sides of each +, as in '{example}'")
        keys: dict[str, str] = {}
        for word in words[1:]:
            key, equals, value = word.partition("=")
            if not equals or not key or not value:
                raise ValueError(f"{word!r} is not key=value; write for example '{example}'")
            keys[key] = value
        items.append((words[0], keys))
    return items


def first_error_message(error: ValidationError, prefix: str = "") -> str:
    """Return the first error of pydantic as one line."""
    first = error.errors()[0]
    message = first["msg"].removeprefix("Value error, ")
    if message.startswith(("world.", "trainer.")):
        # A branch that is validated on its own has named its key already.
        return message
    message = message[0].lower() + message[1:]
    # Other parts are branches of unions: an index, or a type.
    names = (part for part in first["loc"] if isinstance(part, str) and not part.startswith("tuple["))
    key = ".".join(name for name in names if name not in ("int", "float", "str"))
    if not key:
        return message
    if first["type"] == "missing":
        return f"{prefix}{key} must be given."
    value = str(first["input"])
    shown = value if len(value) <= MOST_SHOWN else f"{value[:MOST_SHOWN]}…"
    return f"{prefix}{key}={shown}: {message.rstrip('.')}."


def key_hint(key: str, keys: Iterable[str], otherwise: str = "`holdfast train --help` lists all keys.") -> str:
    """Return a guess at the intended key, by its spelling or by its name in another library."""
    leaf = key.rpartition(".")[2]
    inside = [name for name in keys if name.startswith(f"{key}.")]
    if inside:
        return f"it is a branch; its keys are {', '.join(inside[:3])} and so on."
    same_leaf = [name for name in keys if name.rpartition(".")[2] == leaf]
    names = {"world", *keys}
    elsewhere = [name for name, words in OTHER_NAMES.items() if leaf in words and re.split("[ =]", name)[0] in names]
    # Where the leaf is a name of ours, the path is misspelt.
    if elsewhere and not (same_leaf and "." in key):
        return f"did you mean {elsewhere[0]}?"
    if same_leaf and "." not in key:
        return f"did you mean {' or '.join(same_leaf)}?"
    return did_you_mean(key, keys, otherwise)


Int = Annotated[int, BeforeValidator(parse_int)]
"""An integer; 1e6 and 5_000 are accepted."""

OptionalInt = Annotated[Int | None, BeforeValidator(parse_optional)]
"""An integer or none."""

Options = Annotated[dict[str, Any], BeforeValidator(parse_yaml)]
"""Arguments by name, written as YAML."""

Interval = Annotated[str, BeforeValidator(parse_interval)]
"""`first`, `off` or `every:N`."""

IntOrRange = Annotated[int | tuple[int, int], BeforeValidator(parse_int_or_range), AfterValidator(check_range)]
"""A number of steps, or a range to draw it from."""

NameList = Annotated[tuple[str, ...], BeforeValidator(parse_list)]
"""Words separated by commas."""

IntList = Annotated[tuple[int, ...], BeforeValidator(parse_list)]
"""Integers separated by commas."""
