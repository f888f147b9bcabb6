"""Lists every numbered requirement beside the tests that show it.

Run `python tools/coverage.py` for the whole table, with `--missing` for what no test shows yet
(which fails while there is any), with names of groups (`C D 24 W S Q 1 4 U 1.16`) for those alone.
A test shows a requirement when it carries `@pytest.mark.covers("C24")` and would turn red without
it. The markers are read from the sources; no test is imported. What the numbers stand for is in
`requirements.py`.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # run as a script, its own directory is all that is looked in

from tools.requirements import NOT_APPLICABLE, REQUIREMENTS, group_of  # noqa: E402

# ── the markers ───────────────────────────────────────────────────────────────────────────────────


class MarkerError(Exception):
    """A marker that says nothing: of an unknown number, not a plain text, or on what is no test."""


def _is_mark(node: ast.AST, name: str) -> bool:
    """Return True if a node is pytest.mark.NAME, or mark.NAME."""
    if not isinstance(node, ast.Attribute) or node.attr != name:
        return False
    owner = node.value
    return (owner.attr if isinstance(owner, ast.Attribute) else getattr(owner, "id", "")) == "mark"


def _is_pytestmark(node: ast.Assign) -> bool:
    """Return True if an assignment marks all tests beside it."""
    return any(
        isinstance(target, ast.Name) and target.id == "pytestmark" for target in node.targets
    )


def _markers(nodes: Sequence[ast.AST]) -> Iterator[ast.Call]:
    for node in nodes:
        for inner in ast.walk(node):
            if isinstance(inner, ast.Call) and _is_mark(inner.func, "covers"):
                yield inner


def _runs(decorators: Sequence[ast.expr]) -> bool:
    """Return True if a test is run and may fail; a skipped or expected failure proves nothing."""
    bare = [node.func if isinstance(node, ast.Call) else node for node in decorators]
    return not any(_is_mark(node, name) for node in bare for name in ("skip", "xfail"))


def _numbers(marker: ast.Call, place: str) -> list[str]:
    numbers = []
    for argument in marker.args:
        if not isinstance(argument, ast.Constant) or not isinstance(argument.value, str):
            raise MarkerError(f"{place}:{marker.lineno}: a number must be written out as text")
        if argument.value not in REQUIREMENTS:
            raise MarkerError(
                f"{place}:{marker.lineno}: there is no requirement {argument.value!r}"
            )
        numbers.append(argument.value)
    if marker.keywords or not numbers:
        raise MarkerError(
            f"{place}:{marker.lineno}: a marker names at least one number, and nothing else"
        )
    return numbers


def read_markers(source: str, name: str) -> list[tuple[str, str]]:
    """The (number, test) pairs of a test module; the tests are named as pytest names them.

    Raises:
        MarkerError: A marker that says nothing.
    """
    pairs: list[tuple[str, str]] = []
    used: set[ast.Call] = set()

    def visit(body: Sequence[ast.stmt], prefix: str, inherited: list[str], counts: bool) -> None:
        above = list(inherited)
        for node in body:
            if isinstance(node, ast.Assign) and _is_pytestmark(node):
                for marker in _markers([node.value]):
                    used.add(marker)
                    above += _numbers(marker, name)
        for node in body:
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                continue
            own = list(_markers(node.decorator_list))
            numbers = [number for marker in own for number in _numbers(marker, name)]
            runs = counts and _runs(node.decorator_list)
            if isinstance(node, ast.ClassDef):
                visit(node.body, f"{prefix}{node.name}::", above + numbers, runs)
            elif node.name.startswith("test_"):
                pairs.extend(
                    (number, f"{prefix}{node.name}")
                    for number in dict.fromkeys(above + numbers)
                    if runs
                )
            elif own:
                raise MarkerError(f"{name}:{node.lineno}: {node.name} is no test")
            used.update(own)

    tree = ast.parse(source, name)
    visit(tree.body, f"{name}::", [], True)
    for marker in _markers([tree]):
        if marker not in used:
            raise MarkerError(f"{name}:{marker.lineno}: this marker marks no test")
    return pairs


def collect(tests: Path) -> dict[str, list[str]]:
    """The tests that show each number, from every test module under a directory."""
    found: dict[str, list[str]] = {}
    for path in sorted([*tests.rglob("test_*.py"), *tests.rglob("checks.py")]):
        for number, test in read_markers(
            path.read_text(encoding="utf-8"), path.relative_to(tests).as_posix()
        ):
            found.setdefault(number, []).append(test)
    return found


def missing(found: Mapping[str, Sequence[str]], groups: Sequence[str] = ()) -> list[str]:
    """The numbers without a test that should have one."""
    return [
        number
        for number in REQUIREMENTS
        if number not in found
        and number not in NOT_APPLICABLE
        and (not groups or group_of(number) in groups)
    ]


# ── the table ─────────────────────────────────────────────────────────────────────────────────────


def table(found: Mapping[str, Sequence[str]], groups: Sequence[str] = ()) -> str:
    """Every number, what it asks for, and the tests that show it, as a table in Markdown."""
    lines = ["| number | what | tests |", "|---|---|---|"]
    for number, what in REQUIREMENTS.items():
        if groups and group_of(number) not in groups:
            continue
        shown = "<br>".join(found.get(number, ()))
        if not shown and number in NOT_APPLICABLE:
            shown = f"does not apply: {NOT_APPLICABLE[number]}"
        lines.append(f"| {number} | {what} | {shown or '**none**'} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; the exit status."""
    parser = argparse.ArgumentParser(
        description="Lists requirements beside the tests that show them."
    )
    groups = list(dict.fromkeys(group_of(number) for number in REQUIREMENTS))
    parser.add_argument(
        "groups", nargs="*", metavar="GROUP", help=f"only these groups, of {', '.join(groups)}"
    )
    parser.add_argument(
        "--missing",
        action="store_true",
        help="list those without a test, and fail if there are any",
    )
    parser.add_argument("--tests", type=Path, default=ROOT / "tests", help="where the tests are")
    options = parser.parse_args(arguments)
    if unknown := set(options.groups) - set(groups):
        parser.error(f"there is no group {min(unknown)!r}; there are {', '.join(groups)}")
    try:
        found = collect(options.tests)
    except MarkerError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if not options.missing:
        print(table(found, options.groups))
        return 0
    left = missing(found, options.groups)
    for number in left:
        print(f"{number} | {REQUIREMENTS[number]}")
    asked = [
        number
        for number in REQUIREMENTS
        if not options.groups or group_of(number) in options.groups
    ]
    print(f"{len(left)} of {len(asked)} requirements have no test", file=sys.stderr)
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
