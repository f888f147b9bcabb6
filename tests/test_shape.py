"""The shape of the code, held to ceilings. A ceiling rises only in a commit that says why."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from tools import shape  # noqa: E402

CEILINGS = {
    "flat-modules": 9,
    "cycles": 0,
    "large-classes": 0,
    "large-files": 2,
    "repeated-names": 0,
    "repeated-runs": 4,
    "way-functions": 57,
    "way-modules": 18,
    "private-uses": 0,
    "clauses": 0,
    "wide-code": 0,
    "wide-prose": 0,
}
LARGE = {
    "errors.py": "one tree of errors, most of it documentation",
    "types/record.py": "the base of all records: one mechanism",
}
"""Files above 500 lines, and why each is one."""
CODE = 44_704
"""Lines of code of the package, at 100 columns, without docstrings, comments and blank lines."""


def test_ceilings_cover_every_figure() -> None:
    assert CEILINGS.keys() == shape.FIGURES.keys()


@pytest.mark.parametrize("name", CEILINGS)
def test_figure_stays_below_its_ceiling(name: str) -> None:
    found = shape.FIGURES[name][1]()
    listed = "\n".join(found)
    assert len(found) <= CEILINGS[name], f"{shape.FIGURES[name][0]}:\n{listed}"


def test_large_files_have_a_reason() -> None:
    found = {line.partition(":")[0].removeprefix("src/tinkex/") for line in shape.large_files()}
    assert found == LARGE.keys()


def test_code_does_not_grow() -> None:
    assert shape.code_total() <= CODE, shape.rooms()


def test_each_figure_finds_its_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package with one fault of each kind is found out."""
    package = tmp_path / "src" / "tinkex"
    (package / "room").mkdir(parents=True)
    methods = "".join(f"    def m{number}(self) -> None: ...\n" for number in range(26))
    run = "".join(f"value{number} = call({number})\n" for number in range(6))
    (package / "__init__.py").write_text("")
    (package / "one.py").write_text(
        f'"""What it is."""\n\ndef ask() -> None:\n    from tinkex.room import two\n\n{run}'
        f"class Large:\n{methods}" + "x = 1\n" * 500 + "y = 'wide'" + " " * 100 + "\n"
    )
    (package / "room" / "__init__.py").write_text("")
    (package / "room" / "one.py").write_text("")
    (package / "room" / "two.py").write_text(f"from tinkex.one import ask, _hidden\n{run}")
    monkeypatch.setattr(shape, "ROOT", tmp_path)
    monkeypatch.setattr(shape, "SRC", package)
    shape.modules.cache_clear()
    try:
        counts = {
            name: len(measure())
            for name, (_, measure) in shape.FIGURES.items()
            if not name.startswith("way")
        }
        assert counts == {
            "flat-modules": 1,
            "cycles": 1,
            "large-classes": 1,
            "large-files": 1,
            "repeated-names": 1,
            "repeated-runs": 1,
            "private-uses": 1,
            "clauses": 1,
            "wide-code": 1,
            "wide-prose": 0,
        }
    finally:
        shape.modules.cache_clear()
