"""Pages of documentation as programs: the Python blocks of a page run in order, in one namespace.

The fence of a block decides:

    ```python                              is run; if its first line is indented, it continues the
                                           block before
    ```python title="Not run: a reason"    is compiled only; there are few of these
    ```text title="Output"                 is the output of the Python block before

(The site shows titles, so that readers see both.) A comment `# → …` at the end of a line holds what
that line prints, or the value of its expression. In both, `…` stands for anything, and an output
line that is `…` alone for any number of lines.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import io
import re
import shlex
import types
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
FENCE = re.compile(r"^( *)(`{3,})(.*)$")
ARROW = re.compile(r"#\s*→\s*(.*?)\s*$")
ANYTHING = "…"


@dataclass(frozen=True)
class Block:
    """A fenced block: what its fence says, its text, and the number of its first line."""

    info: str
    text: str
    line: int

    @property
    def last(self) -> int:
        """The number of its last line."""
        return self.line + self.text.count("\n") - 1

    @property
    def language(self) -> str:
        """The first word of the fence."""
        return self.info.split(" ", 1)[0]

    @property
    def is_run(self) -> bool:
        """True if this is a part of the page's program."""
        return self.info == "python"

    @property
    def reason(self) -> str | None:
        """Why the block is not run; None when it is."""
        found = re.fullmatch(r'python title="Not run: (.*)"', self.info)
        return found[1] if found else None

    @property
    def is_output(self) -> bool:
        """True if this is the output of the block before it."""
        return self.info == 'text title="Output"'


def pages() -> list[Path]:
    """Every page of the documentation, the README left out."""
    return sorted(DOCS.rglob("*.md"))


