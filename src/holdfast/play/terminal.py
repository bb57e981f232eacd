"""Play in the terminal: typed commands, and a table of the agents after each."""

from collections.abc import Callable, Sequence
from typing import Any

from pydantic import ValidationError
from rich.console import Console
from rich.table import Table

from holdfast.config.base import first_error_message
from holdfast.errors import HoldfastError, did_you_mean, one_line
from holdfast.play.live import MODES, Command, LivePlay
from holdfast.play.play_loop import Row
from holdfast.worlds.tokens import PADDING

HELP = """Enter or step [N]    take a step, or N
agent N              follow agent N; the commands below are about its memory
clear                clear it now
frozen               from now on it stays as it is until the episode ends
cleared              from now on clear it before every step
intact               let it work again
swap N               swap it with that of agent N
remember, restore    remember its state, and restore it
greedy, sampled      take the most likely actions, or sample
help, quit"""
VERBS = ("step", "agent", "clear", *MODES, "swap", "remember", "restore", "greedy", "sampled", "help", "quit")
MOST = 6
"""Actions and tokens of an agent that are listed."""


def play_in_terminal(play: LivePlay, readline: Callable[[], str], console: Console) -> int:
    """Read commands, one per line, until `quit` or the end."""
    console.print(f"{play.header.policy} in {play.header.world}\n{HELP}\n")
    agent, row = 0, None
    while True:
        _print_agents(console, play, agent, row)
        console.print("> ", end="")
        line = readline()
        words = line.split()
        if not line or words[:1] in (["quit"], ["q"], ["exit"]):
            console.print("" if line else "\n", end="")
            return 0
        try:
            agent, row = _run(console, play, agent, row, words or ["step"])
        except ValidationError as error:
            console.print(first_error_message(error))
        except HoldfastError as error:
            console.print(one_line(error))


def _run(console: Console, play: LivePlay, agent: int, row: Row | None, words: list[str]) -> tuple[int, Row | None]:
    """Run a command; return the followed agent, and its last step if the command took one."""
    verb, number = words[0], words[1] if len(words) > 1 else ""
    if verb.isdecimal():
        verb, number = "step", verb
    takes_number = verb in ("step", "agent", "swap")
    if verb not in VERBS or len(words) > 2 or (number and not (takes_number and number.isdecimal())):
        console.print(
            f"{' '.join(words)!r}: {did_you_mean(verb, VERBS, 'type help.') if verb not in VERBS else 'type help.'}"
        )
    elif verb == "help":
        console.print(HELP)
    elif verb == "agent" and int(number or -1) in range(play.loop.follow):
        return int(number), None
    elif verb in ("agent", "swap") and not (number and int(number) < play.loop.follow):
        console.print(f"{verb} {number or 'N'}: there are agents 0 to {play.loop.follow - 1}.")
    elif verb == "step":
        play.run(Command(do="step", count=int(number or 1)))
        return agent, play.last()
    else:
        play.run(_command(verb, agent, int(number or 0)))
    return agent, None


def _command(verb: str, agent: int, other: int) -> Command:
    fields: dict[str, Any] = {"do": verb, "agent": agent}
    if verb in MODES:
        fields |= {"do": "mode", "mode": verb}
    elif verb in ("greedy", "sampled"):
        fields |= {"do": "greedy", "greedy": verb == "greedy"}
    elif verb == "swap":
        fields |= {"other": other}
    return Command.model_validate(fields)


def _print_agents(console: Console, play: LivePlay, agent: int, last: Row | None) -> None:
    """Print what every agent sees, would do, and got in the last step."""
    now, header = play.now(), play.header
    table = Table(title=f"step {play.total}", title_justify="left", box=None, pad_edge=False, header_style="dim")
    for name in (
        "",
        "agent",
        "sees",
        "next action",
        "probabilities",
        "value",
        "state norm",
        "memory",
        "last reward",
    ):
        table.add_column(name, justify="right" if name in ("value", "state norm", "last reward") else "left")
    for number in range(play.loop.follow):
        reward = "" if last is None else f"{last['reward'][number]:.3g}{' end' if last['end'][number] else ''}"
        table.add_row(
            ">" if number == agent else "",
            f"{header.agents[number]}{' starts' if now['first'][number] else ''}",
            _sees(play, now, number),
            _action(play, now, number),
            _probabilities(play, now, number),
            f"{now['value'][number]:.3f}",
            f"{now['norm'][number]:.2f}" if header.memory else "none",
            play.modes[number],
            reward,
        )
    console.print(table)
    names = {"alone": "memory left alone", "changed": "memory changed"}
    means = [f"{names[name]} {mean:.3f} in {count} episodes" for name, (count, mean) in play.tally().items() if count]
    if means:
        console.print(f"mean return: {' · '.join(means)}")


def _sees(play: LivePlay, now: Row, agent: int) -> str:
    if "obs" in now:
        return " ".join(f"{number:.3g}" for number in now["obs"][agent][:MOST])
    if "tokens" not in now:
        return "…"
    names = {feature.id: feature.name for feature in play.header.features}
    tokens = [names.get(int(token[1]), "?") for token in now["tokens"][agent] if token[0] != PADDING]
    counts = {name: tokens.count(name) for name in tokens}
    return (
        ", ".join(name if count == 1 else f"{count} {name}" for name, count in list(counts.items())[:MOST]) or "nothing"
    )


def _action(play: LivePlay, now: Row, agent: int) -> str:
    names, action = play.header.actions, now["action"][agent]
    return names[int(action[0])] if names and len(action) == 1 else " ".join(f"{part:.3g}" for part in action)


def _probabilities(play: LivePlay, now: Row, agent: int) -> str:
    """Return the probabilities in percent, and those before the memory changed."""
    if "probs" not in now:
        return ""
    before, probs = play.before.get(agent), now["probs"][agent].tolist()
    return _percent(probs) if before is None else f"{_percent(before)} → {_percent(probs)}"


def _percent(probs: Sequence[int]) -> str:
    return " ".join(f"{100 * p / 255:.0f}" for p in probs[:MOST])
