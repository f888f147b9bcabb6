"""Measure the shape of the code: sizes, cycles, names, widths.

`python tools/shape.py` prints a table; `--list NAME` prints what a figure counts.
`tests/test_shape.py` holds each figure to a ceiling.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import subprocess
import sys
import tempfile
import threading
import time
import tokenize
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).resolve().parent.parent
SRC = ROOT / "src" / "tinkex"

MOST_METHODS = 25
MOST_LINES = 500
WIDTH = 100
RUN = 6
"""Lines that two places must share to count as written twice."""
CLAUSE = re.compile(r"(What|Whatever|Whether|How|Where|Whose|Who|Whoever|Which|When)\b")
LINK = re.compile(r"\]\(|https?://|^\s*\[[^\]]+\]:")
PRAGMA = re.compile(r"  # (type: ignore|noqa)\b.*$")
SKIPPED_TOKENS = frozenset(
    {
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENCODING,
        tokenize.ENDMARKER,
    }
)


# ── reading ───────────────────────────────────────────────────────────────────────────────────────


def sources(*folders: str) -> list[Path]:
    """Return the Python files of some folders of the repository."""
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


@cache
def tree_of(path: Path) -> ast.Module:
    """Parse a file."""
    return ast.parse(path.read_text())


def module_name(path: Path) -> str:
    """Return the dotted name of a file in `src`."""
    parts = list(path.relative_to(SRC.parent).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def modules() -> Mapping[str, Path]:
    """Return the package's files by module name."""
    return {module_name(path): path for path in sources("src")}


def shown(path: Path) -> str:
    """Return a file's path in the repository."""
    return path.relative_to(ROOT).as_posix()


# ── sizes ─────────────────────────────────────────────────────────────────────────────────────────


def _texts(path: Path) -> Iterator[ast.Constant]:
    """Yield docstrings, and the strings below attributes that describe them."""
    for node in ast.walk(tree_of(path)):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            yield node.value


def _text_lines(path: Path) -> set[int]:
    return {
        line
        for text in _texts(path)
        for line in range(text.lineno, (text.end_lineno or text.lineno) + 1)
    }


def code_lines(path: Path) -> int:
    """Count the lines that hold code: no blank line, comment or docstring."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        if token.type not in SKIPPED_TOKENS:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - _text_lines(path))


def rooms() -> dict[str, int]:
    """Return the code lines of each folder of the package, the flat modules as one."""
    found: dict[str, int] = defaultdict(int)
    for path in modules().values():
        parts = path.relative_to(SRC).parts
        found[parts[0] if len(parts) > 1 else "(flat)"] += code_lines(path)
    return dict(found)


def flat_modules() -> list[str]:
    """List the modules that lie directly in the package."""
    return sorted(path.name for path in SRC.glob("*.py") if not path.name.startswith("__"))


def large_files() -> list[str]:
    """List the files of the package with more than 500 lines."""
    counts = {shown(path): len(path.read_text().splitlines()) for path in modules().values()}
    return [f"{name}: {count}" for name, count in sorted(counts.items()) if count > MOST_LINES]


def large_classes() -> list[str]:
    """List the classes with more than 25 methods; overloads count once."""
    found = []
    for path in modules().values():
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ClassDef):
                names = {
                    n.name
                    for n in node.body
                    if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)
                }
                if len(names) > MOST_METHODS:
                    found.append(f"{shown(path)}: {node.name}: {len(names)}")
    return sorted(found)


def repeated_names() -> list[str]:
    """List the module names that stand in several folders."""
    places: dict[str, list[str]] = defaultdict(list)
    for path in modules().values():
        if not path.name.startswith("__"):
            places[path.stem].append(shown(path))
    return [
        f"{name}: {', '.join(found)}" for name, found in sorted(places.items()) if len(found) > 1
    ]


# ── imports ───────────────────────────────────────────────────────────────────────────────────────


def _imports(path: Path) -> Iterator[str]:
    """Yield the package's modules that a file imports anywhere, also in functions and for type
    checkers.
    """
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules())
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                if whole in modules():
                    yield whole
                elif node.module in modules():
                    yield node.module


def import_graph() -> dict[str, set[str]]:
    """Return, for each module, the modules that it imports."""
    return {name: set(_imports(path)) - {name} for name, path in modules().items()}


def cycles() -> list[str]:
    """List the import cycles, imports in functions and for type checkers included."""
    graph = import_graph()
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[str] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in graph[name]:
            if other not in index:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], index[other])
        if low[name] == index[name]:
            members = stack[stack.index(name) :]
            del stack[stack.index(name) :]
            if len(members) > 1:
                found.append(" ".join(sorted(members)))

    sys.setrecursionlimit(max(sys.getrecursionlimit(), 10_000))
    for name in sorted(graph):
        if name not in index:
            visit(name)
    return sorted(found)


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__") and name != "_"


def _own_names(path: Path) -> set[str]:
    """Return the private names that a file defines: functions, classes, variables, attributes,
    fields.
    """
    names: set[str] = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.attr)
        elif (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and _is_private(node.value)
        ):
            names.add(node.value)
    return names


def private_uses() -> list[str]:
    """List the uses of private names of the package's other modules."""
    own = {module: _own_names(path) for module, path in modules().items()}
    known = {name for names in own.values() for name in names if _is_private(name)}
    return sorted(
        f"{shown(path)}:{use}"
        for module, path in modules().items()
        for use in _private_uses(path, known - own[module])
    )


