"""The programs of the showcase reach what they state, each in a process of its own, as a reader
would run it."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "examples" / "showcase"
SHARED = "setting.py"
PROGRAMS = sorted(path.name for path in FOLDER.glob("*.py") if path.name != SHARED)


def test_showcase_explains_and_lists_its_eight_programs() -> None:
    readme = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert len(PROGRAMS) == 8
    for name in [*PROGRAMS, SHARED]:
        source = (FOLDER / name).read_text(encoding="utf-8")
        compile(source, name, "exec")
        assert ast.get_docstring(ast.parse(source)), f"{name} does not say what it is for"
        assert f"({name})" in readme, f"{name} is not in the README"
        assert name == SHARED or "conclude(" in source, f"{name} states no result"
    for link in re.findall(r"\]\(([^)]+)\)", readme):
        assert (FOLDER / link).exists(), link


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", PROGRAMS)
def test_program_reaches_its_stated_result(name: str, tmp_path: Path) -> None:
    environment = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("TINKER_", "TINKEX_"))
    }
    environment |= {
        "TINKEX_DATA_DIR": str(tmp_path / "data"),
        "SHOWCASE_SVG": str(tmp_path),
        "COLUMNS": "200",
    }
    done = subprocess.run(
        [sys.executable, FOLDER / name],
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert re.search(
        r"^stated: {3}\S.*\nmeasured: \S.*\nresult: {3}reached, \d+ s of CPU time$",
        done.stdout,
        re.M,
    )
    for picture in tmp_path.glob("*.svg"):
        assert picture.read_text(encoding="utf-8").startswith("<svg ")


@pytest.mark.slow
def test_program_that_does_not_reach_its_result_fails() -> None:
    program = (
        "from setting import conclude; conclude('at least 2', '1', reached=1 >= 2); "
        "print('went on')"
    )
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(FOLDER), os.environ.get("PYTHONPATH", "")]),
    }
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    assert "result:   NOT reached" in done.stdout
    assert "went on" not in done.stdout
