"""A line plot for the terminal, in braille dots: two by four to a character."""

from __future__ import annotations

from collections.abc import Sequence

BLANK = 0x2800
DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))


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
