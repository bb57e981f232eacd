"""The space of a sweep: the keys that vary, each within a range or among choices, checked against the config."""

import math
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, product
from typing import TYPE_CHECKING, Any, get_args

from holdfast.config.base import parse_int
from holdfast.config.run import SCHEDULE, Config, all_keys, expand_alias, lookup, override
from holdfast.errors import ConfigError

if TYPE_CHECKING:
    from optuna.trial import Trial

EXAMPLE = "trainer.optimizer.learning_rate=log:1e-4..1e-2"
FIXED = {
    "run": "run=NAME names the sweep",
    "runs_dir": "runs_dir=DIR sets the folder of the sweep",
    "seed": "--seeds K trains K seeds in each trial",
    "world.name": "returns of different worlds cannot be compared; sweep each world on its own",
}
"""Keys that cannot vary, and what to do instead."""
LOG = "log:"
MOST_CHECKED = 1000
"""Combinations of values that are checked before the first trial; of more, a sample."""
SHOWN = 20
"""Most values that an error proposes."""

Value = str | int | float


@dataclass(frozen=True)
class Dimension:
    """A key, and a range of numbers or choices for it."""

    key: str
    text: str
    """As it is typed."""
    low: int | float = 0
    high: int | float = 0
    log: bool = False
    choices: tuple[str, ...] = ()
    """Values as they are typed; empty: a range."""

    def __str__(self) -> str:
        return f"{self.key}={self.text}"

    @property
    def is_integer(self) -> bool:
        """Whether it is a range of integers."""
        return not self.choices and isinstance(self.low, int)

    def values(self) -> Sequence[Value]:
        """Return the values to check: all choices or integers; of other ranges the ends."""
        if self.choices:
            return self.choices
        if self.is_integer and self.high - self.low < MOST_CHECKED:
            return range(int(self.low), int(self.high) + 1)
        return (self.low, self.high)

    def suggest(self, trial: "Trial") -> Value:
        """Let Optuna choose a value."""
        if self.choices:
            return trial.suggest_categorical(self.key, self.choices)
        if self.is_integer:
            return trial.suggest_int(self.key, int(self.low), int(self.high), log=self.log)
        return trial.suggest_float(self.key, self.low, self.high, log=self.log)

    def value_in(self, config: Config) -> Value | None:
        """Return the value that a config has, in the form of this dimension; None: it lies outside."""
        if self.choices:
            same = (choice for choice in self.choices if override(config, {self.key: choice}) == config)
            return next(same, None)
        value = lookup(config, self.key)
        if not isinstance(value, int | float) or isinstance(value, bool):
            return None
        return value if self.low <= value <= self.high else None


def parse_space(texts: Sequence[str], config: Config) -> tuple[Dimension, ...]:
    """Parse `KEY=log:a..b`, `KEY=a..b` and `KEY=a,b,c`, and check that every combination is a valid config."""
    if not texts:
        raise ConfigError(f"A sweep needs at least one key that varies: --space {EXAMPLE}")
    dimensions = tuple(_parse(text, config) for text in texts)
    keys = [dimension.key for dimension in dimensions]
    for key in keys:
        if keys.count(key) > 1:
            raise ConfigError(f"--space names {key} {keys.count(key)} times; keep one.")
    _check_combinations(dimensions, config)
    return dimensions


def _parse(item: str, config: Config) -> Dimension:
    word, equals, text = item.partition("=")
    text = text.strip()
    if not equals or not word or not text:
        raise ConfigError(f"--space {item}: write KEY=RANGE, for example {EXAMPLE}")
    key = expand_alias(word.strip(), "")[0]
    if key in FIXED:
        raise ConfigError(f"--space {item}: {key} cannot vary; {FIXED[key]}.")
    keys = all_keys(config.world.name)
    if key not in keys and not key.startswith(SCHEDULE):
        # Raises: it knows what was meant.
        override(config, {key: text})
    if "," in text and not text.startswith(LOG):
        return Dimension(key, text, choices=_choices(item, text))
    if ".." not in text:
        hint = "a space has more than one value: a..b, log:a..b or a,b,c"
        raise ConfigError(f"--space {item}: {hint}; for a fixed value type {key}={text.removeprefix(LOG)} instead.")
    low, high, log = _range(item, text, keys[key].annotation if key in keys else None)
    return Dimension(key, text, low, high, log)


