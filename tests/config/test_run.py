import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from holdfast.config.base import OTHER_NAMES
from holdfast.config.run import Config, all_keys, lookup, override, read_config
from holdfast.config.trainer import TrainerConfig
from holdfast.errors import ConfigError
from holdfast.recipes import find_recipe

BASE = find_recipe("recall")


def error_message(overrides, base=BASE):
    """The one line a wrong call is answered with."""
    with pytest.raises(ConfigError) as caught:
        override(base, overrides)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("word", "value", "key", "meant"),
    [
        ("world", "recall", "world.name", "recall"),
        ("policy", "auto", "policy.name", "auto"),
        ("policy", "my.module:Policy", "policy.name", "my.module:Policy"),
        ("py_agent", "auto", "policy.name", "auto"),
        ("py_agent", "auto.py", "policy.name", "auto"),
        ("agent", "fast", "policy.name", "component:fast"),
    ],
)
def test_override_expands_aliases(word, value, key, meant):
    assert override(BASE, {word: value}) == override(BASE, {key: meant})
    assert lookup(override(BASE, {word: value}), key) == meant


@pytest.mark.parametrize("again", ["policy.name", "py_agent", "agent"])
def test_override_rejects_a_key_set_twice(again):
    line = error_message({"policy": "fast", again: "auto"})
    assert line == f"{again}=auto sets policy.name a second time; keep one."


@pytest.mark.parametrize(("word", "truth"), [("true", True), ("false", False), ("1", True), ("no", False)])
def test_booleans(word, truth):
    assert override(BASE, {"world.truncate": word}).world.truncate is truth


@pytest.mark.parametrize(
    ("key", "word", "hint"),
    [
        ("seed", "-1", "greater than or equal to 0"),
        ("seed", None, "valid integer"),
        ("seed", 1.5, "fractional part"),
        ("seed", [1], "valid integer"),
        ("seed", 2**63, "less than 9223372036854775808"),
        ("seed", "99999999999999999999", "less than 9223372036854775808"),
        ("threads", "-1", "greater than or equal to 0"),
        ("device", "gpu", "'auto', 'cpu' or 'cuda'"),
        ("wandb", "yes", "'off', 'offline' or 'online'"),
        ("runs_dir", 5, "valid string"),
        ("run", "a/b", "a name is one word of letters, digits and . _ + -; runs_dir=DIR sets the folder"),
        ("run", "../up", "a name is one word of letters, digits and . _ + -; runs_dir=DIR sets the folder"),
        ("run", "..", "a name is one word of letters, digits and . _ + -; runs_dir=DIR sets the folder"),
        ("run", "-x", "a name is one word of letters, digits and . _ + -; runs_dir=DIR sets the folder"),
        ("run", "a b", "a name is one word of letters, digits and . _ + -; runs_dir=DIR sets the folder"),
        ("run", "a\nb", "a name is one word of letters, digits and . _ + -; runs_dir=DIR sets the folder"),
        ("run", "a\n", "a name is one word of letters, digits and . _ + -; runs_dir=DIR sets the folder"),
        ("world.name", "recal", "did you mean recall?"),
        ("world.name", "gym", "write gym:ID."),
        ("world.name", "gym:", "write gym:ID."),
        ("world.agents", "0", "greater than or equal to 1"),
        ("world.cues", "1", "greater than or equal to 2"),
        ("world.cues", "101", "less than or equal to 100"),
        ("world.truncate", "maybe", "valid boolean"),
        ("world.delay", None, "valid integer"),
        ("world.delay", (1, 2, 3), "valid integer"),
        ("policy.memory_init", "other", "'auto', 'standard' or 'original'"),
        ("policy.precision", "float16", "'float32' or 'bfloat16'"),
        ("policy.kernel", "cudnn", "'auto', 'torch' or 'triton'"),
        ("policy.hidden_size", "0", "greater than or equal to 1"),
        ("policy.num_layers", "0", "greater than or equal to 1"),
        ("policy.compile", "perhaps", "valid boolean"),
        ("memory.clear_on", "done", "'episode', 'trial' or 'never'"),
        ("trainer.update_epochs", "0", "greater than or equal to 1"),
        ("trainer.eval_episodes", "0", "greater than or equal to 1"),
        ("trainer.num_workers", "-1", "greater than or equal to 0"),
        ("trainer.async_factor", "0", "greater than or equal to 1"),
        ("trainer.worker_timeout", "0", "greater than 0"),
        ("trainer.bptt_horizon", "0", "greater than or equal to 1"),
        ("trainer.minibatch_size", "-64", "greater than or equal to 1"),
        ("trainer.optimizer.learning_rate", -1e-9, "greater than or equal to 0"),
        ("trainer.optimizer.learning_rate", "nan", "finite number"),
        ("trainer.optimizer.learning_rate", "inf", "finite number"),
        ("trainer.optimizer.eps", "inf", "finite number"),
        ("trainer.ppo.vf_coef", float("inf"), "finite number"),
        ("trainer.ppo.max_grad_norm", "1e999", "finite number"),
        ("trainer.optimizer.learning_rate", "fast", "valid number"),
        ("trainer.optimizer.weight_decay", "-1", "greater than or equal to 0"),
        ("trainer.optimizer.beta1", "1", "less than 1"),
        ("trainer.ppo.gamma", "1.01", "less than or equal to 1"),
        ("trainer.ppo.gae_lambda", "-0.1", "greater than or equal to 0"),
        ("trainer.ppo.clip_coef", "0", "greater than 0"),
        ("trainer.ppo.max_grad_norm", "0", "greater than 0"),
        ("trainer.ppo.norm_adv", "2", "valid boolean"),
    ],
)
def test_invalid_value_error_names_the_key(key, word, hint):
    with pytest.raises(ConfigError) as caught:
        override(BASE, {key: word})
    assert str(caught.value).startswith(f"{key}={word}: ")
    assert hint in str(caught.value)


