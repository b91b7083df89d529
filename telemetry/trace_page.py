"""A trace as one self-contained HTML page: no script, no font, no server."""

from __future__ import annotations

from html import escape

from ..config import STAGES
from ..config.clock import milliseconds
from . import names
from .trace_file import Span
from .trace_tree import Trace

_STYLE = """
:root { color-scheme: light dark; --ground: #fcfcfb; --ink: #1c1d21; --faint: #6a6d76;
  --line: #e3e3e0; --touched: #f1f1ee; --other: #7d818c; --error: #c62a2f;
  --admission: #0e8a9c; --fairness: #9a4fb8; --batching: #a87000; --executor: #2c8a3e;
  --streaming: #2f6fd0; }
@media (prefers-color-scheme: dark) { :root { --ground: #16171a; --ink: #e6e6e3; --faint: #979aa3;
  --line: #2d2f35; --touched: #202228; --other: #8b8f9a; --error: #ff6b6b;
  --admission: #3cc0d4; --fairness: #c58be0; --batching: #e0ac3f; --executor: #5cc470;
  --streaming: #6fa5ff; } }
* { box-sizing: border-box; }
body { margin: 2rem auto; max-width: 76rem; padding: 0 1.25rem; background: var(--ground);
  color: var(--ink); font: 14px/1.5 system-ui, sans-serif; font-variant-numeric: tabular-nums; }
h1 { font-size: 1.25rem; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 1rem; margin: 2rem 0 .25rem; }
p { margin: .25rem 0 1.25rem; color: var(--faint); overflow-wrap: anywhere; }
.row > summary, .axis { display: grid; grid-template-columns: minmax(8rem, 13rem) 1fr 5.5rem 5.5rem;
  gap: .75rem; align-items: center; }
.row { border-top: 1px solid var(--line); }
.row > summary { cursor: pointer; list-style: none; padding: .3rem 0; }
.row > summary::-webkit-details-marker { display: none; }
.row > summary:hover, .row[open] > summary { background: var(--touched); }
.name { white-space: nowrap; overflow: hidden; text-overflow: ellipsis; }
.number { text-align: right; }
.axis { color: var(--faint); font-size: 12px; padding-bottom: .2rem; }
.axis div:nth-child(2) { display: flex; justify-content: space-between; }
.lane { position: relative; height: 1.1rem; background: linear-gradient(90deg, var(--line) 1px,
  transparent 1px) 0 0 / 25% 100%; border-right: 1px solid var(--line); }
.bar { position: absolute; top: .15rem; bottom: .15rem; min-width: 2px; border-radius: 2px;
  background: var(--colour); }
.mark { position: absolute; top: -.05rem; bottom: -.05rem; width: 2px; margin-left: -1px;
  background: var(--ink); }
.failed .name, .failed .number { color: var(--error); }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .1rem 1rem; margin: 0;
  padding: .3rem 0 .8rem 1rem; font-size: 13px; }
dt { color: var(--faint); } dd { margin: 0; overflow-wrap: anywhere; }
"""


def page(trace: Trace) -> str:
    """Return the page, in the browser's light or dark scheme. A click opens a row."""
    start, end = trace.start_ns, trace.end_ns
    total = milliseconds(end - start)
    title = escape(trace.request_id)
    rows = "\n".join(_row(*row, start, end) for row in trace.rows)
    steps = "\n".join(_row(step, 0, start, end) for step in trace.steps)
    if steps:
        steps = f"<h2>Recorded steps of the lane</h2>\n{steps}"
    return f"""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{_STYLE}</style>
<h1>{title}</h1>
<p>{total} ms, {len(trace.rows)} spans of {len(trace.processes)} processes, trace
{trace.trace_id}</p>
<div class="axis"><div></div><div>{_ticks(end - start)}</div>
<div class="number">start ms</div><div class="number">took ms</div></div>
{rows}
{steps}
</html>
"""


def _ticks(total_ns: int) -> str:
    return "".join(f"<span>{milliseconds(total_ns * part // 4)}</span>" for part in range(5))


def _row(span: Span, depth: int, start_ns: int, end_ns: int) -> str:
    stage = str(span.attributes.get(names.STAGE, ""))
    colour = stage if stage in STAGES else "other"
    scale = 100 / (end_ns - start_ns)
    left = max(0.0, min(100.0, (span.start_ns - start_ns) * scale))
    width = max(0.0, min(100 - left, (span.end_ns - span.start_ns) * scale))
    marks = "".join(
        f'<i class="mark" style="left:{(at_ns - start_ns) * scale:.3f}%" '
        f'title="{escape(name)}"></i>'
        for name, at_ns in span.events
        if start_ns <= at_ns <= end_ns
    )
    return (
        f'<details class="row{" failed" if span.error else ""}"><summary>'
        f'<span class="name" style="padding-left:{depth}rem">{escape(span.name)}</span>'
        f'<span class="lane"><i class="bar" style="--colour:var(--{colour});'
        f'left:{left:.3f}%;width:{width:.3f}%"></i>{marks}</span>'
        f'<span class="number">{milliseconds(span.start_ns - start_ns)}</span>'
        f'<span class="number">{milliseconds(span.end_ns - span.start_ns)}</span></summary>'
        f"{_details(span, start_ns)}</details>"
    )


def _details(span: Span, start_ns: int) -> str:
    pairs = [("error", span.error)] if span.error else []
    pairs += [(name, f"at {milliseconds(at_ns - start_ns)} ms") for name, at_ns in span.events]
    for key, value in sorted(span.attributes.items()):
        pairs.append((key, ", ".join(value) if isinstance(value, list) else str(value)))
    pairs.append(("process", span.instance))
    return f"<dl>{''.join(f'<dt>{escape(k)}</dt><dd>{escape(v)}</dd>' for k, v in pairs)}</dl>"