def _choices(item: str, text: str) -> tuple[str, ...]:
    choices = tuple(choice.strip() for choice in text.split(","))
    if not all(choices):
        raise ConfigError(f"--space {item}: a choice is empty; write for example a,b,c.")
    if len(set(choices)) < len(choices):
        raise ConfigError(f"--space {item}: a choice is there twice; keep one.")
    return choices


def _range(item: str, text: str, annotation: Any) -> tuple[int | float, int | float, bool]:
    """Parse a range; its numbers are those of the key's type, or else what they look like."""
    log = text.startswith(LOG)
    words = text.removeprefix(LOG).split("..")
    kinds = get_args(annotation) or (annotation,)
    try:
        if len(words) != 2:
            raise ValueError("write two numbers, a..b")
        if int in kinds:
            low, high = map(parse_int, words)
        elif float in kinds or not all(word.strip().lstrip("+-").replace("_", "").isdigit() for word in words):
            low, high = map(float, words)
        else:
            low, high = map(int, words)
    except (ValueError, OverflowError) as error:
        reason = "write numbers, such as 1e-4..1e-2" if "convert" in str(error) else str(error)
        raise ConfigError(f"--space {item}: {reason}.") from None
    if not (math.isfinite(low) and math.isfinite(high)):
        raise ConfigError(f"--space {item}: both ends must be finite.")
    if low >= high:
        raise ConfigError(f"--space {item}: {words[0]} is not below {words[1]}; write the smaller number first.")
    if log and low <= 0:
        raise ConfigError(f"--space {item}: a logarithmic range lies above 0; start above 0, or leave out log:.")
    return low, high, log


def _check_combinations(dimensions: Sequence[Dimension], config: Config) -> None:
    """Require that each value is valid and that all go together; of many combinations, check a sample."""
    for combination in _combinations(dimensions):
        try:
            override(config, combination)
        except ConfigError as error:
            raise ConfigError(f"--space {_cause(dimensions, combination, config)}: {error}") from None


def _fitting(dimension: Dimension, config: Config) -> str:
    """Return the integers of a range that are valid on their own, as choices to type."""
    values = [value for value in dimension.values() if _is_valid(config, {dimension.key: value})]
    return f" (valid are {dimension.key}={','.join(map(str, values))})" if 1 < len(values) <= SHOWN else ""


def _combinations(dimensions: Sequence[Dimension]) -> Iterator[dict[str, Value]]:
    values = [dimension.values() for dimension in dimensions]
    keys = [dimension.key for dimension in dimensions]
    if math.prod(map(len, values)) <= MOST_CHECKED:
        rows: Iterable[Sequence[Value]] = product(*values)
    else:
        draw = random.Random(0)
        corners = islice(product(*((each[0], each[-1]) for each in values)), MOST_CHECKED // 2)
        longest = max(map(len, values))
        # Every value at least once.
        diagonal = ([each[row % len(each)] for each in values] for row in range(longest))
        drawn = ([draw.choice(each) for each in values] for _ in range(MOST_CHECKED // 2))
        rows = [*corners, *diagonal, *drawn]
    for row in rows:
        yield dict(zip(keys, row, strict=True))


def _cause(dimensions: Sequence[Dimension], combination: Mapping[str, Value], config: Config) -> str:
    """Return the one key that is wrong on its own, or else the combination."""
    wrong = [
        dimension for dimension in dimensions if not _is_valid(config, {dimension.key: combination[dimension.key]})
    ]
    if len(wrong) == 1:
        return str(wrong[0]) + (_fitting(wrong[0], config) if wrong[0].is_integer else "")
    return " with ".join(f"{key}={value}" for key, value in combination.items())


def _is_valid(config: Config, keys: Mapping[str, Value]) -> bool:
    try:
        override(config, keys)
    except ConfigError:
        return False
    return True
