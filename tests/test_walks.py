"""The walks of docs/architecture.md name functions that a running program passes."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
STEP = re.compile(r"^\d+\. `([\w/]+\.py:[\w.]+)`:$", re.MULTILINE)
LONGEST = 30


def steps(walk: str) -> list[str]:
    """The functions of a walk, as the page lists them."""
    section = PAGE.partition(f"\n## Walk: {walk}\n")[2].partition("\n## ")[0]
    found = STEP.findall(section)
    assert len(found) == len(re.findall(r"^\d+\. ", section, re.MULTILINE)), "a step has no name"
    return found


@pytest.mark.parametrize("walk", ["forward_backward", "sample", "restart"])
def test_walk_is_what_a_running_program_does(walk: str) -> None:
    told = steps(walk)
    assert 10 <= len(told) <= LONGEST
    command = [sys.executable, str(ROOT / "tools" / "walks.py"), walk]
    traced = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert [step for step in told if step not in traced.stdout.split()] == []


def test_drawing_is_in_the_repository_and_has_a_description() -> None:
    drawing = (ROOT / "docs" / "assets" / "rooms.svg").read_text(encoding="utf-8")
    assert "(assets/rooms.svg)" in PAGE
    assert "<title" in drawing
    assert "prefers-color-scheme: dark" in drawing
    assert "://" not in drawing.replace("http://www.w3.org/2000/svg", "")


def test_every_room_of_the_package_is_on_the_page() -> None:
    rooms = {path.name for path in (ROOT / "src" / "tinkex").iterdir() if path.is_dir()}
    missing = [
        room for room in sorted(rooms - {"__pycache__", "models"}) if f"`{room}/`" not in PAGE
    ]
    assert missing == []
