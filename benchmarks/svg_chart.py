"""Small line charts as SVG text, both axes logarithmic: enough for curves beside their limits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd")
WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 420, 320, 58, 34, 14, 46


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """`points` are (x, y), both above 0. Lines of one colour belong together."""

    label: str
    points: Sequence[tuple[float, float]]
    colour: int
    is_limit: bool = False
    """Dashed, without points."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    title: str
    x_label: str
    y_label: str
    lines: Sequence[Line]


def svg(charts: Sequence[Chart]) -> str:
    """Side by side."""
    panels = "".join(
        f'<g transform="translate({i * WIDTH},0)">{_panel(chart)}</g>'
        for i, chart in enumerate(charts)
    )
    width = WIDTH * len(charts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {HEIGHT}" width="{width}" '
        f'height="{HEIGHT}" font-family="sans-serif" font-size="11">'
        f'<rect width="100%" height="100%" fill="white"/>{panels}</svg>\n'
    )


def _panel(chart: Chart) -> str:
    xs = [x for line in chart.lines for x, _ in line.points]
    ys = [y for line in chart.lines for _, y in line.points]
    x_range = min(xs), max(xs)
    y_range = 10 ** math.floor(math.log10(min(ys))), 10 ** math.ceil(math.log10(max(ys)))
    middle = LEFT + (WIDTH - LEFT - RIGHT) / 2
    parts = [
        _text(middle, 18, chart.title, "middle", 'font-weight="bold"'),
        _text(middle, HEIGHT - 8, chart.x_label, "middle"),
        _text(LEFT - 44, TOP - 8, chart.y_label, "start"),
    ]
    for x in sorted(set(xs)):
        at = _place(x, x_range, LEFT, WIDTH - RIGHT)
        parts += [_rule(at, TOP, at, HEIGHT - BOTTOM)]
        parts += [_text(at, HEIGHT - BOTTOM + 15, f"{x:g}", "middle")]
    for power in range(round(math.log10(y_range[0])), round(math.log10(y_range[1])) + 1):
        at = _place(10**power, y_range, HEIGHT - BOTTOM, TOP)
        parts += [_rule(LEFT, at, WIDTH - RIGHT, at)]
        parts += [_text(LEFT - 5, at + 4, f"{10**power:g}", "end")]
    parts += [_line(line, x_range, y_range) for line in chart.lines]
    measured = [line for line in chart.lines if not line.is_limit]
    parts += [
        _text(LEFT + 8, TOP + 14 * (i + 1), line.label, "start", f'fill="{_colour(line)}"')
        for i, line in enumerate(measured)
    ]
    parts += [_text(LEFT + 8, TOP + 14 * (len(measured) + 1), "dashed: limit", "start")]
    return "".join(parts)


def _line(line: Line, x_range: tuple[float, float], y_range: tuple[float, float]) -> str:
    places = [
        (_place(x, x_range, LEFT, WIDTH - RIGHT), _place(y, y_range, HEIGHT - BOTTOM, TOP))
        for x, y in line.points
    ]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    style = ' stroke-dasharray="4 3"' if line.is_limit else ""
    dots = "".join(
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{_colour(line)}"/>' for x, y in places
    )
    return f'<polyline points="{path}" fill="none" stroke="{_colour(line)}"{style}/>' + (
        "" if line.is_limit else dots
    )


def _place(value: float, bounds: tuple[float, float], start: float, end: float) -> float:
    low, high = map(math.log, bounds)
    return start + (math.log(value) - low) / ((high - low) or 1) * (end - start)


def _colour(line: Line) -> str:
    return COLOURS[line.colour % len(COLOURS)]


def _rule(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="#ddd"/>'


def _text(x: float, y: float, text: str, anchor: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {more}>{escape(text)}</text>'
