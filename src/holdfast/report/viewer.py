"""The viewer of a replay: one HTML fragment that needs no network."""

from base64 import b64encode
from html import escape
from importlib.resources import files
from pathlib import Path

from holdfast.report.replay import Replay

FRAGMENT = """<section class="hf-viewer" tabindex="0" aria-label="{label}">
<style>{style}</style>
<noscript>The viewer of this replay needs JavaScript.</noscript>
<script type="application/octet-stream" class="hf-data">{data}</script>
<script>(() => {{
{script}
const root = document.currentScript.parentElement;
hfPlay(root).catch((error) => root.append(hfElement("p", "hf-error", `It cannot be shown: ${{error.message}}`)));
}})();</script>
</section>"""


def resource(name: str) -> str:
    """Return a file of this folder: a style sheet or a script."""
    return (files("holdfast.report") / name).read_text(encoding="utf-8")


def viewer_section(replay: str | Path | Replay) -> str:
    """Return a replay as an HTML fragment with its data, style and script; it loads nothing.

    The file is validated and encoded again, so that the page has nothing of it but its numbers and names; these are
    base64, and the script shows names as text.
    """
    loaded = replay if isinstance(replay, Replay) else Replay.load(replay)
    header = loaded.header
    return FRAGMENT.format(
        label=escape(f"Replay of {header.run}: {len(header.agents)} agents, {loaded.steps} steps", quote=True),
        style=resource("viewer.css"),
        data=b64encode(loaded.to_bytes()).decode(),
        script=resource("viewer.js") + resource("replay_player.js"),
    )