def _private_uses(path: Path, foreign: set[str]) -> Iterator[str]:
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tinkex"):
            for alias in node.names:
                if _is_private(alias.name) and alias.name != "_version":
                    yield f"{node.lineno}: {node.module}.{alias.name}"
        elif isinstance(node, ast.Attribute) and node.attr in foreign and not _is_self(node.value):
            yield f"{node.lineno}: {ast.unparse(node)}"


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


# ── words ─────────────────────────────────────────────────────────────────────────────────────────


def clause_docstrings(*folders: str) -> list[str]:
    """List the docstrings that open with a clause in place of a verb or a noun phrase."""
    found = []
    for path in sources(*(folders or ("src",))):
        for text in _texts(path):
            opening = str(text.value).strip().partition("\n")[0]
            if CLAUSE.match(opening):
                found.append(f"{shown(path)}:{text.lineno}: {opening[:70]}")
    return found


def _lines_of(path: Path) -> Iterator[tuple[int, str]]:
    fenced = False
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if path.suffix == ".md" and line.lstrip().startswith("```"):
            fenced = not fenced
        if not (path.suffix == ".md" and (fenced or line.lstrip().startswith("|"))):
            yield number, line


def wide_lines(suffix: str) -> list[str]:
    """List the lines beyond 100 columns, without tables, links and blocks of Markdown.

    A remark for a tool (`# type: ignore`, `# noqa`) does not count: it cannot be wrapped.
    """
    names = ("src", "tests", "tools", "bench", "examples", "docs")
    files = [path for name in names for path in (ROOT / name).rglob(f"*{suffix}")]
    return [
        f"{shown(path)}:{number}: {len(line)}"
        for path in sorted([*files, *ROOT.glob(f"*{suffix}")])
        for number, line in _lines_of(path)
        if len(PRAGMA.sub("", line)) > WIDTH and not LINK.search(line)
    ]


# ── repetition ────────────────────────────────────────────────────────────────────────────────────