def test_every_key_has_a_description_and_a_value():
    keys = all_keys()
    assert {"run", "seed", "world.delay", "policy.name", "trainer.ppo.gamma"} <= keys.keys()
    assert all(field.description for field in keys.values())
    assert all(lookup(BASE, key) is not ... for key in keys)


def test_names_of_other_libraries_lead_to_keys_that_exist():
    names = [re.split(r"[ =]", name)[0] for name in OTHER_NAMES]
    assert set(names) - {"world"} <= set(all_keys())
    words = [word for words in OTHER_NAMES.values() for word in words]
    assert len(words) == len(set(words))
    assert not set(words) & set(all_keys())


@pytest.mark.parametrize("key", [key for key in all_keys() if not key.endswith(("beta1", "beta2"))])
def test_did_you_mean_for_misspelt_keys(key):
    for place in range(1, len(key)):
        misspelt = [key[:place] + key[place + 1 :]]
        misspelt.append(key[: place - 1] + key[place] + key[place - 1] + key[place + 1 :])
        for word in misspelt:
            if word not in all_keys():
                assert error_message({word: 1}) == f"There is no key {word!r}; did you mean {key}?"


@pytest.mark.parametrize(
    ("word", "key"),
    [
        ("total_timesteps", "trainer.total_timesteps"),
        ("learning_rate", "trainer.optimizer.learning_rate"),
        ("trainer.learning_rate", "trainer.optimizer.learning_rate"),
        ("delay", "world.delay"),
        ("hidden_size", "policy.hidden_size"),
        ("trainer.gamma", "trainer.ppo.gamma"),
        ("gamma", "trainer.ppo.gamma"),
        ("agents", "world.agents"),
        ("name", "world.name or policy.name or trainer.optimizer.name"),
        ("Seed", "seed"),
        ("lr", "trainer.optimizer.learning_rate"),
        ("trainer.lr", "trainer.optimizer.learning_rate"),
        ("n_envs", "world.agents"),
        ("num_envs", "world.agents"),
        ("n_steps", "trainer.batch_size (steps of all agents)"),
        ("n_epochs", "trainer.update_epochs"),
        ("ent_coef", "trainer.ppo.ent_coef"),
        ("clip_range", "trainer.ppo.clip_coef"),
        ("env_id", "world=gym:ID"),
    ],
)
def test_did_you_mean_for_keys_without_path(word, key):
    assert error_message({word: 1}) == f"There is no key {word!r}; did you mean {key}?"


