"""Timelines as one self-contained HTML page."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from planner.schedule.events import Timeline
from planner.schedule.picture import svg
from planner.schedule.units import format_seconds

_STYLE = """
  body { margin: 2rem auto; max-width: 1240px; padding: 0 1rem; background: #ffffff; color: #111827;
         font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; }
  h1 { font-size: 1.4rem; }
  table { border-collapse: collapse; margin: 1rem 0 1.5rem; }
  th, td { padding: .3rem 1.2rem .3rem 0; border-bottom: 1px solid #e5e7eb; text-align: right; }
  th:first-child, td:first-child { text-align: left; }
  figure { margin: 0; overflow-x: auto; }
  figcaption { color: #4b5563; }
"""


def html(
    traces: Sequence[Timeline], title: str = "Timeline of one training step"
) -> str:
    """A page with a table of step time and bubble, and the picture of all timelines; it loads nothing.

    Raises:
        SpecError: there is no timeline.
    """
    rows = "\n".join(map(_row, traces))
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>{_STYLE}</style>
</head>
<body>
<h1>{escape(title)}</h1>
<table>
<thead><tr><th>timeline</th><th>ranks</th><th>step time</th><th>bubble</th></tr></thead>
<tbody>
{rows}
</tbody>
</table>
<figure>
{svg(traces)}
<figcaption>One row per rank, and under it what the rank holds over time; the number in a bar is its
micro-batch. Hover over a bar or a curve to read it.</figcaption>
</figure>
</body>
</html>
"""


def _row(trace: Timeline) -> str:
    return (
        f"<tr><td>{escape(trace.title)}</td><td>{len(trace.ranks)}</td>"
        f"<td>{format_seconds(trace.step_seconds)}</td><td>{trace.bubble_fraction:.1%}</td></tr>"
    )
