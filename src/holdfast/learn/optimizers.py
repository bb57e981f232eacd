"""Adam, AdamW, Muon; schedules; weight clipping and statistics."""

import math
from collections.abc import Iterator, Mapping
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from holdfast.config.run import Config
from holdfast.config.trainer import OptimizerConfig, ScheduleKind, TrainerConfig, with_number
from holdfast.cuda_graphs import can_record
from holdfast.errors import ConfigError, ContractError
from holdfast.policies import LSTMWrapper
from holdfast.policies.distributions import MultiCategorical
from holdfast.state_tree import get_field
from holdfast.types import Float, Tensor


def make_optimizers(policy: LSTMWrapper, config: OptimizerConfig) -> dict[str, Optimizer]:
    """Make the optimizers of a policy, by name, each for its own parameters.

    Muon (Jordan et al. 2024) optimizes the hidden matrices, at AdamW's learning rate, and AdamW the rest.
    """
    options, device = _options(config), next(policy.parameters()).device
    momentum = options.pop("momentum")
    if can_record(device):
        options |= {"fused": True, "capturable": device.type == "cuda"}
        if config.name != "muon":
            # In a CUDA graph numbers are what they were when it was recorded, unless they are tensors.
            options["lr"] = torch.tensor(config.learning_rate, device=device)
    elif device.type == "cpu":
        # Bit for bit the same, with fewer calls. Not `fused`, which rounds differently.
        options["foreach"] = True
    if config.name == "adam":
        return {"Adam": torch.optim.Adam(policy.parameters(), **options)}
    if config.name == "adamw":
        return {"AdamW": torch.optim.AdamW(policy.parameters(), **options)}
    hidden = hidden_matrices(policy)
    matrices = [weight for key, weight in policy.named_parameters() if key in hidden]
    rest = [weight for key, weight in policy.named_parameters() if key not in hidden]
    if not matrices:
        raise ConfigError("Muon optimizes hidden matrices, and this policy has none; use trainer.optimizer.name=adamw.")
    if getattr(torch.optim, "Muon", None) is None:
        raise ConfigError(
            f"Muon comes with torch 2.9, and this is {torch.__version__}; use trainer.optimizer.name=adamw."
        )
    shared: dict[str, Any] = {"lr": config.learning_rate, "weight_decay": config.weight_decay}
    muon = torch.optim.Muon(matrices, momentum=momentum, adjust_lr_fn="match_rms_adamw", **shared)
    return {"muon": muon, "adamw": torch.optim.AdamW(rest, **options)}


def set_options(optimizers: Mapping[str, Optimizer], config: OptimizerConfig) -> None:
    """Set the options that can be scheduled; each optimizer has only some of them."""
    options = _options(config)
    for optimizer in optimizers.values():
        for group in optimizer.param_groups:
            rate = group["lr"]
            group.update({name: option for name, option in options.items() if name in group})
            if isinstance(rate, Tensor):
                group["lr"] = rate.fill_(config.learning_rate)


def _options(config: OptimizerConfig) -> dict[str, Any]:
    """Options of all optimizers, by torch's names; `momentum` is Muon's, `betas` and `eps` are Adam's."""
    options = config.model_dump(include={"eps", "weight_decay", "momentum"})
    return options | {"lr": config.learning_rate, "betas": (config.beta1, config.beta2)}


ADAM = {"step", "exp_avg", "exp_avg_sq"}
MOMENTS = {"Adam": ADAM, "AdamW": ADAM, "Muon": {"momentum_buffer"}}
"""What each optimizer keeps of a weight."""
NON_NEGATIVE = ("step", "exp_avg_sq")


def restore_optimizers(optimizers: Mapping[str, Optimizer], saved: Any) -> None:
    """Load moments; raise before anything changes if they do not fit the parameters."""
    for name, optimizer in optimizers.items():
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        states = get_field(saved, name, dict)
        if not set(states) <= set(range(len(weights))):
            raise ContractError(f"The saved state of {name} is of more than its {len(weights)} weights.")
        for number, state in states.items():
            if set(get_field(states, number, dict)) != MOMENTS[type(optimizer).__name__]:
                raise ContractError(f"The saved state of {name} for weight {number} has {', '.join(map(str, state))}.")
            for key in state:
                moment = get_field(state, key, Tensor)
                if moment.shape != (torch.Size([]) if key == "step" else weights[number].shape):
                    raise ContractError(
                        f"The saved {key!r} of {name} for weight {number} is {list(moment.shape)}; the "
                        f"weight is {list(weights[number].shape)}."
                    )
                is_wrong = not moment.is_floating_point() or not bool(moment.isfinite().all())
                if is_wrong or (key in NON_NEGATIVE and bool((moment < 0).any())):
                    raise ContractError(f"The saved {key!r} of {name} for weight {number} has impossible numbers.")
    for name, optimizer in optimizers.items():
        optimizer.load_state_dict(optimizer.state_dict() | {"state": saved[name]})