def name_of(page: Path) -> str:
    """A page by its place in the project."""
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page."""
    found: list[Block] = []
    opened: tuple[str, str, int] | None = None
    lines: list[str] = []
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        fence = FENCE.match(line)
        if opened is None:
            if fence:
                opened, lines = (fence[2], fence[3].strip(), number + 1), []
        elif fence and fence[2] == opened[0] and not fence[3].strip():
            found.append(Block(opened[1], "".join(f"{text}\n" for text in lines), opened[2]))
            opened = None
        else:
            lines.append(line)
    assert opened is None, f"{name_of(page)}: the block of line {opened and opened[2]} has no end"
    return found


def program(page: Path) -> str:
    """The blocks of a page that are run, each on the lines it has in the page, so that errors name
    these."""
    lines = [""] * len(page.read_text(encoding="utf-8").splitlines())
    for block in blocks(page):
        if block.is_run:
            lines[block.line - 1 : block.last] = block.text.splitlines()
    return "\n".join(lines) + "\n"


@dataclass
class Run:
    """Output of a page, statement by statement."""

    printed: list[tuple[int, str]] = field(default_factory=list)
    """The last line of each statement, and its output."""

    @property
    def output(self) -> str:
        """Everything it printed."""
        return "".join(text for _, text in self.printed)

    def between(self, first: int, last: int) -> str:
        """Return the output of the statements that end on these lines."""
        return "".join(text for line, text in self.printed if first <= line <= last)


def run(page: Path) -> Run:
    """Run a page, and compare what it prints with what it says it prints."""
    source, done = program(page), Run()
    arrows = {
        number: found[1]
        for number, line in enumerate(source.splitlines(), 1)
        if (found := ARROW.search(line))
    }
    namespace = types.ModuleType("page").__dict__
    for statement in ast.parse(source, name_of(page)).body:
        last = statement.end_lineno or statement.lineno
        with contextlib.redirect_stdout(io.StringIO()) as output:
            value = _execute(statement, name_of(page), namespace)
        done.printed.append((last, output.getvalue()))
        shown = output.getvalue().splitlines() or ([] if value is None else [repr(value)])
        expected = [
            arrows.pop(number) for number in range(statement.lineno, last + 1) if number in arrows
        ]
        _compare_arrows(f"{name_of(page)}:{statement.lineno}", expected, shown)
    assert not arrows, f"{name_of(page)}: nothing runs on the lines {sorted(arrows)}"
    _compare_outputs(page, done)
    return done


def _execute(statement: ast.stmt, name: str, namespace: dict[str, object]) -> object:
    if isinstance(statement, ast.Expr):
        return eval(compile(ast.Expression(statement.value), name, "eval"), namespace)
    exec(compile(ast.Module([statement], []), name, "exec"), namespace)
    return None


def _compare_arrows(place: str, expected: list[str], shown: list[str]) -> None:
    """Each of these must be a line of the output, in this order."""
    rest = iter(shown)
    for text in expected:
        assert any(matches(text, line) for line in rest), (
            f"{place}: expected {text!r}, printed {shown}"
        )


def _compare_outputs(page: Path, done: Run) -> None:
    before: Block | None = None
    first = 0
    for block in blocks(page):
        if block.is_output:
            assert before is not None, (
                f"{name_of(page)}:{block.line}: an output without a program before it"
            )
            printed = done.between(first, before.last)
            assert matches(block.text, printed), (
                f"{name_of(page)}:{block.line}: it printed\n{printed}"
            )
        before = block if block.is_run else None
        first = block.line


def matches(expected: str, text: str) -> bool:
    """Return True if a text is the expected one, with `…` for anything.

    Example:
        >>> matches("loss …", "loss 1.5"), matches("a\\n…\\nb", "a\\n1\\n2\\nb"), matches("a", "ab")
        (True, True, False)
    """
    lines = [
        re.escape(line.rstrip()).replace(ANYTHING, ".*")
        for line in expected.strip("\n").split("\n")
    ]
    rule = "\n".join(lines)
    rule = re.sub(r"(^|\n)\.\*(?=\n|$)", r"\1(?:.*\n)*.*", rule)
    return (
        re.fullmatch(rule, "\n".join(line.rstrip() for line in text.strip("\n").split("\n")))
        is not None
    )


@functools.cache
def messages() -> tuple[str, ...]:
    """Every text in the sources, with `…` for what is filled in."""
    found = set()
    for path in (ROOT / "src" / "tinkex").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = (
                    str(part.value) if isinstance(part, ast.Constant) else ANYTHING
                    for part in node.values
                )
                found.add("".join(parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(node.value)
    return tuple(found)


def quoted_messages(page: Path) -> list[str]:
    """Return the errors that a page lists in the first column of a table."""
    rows = re.findall(r"^\| (`[^|]*`)[^|]* \|", page.read_text(encoding="utf-8"), re.MULTILINE)
    told = [
        re.fullmatch(r"`(?:\w+(?:Error|Warning))?:? ?(.*)`", row)
        for row in rows
        if re.search(r"\w(Error|Warning): ", row)
    ]
    return [found[1] for found in told if found]


def is_written(message: str) -> bool:
    """Return True if the sources have this message; `…` stands for anything."""
    pattern = re.compile(
        ".*".join(re.escape(part.strip()) for part in message.split(ANYTHING)), re.DOTALL
    )
    return any(pattern.search(text) for text in messages())


def commands(page: Path, program_name: str = "tinkex") -> list[tuple[int, list[str]]]:
    """The command lines of one program in a page's shell blocks: the line, and the arguments."""
    found: list[tuple[int, list[str]]] = []
    for block in blocks(page):
        if block.language not in ("sh", "bash", "console"):
            continue
        number = block.line
        for line in re.sub(r"\\\n", "\0", block.text).splitlines():
            joined = line.replace("\0", " ").strip().removeprefix("$ ")
            lexer = shlex.shlex(joined, posix=True, punctuation_chars="|&;<>()")
            lexer.whitespace_split = True
            words: list[str] = []
            for word in [*lexer, "|"]:
                if set(word) <= set("|&;<>()"):
                    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
                        words.pop(0)
                    if words[:1] == [program_name]:
                        found.append((number, words[1:]))
                    words = []
                else:
                    words.append(word)
            number += 1 + line.count("\0")
    return found
