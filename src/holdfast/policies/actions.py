"""Kinds of actions: how a policy's scores become actions, and how likely those are.

Every number that is drawn is made from one uniform number, by inverting a cumulative distribution;
those are counter-based, so an action is a pure function of (scores, seed, agent, step).
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from gymnasium import spaces

from holdfast.errors import ContractError
from holdfast.policies.log_probs import divergence, looked_up, normalised, sample, undecided
from holdfast.shapes import Float, Int, Shaped, Tensor
from holdfast.worlds import draws
from holdfast.worlds.step import WorldSpec

LOG_DEVIATIONS = (-5.0, 10.0)
"""Narrower than e^-5, and float32 rounds a mean by more of a deviation than the law of replay allows."""
NEAREST_TO_ONE = 1 - 2.0**-24
"""Where a normal number is cut off: 5.4 deviations from its mean."""


class Actions(ABC):
    """What a policy's scores mean: a distribution over actions, told whole under `key`."""

    key: ClassVar[str] = "full_log_probs"
    """Where a TensorDict tells the whole distribution."""
    dtype: ClassVar[torch.dtype | None] = torch.int64
    """What actions are made of; None: fractions as precise as the policy."""

    @property
    @abstractmethod
    def size(self) -> int | None:
        """How many scores a policy gives; None where that is left to it."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """The shape of one action, and of the uniform numbers it is drawn from."""

    @property
    def draws(self) -> int:
        """How many uniform numbers an action is drawn from."""
        return math.prod(self.shape)

    @abstractmethod
    def tell(self, scores: Float[Tensor, "*batch scores"]) -> Float[Tensor, "*batch told"]:
        """Make of scores what the distribution is told by; everything below reads that."""

    @abstractmethod
    def sample(
        self, told: Float[Tensor, "*batch told"], uniform: Float[Tensor, "..."]
    ) -> Shaped[Tensor, "..."]:
        """Draw actions `[*batch, *shape]` from as many uniform numbers in [0, 1)."""

    @abstractmethod
    def log_prob(
        self, told: Float[Tensor, "*batch told"], action: Shaped[Tensor, "..."]
    ) -> Float[Tensor, "*batch"]:
        """Say how likely actions are."""

    @abstractmethod
    def entropy(self, told: Float[Tensor, "*batch told"]) -> Float[Tensor, "*batch"]:
        """Say how undecided the distribution is."""

    @abstractmethod
    def kl(
        self, told_p: Float[Tensor, "*batch told"], told_q: Float[Tensor, "*batch told"]
    ) -> Float[Tensor, "*batch"]:
        """Say how far q is from p, E_p[log p - log q]: exactly 0 where they are told alike."""

    def cross_entropy(
        self, teacher_told: Float[Tensor, "*batch told"], told: Float[Tensor, "*batch told"]
    ) -> Float[Tensor, "*batch"]:
        """Say how unlikely a teacher's actions are, -E_teacher[log p]: its entropy, and how far it is."""
        return self.entropy(teacher_told) + self.kl(teacher_told, told)

    @abstractmethod
    def greedy(self, told: Float[Tensor, "*batch told"]) -> Shaped[Tensor, "..."]:
        """Take the likeliest action."""

    def uniform(
        self, seed: int, agent: Int[Tensor, " A"], clock: int | Int[Tensor, " A"]
    ) -> Float[Tensor, "A *shape"]:
        """Draw the numbers of one step, everybody's own if they are not at one; k parts use up k counts."""
        if not self.shape:
            return draws.uniform(seed, draws.STREAM_ACTION, agent, clock)
        when = clock if isinstance(clock, int) else clock[:, None]
        count = self.draws * when + torch.arange(self.draws, device=agent.device)
        return draws.uniform(seed, draws.STREAM_ACTION, agent[:, None], count)

    def idle(self, rows: int, device: torch.device) -> Float[Tensor, "rows *shape"]:
        """Make the numbers for whoever draws nothing."""
        return torch.zeros(rows, *self.shape, device=device)