def hidden_matrices(policy: LSTMWrapper) -> set[str]:
    """Names of the hidden weight matrices.

    They are the two-dimensional `weight...` of modules, without embeddings and output layers. An output
    layer has as many rows as there are values (1), logits, both together, or logits of one MultiDiscrete
    part; a hidden layer of that width counts as an output layer.
    """
    actions = policy.actions
    if actions.size is None:
        raise ContractError("This policy is not bound to a world yet; call policy.bind(world.spec).")
    # The means of a Gaussian are half of its parameters.
    parts = actions.nvec if isinstance(actions, MultiCategorical) else actions.shape
    outputs = {1, actions.size, actions.size + 1, *parts}
    return {
        f"{place}.{key}" if place else key
        for place, module in policy.named_modules()
        if not isinstance(module, nn.Embedding | nn.EmbeddingBag)
        for key, weight in module.named_parameters(recurse=False)
        if key.startswith("weight") and weight.dim() == 2 and len(weight) not in outputs
    }


def schedule_value(kind: ScheduleKind, start: float, end: float, progress: float) -> float:
    """Value of a schedule at `progress`: `start` at 0, `end` from 1 on.

    linear: start + (end - start) p. cosine: start + (end - start) (1 - cos(pi p)) / 2.
    exponential: start (end / start)^p. logarithmic: start + (end - start) log(1 + 9 p) / log 10.
    """
    p = min(max(progress, 0.0), 1.0)
    if kind == "constant":
        return start
    if kind == "exponential" and not (start > 0 and end > 0):
        raise ValueError(
            f"An exponential schedule cannot go from {start:g} to {end:g}: both ends must be greater than 0; "
            "take linear, or an end such as 1e-6."
        )
    if p in (0, 1):
        return end if p else start
    if kind == "exponential":
        value = start * (end / start) ** p
    else:
        share = {"linear": p, "cosine": (1 - math.cos(math.pi * p)) / 2, "logarithmic": math.log10(1 + 9 * p)}
        value = start + (end - start) * share[kind]
    # Rounding may leave the range by a last digit.
    return min(max(value, min(start, end)), max(start, end))


def trainer_config_at(config: Config, progress: float, numbers: Mapping[str, float] | None = None) -> TrainerConfig:
    """Return the trainer config with the scheduled values at a share of the run; `numbers` come before schedules."""
    values = {
        schedule.key: schedule_value(schedule.kind, attrgetter(schedule.key)(config), schedule.end, progress)
        for schedule in config.schedule
    }
    trainer = config.trainer
    for key, value in (values | dict(numbers or {})).items():
        trainer = with_number(trainer, key, value)
    return trainer


@torch.no_grad()
def initial_bounds(policy: nn.Module) -> dict[str, float]:
    """Largest absolute entry of each weight matrix before training; matrices of zeros have no bound."""
    largest = {name: float(weight.abs().max()) for name, weight in _matrices(policy)}
    return {name: bound for name, bound in largest.items() if bound > 0}


@torch.no_grad()
def clip_weights(policy: nn.Module, bounds: Mapping[str, float], clip_range: float) -> None:
    """Clamp each weight matrix to +- clip_range x its bound, in place; 0 is off; biases are not clipped."""
    if clip_range == 0:
        return
    for name, bound in bounds.items():
        policy.get_parameter(name).clamp_(-clip_range * bound, clip_range * bound)


@torch.no_grad()
def weight_metrics(policy: nn.Module) -> dict[str, float]:
    """Statistics of each weight matrix's singular values, `weights/<measure>@<parameter>`.

    More than two axes are flattened to `[out, rest]`; a bilinear form with one output is a matrix.
    """
    return {
        f"weights/{measure}@{name}": number
        for name, matrix in _matrices(policy)
        for measure, number in describe(torch.linalg.svdvals(matrix.double())).items()
    }


def describe(values: Float[Tensor, " k"]) -> dict[str, float]:
    """Statistics of singular values, largest first; a matrix of zeros has rank 0 and is collapsed.

    norm: sqrt(sum s^2). sv_ratio: the largest over the smallest that is not 0 within rounding. collapsed: the
    share of at most 1 % of the largest. effective_rank: the fewest that make 99 % of the sum.
    loglog_slope, loglog_r2: the line through log s over log rank, and how much of log s it explains.
    """
    largest = values[0]
    if largest == 0:
        names = ("norm", "largest_sv", "mean_sv", "sv_ratio", "effective_rank", "loglog_slope", "loglog_r2")
        return dict.fromkeys(names, 0.0) | {"collapsed": 1.0}
    present = values[values > largest * len(values) * torch.finfo(torch.float32).eps]
    so_far = values.cumsum(0)
    slope, explained = _line(present.log())
    return {
        "norm": float(values.square().sum().sqrt()),
        "largest_sv": float(largest),
        "mean_sv": float(values.mean()),
        "sv_ratio": float(largest / present[-1]),
        "collapsed": float((values <= 0.01 * largest).double().mean()),
        "effective_rank": float((so_far < 0.99 * so_far[-1]).sum() + 1),
        "loglog_slope": slope,
        "loglog_r2": explained,
    }


def _line(log_values: Tensor) -> tuple[float, float]:
    """Fit a line over log rank by least squares: its slope, and the share it explains (0: all are equal)."""
    y = log_values - log_values.mean()
    total = float(y.square().sum())
    if total <= 1e-12 * len(y):
        return 0.0, 0.0
    x = torch.arange(1, len(y) + 1, dtype=y.dtype, device=y.device).log()
    x = x - x.mean()
    slope = (x * y).sum() / x.square().sum()
    return float(slope), 1 - float((y - slope * x).square().sum()) / total


def _matrices(policy: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, weight in policy.named_parameters():
        if weight.dim() >= 2:
            is_single = weight.dim() == 3 and len(weight) == 1
            yield name, weight[0] if is_single else weight.flatten(1)