def test_unknown_key_error_points_to_help():
    assert error_message({"zzzzzz": 1}) == "There is no key 'zzzzzz'; `holdfast train --help` lists all keys."


def test_override_returns_a_copy():
    changed = override(BASE, {"seed": 5, "trainer.ppo.gamma": "0.5"})
    assert (BASE.seed, BASE.trainer.ppo.gamma) == (0, 0.9)
    assert (changed.seed, changed.trainer.ppo.gamma) == (5, 0.5)
    assert override(changed, {"seed": 0, "trainer.ppo.gamma": 0.9}) == BASE


def test_read_config_rejects_unknown_keys():
    with pytest.raises(ValidationError, match="extra"):
        Config.model_validate({"trainer": {"epochs": 3}})
    with pytest.raises(ConfigError) as caught:
        read_config('{"trainer": {"epochs": 3}}')
    assert str(caught.value).startswith("this is not a config of this version: trainer.epochs=3: ")


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"seed": -1}', '{"world": {"delay": -1}}'])
def test_read_config_error_is_one_line(text):
    with pytest.raises(ConfigError, match="this is not a config of this version: ") as caught:
        read_config(text)
    assert "\n" not in str(caught.value)


overrides = st.fixed_dictionaries(
    {},
    optional={
        "run": st.from_regex(r"\A[a-z0-9][a-z0-9.+-]{0,10}\Z").filter(lambda name: name not in ("none", "null")),
        "seed": st.integers(0, 2**62),
        "world.delay": st.one_of(st.integers(0, 50), st.tuples(st.integers(0, 9), st.integers(9, 30))),
        "world.cues": st.integers(2, 100),
        "world.truncate": st.booleans(),
        "policy.name": st.sampled_from(["auto", "fast", "my.module:Policy"]),
        "memory.clear_on": st.sampled_from(["episode", "trial", "never"]),
        "trainer.optimizer.learning_rate": st.floats(1e-9, 1),
        "trainer.ppo.target_kl": st.one_of(st.none(), st.floats(0.001, 1)),
        "trainer.ppo.gamma": st.floats(0, 1),
        "trainer.ppo.norm_adv": st.booleans(),
    },
)


@given(overrides)
def test_config_json_round_trip(changes):
    config = override(BASE, changes)
    assert read_config(config.model_dump_json()) == config
    for key, value in changes.items():
        assert lookup(config, key) == value


def test_minibatch_size_error_proposes_multiples():
    message = error_message({"trainer.minibatch_size": "1000"})
    assert (
        message == "trainer.minibatch_size=1000 is not a multiple of trainer.bptt_horizon=64; "
        "try trainer.minibatch_size=256 or 512 or 1024."
    )


def test_minibatch_smaller_than_segment_error():
    message = error_message({"trainer.minibatch_size": "10"})
    assert "trainer.bptt_horizon=64; try trainer.minibatch_size=64 or 128 or 256." in message
    assert " 0 " not in message


def test_batch_size_error_shows_the_arithmetic():
    message = error_message({"trainer.batch_size": 512 * 9})
    assert "trainer.batch_size=4608" in message
    assert "world.agents * trainer.bptt_horizon = 64 * 64 = 4096" in message


def proposals(keys):
    """The sizes that are proposed for sizes that do not fit, each with all the keys it was proposed for."""
    try_this, _, with_this = error_message(keys).split("try ")[1].partition(" with ")
    key, _, rest = try_this.partition("=")
    sizes = [int(size) for size in re.findall(r"\d+", rest)]
    others = {other: int(size) for other, size in re.findall(r"([\w.]+)=(\d+)", with_this)}
    assert sizes
    assert sizes == sorted(set(sizes))
    assert all(size > 0 for size in sizes)
    return [keys | {key: size} | others for size in sizes]


