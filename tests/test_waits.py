"""One module waits after a failure: `tinkex.client.http.retry`."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "src" / "tinkex"
ROOMS = ("client", "hub", "recovery", "telemetry", "local.py")
RETRY = "client/http/retry.py"
NO_RETRIES = {
    ("client/http/http_exchange.py", "_upload"): "lets the loop do other work between pieces",
    ("client/http/limits.py", "wait"): "keeps a pause that all who share it keep",
    ("client/session.py", "_heartbeat"): "beats at an interval, after successes too",
    ("client/session.py", "_keep_informed"): "asks at an interval, after successes too",
    ("recovery/monitor.py", "_watch"): "looks at an interval, after successes too",
}
"""Functions that sleep but retry nothing, each with what it does instead."""


def sleeps(text: str) -> Iterator[str]:
    """The innermost function around each call of something that is named like `sleep`."""

    def walk(node: ast.AST, function: str) -> Iterator[str]:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            function = node.name
        if isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if name.lstrip("_") == "sleep":
                yield function
        for child in ast.iter_child_nodes(node):
            yield from walk(child, function)

    return walk(ast.parse(text), "")


def test_only_the_retry_module_waits_after_a_failure() -> None:
    found = set()
    for room in ROOMS:
        for path in [PACKAGE / room] if room.endswith(".py") else (PACKAGE / room).rglob("*.py"):
            name = path.relative_to(PACKAGE).as_posix()
            found |= {(name, function) for function in sleeps(path.read_text())}
    assert {function for name, function in found if name == RETRY} <= {"persist"}
    assert {place for place in found if place[0] != RETRY} == NO_RETRIES.keys()


def test_sleep_is_found_by_any_of_its_names() -> None:
    text = "async def f(self):\n await asyncio.sleep(1)\ndef g():\n time.sleep(2)\n"
    text += "async def h(self):\n await self._sleep(3)\n sleep(4)\n"
    assert list(sleeps(text)) == ["f", "g", "h", "h"]
