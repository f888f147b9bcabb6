"""The documentation: every page is in the navigation, links lead somewhere, and what it quotes is
in the code."""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import tomllib
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
CONFIG = tomllib.loads((ROOT / "zensical.toml").read_text(encoding="utf-8"))["project"]


def load_tool(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"{name}_tool", ROOT / "tools" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


site = load_tool("site")


def prose(text: str) -> str:
    """A page without its code."""
    return re.sub(r"^```.*?^```|`[^`\n]*`", "", text, flags=re.DOTALL | re.MULTILINE)


# ── navigation and links ──────────────────────────────────────────────────────────────────────────


def test_every_page_is_in_the_navigation_once_and_every_entry_is_a_page() -> None:
    entries = list(site.listed(CONFIG["nav"]))
    assert len(entries) == len(set(entries))
    there = set(site.pages())
    assert site.MADE.keys() <= there
    patterns = [entry for entry in entries if "*" in entry]
    named = {entry for entry in entries if "*" not in entry}
    assert named <= there
    missing = {
        page for page in there - named if not any(Path(page).match(pattern) for pattern in patterns)
    }
    assert not missing


def test_no_list_of_the_navigation_is_longer_than_a_glance() -> None:
    lists = [CONFIG["nav"]]
    for entries in lists:
        assert len(entries) <= 12, entries
        inner = [value for entry in entries if isinstance(entry, dict) for value in entry.values()]
        lists += [value for value in inner if isinstance(value, list)]
    assert len(lists) > 10


def test_pattern_in_the_navigation_stands_for_pages_by_title(tmp_path: Path) -> None:
    for name, heading in (
        ("b.md", "# Apples\n"),
        ("a.md", "# `Zebras` at home\n"),
        ("c.md", "# Listed\n"),
    ):
        (tmp_path / name).write_text(heading, encoding="utf-8")
    kept = {f"guides/{path.name}": path for path in tmp_path.iterdir()}
    written = site.navigation([{"Guides": ["guides/*.md", {"Mine": "guides/c.md"}]}], kept)
    assert tomllib.loads(f"nav = {written}")["nav"] == [
        {
            "Guides": [
                {"Apples": "guides/b.md"},
                {"Zebras at home": "guides/a.md"},
                {"Mine": "guides/c.md"},
            ]
        }
    ]


@pytest.mark.parametrize("page", sorted(site.pages()))
def test_files_linked_by_pages_exist(page: str) -> None:
    source = site.pages()[page]
    for link in re.findall(r"\]\(([^()\s]+)\)", prose(source.read_text(encoding="utf-8"))):
        target = link.partition("#")[0]
        if not target or re.match(r"[a-z]+:", target):
            continue
        assert (source.parent / target).exists(), link


def test_links_are_made_for_the_place_that_a_page_has_on_the_site() -> None:
    text = (
        "[a](docs/tutorial.md#1) [b](src/tinkex/errors.py) [c](docs/none.md) "
        "`[d](docs/tutorial.md)` [e](https://x.y/z)"
    )
    made = site.relinked(text, "contributing.md", ROOT / "CONTRIBUTING.md")
    assert (
        made == "[a](tutorial.md#1) b [c](docs/none.md) `[d](docs/tutorial.md)` [e](https://x.y/z)"
    )
    inner = site.relinked(
        "[a](../../CONTRIBUTING.md) [b](../reference/commands.md)",
        "guides/x.md",
        DOCS / "guides/x.md",
    )
    assert inner == "[a](../contributing.md) [b](../reference/commands.md)"


def test_page_has_its_heading_and_first_sentences_as_title_and_description() -> None:
    text = (
        "---\nlicense: mit\n---\n\n# The `one` page\n\n```sh\nrun\n```\n\n| a |\n|---|\n\n"
        "[Names][a.b] lead *here*, see\n[there](x.md#y). " + "More words. " * 20
    )
    made = site.described(text)
    assert made.startswith(
        '---\ntitle: "The one page"\ndescription: "Names lead here, see there. More words. More'
    )
    assert made.endswith(f"---\n\n{text.partition(chr(10) * 2)[2]}")
    description = made.splitlines()[2]
    assert description.endswith('words."')
    assert site.LONGEST - 20 < len(description) < site.LONGEST + 20
    assert "license" not in made


# ── what is made of the code, and what quotes it ──────────────────────────────────────────────────


def test_every_command_is_in_the_reference_with_its_options() -> None:
    page = site.commands_page()
    names = [name for name, _ in site.commands()]
    assert {"tinkex", "tinkex serve", "tinkex key create", "tinkex checkpoint import"} <= set(names)
    for name, command in site.commands():
        assert re.search(rf"^## {re.escape(name)}$", page, re.MULTILINE), name
        for parameter in command.params:
            for option in parameter.opts:
                assert not option.startswith("--") or option in page, (name, option)


def test_every_endpoint_is_in_the_reference() -> None:
    from tinkex.wire.protocol import OPERATIONS

    page = site.endpoints_page()
    for operation in OPERATIONS:
        assert f"| `{operation.name}` | `{operation.method} {operation.path}` |" in page


def test_every_variable_that_the_client_reads_is_in_the_reference() -> None:
    page = site.environment_page()
    source = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py"))
    for name in set(re.findall(r"\"((?:TINKER|TINKEX|CLOUDFLARE)_[A-Z_]+)\"", source)):
        assert f"`{name}`" in page, name


def test_every_public_name_is_in_the_reference() -> None:
    import tinkex
    from tinkex._lazy import homes_of

    homes = homes_of(tinkex.__file__)
    pages = "".join(path.read_text(encoding="utf-8") for path in (DOCS / "reference").glob("*.md"))
    shown = set(re.findall(r"^::: (\S+)$", pages, re.MULTILINE))
    members = set(re.findall(r"\w+", " ".join(re.findall(r"members: \[(.*?)\]", pages))))
    named = set(re.findall(r"`tinkex\.(\w+)`", pages))
    for name in tinkex.__all__:
        home = homes.get(name, "")
        is_shown = f"tinkex.{name}" in shown or home in shown or name in members or name in named
        is_package = any(page.startswith(f"tinkex.{name}") for page in shown)
        assert is_shown or is_package or name.startswith("__"), name


@cache
def messages() -> tuple[str, ...]:
    """Every text in the sources, docstrings aside, with … for what is filled in."""
    found = set()
    for path in (ROOT / "src" / "tinkex").rglob("*.py"):
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        described = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        for node in nodes:
            if id(node) in described:
                continue
            if isinstance(node, ast.JoinedStr):
                parts = (
                    str(part.value) if isinstance(part, ast.Constant) else "…"
                    for part in node.values
                )
                found.add("".join(parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(re.sub(r"%(\.\d)?[sdrf]", "…", node.value))
    return tuple(found)


def is_in_the_sources(message: str) -> bool:
    """Whether a text of the sources has this message in it; … stands for anything, of one text or
    of several on end."""
    pattern = re.compile(".*".join(re.escape(part) for part in message.split("…")), re.DOTALL)
    return any(pattern.search(text) for text in messages())


HEADINGS = re.findall(
    r"^### `(.+)`$", (DOCS / "troubleshooting.md").read_text(encoding="utf-8"), re.MULTILINE
)


@pytest.mark.parametrize("message", HEADINGS)
def test_messages_of_the_troubleshooting_page_exist_in_the_sources(message: str) -> None:
    assert is_in_the_sources(message)


def test_unknown_message_is_found() -> None:
    assert len(HEADINGS) > 50
    assert not is_in_the_sources("this is a message that … nobody writes")
    assert is_in_the_sources("there is no loss …; loss_fn must be one of …")
    assert not is_in_the_sources("there is no loss …; loss_fn must be all of …")


def test_losses_that_the_engine_has_are_in_the_guide() -> None:
    from tinkex.engine.losses.table import LOSSES

    page = (DOCS / "guides" / "training-loop.md").read_text(encoding="utf-8")
    table = page[page.index("## Losses") :].partition("\n## ")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) - {"loss_fn"} == set(LOSSES)
    for name, loss in LOSSES.items():
        row = next(line for line in table.splitlines() if line.startswith(f"| `{name}` |"))
        for word in (*loss.required, *loss.optional, *loss.config):
            assert f"`{word}`" in row, (name, word)


def test_families_that_the_engine_has_are_in_the_page_on_models() -> None:
    from tinkex.engine.families.family import families

    page = (DOCS / "models.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\|[^|]*\| `(\w+)` \|", page, re.MULTILINE)) - {"model_type"} == set(
        families()
    )


def test_each_known_defect_has_its_outcome() -> None:
    numbers = re.findall(r"^(D\d\d) ", load_tool("requirements").DEFECTS, re.MULTILINE)
    page = (DOCS / "moving-from-elixir.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| (D\d\d) \|", page, re.MULTILINE) == numbers


# ── the build ─────────────────────────────────────────────────────────────────────────────────────


def has_builder() -> bool:
    return (ROOT / ".venv-docs" / "bin" / "python").exists()


@pytest.mark.slow
@pytest.mark.skipif(not has_builder(), reason="make docs has not been run")
def test_site_is_built_without_a_warning() -> None:
    done = subprocess.run(
        [str(ROOT / ".venv-docs" / "bin" / "python"), str(ROOT / "tools" / "site.py")],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    pages = list((ROOT / "site").rglob("*.html"))
    assert len(pages) > 30
    remote = re.compile(r"<(?:script|link|img)[^>]+(?:src|href)=[\"']?https?:")
    texts = {
        page.relative_to(ROOT / "site").as_posix(): page.read_text(encoding="utf-8")
        for page in pages
    }
    assert not [name for name, text in texts.items() if remote.search(text)]
    titles = [re.findall(r"<title>(.*?)</title>", text) for text in texts.values()]
    assert len({title[0] for title in titles}) == len(pages)
    assert all('<meta name="description" content="' in text for text in texts.values())
    assert (ROOT / "site" / "assets" / "favicon.svg").exists()
    shown = re.sub(r"<[^>]+>", "", texts["reference/types.html"])
    assert "AdamParams(\n    *,\n    learning_rate: float = 0.0001,\n" in shown
    assert "SENT_AS_NULL" not in shown
