"""Wrappers with arguments in a config, and the presets of well-known environments."""

import json

import pytest

from holdfast.config.run import Config, override, read_config
from holdfast.config.world_names import parse_world
from holdfast.config.wrapper_list import WrapperCall, parse_wrapper, split_wrappers
from holdfast.errors import ConfigError
from holdfast.report.text import format_value

LIMIT = "gymnasium.wrappers:TimeLimit(max_episode_steps=200)"


def world_of(name="gym:CartPole-v1", **keys):
    return override(Config(), {"world": name, **{f"world.{key}": value for key, value in keys.items()}}).world


@pytest.mark.parametrize(
    ("text", "items"),
    [
        ("a:B", ["a:B"]),
        ("a:B,c:D", ["a:B", "c:D"]),
        ("a:B + c:D", ["a:B", "c:D"]),
        ("a:B(x=1, y=[2, 3])+c:D(z=(4, 5), w={'k': 6})", ["a:B(x=1, y=[2, 3])", "c:D(z=(4, 5), w={'k': 6})"]),
        ("a:B(x='),+(', y=\"it's\"), c:D", ["a:B(x='),+(', y=\"it's\")", "c:D"]),
        (r"a:B(x='\'),'),c:D", [r"a:B(x='\'),')", "c:D"]),
        ("none", []),
        (LIMIT, [LIMIT]),
    ],
)
def test_lists_are_split_outside_of_brackets_and_texts(text, items):
    assert split_wrappers(text) == items
    assert world_of(wrappers=text).wrappers == tuple(items)


def test_arguments_are_literals():
    assert parse_wrapper("a.b:C(4, x=-0.5, y='text', z=[1, None], w={'k': True})") == WrapperCall(
        "a.b:C", (4,), {"x": -0.5, "y": "text", "z": [1, None], "w": {"k": True}}
    )
    assert parse_wrapper("a.b:C()") == parse_wrapper("a.b:C") == WrapperCall("a.b:C", (), {})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a:B(x=true)", "true is no literal such as 4, 0.5, 'text', True"),
        ("a:B(x=open('f'))", r"open\('f'\) is no literal"),
        ("a:B(x=__import__('os').system('ls'))", "is no literal"),
        ("a:B(x=1)(y=2)", r"a:B\(x=1\)\(y=2\) cannot be read; write package.module:Class\(argument=value\)"),
        ("a:B(x=1).y", "cannot be read; write package.module:Class"),
        ("a:B(x=1", "cannot be read: '.' was never closed"),
        ("a:B(**{'x': 1})", r"has \*\*arguments; write argument=value"),
        ("a:B(*[1])", r"\*\[1\] is no literal"),
        ("a:B,,c:D", "name a wrapper on both sides of each"),
        ("(x=1)", "name a wrapper"),
        pytest.param(f"a:B({'-' * 50_000}1)", "nested too deeply", id="minus signs"),
        pytest.param(f"a:B({'1+' * 20_000}1)", "nested too deeply", id="plus signs"),
    ],
)
def test_errors_name_the_key_and_what_to_write(text, message):
    with pytest.raises(ConfigError, match=rf"^world.wrappers=.*{message}") as caught:
        world_of(wrappers=text)
    assert "\n" not in str(caught.value)


def test_config_with_arguments_round_trips():
    config = override(Config(), {"world": "gym:CartPole-v1", "world.wrappers": f"{LIMIT} + a:B(x='y,+')"})
    assert json.loads(config.model_dump_json())["world"]["wrappers"] == [LIMIT, "a:B(x='y,+')"]
    assert read_config(config.model_dump_json()) == config
    # As printed in tables of changed keys, it can be typed again.
    assert world_of(wrappers=format_value(config.world.wrappers)) == config.world


ATARI = ("holdfast.worlds.gym.seed_episodes:SeedEpisodes", "gymnasium.wrappers:AtariPreprocessing")


@pytest.mark.parametrize(
    ("keys", "options", "wrappers", "frames"),
    [
        ({}, {"frameskip": 1}, ATARI, 4),
        ({"frame_stack": "1"}, {"frameskip": 1}, ATARI, 1),
        ({"options": "{mode: 2}"}, {"frameskip": 1, "mode": 2}, ATARI, 4),
        ({"options": "{frameskip: 2}"}, {"frameskip": 2}, ATARI, 4),
        ({"wrappers": "none"}, {}, (), 1),
        ({"wrappers": LIMIT, "frame_stack": 2}, {}, (LIMIT,), 2),
        ({"vector": "native"}, {}, (), 1),
    ],
)
def test_preset_fills_keys_that_are_not_set_unless_wrappers_are(keys, options, wrappers, frames):
    for name in ("gym:ALE/Pong-v5", "gym:ale_py:ALE/Pong-v5", "gym:PongNoFrameskip-v4"):
        world = world_of(name, **keys)
        assert (world.options, world.wrappers, world.frame_stack) == (options, wrappers, frames)
        # A saved config has all keys: the preset changes nothing.
        assert parse_world(world.model_dump()) == world


def test_presets_are_by_the_start_of_the_id():
    assert world_of("gym:MiniGrid-DoorKey-5x5-v0").wrappers == ("holdfast.worlds.gym.minigrid_cells:MiniGridCells",)
    for name in ("gym:CartPole-v1", "popgym:RepeatFirstEasy", "gym:my.envs:Pong"):
        world = world_of(name)
        assert (world.wrappers, world.frame_stack, world.options) == ((), 1, {})
