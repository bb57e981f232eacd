"""Action distributions: Categorical, MultiCategorical, Gaussian."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from gymnasium import spaces

from holdfast import rng
from holdfast.errors import ContractError
from holdfast.kernel_support import refused_on
from holdfast.types import Float, Int, Shaped, Tensor
from holdfast.worlds.step import WorldSpec

Logits = Float[Tensor, "*batch logits"]
Params = Float[Tensor, "*batch params"]
Batch = Float[Tensor, "*batch"]
AnyAction = Shaped[Tensor, "..."]


def sample(log_probs: Params, uniform: Batch) -> Int[Tensor, "*batch"]:
    """Sample actions from one uniform number each, by inverting the cumulative distribution."""
    # On a GPU a sum along the last axis, which is short, takes ten times as long.
    axis = -1 if log_probs.is_cpu else 0
    cumulative = log_probs.exp().movedim(-1, axis).contiguous().cumsum(axis)
    total = cumulative.select(axis, -1).unsqueeze(axis)
    point = uniform.to(cumulative.dtype).unsqueeze(axis) * total
    # Rounding may lift the point to the total; the last action with a probability is where it is reached.
    return ((cumulative <= point) & (cumulative < total)).sum(axis)


def log_softmax(logits: Logits) -> Params:
    """Return log-probabilities; at probability 0 the least finite number, since 0 * -inf is NaN."""
    return torch.log_softmax(logits, dim=-1).clamp(min=torch.finfo(logits.dtype).min)


def _log_prob(log_probs: Params, action: Shaped[Tensor, "*batch"]) -> Batch:
    return log_probs.gather(-1, action.long().unsqueeze(-1)).squeeze(-1)


LOG_STD_RANGE = (-5.0, 10.0)
"""Below e^-5, float32 rounds a mean by more of a standard deviation than the law of replay allows."""
NEAREST_TO_ONE = 1 - 2.0**-24
"""Where a normal sample is cut off: 5.4 standard deviations from its mean."""
OCTAVES = 6
"""Parts of pink noise; the slowest changes every 32 steps."""


class ActionDistribution(ABC):
    """A distribution over actions, given by its parameters: a function of the policy's logits."""

    key: ClassVar[str] = "full_log_probs"
    """TensorDict key of the parameters."""
    dtype: ClassVar[torch.dtype | None] = torch.int64
    """Dtype of actions; None: that of the policy."""

    @property
    @abstractmethod
    def size(self) -> int | None:
        """Number of logits; None: any number."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """Shape of one action, and of the uniform numbers it is sampled from."""

    @abstractmethod
    def parameters(self, logits: Logits) -> Params:
        """Convert logits to distribution parameters, which all methods below take."""

    @abstractmethod
    def sample(self, params: Params, uniform: Float[Tensor, "..."]) -> AnyAction:
        """Sample actions `[*batch, *shape]` from as many uniform numbers in [0, 1)."""

    def act(self, logits: Logits, uniform: Float[Tensor, "..."]) -> tuple[Params, AnyAction, Batch]:
        """Return the parameters, sampled actions, and their log-probability."""
        params = self.parameters(logits)
        action = self.sample(params, uniform)
        return params, action, self.log_prob(params, action)

    @abstractmethod
    def log_prob(self, params: Params, action: AnyAction) -> Batch:
        """Return the log-probability of actions."""

    @abstractmethod
    def entropy(self, params: Params) -> Batch:
        """Return the entropy."""

    @abstractmethod
    def kl(self, params_p: Params, params_q: Params) -> Batch:
        """Return KL(p || q), E_p[log p - log q]: exactly 0 where the parameters are equal."""

    def cross_entropy(self, teacher_params: Params, params: Params) -> Batch:
        """Return -E_teacher[log p]: the teacher's entropy plus its KL divergence."""
        return self.entropy(teacher_params) + self.kl(teacher_params, params)

    @abstractmethod
    def greedy(self, params: Params) -> AnyAction:
        """Return the mode."""

    def draws_for(self, seed: int, agent: Int[Tensor, "..."], clock: int | Int[Tensor, "..."]) -> Float[Tensor, "..."]:
        """Draw the uniform numbers of steps, given by agent and clock, which broadcast; k numbers use up k counts."""
        if not self.shape:
            return rng.uniform(seed, rng.STREAM_ACTION, agent, clock)
        clock = clock if isinstance(clock, int) else clock[..., None]
        (draws,) = self.shape
        count = draws * clock + torch.arange(draws, device=agent.device)
        return rng.uniform(seed, rng.STREAM_ACTION, agent[..., None], count)

    def no_draws(self, rows: int, device: torch.device) -> Float[Tensor, "rows *shape"]:
        """Return zeros in place of uniform numbers, for calls whose samples are not used."""
        return torch.zeros(rows, *self.shape, device=device)


