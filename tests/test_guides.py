"""The examples in the guides run as they stand."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parent.parent / "docs"


@pytest.mark.parametrize(
    ("guide", "shown"),
    [
        ("metrics", r"(?s)^(\d+) \1\n.*p50 [\d.]+ ms.*# TYPE tinkex_requests_total counter.*epoch 3\n"),
        ("regularizers", r"(?s)l1_sparsity 2\.5.*kl .*'total_grad_norm': \d"),
        ("platforms", r"tinker://\S+/weights/taught.*taught', \["),
    ],
    ids=["metrics", "regularizers", "platforms"],
)
def test_the_examples_of_a_guide_run(guide: str, shown: str, tmp_path: Path) -> None:
    text = (DOCS / f"{guide}.md").read_text(encoding="utf-8")
    program = "".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL))  # each goes on where the last ended
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert re.search(shown, done.stdout), done.stdout
