"""Names in prose and strings: modules, attributes and files that no import statement checks."""

from __future__ import annotations

import functools
import importlib
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parent.parent
DOTTED = re.compile(r"(?<![\w./@-])tinkex(?:\.[a-zA-Z_]\w*)+")
IMPORTED = re.compile(r"from (tinkex[\w.]*) import (\w+)")
FILE = re.compile(r"`((?:[\w.]+/)*\w+\.(?:py|c|md|svg))(?:::?\w+)?`")
NO_MODULE = re.compile(
    r"tinkex\.(http\.request|queue|future|retry|recovery|custom_loss|regularizer)\b"  # events
    r"|tinkex\.(toml|sqlite3|engines|dev|operation)$"  # files, groups, spans
    r"|tinkex\.TrainingClient\.model_id$"  # a field
)
NEEDS = ("tinkex.engine.kernels.", "tinkex.cluster.ray_link.")
"""Modules that need Triton or Ray."""


def tracked() -> list[str]:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    return listed.stdout.split() or [
        str(path.relative_to(ROOT))
        for folder in ("src", "docs", "tests", "tools", "bench", "examples")
        for path in (ROOT / folder).rglob("*.*")
    ]


FILES = tracked()
READ = [
    name
    for name in FILES
    if re.match(r"(src|docs|tools|bench)/.*\.(py|md)$|(README|CONTRIBUTING)\.md$", name)
]
TAILS = {"/".join(parts[k:]) for name in FILES for parts in [name.split("/")] for k in range(9)}


@functools.cache
def leads_somewhere(name: str) -> bool:
    """Return True if a dotted name is a module, or an attribute of one."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            found: object = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        for part in parts[count:]:
            found = getattr(found, part, None)
        return found is not None
    return False


def test_dotted_names_lead_somewhere() -> None:
    lost = []
    for file in READ:
        text = (ROOT / file).read_text(encoding="utf-8")
        told = set(DOTTED.findall(text)) | {".".join(pair) for pair in IMPORTED.findall(text)}
        told = {
            one
            for one in told
            if not NO_MODULE.match(one) and not any(n in f"{one}." for n in NEEDS)
        }
        lost += [f"{file}: {one}" for one in told if not leads_somewhere(one)]
    assert sorted(lost) == []


def test_files_in_prose_exist() -> None:
    lost = [
        f"{file}: {one}"
        for file in READ
        for one in FILE.findall((ROOT / file).read_text(encoding="utf-8"))
        if one not in TAILS
    ]
    assert sorted(lost) == []


def test_wrong_name_is_found() -> None:
    assert not leads_somewhere("tinkex.engine.product_check")
    assert not leads_somewhere("tinkex.client.service.ServiceClients")
    assert leads_somewhere("tinkex.client.service.ServiceClient")
