"""Parsing component graphs: one clear error for a bad graph."""

import re

import pytest

from helpers.component_graphs import SMALL, with_line
from helpers.component_graphs import make_graph_policy as make
from holdfast.errors import ConfigError
from holdfast.policies.components.graph import GraphError, find_graph, read_graph


@pytest.mark.parametrize(
    ("text", "message", "place"),
    [
        (
            with_line("sources: [flat], out: 6", "sources: [_core_], out: 6"),
            "it reads itself: ",
            "seen",
        ),
        (
            with_line("sources: [flat], out: 6", "sources: [flatt], out: 6"),
            "its source flatt is not there; did you mean flat?",
            "seen",
        ),
        (
            with_line("Linear, sources: [flat], out: 6", "Conv2d, sources: [flat], out_channels: 2, kernel_size: 3"),
            "it reads [channels, rows, columns]; its source gives [605].",
            "seen",
        ),
        (
            with_line("component: Linear, sources: [flat]", "component: Linnear, sources: [flat]"),
            "There is no component 'Linnear'; did you mean Linear?",
            "seen",
        ),
        (SMALL + "  _core_: {component: LSTM, sources: [seen]}\n", "there are two _core_", "_core_"),
        (with_line("  _value_: ", "  worth: "), "there is no _value_; a graph has _obs_, _core_", None),
        (SMALL + "  idle: {component: Flatten, sources: [_obs_]}\n", "idle is not used", "idle"),
        (with_line("out: 6", "outt: 6"), "Linear has no option 'outt'; did you mean out?", "seen"),
        (with_line(", out: 6", ""), "Linear needs the option 'out'.", "seen"),
        (with_line("out: 6", "out: many"), "out='many': ", "seen"),
        (with_line("LSTM, sources: [seen]", "Linear, out: 4, sources: [seen]"), "", "_core_"),
        (with_line("out: actions", "out: 3"), "it must give [4]; it gives [3].", "_action_"),
        (with_line("sources: [flat], ", ""), "it reads nothing; name its sources.", "seen"),
        (with_line("sources: [flat], ", "sources: 3, "), "sources is a list of names", "seen"),
        (with_line("component: Flatten, ", ""), "say which component it is", "flat"),
        (with_line("flat: {", "items: {"), "the name items is taken", "items"),
        (with_line("flat: {", "training: {"), "the name training is taken", "training"),
        (with_line("flat: {", "fl-at: {"), "a component's name is one word", "fl-at"),
        (with_line("out: 6", "out: 6, out: 7"), "line 5: out is given twice.", None),
        (with_line("flat: {", "1: {"), "'1' is not a name", None),
        (with_line("flat: {", "yes: {"), "'yes' is not a name", None),
        (with_line("flat: {", "? [a, b]\n  : {"), "is not", None),
        (with_line("out: 6", "out: 2024-13-45"), "is not YAML that can be read", None),
        (with_line("out: 6", "out: !!int x"), "is not YAML that can be read", None),
        ("", "has no components", None),
        ("components: {a: " + "[" * 5000, "is not YAML that can be read", None),
        (
            "components: {a: [&a0 [1]" + "".join(f", &a{n + 1} [*a{n}, *a{n}]" for n in range(20)) + "]}",
            "aliases expand to more than 100,000 values",
            None,
        ),
        (with_line("Flatten, sources: [_obs_]", "TokensToBox"), "only _obs_ does", "flat"),
        (with_line("{component: TokensToBox}", "{component: Flatten, sources: [flat]}"), "", "_obs_"),
        (with_line("hidden_size: 8", "hidden_size: 0"), "hidden_size", "_core_"),
        ("components: [1, 2]", "has no components", None),
        ("parts: {}", "has no components", None),
        (SMALL + "colour: red\n", "has 'colour' beside its components", None),
        ("components: {a: [", "is not YAML", None),
        ("components:\n\t_obs_: 1", "is not YAML", None),
    ],
)
def test_invalid_graph_raises_at_its_line(text, message, place):
    with pytest.raises(ConfigError) as caught:
        make(text)
    first, *graph = str(caught.value).splitlines()
    assert first.startswith("small.yaml")
    assert message in first
    marked = [line for line in graph if line.startswith(">")]
    assert len(marked) == (0 if place is None else 1 + ("there are two" in message))
    if place is not None:
        assert marked[0].split()[1] == place
        assert re.match(rf"small.yaml, line \d+, {place}: ", first)
        assert len(graph) >= 6


def test_yaml_anchors_and_merges():
    text = SMALL.replace("_value_: {", "_value_: &head {").splitlines()
    *rest, action, value = [line for line in text if line]
    merged = "\n".join([*rest, value, action.split("{")[0] + "{<<: *head, out: actions}"])
    assert make(merged).shapes["_action_"] == (4,)


def test_error_names_the_line_of_the_file():
    with pytest.raises(GraphError, match=r"small.yaml, line 5, seen: "):
        make(with_line("out: 6", "outt: 6"))


def test_find_graph_in_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "configs" / "agent"
    folder.mkdir(parents=True)
    (folder / "mine.yaml").write_text(SMALL)
    assert find_graph("mine").where == "configs/agent/mine.yaml"
    assert find_graph("configs/agent/mine.yaml").text == SMALL
    with pytest.raises(ConfigError, match="There is no component graph 'mien'; did you mean mine"):
        find_graph("mien")
    (folder / "fast.yaml").write_text(SMALL)
    with pytest.raises(ConfigError, match=r"agent=configs/agent/fast.yaml"):
        find_graph("fast")
    with pytest.raises(ConfigError, match="is not a regular file"):
        read_graph(folder)
