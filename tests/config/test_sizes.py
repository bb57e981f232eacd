"""Sizes that cannot fit into memory are refused in one line that names the key and the need."""

import pytest
import torch

from holdfast.cli import main
from holdfast.config.run import Config, override
from holdfast.config.sizes import check_sizes, explaining_allocations, format_bytes
from holdfast.errors import ConfigError

GIB = 2**30
ONE = {"trainer.bptt_horizon": 1, "trainer.minibatch_size": 1}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"policy.hidden_size": 10**7}, "policy.hidden_size=10000000 needs at least 364 TiB of memory, and there"),
        ({"policy.hidden_size": 10**30}, r"policy.hidden_size=1\d+ needs at least \d+ EiB"),
        (
            {"world.agents": 10**9, "trainer.batch_size": 10**9, **ONE},
            "world.agents=1000000000 needs at least 34 GiB of memory, and there are 16 GiB; give less.",
        ),
        (
            {"world.agents": 1, "trainer.batch_size": 2**30, **ONE},
            "trainer.batch_size=1073741824 needs at least 32 GiB of memory",
        ),
    ],
)
def test_the_key_and_its_need_are_named(keys, message):
    with pytest.raises(ConfigError, match=message):
        check_sizes(override(Config(), keys), 16 * GIB)


def test_default_sizes_fit():
    check_sizes(Config(), GIB)


def test_training_refuses_a_size_before_anything_is_built(tmp_path, capsys):
    assert main(["train", "policy.hidden_size=10000000", f"runs_dir={tmp_path}"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("holdfast: policy.hidden_size=10000000 needs at least 364 TiB of memory, and there are ")
    assert error.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_too_many_layers_are_refused(capsys):
    assert main(["train", "policy.num_layers=1e8"]) == 2
    assert capsys.readouterr().err.startswith("holdfast: policy.num_layers=1e8: input should be less than or equal to ")


def test_a_failed_allocation_names_the_keys_to_lower():
    def allocate():
        with explaining_allocations(Config()):
            torch.empty(2**60)

    with pytest.raises(
        ConfigError, match=r"not enough memory for \d+ bytes more; lower one of world.agents=64, trainer.b"
    ):
        allocate()


def test_other_errors_pass():
    def fail():
        with explaining_allocations(Config()):
            raise RuntimeError("something else")

    with pytest.raises(RuntimeError, match="something else"):
        fail()


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (-2.5 * 2**20, "-2.5 MiB"),
        (391 * 2**20, "391 MiB"),
        (140 * 2**30, "140 GiB"),
        (3 * 2**50, "3.0 PiB"),
        (2**80, "1048576 EiB"),
    ],
)
def test_bytes_have_a_binary_unit(count, text):
    assert format_bytes(count) == text
