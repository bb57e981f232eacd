"""The page of a check: verdict, laws, what is wrong and what to write, in one file that opens from disk."""

from base64 import b64encode
from html import escape

from holdfast.check import Law, Laws, Measurement
from holdfast.check.results import Reach
from holdfast.report.pictures import reach_png, telling_agent
from holdfast.report.verdict import IN_WORDS, bound, finding, number, summary
from holdfast.version import __version__

PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<main>
<h1>{title}</h1>
{body}
<footer>Measured by holdfast {version}, on scripted observations and actions, on the CPU.</footer>
</main>
</body>
</html>
"""

STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #59636e; --paper: #ffffff; --card: #f6f8fa;
  --line: #d4dae1; --good: #16793a; --good-card: #e3f6e8; --bad: #c20d22; --bad-card: #ffebec; }
@media (prefers-color-scheme: dark) { :root { --ink: #e8ebef; --soft: #9aa4b0; --paper: #12161b;
  --card: #1c2229; --line: #343c46; --good: #5fd283; --good-card: #12301d; --bad: #ff7f86;
  --bad-card: #3a1519; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 2rem 1.5rem 3rem; }
h1 { font-size: 1.6rem; margin: 0 0 1rem; overflow-wrap: anywhere; }
h2 { font-size: 1.2rem; margin: 2.2rem 0 .7rem; }
h3 { font-size: 1rem; margin: 0 0 .6rem; } h3 .soft { font-weight: 400; }
.verdict { padding: .8rem 1.1rem; border-radius: 8px; font-size: 1.1rem; font-weight: 600; }
.verdict.good { background: var(--good-card); color: var(--good); }
.verdict.bad { background: var(--bad-card); color: var(--bad); }
.good { color: var(--good); } .bad { color: var(--bad); } .soft { color: var(--soft); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; margin-top: 1.4rem; }
th { text-align: left; font-weight: 600; color: var(--soft); font-size: .85rem; }
th, td { padding: .5rem .9rem .5rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
td.number { white-space: nowrap; font-variant-numeric: tabular-nums; }
td.mark { font-weight: 700; }
td .words { display: block; color: var(--soft); font-size: .9rem; }
td details { font-size: .9rem; } summary { cursor: pointer; }
details ul { margin: .4rem 0 0; padding-left: 1.1rem; } details li { margin: .15rem 0; }
.card { background: var(--card); border-left: 4px solid var(--bad); border-radius: 6px;
  padding: 1rem 1.2rem; margin: 0 0 1rem; }
dl { display: grid; grid-template-columns: 6rem 1fr; gap: .35rem 1rem; margin: 0; }
dt { color: var(--soft); } dd { margin: 0; overflow-wrap: anywhere; }
dd.write { background: var(--paper); border: 1px solid var(--line); border-radius: 4px;
  padding: .35rem .6rem; font: .9rem/1.45 ui-monospace, monospace; }
figure { margin: 0; } figure img { width: 100%; height: auto; display: block; background: #fff;
  border: 1px solid var(--line); border-radius: 6px; }
.legend { margin: .9rem 0 0; padding-left: 1.2rem; }
footer { margin-top: 2.5rem; color: var(--soft); font-size: .85rem; }
"""

LEGEND = (
    "A row is one experiment: what the agent sees at that step is changed, and colour shows at which steps "
    "what it says changes. The third panel shows the same for gradients: which earlier sights an output "
    "pulls on while it learns.",
    "White is exactly 0. Blue is felt, the darker the more. The black line encloses where something may be "
    "felt: later in the same episode; for gradients in the same segment too.",
    "Red is felt and must not be: across the start of an episode, before it was seen, or, for gradients, "
    "across the edge of a segment.",
    "Orange outlines what is not felt although it must be.",
    "Triangles mark the agent's episode starts, where memory must be emptied; dotted lines mark segment "
    "edges; in grey steps nobody acts.",
)


