import json
import re

import pytest
import torch

import holdfast
from holdfast.build import load_policy
from holdfast.cli import main
from holdfast.config import Config
from holdfast.unseen import unseen_seed

TINY = {
    "world.agents": 4,
    "world.delay": 2,
    "trainer.bptt_horizon": 8,
    "trainer.batch_size": 64,
    "trainer.minibatch_size": 32,
    "trainer.total_timesteps": 128,
    "trainer.eval_episodes": 4,
    "policy.hidden_size": 8,
    "policy.num_layers": 1,
}
CROWD = {
    **TINY,
    "world": "arena",
    "world.agents": 24,
    "world.size": 14,
    "world.length": 4,
    "trainer.batch_size": 384,
    "trainer.minibatch_size": 96,
}
PROMISED = {
    *("episodes", "return_mean", "return_iqm", "return_ci95", "length_mean"),
    *("memory", "policy", "world", "steps_trained"),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two policies that name cues, and two that gather; none of them learnt anything."""
    folder = tmp_path_factory.mktemp("runs")
    for name, keys in (("x", {}), ("y", {"seed": 1})):
        holdfast.train("recall", {**TINY, **keys, "run": name, "runs_dir": str(folder)})
        few = {key: value for key, value in CROWD.items() if key != "world.delay"}
        holdfast.train("arena", {**few, **keys, "run": f"arena-{name}", "runs_dir": str(folder)})
    return folder


@pytest.fixture
def evaluated(runs, capsys):
    """Evaluate a run as JSON, and return what was said."""

    def play(name, *words):
        assert main(["eval", f"{runs}/{name}", "--json", *words]) == 0
        said = capsys.readouterr()
        assert said.err == ""
        return json.loads(said.out)

    return play


def test_an_evaluation_tells_what_was_promised(evaluated, runs):
    found = evaluated("x", "--episodes", "50")
    assert set(found) >= PROMISED
    assert (found["episodes"], found["seeds"], found["greedy"]) == (50, 5, True)
    assert (found["memory"], found["policy"], found["world"]) == ("intact", "fast", "recall")
    assert (found["length_mean"], found["steps_trained"]) == (4.0, 128)
    assert found["checkpoint"] == f"{runs}/x/checkpoints/000002"
    for name in ("return", "return_iqm"):
        low, high = found[f"{name}_ci95"]
        assert 0 <= low <= found["return_mean" if name == "return" else name] <= high <= 1


def test_it_is_what_python_gives_on_unseen_episodes(evaluated, runs):
    policy, config = load_policy(runs / "x", torch.device("cpu"))
    returns = []
    for number in range(3):
        seed = unseen_seed(config, number)
        world = holdfast.make_world("recall", agents=20, delay=2, seed=seed)
        returns.append(holdfast.evaluate(policy, world, episodes=20, memory="shuffled", seed=seed).returns)
    found = evaluated("x", "--episodes", "60", "--seeds", "3", "--memory", "shuffled")
    assert found["return_mean"] == pytest.approx(float(torch.cat(returns).mean()))
    assert found == evaluated("x", "--episodes", "60", "--seeds", "3", "--memory", "shuffled")


def test_drawn_actions_are_another_evaluation(evaluated):
    greedy, sampled = evaluated("x", "--episodes", "200"), evaluated("x", "--episodes", "200", "--sampled")
    assert (greedy["greedy"], sampled["greedy"]) == (True, False)
    assert greedy["return_mean"] != sampled["return_mean"]


def test_several_modes_are_a_list_each_once(evaluated):
    words = ["--episodes", "20", "--seeds", "2"]
    assert [found["memory"] for found in evaluated("x", *words, "--memory", "all", "--memory", "frozen")] == [
        "intact",
        "cleared",
        "frozen",
        "shuffled",
    ]
    modes = ["--memory", "shuffled", "--memory", "cleared"]
    assert {found["memory"] for found in evaluated("x", *words, *modes)} == {"cleared", "shuffled"}


def test_the_world_can_be_changed(evaluated):
    found = evaluated("x", "world.delay=7", "--episodes", "10", "--agents", "3")
    assert found["length_mean"] == 9.0
    assert found["world_changed"] == {"world.delay": "7"}


def test_fewer_episodes_than_seeds_are_played_from_fewer(evaluated):
    found = evaluated("x", "--episodes", "3")
    assert (found["episodes"], found["seeds"]) == (3, 3)


def test_an_uneven_number_is_spread_over_the_seeds(evaluated):
    assert evaluated("x", "--episodes", "1_1", "--seeds", "3")["episodes"] == 11


def test_the_table_has_a_row_for_each_mode_and_the_bests(runs, capsys):
    assert main(["eval", f"{runs}/x", "--episodes", "20", "--memory", "all"]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    assert "\x1b" not in said.out
    head, played, names, *rows, best = said.out.splitlines()
    assert head == f"{runs}/x · fast after 128 steps · recall"
    assert played == "20 greedy episodes from 5 seeds"
    assert names.split() == ["memory", "return", "95", "%", "middle", "half", "95", "%", "length"]
    assert best == "the best there is 1.000 · the best without memory 0.250"
    number = r"\d\.\d{3}"
    for mode, row in zip(("intact", "cleared", "frozen", "shuffled"), rows, strict=True):
        pair = rf"{number} +{number} to {number}"
        assert re.fullmatch(rf"{mode} +{pair} +{pair} +4\.0", row)


def test_crowds_are_played_whole(evaluated):
    found = evaluated("arena-x", "--episodes", "100", "--seeds", "2")
    # Fifty for each seed, in crowds of 24.
    assert found["episodes"] == 144


def test_a_policy_plays_against_another_where_several_share_a_place(evaluated, runs, capsys):
    against = f"{runs}/arena-y"
    found = evaluated("arena-x", "--against", against, "--episodes", "192", "--seeds", "2")
    assert found["episodes"] == found["against_episodes"] == 96
    assert found["against"] == against
    lead = found["return_mean"] - found["against_return_mean"]
    assert found["difference_mean"] == pytest.approx(lead)
    low, high = found["difference_ci95"]
    assert low <= lead <= high
    words = ["--against", against, "--episodes", "192", "--seeds", "2", "--memory", "cleared"]
    assert main(["eval", f"{runs}/arena-x", *words]) == 0
    head, played, _, mine, theirs, told = capsys.readouterr().out.splitlines()
    assert head.endswith(f" · arena · against {against}")
    assert played == "192 greedy episodes from 2 seeds"
    assert mine.startswith("this one, memory cleared ")
    assert theirs.startswith("the other ")
    assert told.startswith("difference ")


@pytest.fixture
def refused(capsys):
    """Give a wrong call to `holdfast eval`, and return the one line it is answered with."""

    def give(*words, code=2):
        assert main(["eval", *map(str, words)]) == code
        said = capsys.readouterr()
        assert said.out == ""
        assert said.err.startswith("holdfast: ")
        assert said.err.count("\n") == 1
        return said.err.removeprefix("holdfast: ").rstrip()

    return give


def test_a_run_that_is_not_there_is_told(refused, tmp_path):
    assert (
        refused(tmp_path / "no") == f"{tmp_path}/no does not exist; a run's folder is for example runs/NAME."
    )
    assert refused(tmp_path) == f"{tmp_path} is a folder without config.json, so it is no run."
    (tmp_path / "config.json").write_text(Config().model_dump_json())
    assert "has the run saved one?" in refused(tmp_path)


def test_naming_no_run_or_two_is_told(refused, runs):
    assert refused() == (
        "Name one run to evaluate, for example: holdfast eval runs/NAME; see holdfast eval --help."
    )
    told = refused(runs / "x", runs / "y")
    assert told == f"Name one run to evaluate, not {runs}/x and {runs}/y; see holdfast eval --help."


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--memory", "cleard"], "--memory cleard: there is no such mode; did you mean cleared?"),
        (["--memory", "zzz"], "there is intact, cleared, frozen, shuffled, all."),
        (["--episodes", "0"], "argument --episodes: 0: give a whole number above 0, such as 2000 or 1e6;"),
        (["--episodes", "-5"], "argument --episodes: -5: give a whole number above 0"),
        (["--episodes", "many"], "argument --episodes: many: give a whole number above 0"),
        (["--episodes", "inf"], "argument --episodes: inf: give a whole number above 0"),
        (["--episodes", "1"], "--episodes 1: one episode says nothing of chance; give 2 or more."),
        (["--episodes", "3", "--seeds", "4"], "--seeds 4 are more than 3 episodes; try --seeds 3."),
        (["--seeds", "0"], "argument --seeds: 0: give a whole number above 0"),
        (["--device", "tpu"], "argument --device: invalid choice: 'tpu'"),
        (["--memroy", "cleared"], "unrecognized arguments: --memroy"),
        (["world.dealy=3"], "There is no key 'world.dealy'; did you mean world.delay?"),
        (["world.delay=-3"], "world.delay=-3: give a number from 0 to 1000000"),
        (["world.agents=8"], "world.agents=8: how many play at once is said by --agents 8."),
        (["seed=3"], "seed=3 cannot be changed here; keys of the run's world can: world.KEY."),
        (["world.cues=5"], ""),
    ],
)
def test_a_wrong_call_is_one_line(refused, runs, words, told):
    if told:
        assert told in refused(runs / "x", *words)
    else:
        # Another number of cues is another number of actions: known by name, so it can be played.
        assert main(["eval", f"{runs}/x", "--episodes", "20", *words]) == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_an_evaluation_on_a_gpu_that_is_not_there_is_told(refused, runs):
    assert "torch finds no GPU here" in refused(runs / "x", "--device", "cuda")


def test_one_agent_alone_has_nobody_to_shuffle_with(refused, runs):
    told = refused(runs / "x", "--memory", "shuffled", "--agents", "1", "--episodes", "4", code=1)
    assert told.endswith("it needs 2 agents or more.")


def test_a_world_that_never_ends_is_not_good(refused, runs):
    told = refused(runs / "x", "world.delay=500", "--patience", "50", "--episodes", "4", code=1)
    assert told == "Agent 0 finished no episode within 50 steps; evaluation needs episodes that end."


def test_where_everybody_is_alone_nobody_is_played_against(refused, runs):
    assert refused(runs / "x", "--against", runs / "y") == (
        f"--against {runs}/y: in recall everybody is alone; play against others where several share a place, "
        "such as arena."
    )


def test_a_policy_that_knows_nothing_of_this_world_is_told(refused, runs):
    told = refused(runs / "arena-x", "--against", runs / "x", "--episodes", "96")
    assert told.startswith(
        "The other policy in arena cannot be played: This policy knows none of the world's"
    )
    assert refused(runs / "arena-x", "--against", runs / "z").startswith(f"{runs}/z does not exist;")


def test_help_tells_of_every_mode(capsys):
    with pytest.raises(SystemExit) as left:
        main(["eval", "--help"])
    assert left.value.code == 0
    said = capsys.readouterr().out
    for word in ("intact", "cleared", "frozen", "shuffled", "--against", "--json", "--sampled", "--patience"):
        assert word in said


def test_a_file_of_weights_is_told_with_its_folder(tmp_path, capsys):
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert main(["eval", str(tmp_path / "model.safetensors")]) == 2
    assert f"is a file; give the folder it lies in, {tmp_path}." in capsys.readouterr().err
