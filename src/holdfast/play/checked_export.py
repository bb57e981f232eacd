"""Export a policy to a file that is compared with it before it gets its name."""

import tempfile
from dataclasses import dataclass
from pathlib import Path

from holdfast.config.run import Config
from holdfast.errors import ConfigError
from holdfast.evaluation.held_out import held_out_seed, held_out_world
from holdfast.play.export import (
    SUFFIX,
    ExportModule,
    To,
    difference_in_world,
    export_module,
    max_difference,
    open_exported,
    write_exported,
)
from holdfast.policies import LSTMWrapper

BOUND = 1e-5
"""Largest difference of an exported file from its policy: |a - b| / max(1, |a|)."""
CARRIED_BOUND = 1e-4
"""The same where policy and file carry memories of their own on random inputs, which amplify rounding errors."""
ROWS = (1, 3, 17)
STEPS = 200


@dataclass(frozen=True)
class CheckedExport:
    """An exported step, and how far its file is from the policy."""

    step: ExportModule
    random: dict[int, float]
    """Largest difference on random inputs, by batch size."""
    carried_bound: float
    """Bound of `carried`."""
    carried: float
    """Largest difference where each has its own memory: in the world of the run, without a world on random inputs."""

    @property
    def ok(self) -> bool:
        """Whether the file agrees with the policy, and was written."""
        return max(self.random.values()) <= BOUND and self.carried <= self.carried_bound


def export_checked(policy: LSTMWrapper, config: Config | None, out: Path, to: To, name: str = "") -> CheckedExport:
    """Export a policy; the file is written if it agrees with it. Without a config, `name` says where it is from."""
    step = export_module(policy)
    name = name if config is None else config.world.name
    with tempfile.TemporaryDirectory(prefix=".export-", dir=out.parent) as folder:
        # Checked before it replaces a file that exists.
        file = Path(folder) / f"policy{SUFFIX[to]}"
        write_exported(step, file, to, name)
        if config is None:
            bound, carried = CARRIED_BOUND, measure_carried(step, file)
        else:
            bound, carried = BOUND, measure_in_world(step, file, config)
        result = CheckedExport(step, measure(step, file), bound, carried)
        if result.ok:
            file.replace(out)
    return result


def measure(step: ExportModule, file: Path) -> dict[int, float]:
    """Return the largest difference of an exported file from its policy on random inputs, by batch size."""
    exported = open_exported(file)
    return {rows: max_difference(step, exported, rows=rows, steps=STEPS, carry=False) for rows in ROWS}


def measure_carried(step: ExportModule, file: Path) -> float:
    """Return the largest difference on random inputs, each with its own memory."""
    return max_difference(step, open_exported(file), rows=ROWS[-1], steps=STEPS)


def measure_in_world(step: ExportModule, file: Path, config: Config) -> float:
    """Return the largest difference in the world of the run, each with its own memory."""
    device = next(step.policy.parameters()).device
    with held_out_world(config.world, device, config.world.agents, held_out_seed(config, 0)) as world:
        return difference_in_world(step, open_exported(file), world, steps=STEPS)


def require_output_file(out: str | Path, to: To) -> Path:
    """Return the output file; raise if its name or its folder is wrong."""
    file, suffix = Path(out), SUFFIX[to]
    if file.suffix != suffix:
        raise ConfigError(f"{out}: a file for {to} ends in {suffix}; try {file.with_suffix(suffix)}.")
    if not file.parent.is_dir():
        raise ConfigError(f"{out}: there is no folder {file.parent}.")
    return file
