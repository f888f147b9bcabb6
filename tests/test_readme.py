"""What the README says is so."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_the_training_loop_runs_and_learns() -> None:
    program = "".join(re.findall(r"```python\n(.*?)```", README, re.DOTALL))  # each goes on where the last ended
    assert "sample_stream" in program
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"^\d+ ([\d.]+) ", done.stdout, re.MULTILINE)]
    assert len(losses) == 10
    assert losses[-1] < losses[0] / 4
    assert "tinker://" in done.stdout


def test_the_make_targets_it_names_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"`?make ([a-z-]+)", README):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_the_links_lead_somewhere() -> None:
    for link in re.findall(r"\]\(([^)]+)\)", README):
        assert link.startswith("https://") or (ROOT / link).exists(), link
