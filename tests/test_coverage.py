"""The list of requirements and the markers on tests: read as they are meant, and no marker says
nothing."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def coverage() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "requirements_tool", ROOT / "tools" / "coverage.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def found(coverage: ModuleType) -> dict[str, list[str]]:
    """Return the requirements of each test."""
    shown: dict[str, list[str]] = coverage.collect(ROOT / "tests")
    return shown


def test_every_marker_in_the_tests_names_a_requirement(found: dict[str, list[str]]) -> None:
    assert found
    assert all(tests for tests in found.values())


def test_numbers_are_complete(coverage: ModuleType) -> None:
    numbers = list(coverage.REQUIREMENTS)
    for prefix, last, width in (
        ("C", 90, 2),
        ("D", 34, 2),
        ("W", 27, 2),
        ("S", 44, 1),
        ("Q-", 29, 1),
    ):
        assert [number for number in numbers if number.startswith(prefix)] == [
            f"{prefix}{index:0{width}}" for index in range(1, last + 1)
        ]
    clauses = [number.split(".") for number in numbers if number.startswith("24.")]
    sizes = {part: sum(clause[1] == part for clause in clauses) for _, part, _ in clauses}
    assert sizes == {
        "config": 8,
        "http": 12,
        "session": 7,
        "service": 7,
        "training": 12,
        "custom": 3,
        "futures": 11,
        "sampling": 10,
        "rest": 8,
        "types": 8,
        "code": 22,
    }
    assert all(what.strip() for what in coverage.REQUIREMENTS.values())


def test_every_section_of_the_extras_lists_its_rows(coverage: ModuleType) -> None:
    sections: dict[str, list[str]] = {}
    for number in coverage.REQUIREMENTS:
        if coverage.group_of(number) in ("1", "4"):
            section, _, row = number.partition("/")
            sections.setdefault(section, []).append(row)
    assert all(
        rows == [str(index) for index in range(1, len(rows) + 1)] for rows in sections.values()
    )
    # as many as the tables of the list have rows: a row that is dropped is noticed
    sizes = {
        "1.1.2": 6,
        "1.1.4": 11,
        "1.1.5": 6,
        "1.2.3": 20,
        "1.4.2": 9,
        "1.5.1": 14,
        "1.5.3": 6,
        "1.11.1": 11,
    }
    sizes |= {
        "1.11.4": 9,
        "1.12.7": 7,
        "1.12.8": 12,
        "1.12.9": 14,
        "1.13": 7,
        "1.14.2": 7,
        "1.17.2": 7,
        "1.19": 7,
    }
    assert {section: len(sections[section]) for section in sizes} == sizes
    first = {section.split(".")[1] for section in sections if section.startswith("1.")}
    assert len(first) == 18  # 1 to 19, without the command line
    commands = [number for number in coverage.REQUIREMENTS if coverage.group_of(number) == "1.16"]
    assert commands == [f"1.16.{index}" for index in range(1, 8)]


def test_inapplicable_requirements_give_a_reason(coverage: ModuleType) -> None:
    assert coverage.NOT_APPLICABLE.keys() <= coverage.REQUIREMENTS.keys()
    assert all(len(reason) > 20 for reason in coverage.NOT_APPLICABLE.values())


def test_every_weakness_has_a_test_of_its_name(found: dict[str, list[str]]) -> None:
    for number in (f"W{index:02}" for index in range(1, 28)):
        names = [
            test.split("::")[1] for test in found[number] if test.startswith("test_weaknesses.py::")
        ]
        assert any(name.startswith(f"test_{number.lower()}_") for name in names), number


SOURCE = """
import pytest
from pytest import mark

pytestmark = [pytest.mark.slow, pytest.mark.covers("C01")]

@pytest.mark.covers("C02", "D17")
def test_one() -> None: ...

@pytest.mark.parametrize("x", [1, pytest.param(2, marks=pytest.mark.covers("W03"))])
@mark.covers("24.http.1")
async def test_two(x: int) -> None: ...

@pytest.mark.covers("S7")
class TestSeveral:
    @pytest.mark.covers("Q-2")
    def test_three(self) -> None: ...
    def helper(self) -> None: ...