class _Discrete(ActionDistribution):
    """Entropy and KL divergence from log-probabilities; independent actions are concatenated."""

    def entropy(self, params: Params) -> Batch:
        """Compute -sum p log p."""
        return -(params.exp() * params).sum(-1)

    def kl(self, params_p: Params, params_q: Params) -> Batch:
        """Compute sum p (log p - log q); near 0 it may round to a little less."""
        return (params_p.exp() * (params_p - params_q)).sum(-1)


@dataclass(frozen=True)
class Categorical(_Discrete):
    """One discrete action; the parameters are log-probabilities."""

    count: int | None = None
    """Number of actions; None: the number of logits."""

    @property
    def size(self) -> int | None:
        """One logit per action."""
        return self.count

    @property
    def shape(self) -> tuple[int, ...]:
        """A scalar."""
        return ()

    def act(self, logits: Logits, uniform: Float[Tensor, "..."]) -> tuple[Params, AnyAction, Batch]:
        """Return the parameters, sampled actions, and their log-probability; on a GPU in one kernel."""
        if not logits.is_cuda or logits.dtype != torch.float32 or logits.dim() != 2 or torch.is_grad_enabled():
            return super().act(logits, uniform)
        if refused_on(logits.device) is not None:
            return super().act(logits, uniform)
        from holdfast.policies.sample_kernel import MOST_ACTIONS, sample_actions

        if logits.shape[1] > MOST_ACTIONS:
            return super().act(logits, uniform)
        with torch.cuda.device(logits.device):
            return sample_actions(logits, uniform)

    def parameters(self, logits: Logits) -> Params:
        """Normalize logits."""
        return log_softmax(logits)

    def sample(self, params: Params, uniform: Batch) -> Int[Tensor, "*batch"]:
        """Sample actions from one uniform number each."""
        return sample(params, uniform)

    def log_prob(self, params: Params, action: Shaped[Tensor, "*batch"]) -> Batch:
        """Look up the log-probability of actions."""
        return _log_prob(params, action)

    def greedy(self, params: Params) -> Int[Tensor, "*batch"]:
        """Return the most likely action."""
        return params.argmax(-1)


@dataclass(frozen=True)
class MultiCategorical(_Discrete):
    """Several independent discrete actions; their log-probabilities are concatenated."""

    nvec: tuple[int, ...]
    """Number of choices of each action."""

    @property
    def size(self) -> int:
        """One logit per choice of each action."""
        return sum(self.nvec)

    @property
    def shape(self) -> tuple[int, ...]:
        """One integer per action."""
        return (len(self.nvec),)

    def parameters(self, logits: Logits) -> Params:
        """Normalize the logits of each action."""
        _require_size(self, logits)
        return torch.cat([log_softmax(group) for group in logits.split(self.nvec, -1)], -1)

    def sample(self, params: Params, uniform: Float[Tensor, "*batch n"]) -> Int[Tensor, "*batch n"]:
        """Sample each action from a number of its own."""
        pairs = zip(params.split(self.nvec, -1), uniform.unbind(-1), strict=True)
        return torch.stack([sample(log_probs, number) for log_probs, number in pairs], dim=-1)

    def log_prob(self, params: Params, action: Shaped[Tensor, "*batch n"]) -> Batch:
        """Sum the log-probabilities of all actions."""
        pairs = zip(params.split(self.nvec, -1), action.unbind(-1), strict=True)
        return torch.stack([_log_prob(log_probs, choice) for log_probs, choice in pairs]).sum(0)

    def greedy(self, params: Params) -> Int[Tensor, "*batch n"]:
        """Return the most likely choice of each action."""
        return torch.stack([log_probs.argmax(-1) for log_probs in params.split(self.nvec, -1)], dim=-1)


