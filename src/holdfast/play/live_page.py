"""The live page as HTML: the viewer of replays, controls, and changes of memory."""

from base64 import b64encode
from html import escape
from importlib.resources import files

from holdfast.play.live import LivePlay
from holdfast.report.viewer import resource

PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<link rel="icon" href="data:,">
<title>{title}</title>
<style nonce="{nonce}">
{style}
</style>
</head>
<body>
<main>
<header class="hf-head"><h1>{run}</h1><p>{about}</p></header>
<section class="hf-viewer" tabindex="0" aria-label="{title}"></section>
</main>
<script nonce="{nonce}" type="application/octet-stream" id="header">{header}</script>
<script nonce="{nonce}">
{script}
hfLive(document.querySelector(".hf-viewer"), JSON.parse(new TextDecoder().decode(hfBytes(header.textContent))));
</script>
</body>
</html>
"""


def live_page(play: LivePlay, nonce: str) -> str:
    """Return the page; its script asks the server for the state of play."""
    header = play.header
    about = f"{header.policy} in {header.world}, trained for {header.steps_trained:,} steps · held-out episodes"
    here = files("holdfast.play")
    return PAGE.format(
        nonce=nonce,
        title=escape(f"{header.run} · holdfast play", quote=True),
        run=escape(header.run),
        about=escape(about),
        style=resource("viewer.css") + (here / "live.css").read_text(encoding="utf-8"),
        header=b64encode(header.model_dump_json().encode()).decode(),
        script=resource("viewer.js") + (here / "live.js").read_text(encoding="utf-8"),
    )
