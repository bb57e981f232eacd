"""`holdfast play`: watch a run's policy act, and change its memory, in a local page or in the terminal."""

import os
import signal
import sys
import webbrowser
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console

from holdfast.build import find_checkpoint, load_policy_from, select_device
from holdfast.cli.arguments import Parser, add_trust_code, count
from holdfast.cli.check import find_run, to_stderr
from holdfast.cli.eval import WIDTH, split_overrides
from holdfast.config.run import Config, override
from holdfast.errors import ConfigError
from holdfast.play import Player
from holdfast.play.live import LivePlay
from holdfast.play.live_server import LiveServer
from holdfast.play.play_loop import PlayLoop
from holdfast.play.terminal import play_in_terminal
from holdfast.report.replay import AXES
from holdfast.trust import trusting

AGENTS = 8


def run_play(args: Sequence[str]) -> int:
    """Play until Ctrl-C, or until `quit` in the terminal."""
    options = _parser().parse_intermixed_args(args)
    if options.agents > AXES["A"]:
        raise ConfigError(f"--agents {options.agents}: at most {AXES['A']} can be shown.")
    if options.port is not None and not 0 < options.port < 65536:
        raise ConfigError(f"--port {options.port}: give a number from 1 to 65535.")
    folder, overrides = split_overrides(options.args)
    device = select_device(Config(device=options.device))
    with trusting(options.trust_code):
        saved = find_checkpoint(find_run(folder), to_stderr)
        policy, config = load_policy_from(saved, device)
        config = override(config, overrides) if overrides else config
        if config.threads:
            torch.set_num_threads(config.threads)
        settings = {"seed": options.seed, "greedy": not options.sampled, "frames": not options.terminal}
        with PlayLoop(Player(policy, config), options.agents, follow=options.agents, **settings) as loop:
            play = LivePlay(loop, loop.header(Path(folder).resolve().name, saved.global_step or 0))
            if options.terminal:
                width = None if sys.stdout.isatty() else WIDTH
                console = Console(highlight=False, markup=False, emoji=False, width=width)
                return play_in_terminal(play, sys.stdin.readline, console)
            return _serve(play, options.port or 0, open_browser=options.open)


def _serve(play: LivePlay, port: int, *, open_browser: bool) -> int:
    server = LiveServer(play, port)
    with server.serving() as url:
        # Printed at once, also into a pipe.
        print(f"playing {play.header.run} at {url}\nCtrl-C ends it.", flush=True)
        if open_browser and _has_display():
            webbrowser.open(url)
        # A kill ends it as Ctrl-C does.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            signal.pause()
        except KeyboardInterrupt:
            print("\nstopped.", flush=True)
    return 0


def _has_display() -> bool:
    """Return whether a browser has a window to open; one in the terminal would cover the address."""
    return sys.platform != "linux" or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


def _parser() -> Parser:
    parser = Parser(
        prog="holdfast play",
        usage="holdfast play runs/NAME [world.KEY=value ...] [options]",
        description="Watch a run's policy act on held-out episodes, and clear, freeze, swap or restore its memory, in "
        "a page that this machine alone can open.",
    )
    add = parser.add_argument
    add("args", nargs="*", metavar="runs/NAME", help="a run's folder; world.delay=16 changes its world")
    add("--agents", type=count, default=AGENTS, metavar="N", help=f"number of agents to show ({AGENTS})")
    add("--seed", type=int, default=0, metavar="N", help="other episodes and samples (0)")
    add("--sampled", action="store_true", help="sample actions instead of taking the most likely")
    add("--port", type=int, metavar="N", help="port of the page (a free one)")
    add("--no-open", dest="open", action="store_false", help="print the address, and open no browser")
    add("--terminal", action="store_true", help="play in the terminal, by typed commands")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="device (auto)")
    add_trust_code(parser)
    return parser