@dataclass(frozen=True)
class Categorical(Actions):
    """One of some actions: told by their log-probabilities."""

    count: int | None = None
    """How many actions there are; None: as many as the policy scores."""

    @property
    def size(self) -> int | None:
        """One score an action."""
        return self.count

    @property
    def shape(self) -> tuple[int, ...]:
        """One whole number."""
        return ()

    def tell(self, scores: Float[Tensor, "*batch scores"]) -> Float[Tensor, "*batch told"]:
        """Normalise scores."""
        return normalised(scores)

    def sample(
        self, told: Float[Tensor, "*batch told"], uniform: Float[Tensor, "*batch"]
    ) -> Int[Tensor, "*batch"]:
        """Draw actions from one uniform number each."""
        return sample(told, uniform)

    def log_prob(
        self, told: Float[Tensor, "*batch told"], action: Shaped[Tensor, "*batch"]
    ) -> Float[Tensor, "*batch"]:
        """Look the actions up."""
        return looked_up(told, action)

    def entropy(self, told: Float[Tensor, "*batch told"]) -> Float[Tensor, "*batch"]:
        """Compute -sum p log p."""
        return undecided(told)

    def kl(
        self, told_p: Float[Tensor, "*batch told"], told_q: Float[Tensor, "*batch told"]
    ) -> Float[Tensor, "*batch"]:
        """Compute sum p (log p - log q)."""
        return divergence(told_p, told_q)

    def greedy(self, told: Float[Tensor, "*batch told"]) -> Int[Tensor, "*batch"]:
        """Take the likeliest action."""
        return told.argmax(-1)


@dataclass(frozen=True)
class MultiCategorical(Actions):
    """One of some actions for each of several parts, drawn independently: told side by side."""

    nvec: tuple[int, ...]
    """How many actions each part has."""

    @property
    def size(self) -> int:
        """How many scores a policy gives: those of the parts, side by side."""
        return sum(self.nvec)

    @property
    def shape(self) -> tuple[int, ...]:
        """One whole number a part."""
        return (len(self.nvec),)

    def tell(self, scores: Float[Tensor, "*batch scores"]) -> Float[Tensor, "*batch told"]:
        """Normalise the scores of each part."""
        _require_scores(self, scores)
        return torch.cat([normalised(part) for part in scores.split(self.nvec, -1)], -1)

    def sample(
        self, told: Float[Tensor, "*batch told"], uniform: Float[Tensor, "*batch n"]
    ) -> Int[Tensor, "*batch n"]:
        """Draw each part from a number of its own."""
        pairs = zip(told.split(self.nvec, -1), uniform.unbind(-1), strict=True)
        return torch.stack([sample(part, each) for part, each in pairs], dim=-1)

    def log_prob(
        self, told: Float[Tensor, "*batch told"], action: Shaped[Tensor, "*batch n"]
    ) -> Float[Tensor, "*batch"]:
        """Add up what the parts are."""
        pairs = zip(told.split(self.nvec, -1), action.unbind(-1), strict=True)
        return torch.stack([looked_up(part, each) for part, each in pairs]).sum(0)

    def entropy(self, told: Float[Tensor, "*batch told"]) -> Float[Tensor, "*batch"]:
        """Add up the parts: they are independent."""
        return undecided(told)

    def kl(
        self, told_p: Float[Tensor, "*batch told"], told_q: Float[Tensor, "*batch told"]
    ) -> Float[Tensor, "*batch"]:
        """Add up the parts."""
        return divergence(told_p, told_q)

    def greedy(self, told: Float[Tensor, "*batch told"]) -> Int[Tensor, "*batch n"]:
        """Take the likeliest of each part."""
        return torch.stack([part.argmax(-1) for part in told.split(self.nvec, -1)], dim=-1)


