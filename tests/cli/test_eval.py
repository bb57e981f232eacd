import json
import re

import pytest
import torch

import holdfast
from holdfast.build import load_policy
from holdfast.cli import main
from holdfast.config.run import Config
from holdfast.evaluation.held_out import held_out_seed

TINY = {
    "world.agents": 4,
    "world.delay": 2,
    "trainer.bptt_horizon": 8,
    "trainer.batch_size": 64,
    "trainer.minibatch_size": 32,
    "trainer.total_timesteps": 128,
    "report": "off",
    "trainer.eval_episodes": 4,
    "policy.hidden_size": 8,
    "policy.num_layers": 1,
}
MULTI_AGENT = {
    **TINY,
    "world": "arena",
    "world.agents": 24,
    "world.size": 14,
    "world.length": 4,
    "trainer.batch_size": 384,
    "trainer.minibatch_size": 96,
}
FIELDS = {
    *("episodes", "return_mean", "return_iqm", "return_ci95", "length_mean"),
    *("memory", "policy", "world", "steps_trained"),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two untrained policies in recall, and two in arena."""
    folder = tmp_path_factory.mktemp("runs")
    for name, keys in (("x", {}), ("y", {"seed": 1})):
        holdfast.train("recall", {**TINY, **keys, "run": name, "runs_dir": str(folder)})
        keys_of_arena = {key: value for key, value in MULTI_AGENT.items() if key != "world.delay"}
        holdfast.train("arena", {**keys_of_arena, **keys, "run": f"arena-{name}", "runs_dir": str(folder)})
    return folder


@pytest.fixture
def evaluated(runs, capsys):
    """Evaluate a run, and return its JSON output."""

    def call(name, *args):
        assert main(["eval", f"{runs}/{name}", "--json", *args]) == 0
        captured = capsys.readouterr()
        assert captured.err == ""
        return json.loads(captured.out)

    return call


def test_json_has_all_documented_fields(evaluated, runs):
    result = evaluated("x", "--episodes", "50")
    assert set(result) >= FIELDS
    assert (result["episodes"], result["seeds"], result["greedy"]) == (50, 5, True)
    assert (result["memory"], result["policy"], result["world"]) == ("intact", "fast", "recall")
    assert (result["length_mean"], result["steps_trained"]) == (4.0, 128)
    assert result["checkpoint"] == f"{runs}/x/checkpoints/000002"
    for name in ("return", "return_iqm"):
        low, high = result[f"{name}_ci95"]
        assert 0 <= low <= result["return_mean" if name == "return" else name] <= high <= 1


def test_eval_equals_evaluate_on_held_out_seeds(evaluated, runs):
    policy, config = load_policy(runs / "x", torch.device("cpu"))
    returns = []
    for number in range(3):
        seed = held_out_seed(config, number)
        world = holdfast.make_world("recall", agents=20, delay=2, seed=seed)
        returns.append(holdfast.evaluate(policy, world, episodes=20, memory="shuffled", seed=seed).returns)
    result = evaluated("x", "--episodes", "60", "--seeds", "3", "--memory", "shuffled")
    assert result["return_mean"] == pytest.approx(float(torch.cat(returns).mean()))
    assert result == evaluated("x", "--episodes", "60", "--seeds", "3", "--memory", "shuffled")


def test_sampled_actions_differ_from_greedy(evaluated):
    greedy, sampled = evaluated("x", "--episodes", "200"), evaluated("x", "--episodes", "200", "--sampled")
    assert (greedy["greedy"], sampled["greedy"]) == (True, False)
    assert greedy["return_mean"] != sampled["return_mean"]


def test_memory_modes_are_listed_once_each(evaluated):
    args = ["--episodes", "20", "--seeds", "2"]
    assert [result["memory"] for result in evaluated("x", *args, "--memory", "all", "--memory", "frozen")] == [
        "intact",
        "cleared",
        "frozen",
        "shuffled",
    ]
    modes = ["--memory", "shuffled", "--memory", "cleared"]
    assert {result["memory"] for result in evaluated("x", *args, *modes)} == {"cleared", "shuffled"}


def test_world_keys_can_be_overridden(evaluated):
    result = evaluated("x", "world.delay=7", "--episodes", "10", "--agents", "3")
    assert result["length_mean"] == 9.0
    assert result["world_changed"] == {"world.delay": "7"}


def test_fewer_episodes_than_seeds_use_fewer_seeds(evaluated):
    result = evaluated("x", "--episodes", "3")
    assert (result["episodes"], result["seeds"]) == (3, 3)


def test_uneven_episode_counts_are_spread_over_seeds(evaluated):
    assert evaluated("x", "--episodes", "1_1", "--seeds", "3")["episodes"] == 11


def test_table_has_a_row_per_memory_mode_and_best_returns(runs, capsys):
    assert main(["eval", f"{runs}/x", "--episodes", "20", "--memory", "all"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    assert "\x1b" not in captured.out
    head, episodes, names, *rows, best = captured.out.splitlines()
    assert head == f"{runs}/x · fast after 128 steps · recall"
    assert episodes == "20 greedy episodes from 5 seeds"
    assert names.split() == ["memory", "return", "95", "%", "IQM", "95", "%", "length"]
    assert best == "best possible return 1.000 · without memory 0.250"
    number = r"\d\.\d{3}"
    for mode, row in zip(("intact", "cleared", "frozen", "shuffled"), rows, strict=True):
        pair = rf"{number} +{number} to {number}"
        assert re.fullmatch(rf"{mode} +{pair} +{pair} +4\.0", row)


def test_multi_agent_environments_are_evaluated_as_a_whole(evaluated):
    result = evaluated("arena-x", "--episodes", "100", "--seeds", "2")
    # Fifty per seed, in environments of 24 agents.
    assert result["episodes"] == 144


def test_against_plays_two_policies_in_one_environment(evaluated, runs, capsys):
    against = f"{runs}/arena-y"
    result = evaluated("arena-x", "--against", against, "--episodes", "192", "--seeds", "2")
    assert result["episodes"] == result["against_episodes"] == 96
    assert result["against"] == against
    margin = result["return_mean"] - result["against_return_mean"]
    assert result["difference_mean"] == pytest.approx(margin)
    low, high = result["difference_ci95"]
    assert low <= margin <= high
    args = ["--against", against, "--episodes", "192", "--seeds", "2", "--memory", "cleared"]
    assert main(["eval", f"{runs}/arena-x", *args]) == 0
    head, episodes, _, row, opponent_row, margin = capsys.readouterr().out.splitlines()
    assert head.endswith(f" · arena · against {against}")
    assert episodes == "192 greedy episodes from 2 seeds"
    assert row.startswith("this policy, memory cleared ")
    assert opponent_row.startswith("the opponent ")
    assert margin.startswith("difference ")


@pytest.fixture
def refused(capsys):
    """Call `holdfast eval` with wrong arguments, and return its one-line error."""

    def call(*args, code=2):
        assert main(["eval", *map(str, args)]) == code
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.startswith("holdfast: ")
        assert captured.err.count("\n") == 1
        return captured.err.removeprefix("holdfast: ").rstrip()

    return call


def test_missing_run_is_refused(refused, tmp_path):
    assert refused(tmp_path / "no") == f"{tmp_path}/no does not exist; a run's folder is for example runs/NAME."
    assert refused(tmp_path) == f"{tmp_path} is a folder without config.json, so it is not a run."
    (tmp_path / "config.json").write_text(Config().model_dump_json())
    assert "has the run saved one?" in refused(tmp_path)


def test_exactly_one_run_is_needed(refused, runs):
    assert refused() == ("Name one run to evaluate, for example: holdfast eval runs/NAME; see holdfast eval --help.")
    line = refused(runs / "x", runs / "y")
    assert line == f"Name one run to evaluate, not {runs}/x and {runs}/y; see holdfast eval --help."


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--memory", "cleard"], "argument --memory: cleard: did you mean cleared?; see holdfast eval --help."),
        (["--memory", "zzz"], "--memory: zzz: choose from intact, cleared, frozen, shuffled, all;"),
        (["--episodes", "0"], "argument --episodes: 0: give an integer above 0, such as 2000 or 1e6;"),
        (["--episodes", "-5"], "argument --episodes: -5: give an integer above 0"),
        (["--episodes", "many"], "argument --episodes: many: give an integer above 0"),
        (["--episodes", "inf"], "argument --episodes: inf: give an integer above 0"),
        (["--episodes", "1"], "--episodes 1: one episode gives no confidence interval; give 2 or more."),
        (["--episodes", "3", "--seeds", "4"], "--seeds 4 is more than 3 episodes; try --seeds 3."),
        (["--seeds", "0"], "argument --seeds: 0: give an integer above 0"),
        (["--device", "tpu"], "argument --device: invalid choice: 'tpu'"),
        (["--memroy", "cleared"], "unrecognized arguments: --memroy"),
        (["world.dealy=3"], "There is no key 'world.dealy'; did you mean world.delay?"),
        (["world.delay=-3"], "world.delay=-3: give a number from 0 to 1000000"),
        (["world.agents=8"], "world.agents=8: set the number of parallel agents with --agents 8."),
        (["seed=3"], "seed=3 cannot be changed here, only keys of the run's world: world.KEY."),
        (["world.cues=5"], ""),
    ],
)
def test_usage_error_is_one_line(refused, runs, args, message):
    if message:
        assert message in refused(runs / "x", *args)
    else:
        # Another number of cues is another number of actions, which are bound by name.
        assert main(["eval", f"{runs}/x", "--episodes", "20", *args]) == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_missing_gpu_is_refused(refused, runs):
    assert "torch finds no GPU here" in refused(runs / "x", "--device", "cuda")


def test_shuffled_memory_needs_two_agents(refused, runs):
    line = refused(runs / "x", "--memory", "shuffled", "--agents", "1", "--episodes", "4", code=1)
    assert line.endswith("it needs 2 agents or more.")


def test_episodes_longer_than_the_limit_are_cut_and_reported(runs, capsys):
    args = ["eval", f"{runs}/x", "world.delay=500", "--max-steps", "50", "--episodes", "4", "--seeds", "1", "--json"]
    assert main(args) == 0
    captured = capsys.readouterr()
    scores = json.loads(captured.out)
    assert (scores["episodes"], scores["episodes_cut"], scores["length_mean"]) == (4, 4, 50.0)
    assert captured.err.startswith("4 episodes did not end within 50 steps: each counts with its return until then, ")


def test_against_needs_several_agents_per_environment(refused, runs):
    assert refused(runs / "x", "--against", runs / "y") == (
        f"--against {runs}/y: recall has one agent per environment; use a world with several, such as arena."
    )


def test_policy_without_any_action_of_the_world_is_an_error(refused, runs):
    message = refused(runs / "arena-x", "--against", runs / "x", "--episodes", "96")
    assert message.startswith("The other policy in arena cannot be played: This policy has none of the world's")
    assert refused(runs / "arena-x", "--against", runs / "z").startswith(f"{runs}/z does not exist;")


def test_eval_help_lists_modes_and_options(capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["eval", "--help"])
    assert exit_.value.code == 0
    captured = capsys.readouterr().out
    for word in ("intact", "cleared", "frozen", "shuffled", "--against", "--json", "--sampled", "--max-steps"):
        assert word in captured


def test_a_weights_file_is_refused_with_its_folder(tmp_path, capsys):
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert main(["eval", str(tmp_path / "model.safetensors")]) == 2
    assert f"is a file; give the folder it is in, {tmp_path}." in capsys.readouterr().err