@dataclass(frozen=True)
class Gaussian(ActionDistribution):
    """A diagonal Gaussian; the parameters are means and log standard deviations, concatenated.

    Actions are stored as sampled, with [-1,1] as the world's Box: `policy.env_actions` scales and clips them for the
    world. Log-probabilities are those of the sample, so clipping changes no ratio.
    """

    count: int
    """Number of dimensions."""
    key: ClassVar[str] = "gaussian"
    dtype: ClassVar[torch.dtype | None] = None

    @property
    def size(self) -> int:
        """A mean and a log standard deviation per dimension."""
        return 2 * self.count

    @property
    def shape(self) -> tuple[int, ...]:
        """One number per dimension."""
        return (self.count,)

    def parameters(self, logits: Logits) -> Params:
        """Clamp log standard deviations to `LOG_STD_RANGE`, softly."""
        _require_size(self, logits)
        mean, log_std = logits.chunk(2, -1)
        inside = log_std.clamp(*LOG_STD_RANGE)
        # Softly: with a gradient of 0 outside the range, training could never come back.
        return torch.cat([mean, inside + 0.1 * torch.tanh(log_std - inside)], -1)

    @torch.no_grad()
    def sample(self, params: Params, uniform: Float[Tensor, "*batch k"]) -> Float[Tensor, "*batch k"]:
        """Sample m + s sqrt(2) erfinv(2u - 1), with u in the middle of its 2^-24.

        Without gradient: the log-probability of an action must not depend on m through the action.
        """
        mean, log_std = params.chunk(2, -1)
        point = 2 * uniform.to(torch.promote_types(params.dtype, torch.float32)) - 1 + 2.0**-24
        normal = math.sqrt(2) * torch.erfinv(point.clamp(-NEAREST_TO_ONE, NEAREST_TO_ONE))
        return mean + log_std.exp() * normal.to(params.dtype)

    def log_prob(self, params: Params, action: Float[Tensor, "*batch k"]) -> Batch:
        """Compute the sum of -((a - m) / s)^2 / 2 - log s - log(2 pi) / 2."""
        mean, log_std = params.chunk(2, -1)
        z = (action - mean) * (-log_std).exp()
        return -(0.5 * z.square() + log_std + 0.5 * math.log(2 * math.pi)).sum(-1)

    def entropy(self, params: Params) -> Batch:
        """Compute the sum of log s + (1 + log(2 pi)) / 2."""
        return (params.chunk(2, -1)[1] + 0.5 * (1 + math.log(2 * math.pi))).sum(-1)

    def kl(self, params_p: Params, params_q: Params) -> Batch:
        """Compute the sum of (e^x - 1 - x + ((m_p - m_q) / s_q)^2) / 2 with x = 2 log(s_p / s_q)."""
        (mean_p, log_p), (mean_q, log_q) = params_p.chunk(2, -1), params_q.chunk(2, -1)
        x, z = 2 * (log_p - log_q), (mean_p - mean_q) * (-log_q).exp()
        return 0.5 * (torch.expm1(x) - x + z.square()).sum(-1)

    def greedy(self, params: Params) -> Float[Tensor, "*batch k"]:
        """Return the means."""
        return params.chunk(2, -1)[0]


def pink_draws_for(
    actions: Gaussian, seed: int, agent: Int[Tensor, "..."], clock: Int[Tensor, "..."]
) -> Float[Tensor, "..."]:
    """Draw as `draws_for` does, but so that the normal samples of an agent are pink noise: correlated over time.

    A sample is the sum of `OCTAVES` ones that are held for 1, 2, 4, ... steps, scaled to variance 1 (Voss and
    McCartney). Each is uniform as others are, and a function of (seed, agent, clock).
    """
    total = torch.zeros((), dtype=torch.float64, device=agent.device)
    for octave in range(OCTAVES):
        octave_seed = rng.derive_seed(seed, rng.STREAM_OCTAVE, octave)
        uniform = actions.draws_for(octave_seed, agent, clock >> octave).double()
        total = total + torch.special.ndtri(uniform + 2.0**-25)
    return torch.special.ndtr(total / math.sqrt(OCTAVES)).float().clamp(max=NEAREST_TO_ONE)


def distribution_for(spec: WorldSpec) -> ActionDistribution:
    """Return the distribution for a world's action space."""
    if isinstance(spec.action, spaces.MultiDiscrete):
        return MultiCategorical(tuple(int(count) for count in spec.action.nvec))
    if isinstance(spec.action, spaces.Box):
        return Gaussian(spec.action.shape[0])
    return Categorical(len(spec.action_names))


def require_fit(actual: ActionDistribution, num_logits: int, expected: ActionDistribution) -> None:
    """Reject a policy whose action distribution is not the world's."""
    if actual == expected or (actual == Categorical() and isinstance(expected, Categorical)):
        if num_logits != expected.size:
            raise ContractError(f"The policy gives {num_logits} logits; the world has {expected.size} actions.")
        return
    raise ContractError(
        f"The policy's actions are {actual}; the world's are {expected}. Build the policy for this world: in its "
        f"__init__ set self.actions = holdfast.policies.distribution_for(spec), and give {expected.size} logits."
    )


def _require_size(actions: ActionDistribution, logits: Tensor) -> None:
    if logits.shape[-1] != actions.size:
        raise ContractError(
            f"The policy gives {logits.shape[-1]} logits; {actions} takes {actions.size}: let `decode` return "
            f"[N,{actions.size}]."
        )
