"""A world in several processes: its agents are shared out, and some act while others are answered."""

import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from holdfast.errors import ConfigError, ContractError, CrowdError
from holdfast.saved import misfit, require_same, taken, tensor_like
from holdfast.shapes import Int, Shaped, Tensor
from holdfast.worlds.going_on import unread
from holdfast.worlds.pool.crew import Blueprint, Crew
from holdfast.worlds.pool.shared import Board, Form, Layout, write_seen
from holdfast.worlds.pool.worker_error import WorkerError
from holdfast.worlds.step import Anew, Step, WorldSpec, check_actions
from holdfast.worlds.turns import Turn, joined, moved
from holdfast.worlds.watched import Guarded


class Pool(Guarded):
    """Agents in `workers` processes, answered in `shares`: while some are answered, the others act.

    Agents are shared out evenly and in order, first to the shares, then within each to the workers. A world
    that is a share of a bigger one lives as its agents do there (`count_from`), so that any number of workers
    live the same, and so does one process in which the same number of agents is answered at once.

    What workers tell is read where they write it; it stays until its agents have been answered twice. A
    worker that raises, is silent for `timeout` seconds or dies is a `WorkerError`. With `restart` it is
    started anew instead: the episodes of its agents are truncated, and new ones begin.
    """

    def __init__(
        self,
        plan: Blueprint,
        agents: int,
        *,
        workers: int,
        shares: int = 1,
        seed: int = 0,
        device: str | torch.device = "cpu",
        timeout: float = 120.0,
        restart: bool = False,
        say: Callable[[str], object] = warnings.warn,
    ) -> None:
        _require_even(agents, workers, shares)
        self.agents, self._restart, self._device = agents, restart, torch.device(device)
        self._rows = agents // shares
        self.shares = tuple(torch.arange(agents).split(self._rows))
        self._slot, self._acting = [0] * shares, deque[int]()
        self._board: Board | None = None
        # Whose episode goes on: others have none that could be truncated.
        self._living = torch.zeros(agents, dtype=torch.bool)
        self._crew = Crew(plan, self.shares, workers, seed=seed, timeout=timeout, restart=restart, say=say)
        try:
            self.spec = self._made()
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        """The processes of the workers."""
        return [line.pid for line in self._crew.lines]

    def tell(self, say: Callable[[str], object], losses: Path) -> None:
        """Say from now on to somebody else who was started anew, and write down what lost workers said."""
        self._crew.say, self._crew.losses = say, losses

    def reset(self) -> Step:
        """Start every agent's first episode."""
        self._crew.require_whole()
        while self._acting:
            self.turn()
        layout = self._lay_out(self._crew.all("reset"))
        self._slot = [0] * len(self.shares)
        self._crew.all("show", lambda number: {"place": number}, layout=layout, fresh=False)
        self._living[:] = True
        return joined([Turn(rows, self._told(share)) for share, rows in enumerate(self.shares)])

    def step(self, actions: Shaped[Tensor, "A ..."]) -> Step:
        """Let everybody act, and wait for all of them."""
        for rows, own in zip(self.shares, actions.split(self._rows), strict=True):
            self.answer(rows, own)
        return joined([self.turn() for _ in self.shares])

    def answer(self, rows: Int[Tensor, " N"], actions: Shaped[Tensor, "N ..."]) -> None:
        """Let the agents of a share act; their workers go to work."""
        share = int(rows[0]) // self._rows
        if not rows.equal(self.shares[share]) or share in self._acting:
            raise ContractError(f"Agents of a pool are answered share by share, once; not {rows.tolist()}.")
        if self._board is None:
            raise ContractError("Call reset() before the first step().")
        actions = actions.cpu()
        check_actions(actions, self._rows, self.spec.action or len(self.spec.action_names))
        self._board.actions(share, actions.dtype, tuple(actions.shape[1:])).copy_(actions)
        self._slot[share] = 1 - self._slot[share]
        self._acting.append(share)
        self._crew.begin_step(share, self._slot[share], actions)

    def turn(self) -> Turn:
        """Wait for those who have acted longest."""
        if not self._acting:
            raise ContractError("Nobody acts: answer(rows, actions) comes before turn().")
        self._crew.require_whole()
        share = self._acting.popleft()
        for number in self._crew.end_step():
            self._truncate(number, share)
        step, rows = self._told(share), self.shares[share]
        if self._restart:
            ended, begun = step.terminated | step.truncated, step.first | step.valid
            self._living[rows] = (self._living[rows] & ~ended.cpu()) | begun.cpu()
        return Turn(rows, step)

    def state(self) -> dict[str, Any] | None:
        """Say where every world is; None if none of them can."""
        self._require_told("state()")
        pieces, lives = self._crew.states(), list(self._crew.lives)
        if not any(lives) and all(piece is None for of_worker in pieces for piece in of_worker):
            return None
        sizes = {"workers": len(pieces), "shares": len(self.shares)}
        told = {"clocks": list(self._crew.clocks), "living": self._living.clone()}
        return {**sizes, **told, "lives": lives, "pieces": pieces}

    def restore(self, state: Mapping[str, Any]) -> Anew | None:
        """Put every world back; a worker that was started anew is so again."""
        self._require_told("restore()")
        workers = len(self._crew.lines)
        require_same(state, "workers", workers)
        require_same(state, "shares", len(self.shares))
        lives, pieces = taken(state, "lives", list), taken(state, "pieces", list)
        if [len(each) for each in pieces] != [len(self.shares)] * workers or len(lives) != workers:
            raise misfit("'pieces' and 'lives' must be those of every worker, a piece for each share")
        living, clocks = tensor_like(state, "living", self._living), taken(state, "clocks", list)
        for number, life in enumerate(lives):
            if life != self._crew.lives[number]:
                self._crew.relive(number, life)
        self._living, self._crew.clocks = living, clocks
        return self._anew(self._crew.all("restore", lambda number: {"states": pieces[number]}))

    def _require_told(self, what: str) -> None:
        if self._acting:
            raise ContractError(f"Agents still act: turn() comes before {what}.")

    def settle(self) -> None:
        """Raise nothing: workers look at every step at once."""

    def close(self) -> None:
        """End the workers, whatever they do."""
        self._crew.close()

    def _made(self) -> WorldSpec:
        try:
            specs = self._crew.all("make", self._crew.plan_of)
        except CrowdError as error:
            raise _uneven(self.agents, len(self._crew.lines), len(self.shares), error.crowd) from None
        _require_alike([spec.words for spec in specs], "worlds")
        # Who is started anew truncates episodes, in any world.
        return replace(specs[0], truncates="always") if self._restart else specs[0]

    def _lay_out(self, forms: Sequence[Form]) -> Layout:
        """Lay the steps out in memory when it is first known what they are made of."""
        _require_alike(forms, "steps")
        form = {"last_obs": forms[0]["obs"], **forms[0]} if self._restart else forms[0]
        space = self.spec.action
        layout = Layout(form, self._rows, len(self.shares), 1 if space is None else int(space.shape[0]))
        if layout != self._crew.layout:
            self._board, self._crew.layout = layout.map(self._crew.memory), layout
        return layout

    def _told(self, share: int) -> Step:
        assert self._board is not None
        return moved(self._board.step(share, self._slot[share]), self._device)

    def _truncate(self, number: int, share: int) -> None:
        """Tell the agents of a worker that was started anew that their episodes were cut off."""
        assert self._board is not None
        each = self._crew.each
        rows = slice(number * each, (number + 1) * each)
        now, before = (self._board.step(share, slot) for slot in (self._slot[share], 1 - self._slot[share]))
        assert now.last_obs is not None
        now.truncated[rows] = self._living[self.shares[share][rows]]
        write_seen(before.obs[rows], now.last_obs, rows)

    def _anew(self, found: Sequence[Sequence[Anew | None]]) -> Anew | None:
        """Put together who began anew in which worker."""
        told = [each for of_worker in found for each in of_worker if each is not None]
        if not told:
            return None
        turns, who = list[Turn](), torch.zeros(self.agents, dtype=torch.bool)
        for number, of_worker in enumerate(found):
            for rows, each in zip(self._crew.rows_of(number), of_worker, strict=True):
                step = unread(self.spec, len(rows), torch.device("cpu")) if each is None else each.step
                if self._restart and step.last_obs is None:
                    step = replace(step, last_obs=step.obs)
                turns.append(Turn(rows, step))
                who[rows] = False if each is None else each.who
        why = "; ".join(dict.fromkeys(each.why for each in told))
        return Anew(who.to(self._device), moved(joined(turns), self._device), why)


def _require_alike(found: Sequence[Any], what: str) -> None:
    other = next((number for number, each in enumerate(found) if each != found[0]), None)
    if other is not None:
        raise WorkerError(
            f"The {what} of workers 0 and {other} are not alike: {found[0]} and {found[other]}."
        )


def _require_even(agents: int, workers: int, shares: int) -> None:
    if agents % (workers * shares) or not agents:
        raise _uneven(agents, workers, shares)


def _uneven(agents: int, workers: int, shares: int, crowd: int = 1) -> ConfigError:
    pieces = workers * shares * crowd
    near = max(1, round(agents / pieces)) * pieces
    whole = "" if crowd == 1 else f" of whole crowds of {crowd}"
    return ConfigError(
        f"world.agents={agents} cannot be shared out evenly: trainer.num_workers={workers} and "
        f"trainer.async_factor={shares} make {workers * shares} pieces{whole}; try world.agents={near}."
    )