def _shapes(path: Path) -> list[tuple[int, str]]:
    """Return the code lines of a file without names, numbers and strings, imports left out."""
    imports = {
        line
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    skipped = imports | _text_lines(path)
    lines = path.read_text().splitlines()
    return [
        (number, " ".join(line.split()))
        for number, line in enumerate(lines, 1)
        if number not in skipped
        and len(re.sub(r"[^A-Za-z]", "", line)) > 2
        and not line.lstrip().startswith("#")
    ]


def repeated_runs() -> list[str]:
    """List the pairs of files (or a file with itself) that share a run of six identical lines of
    code.
    """
    places: dict[tuple[str, ...], list[tuple[Path, int]]] = defaultdict(list)
    for path in modules().values():
        lines = _shapes(path)
        for start in range(len(lines) - RUN + 1):
            run = lines[start : start + RUN]
            places[tuple(text for _, text in run)].append((path, run[0][0]))
    pairs: dict[tuple[Path, Path], tuple[int, int]] = {}
    for found in places.values():
        for number, (path, line) in enumerate(found):
            for other, second in found[number + 1 :]:
                if path != other or second - line >= RUN:
                    pairs.setdefault((path, other), (line, second))
    return sorted(
        f"{shown(a)}:{first} ~ {shown(b)}:{second}" for (a, b), (first, second) in pairs.items()
    )


# ── the way of a request ─────────────────────────────────────────────────────────────────────────


@cache
def way() -> tuple[str, ...]:
    """List the functions that hand one `forward_backward` on to another module, there and back.

    It is traced in a process of its own: threads that run already would not be seen.
    """
    command = [sys.executable, __file__, "--trace"]
    traced = subprocess.run(command, capture_output=True, text=True, check=True)
    return tuple(traced.stdout.split())


def trace() -> list[str]:
    """Trace one `forward_backward` in this process.

    Client and server run over the fake engine, and the call is not the first of its run.
    Comprehensions, lambdas and `__dunder__` methods do not count.
    """
    sys.path.insert(0, str(ROOT / "src"))
    from tinkex import AdamParams, Datum, LocalBackend, ModelInput, ServiceClient
    from tinkex.engine.fake import FakeEngine

    calls: set[tuple[str, str]] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and (callee := _step(frame)) is not None:
            above = frame.f_back
            while above is not None and (caller := _step(above)) is None:
                above = above.f_back
            if above is not None and caller is not None:
                calls.add((caller, callee))

    data = [Datum(ModelInput.from_ints([1, 2, 3]), {"target_tokens": [2, 3, 4]})]
    threading.setprofile(note)
    try:
        with (
            tempfile.TemporaryDirectory() as folder,
            LocalBackend(data_dir=folder, engine=FakeEngine()) as backend,
            ServiceClient(base_url=backend.base_url) as service,
        ):
            client = service.create_lora_training_client("fake", rank=4).result()
            client.forward_backward(data, "cross_entropy").result()
            client.optim_step(AdamParams(learning_rate=0.1)).result()
            time.sleep(0.3)
            calls.clear()
            sys.setprofile(note)
            for _ in range(8):  # which thread is the first at something differs
                client.forward_backward(data, "cross_entropy").result()
            sys.setprofile(None)
            made = set(calls)
    finally:
        threading.setprofile(None)
    return sorted({a for a, b in made if a.partition(":")[0] != b.partition(":")[0]})


def _step(frame: FrameType) -> str | None:
    """Name the function of a frame by its place in the package; None if it does not count."""
    code = frame.f_code
    if not code.co_filename.startswith(str(SRC)) or not code.co_name.isidentifier():
        return None
    if code.co_name.startswith("__"):
        return None
    return f"{Path(code.co_filename).relative_to(SRC)}:{code.co_qualname.replace('<locals>.', '')}"


def way_modules() -> list[str]:
    """List the modules on the way of one `forward_backward`."""
    return sorted({step.partition(":")[0] for step in way()})


# ── the table ─────────────────────────────────────────────────────────────────────────────────────

FIGURES: dict[str, tuple[str, Callable[[], Sequence[str]]]] = {
    "flat-modules": ("modules that lie flat in the package", flat_modules),
    "cycles": ("import cycles, with imports in functions", cycles),
    "large-classes": ("classes above 25 methods", large_classes),
    "large-files": ("files above 500 lines", large_files),
    "repeated-names": ("module names that occur twice", repeated_names),
    "repeated-runs": ("pairs of files that share six lines of code", repeated_runs),
    "way-functions": ("functions that hand a forward_backward on to another module", way),
    "way-modules": ("modules on the way of a forward_backward", way_modules),
    "private-uses": ("private names used across modules", private_uses),
    "clauses": ("docstrings in src that open with a clause", clause_docstrings),
    "wide-code": ("lines of code above 100 columns", lambda: wide_lines(".py")),
    "wide-prose": ("lines of Markdown above 100 columns", lambda: wide_lines(".md")),
}


def code_total() -> int:
    """Count the lines of code in the package."""
    return sum(rooms().values())


def rows() -> Iterable[tuple[str, int, str]]:
    """Yield each figure: its name, its value and its meaning."""
    yield "code", code_total(), "lines of code in src"
    for name, (meaning, measure) in FIGURES.items():
        yield name, len(measure()), meaning


def main() -> None:
    """Print the figures, or what one of them counts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--list", choices=FIGURES, help="print what this figure counts")
    parser.add_argument("--trace", action="store_true", help="print the way of a forward_backward")
    args = parser.parse_args()
    if args.trace:
        print("\n".join(trace()))
        return
    if args.list:
        print("\n".join(FIGURES[args.list][1]()))
        return
    for name, value, meaning in rows():
        print(f"{name:15} {value:7,}  {meaning}")
    for room, lines in sorted(rooms().items(), key=lambda item: -item[1]):
        print(f"  {room:13} {lines:7,}")


if __name__ == "__main__":
    main()