def check_page(laws: Laws, title: str) -> str:
    """Write a check as one page of HTML that needs nothing beside itself."""
    body = [_verdict(laws), _table(laws)]
    broken = {name: law for name, law in laws.items() if not law.ok}
    if broken:
        body += ["<h2>What is wrong, and what to write</h2>", *(_card(*each) for each in broken.items())]
    if laws.notes:
        notes = "".join(f"<li>{escape(note)}</li>" for note in laws.notes)
        body.append(f"<h2>Notes</h2>\n<ul>{notes}</ul>")
    if laws.reach is not None:
        body.append(_figure(laws.reach))
    return PAGE.format(title=escape(title), style=STYLE, body="\n".join(body), version=escape(__version__))


def _verdict(laws: Laws) -> str:
    kind, mark = ("good", "✓") if laws.ok else ("bad", "✗")
    return f'<p class="verdict {kind}">{mark} {escape(summary(laws))}</p>'


def _table(laws: Laws) -> str:
    head = "".join(f"<th>{each}</th>" for each in ("law", "measured", "bound", "", "what was measured"))
    rows = "\n".join(_row(name, law) for name, law in laws.items())
    inside = f"<thead><tr>{head}</tr></thead>\n<tbody>\n{rows}\n</tbody>"
    return f'<div class="scroll"><table>\n{inside}</table></div>'


def _row(name: str, law: Law) -> str:
    words = f'<strong>{escape(name)}</strong><span class="words">{escape(IN_WORDS[name])}</span>'
    numbers = (
        f'<td class="number">{number(law.measured)}</td><td class="number">{escape(bound(law.worst))}</td>'
    )
    return f"<tr><td>{words}</td>{numbers}<td class='mark'>{_mark(law.ok)}</td><td>{_parts(law)}</td></tr>"


def _parts(law: Law) -> str:
    """Show the measurement that counts, and all others on demand."""
    what = escape(law.worst.what)
    if len(law.parts) == 1:
        return what
    listed = "".join(f"<li>{_part(part)}</li>" for part in law.parts)
    return (
        f"{what}<details><summary class='soft'>all {len(law.parts)} measurements</summary>"
        f"<ul>{listed}</ul></details>"
    )


def _part(part: Measurement) -> str:
    told = f"{_mark(part.ok)} {escape(part.what)}: {number(part.measured)} ({escape(bound(part))})"
    return told if part.ok else f"{told}<br><span class='soft'>{escape(part.finding)}</span>"


def _mark(ok: bool) -> str:
    return '<span class="good">✓</span>' if ok else '<span class="bad">✗</span>'


def _card(name: str, law: Law) -> str:
    found = finding(law)
    others = f' <span class="soft">and {found.more} more like it, in the table</span>' if found.more else ""
    lines = [("measured", escape(found.what) + others), ("where", escape(found.where))]
    lines += [("size", escape(found.size))]
    lines += [("pattern", escape(found.pattern or "none we know explains these numbers"))]
    told = "\n".join(f"<dt>{term}</dt><dd>{words}</dd>" for term, words in lines)
    if found.write is not None:
        told += f'\n<dt>write</dt><dd class="write">{escape(found.write)}</dd>'
    words = f'<span class="soft">{escape(IN_WORDS[name])}</span>'
    head = f'<h3><span class="bad">✗ {escape(name)}</span> {words}</h3>'
    return f'<section class="card">{head}\n<dl>{told}</dl></section>'


def _figure(reach: Reach) -> str:
    agent = telling_agent(reach)
    data = b64encode(reach_png(reach, agent, dpi=170)).decode()
    alt = f"What agent {agent} sees at each step, and at which steps it is felt"
    legend = "".join(f"<li>{escape(each)}</li>" for each in LEGEND)
    return (
        f'<h2>What reaches where</h2>\n<figure><img alt="{alt}" src="data:image/png;base64,{data}">\n'
        f'<figcaption><ul class="legend">{legend}</ul></figcaption></figure>'
    )
