"""Folders of runs for tests of reports, written by hand."""

import json
import re
from html.parser import HTMLParser

VOID = {"meta", "br", "img", "link"}
SELF_CLOSED_IN_SVG = {"path", "use", "rect", "image", "line", "circle"}


def write_run(folder, name="a", lines=None, seed=0, **config):
    """Write config, command and metrics of a run; `lines` are objects, or text as it is."""
    path = folder / name
    path.mkdir(parents=True)
    trainer = {"bptt_horizon": 8, "total_timesteps": 640, "batch_size": 64}
    values = {"world": {"name": "recall", "delay": 8}, "policy": {"name": "fast"}, "seed": seed, "trainer": trainer}
    (path / "config.json").write_text(json.dumps(values | config))
    (path / "command.txt").write_text(f"command: holdfast train recall seed={seed}\nholdfast: 0.1.0\n")
    lines = [line(i, seed) for i in range(1, 11)] if lines is None else lines
    text = "".join(f"{each if isinstance(each, str) else json.dumps(each)}\n" for each in lines)
    (path / "metrics.jsonl").write_text(text)
    return path


def line(iteration, seed=0, **more):
    """One line of metrics of a run whose memory is right."""
    metrics = {
        "iteration": iteration,
        "global_step": 64 * iteration,
        "seconds": 0.5 * iteration,
        "charts/SPS": 1000.0,
        "charts/episodic_return": 0.25 + 0.05 * iteration + 0.01 * seed,
        "charts/episodic_length": 10.0,
        "memory/replay_error": 1e-7,
        "memory/replay_value_error": 2e-8,
        "memory/resets": 6,
        "memory/resets_due": 6,
        "memory/drift": 0.1,
        "memory/stale_kl": 1e-4,
        "losses/approx_kl": 1e-3,
        **{f"time/{phase}": 0.1 for phase in ("world", "forward", "copy", "update", "other")},
    }
    if iteration % 5 == 0:
        metrics |= {"memory/gradient_reach": 4, "gradients/within@1": 0.3, "gradients/within@8": 1.0}
    return metrics | more


class Page(HTMLParser):
    """A parsed page: its elements, its text, what it would load; all tags must be closed."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.words, self.attributes = [], [], "", []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "script" not in self.open[-1:] and "style" not in self.open[-1:]:
            self.words += data

    @property
    def loads(self):
        """Addresses that a browser would fetch."""
        names = ("src", "href", "xlink:href", "action")
        values = [value for name, value in self.attributes if name in names and value]
        inside = ("#", "data:image/png;base64,", "data:image/webp;base64,", "data:video/mp4;base64,")
        return [value for value in values if not value.startswith(inside)]

    @property
    def handlers(self):
        """Attributes that run code."""
        return [name for name, _ in self.attributes if name.startswith("on")]


def data_of(page):
    """The numbers of the plots, by plot."""
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)[1])
