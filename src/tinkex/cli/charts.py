"""Line charts: for the terminal, in braille dots, and as an SVG file."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from xml.sax.saxutils import escape

BLANK = 0x2800
DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
"""Bits of a braille character's dots, two columns of four."""
WIDTH, HEIGHT = 720, 400
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 40, 44
COLOURS = ("#1f77b4", "#d62728", "#2ca02c")
TICKS = 5
LONGEST_TITLE = 50


def plot(
    values: Sequence[float],
    *,
    width: int = 60,
    height: int = 8,
    label: str = "",
    ends: Sequence[object] = (),
) -> str:
    """Draw values from left to right; the axis shows the largest and the smallest.

    `ends` name the first and the last value, below the line.

    Example:
        >>> print(plot([1, 2, 3], width=4, height=2, label="loss"))
           loss
        3 │⠀⠀⣠⠞
        1 │⣠⠞⠁
          └────
        >>> print(plot([1, 2, 3], width=4, height=2, ends=(5, 7)))
        3 │⠀⠀⣠⠞
        1 │⣠⠞⠁
          └────
           5  7
    """
    if not values:
        return ""
    low, high = min(values), max(values)
    span = (high - low) or 1.0
    columns, rows = width * 2, height * 4
    cells = [[BLANK] * width for _ in range(height)]
    previous: int | None = None
    for x in range(columns):
        place = x * (len(values) - 1) / max(columns - 1, 1)
        left = int(place)
        right = min(left + 1, len(values) - 1)
        value = values[left] + (values[right] - values[left]) * (place - left)
        y = round((high - value) / span * (rows - 1))
        for row in range(
            min(y, y if previous is None else previous),
            max(y, y if previous is None else previous) + 1,
        ):
            cells[row // 4][x // 2] |= DOTS[x % 2][row % 4]
        previous = y
    axis = [f"{high:.3g}", *[""] * (height - 2), f"{low:.3g}"]
    margin = max(map(len, axis))
    lines = [
        f"{text:>{margin}} │{''.join(map(chr, row)).rstrip(chr(BLANK))}"
        for text, row in zip(axis, cells, strict=True)
    ]
    lines.append(f"{'':>{margin}} └{'─' * width}")
    if ends:
        first, last = map(str, ends)
        lines.append(f"{'':>{margin}}  {first}{last:>{max(width - len(first), len(last) + 1)}}")
    return "\n".join([f"{'':>{margin}}  {label}", *lines] if label else lines)


def chart(
    lines: Mapping[str, Sequence[tuple[float, float]]], title: str, x_label: str = "step"
) -> str:
    """Draw named lines of (x, y) points; skip lines without points."""
    drawn = {name: points for name, points in lines.items() if points}
    everything = [point for points in drawn.values() for point in points] or [(0.0, 0.0)]
    left, right = min(x for x, _ in everything), max(x for x, _ in everything)
    low, high = min(y for _, y in everything), max(y for _, y in everything)

    def x_of(x: float) -> float:
        return LEFT + (x - left) / ((right - left) or 1) * (WIDTH - LEFT - RIGHT)

    def y_of(y: float) -> float:
        return TOP + (high - y) / ((high - low) or 1) * (HEIGHT - TOP - BOTTOM)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 '
        f'{WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="22" font-size="15">{escape(title[-LONGEST_TITLE:])}</text>',
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 8}" '
        f'text-anchor="middle">{escape(x_label)}</text>',
    ]
    for tick in range(TICKS + 1):
        y = low + (high - low) * tick / TICKS
        parts += [
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y_of(y):.1f}" y2="{y_of(y):.1f}" '
            'stroke="#ddd"/>',
            f'<text x="{LEFT - 6}" y="{y_of(y) + 4:.1f}" text-anchor="end">{y:.3g}</text>',
        ]
    parts += [
        f'<text x="{x_of(step):.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{step}</text>'
        for step in steps(left, right)
    ]
    for index, (name, points) in enumerate(drawn.items()):
        colour = COLOURS[index % len(COLOURS)]
        path = " ".join(f"{x_of(x):.1f},{y_of(y):.1f}" for x, y in points)
        parts.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>'
        )
        if len(points) <= 50:
            parts += [
                f'<circle cx="{x_of(x):.1f}" cy="{y_of(y):.1f}" r="2.5" fill="{colour}"/>'
                for x, y in points
            ]
        label = WIDTH - RIGHT - 110 * (len(drawn) - index)
        parts.append(f'<text x="{label}" y="22" fill="{colour}">{escape(name)}</text>')
    return "\n".join([*parts, "</svg>\n"])


def steps(left: float, right: float) -> list[int]:
    """Return evenly spaced whole numbers within the ends, to label an axis.

    Example:
        >>> steps(1, 3), steps(1, 40)
        ([1, 2, 3], [10, 20, 30, 40])
    """
    apart, factors = 1, (2, 5, 10)
    while (right - left) / apart > TICKS:
        apart = next(size for factor in factors if (size := _unit(apart) * factor) > apart)
    return list(range(math.ceil(left / apart) * apart, math.floor(right) + 1, apart))


def _unit(size: int) -> int:
    """Return the power of ten at or below a size."""
    return int(10 ** (len(str(size)) - 1))