@dataclass(frozen=True)
class Gaussian(Actions):
    """Numbers, drawn independently around means: told by means and log deviations, side by side.

    An action is the raw sample, which may lie outside of the world's box: the world, or its adapter,
    clips it. Log-probabilities are those of the raw sample, so what is clipped changes no ratio.
    """

    count: int
    """How many numbers an action has."""
    key: ClassVar[str] = "gaussian"
    dtype: ClassVar[torch.dtype | None] = None

    @property
    def size(self) -> int:
        """How many scores a policy gives: a mean and a log deviation for each number."""
        return 2 * self.count

    @property
    def shape(self) -> tuple[int, ...]:
        """As many fractions as there are numbers."""
        return (self.count,)

    def tell(self, scores: Float[Tensor, "*batch scores"]) -> Float[Tensor, "*batch told"]:
        """Keep log deviations where floats can work with them."""
        _require_scores(self, scores)
        mean, log_deviation = scores.chunk(2, -1)
        inside = log_deviation.clamp(*LOG_DEVIATIONS)
        # A wall that gives a little: where the gradient is 0, nothing ever leads back.
        return torch.cat([mean, inside + 0.1 * torch.tanh(log_deviation - inside)], -1)

    @torch.no_grad()
    def sample(
        self, told: Float[Tensor, "*batch told"], uniform: Float[Tensor, "*batch k"]
    ) -> Float[Tensor, "*batch k"]:
        """Draw m + s sqrt(2) erfinv(2u - 1), with u in the middle of its 2^-24.

        Without a graph: an action is what was done, and its likelihood must not feel that it follows m.
        """
        mean, log_deviation = told.chunk(2, -1)
        point = 2 * uniform.to(torch.promote_types(told.dtype, torch.float32)) - 1 + 2.0**-24
        normal = math.sqrt(2) * torch.erfinv(point.clamp(-NEAREST_TO_ONE, NEAREST_TO_ONE))
        return mean + log_deviation.exp() * normal.to(told.dtype)

    def log_prob(
        self, told: Float[Tensor, "*batch told"], action: Float[Tensor, "*batch k"]
    ) -> Float[Tensor, "*batch"]:
        """Compute the sum of -((a - m) / s)^2 / 2 - log s - log(2 pi) / 2."""
        mean, log_deviation = told.chunk(2, -1)
        far = (action - mean) * (-log_deviation).exp()
        return -(0.5 * far.square() + log_deviation + 0.5 * math.log(2 * math.pi)).sum(-1)

    def entropy(self, told: Float[Tensor, "*batch told"]) -> Float[Tensor, "*batch"]:
        """Compute the sum of log s + (1 + log(2 pi)) / 2."""
        return (told.chunk(2, -1)[1] + 0.5 * (1 + math.log(2 * math.pi))).sum(-1)

    def kl(
        self, told_p: Float[Tensor, "*batch told"], told_q: Float[Tensor, "*batch told"]
    ) -> Float[Tensor, "*batch"]:
        """Compute the sum of (e^x - 1 - x + ((m_p - m_q) / s_q)^2) / 2 with x = 2 log(s_p / s_q)."""
        (mean_p, log_p), (mean_q, log_q) = told_p.chunk(2, -1), told_q.chunk(2, -1)
        wider, far = 2 * (log_p - log_q), (mean_p - mean_q) * (-log_q).exp()
        return 0.5 * (torch.expm1(wider) - wider + far.square()).sum(-1)

    def greedy(self, told: Float[Tensor, "*batch told"]) -> Float[Tensor, "*batch k"]:
        """Take the means."""
        return told.chunk(2, -1)[0]


def actions_of(spec: WorldSpec) -> Actions:
    """Say which kind of actions a world takes."""
    if isinstance(spec.action, spaces.MultiDiscrete):
        return MultiCategorical(tuple(int(count) for count in spec.action.nvec))
    if isinstance(spec.action, spaces.Box):
        return Gaussian(spec.action.shape[0])
    return Categorical(len(spec.action_names))


def require_fit(mine: Actions, scored: int, wanted: Actions) -> None:
    """Refuse a policy whose actions are not the world's."""
    if mine == wanted or (mine == Categorical() and isinstance(wanted, Categorical)):
        if scored != wanted.size:
            raise ContractError(f"The policy scores {scored} actions; the world has {wanted.size}.")
        return
    raise ContractError(
        f"The policy's actions are {mine}; the world's are {wanted}. Build the policy for this world: in its "
        f"__init__ set self.actions = holdfast.policies.actions_of(spec), and give {wanted.size} scores."
    )


def _require_scores(actions: Actions, scores: Tensor) -> None:
    if scores.shape[-1] != actions.size:
        raise ContractError(
            f"The policy gives {scores.shape[-1]} scores; {actions} takes {actions.size}. Let `decode` give "
            f"logits [N,{actions.size}]."
        )
