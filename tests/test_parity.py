"""What the official package has and tinkex does not: known by name, written down in the docs, and
only ever less."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import tinkex

ROOT = Path(__file__).parent.parent

# Take a name out when it is there; a name that has to be put in is something that was lost.
MISSING: set[str] = set()


@pytest.fixture(scope="module")
def parity() -> ModuleType:
    """The script that compares the two packages."""
    spec = importlib.util.spec_from_file_location("parity", ROOT / "tools" / "parity.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["parity"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def compared(parity: ModuleType) -> tuple[dict[str, Any], list[tuple[str, list[Any]]]]:
    """The official surface, and the rows of the table."""
    surface = parity.ask_official()
    return surface, list(parity.sections(surface))


class Whole:
    """A class with a method of each kind that matters."""

    def done(self, used: int, *, option: str = "") -> str:
        """Do it."""
        return option * used

    async def done_async(self, *args: Any, **kwargs: Any) -> str:
        """Like `done`."""
        return self.done(*args, **kwargs)

    def half(self, used: int, unused: int = 0) -> int:
        """Do a part of it."""
        return used

    def stub(self, used: int) -> int:
        """Do nothing."""
        raise NotImplementedError

    def empty(self) -> None:
        """Do nothing."""

    def dots(self) -> None: ...


def test_table_is_current(
    parity: ModuleType,
    compared: tuple[Any, Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(parity, "ask_official", lambda: compared[0])
    assert parity.main(["--check"]) == 0, "run python tools/parity.py"
    assert "current" in capsys.readouterr().out


def test_stale_table_is_noticed(
    parity: ModuleType, compared: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(parity, "ask_official", lambda: compared[0])
    monkeypatch.setattr(parity, "TABLE", tmp_path / "parity.md")
    assert parity.main(["--check"]) == 1
    assert parity.main([]) == 0
    assert parity.main(["--check"]) == 0
    (tmp_path / "parity.md").write_text("something else")
    assert parity.main(["--check"]) == 1


def test_missing_names_are_listed(parity: ModuleType, compared: tuple[Any, Any]) -> None:
    missing = set(parity.missing_names(compared[1]))
    assert missing - MISSING == set(), "these were there, or are new in the official package"
    assert MISSING - missing == set(), "these are there now: take them out of the list"


def test_official_surface_is_read_whole(compared: tuple[Any, Any]) -> None:
    surface, parts = compared
    rows = [row for _, rows in parts for row in rows]
    assert surface["version"] == "0.38.0"
    assert len(surface["top"]) == 61
    # A type that is at the top level too has its methods in the table once, as a type.
    shown = {row.name for row in rows} | {row.name.removeprefix("types.") for row in rows}
    assert set(surface["entries"]) - shown == set()
    assert sum(row.parameters for row in rows) > 700
    assert {row.verdict for row in rows} <= {"same", "extra keywords", "differs", "MISSING"}


def test_stub_is_absent(parity: ModuleType) -> None:
    stubs = [
        name
        for name in ("done", "half", "stub", "empty", "dots")
        if parity.describe_member(Whole, name)["stub"]
    ]
    assert stubs == ["stub", "empty", "dots"]


def test_parameter_that_is_never_read_is_absent(parity: ModuleType) -> None:
    half, done = (parity.describe_member(Whole, name) for name in ("half", "done"))
    assert [one["read"] for one in half["parameters"]] == [True, False]
    wanted = {**half, "parameters": [{**one, "read": True} for one in half["parameters"]]}
    assert parity.compare_parameters(wanted, half) == (["ignores `unused`"], ["unused"], [])
    assert parity.compare_parameters(wanted, done) == (["lacks `unused`"], ["unused"], ["option"])
    assert parity.compare_parameters(half, half) == ([], [], [])


def test_twin_has_the_parameters_of_its_original(parity: ModuleType) -> None:
    twin = parity.describe_member(Whole, "done_async")
    assert twin["passes_to"] == "done"
    assert [one["name"] for one in twin["parameters"]] == ["used", "option"]
    assert twin["async"]


def test_every_public_name_resolves_and_is_in_its_place() -> None:
    for name in tinkex.__all__:
        assert getattr(tinkex, name) is not None, name
    assert tinkex.__all__ == sorted(tinkex.__all__)
    assert tinkex.TrainingRun is tinkex.types.TrainingRun
