"""Two-digit addition: the verifiable task of the bundled model, its demo and its tests.

The task has a fixed held-out split over *unordered* pairs: when ``{a, b}`` is held out, neither ``a
+ b`` nor ``b + a`` occurs in the bundled model's training text, in any wording, nor in
`training_problems`. Accuracy on `held_out_problems` therefore measures addition, not memory.
"""

from __future__ import annotations

import hashlib

SMALLEST = 10
"""Smallest addend of the task."""

LARGEST = 99
"""Largest addend of the task."""

STOP = "\n"
"""The text that ends an answer; the bundled tokenizer always makes it one token of its own."""

MAX_ANSWER_TOKENS = 4
"""Enough tokens for the longest answer: three digits and the stop."""

_HELD_OUT_ONE_IN = 16


def is_held_out(a: int, b: int) -> bool:
    """Tell whether the unordered pair ``{a, b}`` belongs to the held-out split.

    The rule is a hash of the ordered pair of the smaller and the larger number, so it needs no
    table, depends on no random state, and gives ``(a, b)`` and ``(b, a)`` the same side.

    Args:
        a: One addend.
        b: The other addend.

    Returns:
        True for about one pair in sixteen of the two-digit pairs, False for every pair with a
        number that is not of two digits.
    """
    low, high = min(a, b), max(a, b)
    if low < SMALLEST or high > LARGEST:
        return False
    digest = hashlib.sha256(f"addition {low} {high}".encode()).digest()
    return int.from_bytes(digest[:8], "big") % _HELD_OUT_ONE_IN == 0


def _problems(held_out: bool) -> list[tuple[int, int]]:
    numbers = range(SMALLEST, LARGEST + 1)
    return [(a, b) for a in numbers for b in numbers if is_held_out(a, b) is held_out]


def training_problems() -> list[tuple[int, int]]:
    """List every ordered problem that training may use, in ascending order."""
    return _problems(held_out=False)


def held_out_problems() -> list[tuple[int, int]]:
    """List every ordered problem that only evaluation may use, in ascending order."""
    return _problems(held_out=True)


def prompt(a: int, b: int) -> str:
    """Write the text that asks for ``a + b``, such as ``37+45=``."""
    return f"{a}+{b}="


def answer(a: int, b: int) -> str:
    r"""Write the text that answers `prompt`, stop included, such as ``82\n``."""
    return f"{a + b}{STOP}"


def reward(text: str, a: int, b: int) -> float:
    """Score a sampled answer.

    Args:
        text: What the model wrote after `prompt`, with or without the stop; text behind the stop is
            ignored.
        a: The first addend.
        b: The second addend.

    Returns:
        1.0 if the text up to the stop is the sum and nothing else, otherwise 0.0.
    """
    return 1.0 if text.partition(STOP)[0].strip() == str(a + b) else 0.0