def test_bare() -> None: ...
"""


def test_markers_are_read_in_every_place(coverage: ModuleType) -> None:
    pairs = set(coverage.read_markers(SOURCE, "t.py"))
    assert {test for number, test in pairs if number == "C01"} == {
        "t.py::test_one",
        "t.py::test_two",
        "t.py::TestSeveral::test_three",
        "t.py::test_bare",
    }
    assert {pair for pair in pairs if pair[0] != "C01"} == {
        ("C02", "t.py::test_one"),
        ("D17", "t.py::test_one"),
        ("W03", "t.py::test_two"),
        ("24.http.1", "t.py::test_two"),
        ("S7", "t.py::TestSeveral::test_three"),
        ("Q-2", "t.py::TestSeveral::test_three"),
    }


@pytest.mark.parametrize("mark", ["skip", 'skip(reason="x")', "xfail", "xfail(strict=True)"])
def test_test_that_cannot_fail_proves_nothing(coverage: ModuleType, mark: str) -> None:
    source = f'@pytest.mark.covers("C01")\n@pytest.mark.{mark}\ndef test_one(): ...'
    assert coverage.read_markers(source, "t.py") == []
    assert coverage.read_markers(source.replace(mark, "slow"), "t.py") == [
        ("C01", "t.py::test_one")
    ]


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ('@pytest.mark.covers("C91")\ndef test_a(): ...', r"t.py:1: there is no requirement 'C91'"),
        ('@pytest.mark.covers("c01")\ndef test_a(): ...', "no requirement 'c01'"),
        ("@pytest.mark.covers(NUMBER)\ndef test_a(): ...", "written out"),
        ("@pytest.mark.covers(1)\ndef test_a(): ...", "written out"),
        ("@pytest.mark.covers()\ndef test_a(): ...", "at least one"),
        ('@pytest.mark.covers("C01", why="x")\ndef test_a(): ...', "at least one"),
        ('@pytest.mark.covers("C01")\ndef helper(): ...', "helper is no test"),
        ('each = pytest.mark.covers("C01")\ndef test_a(): ...', "marks no test"),
        ('pytestmark = pytest.mark.covers("C00")\ndef test_a(): ...', "no requirement 'C00'"),
    ],
)
def test_empty_marker_is_an_error(coverage: ModuleType, source: str, words: str) -> None:
    with pytest.raises(coverage.MarkerError, match=words):
        coverage.read_markers(source, "t.py")


def write(directory: Path, *numbers: str) -> Path:
    """A directory of tests, one for these numbers."""
    shown = ", ".join(f'"{number}"' for number in numbers)
    (directory / "deep").mkdir()
    (directory / "deep" / "test_it.py").write_text(
        f"@pytest.mark.covers({shown})\ndef test_a(): ..."
    )
    (directory / "helper.py").write_text("@pytest.mark.covers(1)\ndef test_a(): ...")
    return directory


def test_missing_requirement_is_listed_and_fails(
    coverage: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tests = write(tmp_path, *(f"D{index:02}" for index in range(1, 33)))
    assert coverage.main(["--missing", "D", "--tests", str(tests)]) == 1
    shown = capsys.readouterr()
    assert shown.out.splitlines() == [f"D34 | {coverage.REQUIREMENTS['D34']}"]  # D33 does not apply
    assert "1 of 34" in shown.err
    assert coverage.main(["--missing", "--tests", str(tests)]) == 1
    assert "W01 |" in capsys.readouterr().out


def test_full_coverage_succeeds(coverage: ModuleType, tmp_path: Path) -> None:
    tests = write(tmp_path, *(f"W{index:02}" for index in range(1, 28)))
    assert coverage.main(["--missing", "W", "--tests", str(tests)]) == 0


def test_table_names_the_tests(
    coverage: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert coverage.main(["D", "--tests", str(write(tmp_path, "D01"))]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "| number | what | tests |"
    assert lines[2].startswith("| D01 |")
    assert lines[2].endswith("| deep/test_it.py::test_a |")
    assert lines[3].endswith("| **none** |")
    assert "does not apply: " in lines[34]
    assert len(lines) == 2 + 34


def test_bad_markers_and_unknown_groups_are_errors(
    coverage: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert coverage.main(["--tests", str(write(tmp_path, "C99"))]) == 2
    assert "there is no requirement 'C99'" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        coverage.main(["X"])