@pytest.mark.parametrize(
    "keys",
    [
        {"trainer.batch_size": 5000},
        {"trainer.batch_size": 1},
        {"trainer.minibatch_size": 1000},
        {"trainer.minibatch_size": 960},
        {"trainer.minibatch_size": 1},
        {"trainer.minibatch_size": 10**6},
        {"world.agents": 48},
        {"world.agents": 48, "trainer.minibatch_size": 1000},
        {"trainer.batch_size": 5000, "trainer.minibatch_size": 1000},
        {"trainer.bptt_horizon": 60},
    ],
    ids=str,
)
def test_proposed_sizes_work_for_the_recipe(keys):
    for proposed in proposals(keys):
        override(BASE, proposed)


size_of_a_run = {
    "world.agents": st.integers(1, 40),
    "trainer.bptt_horizon": st.integers(1, 16),
    "trainer.minibatch_size": st.integers(1, 300),
    "trainer.batch_size": st.integers(1, 3000),
}


def fit(keys):
    """Whether whole segments fill the minibatches, and whole minibatches and rollouts the batch."""
    agents, horizon, minibatch, batch = (keys[key] for key in size_of_a_run)
    return minibatch % horizon == 0 and batch % minibatch == 0 and batch % (agents * horizon) == 0


@example(dict(zip(size_of_a_run, (64, 60, 512, 4096), strict=True)))
@settings(max_examples=200)
@given(st.fixed_dictionaries(size_of_a_run))
def test_batch_size_error_iff_sizes_do_not_divide(keys):
    if fit(keys):
        config = override(BASE, keys)
        assert config.rollout_length * config.world.agents == config.trainer.batch_size
        assert config.rollout_length % config.trainer.bptt_horizon == 0
        return
    for proposed in proposals(keys):
        assert fit(proposed)
        override(BASE, proposed)


@settings(max_examples=60)
@given(st.integers(1, 40), st.integers(1, 16), st.integers(1, 8), st.integers(1, 60))
def test_proposed_batch_sizes_work(agents, horizon, rows, batches):
    keys = {
        "world.agents": agents,
        "trainer.bptt_horizon": horizon,
        "trainer.minibatch_size": rows * horizon,
        "trainer.batch_size": batches * rows * horizon,
    }
    if fit(keys):
        override(BASE, keys)
        return
    assert f"{agents} * {horizon} = {agents * horizon}" in error_message(keys)
    for proposed in proposals(keys):
        assert proposed["trainer.batch_size"] % (rows * horizon) == 0
        override(BASE, proposed)


def test_iterations_reach_total_timesteps():
    assert override(BASE, {"trainer.total_timesteps": 5000}).iterations == 2
    assert override(BASE, {"trainer.total_timesteps": 4096}).iterations == 1
    assert override(BASE, {"trainer.total_timesteps": 4097}).iterations == 2
    assert override(BASE, {"trainer.total_timesteps": 1}).iterations == 1


def test_default_hyperparameters():
    trainer = TrainerConfig()
    assert (trainer.batch_size, trainer.minibatch_size, trainer.bptt_horizon) == (524288, 16384, 64)
    assert (trainer.update_epochs, trainer.total_timesteps) == (1, 50_000_000)


def test_did_you_mean_for_unknown_recipe():
    with pytest.raises(ConfigError, match=r"There is no recipe 'recal'; did you mean recall\?"):
        find_recipe("recal")
    with pytest.raises(ConfigError, match="There is no recipe 'zzz'; choose from recall"):
        find_recipe("zzz")


def test_read_config_rejects_other_text():
    config = override(find_recipe("recall"), {"trainer.num_workers": 1})
    assert read_config(config.model_dump_json()) == config
    for text in ("", "[]", '{"trainer": 3}'):
        with pytest.raises(ConfigError, match="not a config of this version"):
            read_config(text)
