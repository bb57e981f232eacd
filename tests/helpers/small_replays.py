"""Players with untrained policies, and small replays of them."""

import gzip
import json

import torch

import holdfast
from holdfast.config.run import Config, override
from holdfast.evaluation.held_out import world_spec
from holdfast.play import Player
from holdfast.play.record import record_replay


def player_of(world="recall", memory="lstm", **options):
    """A player of an untrained policy in a world with these options."""
    # Sizes that fit the agents of every world.
    sizes = {"trainer.batch_size": 12288, "trainer.minibatch_size": 4096}
    config = override(Config(), {"world": world, **sizes, **{f"world.{key}": value for key, value in options.items()}})
    policy = holdfast.make_policy(
        "fast", world_spec(config.world, torch.device("cpu")), seed=0, hidden_size=8, memory=memory
    )
    return Player(policy, config)


def small_replay(world="recall", steps=12, agents=3, **options):
    """A replay of an untrained policy."""
    return record_replay(player_of(world, **options), steps, agents=agents, run="small")


def content_of(file):
    """The JSON of a replay file."""
    return json.loads(gzip.decompress(file.read_bytes()))


def write_content(file, content):
    """Write JSON as a replay file, whether it is one or not."""
    text = content if isinstance(content, bytes) else json.dumps(content).encode()
    file.write_bytes(gzip.compress(text, mtime=0))
    return file
