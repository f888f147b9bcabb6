"""Claims of the README are true."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pages import ROOT, program, run

PAGE = ROOT / "README.md"
README = PAGE.read_text(encoding="utf-8")


def test_training_loop_runs_and_learns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "sample_stream" in program(PAGE)
    output = run(PAGE).output
    losses = [float(loss) for loss in re.findall(r"^\d+ ([\d.]+) ", output, re.MULTILINE)]
    assert len(losses) == 10
    assert losses[-1] < losses[0] / 4
    assert "tinker://" in output


def test_make_targets_it_names_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"`?make ([a-z-]+)", README):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_links_lead_somewhere() -> None:
    for link in re.findall(r"\]\(([^)]+)\)", README):
        assert link.startswith("https://") or (ROOT / link).exists(), link
