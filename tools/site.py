"""Builds the documentation site: the pages of docs/ beside pages made of the code. `make docs` runs
it.

`zensical.toml` is the configuration. Everything is put together in build/docs and built from there
into site/, in strict mode: a link, an anchor or a name that leads nowhere ends the build.
"""

from __future__ import annotations

import argparse
import ast
import html
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

ROOT = Path(__file__).parent.parent
STAGE = ROOT / "build" / "docs"
OTHERS = {
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "README.md": "index.md",
    "examples/showcase/README.md": "showcase.md",
    "src/tinkex/models/tiny/README.md": "tiny.md",
}
"""Pages that are not kept in docs/, and what they are called on the site; the README leads to the
site's first page."""
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^()\s#]*)(#[^()\s]*)?\)")
FENCE = re.compile(r"(^```.*?^```|`[^`\n]*`)", re.DOTALL | re.MULTILINE)

BLOCK = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
LONGEST = 160
"""Characters that the description of a page may have, if its first sentence is not longer."""


# ── pages made of the code ────────────────────────────────────────────────────────────────────────


def commands(
    command: click.Command | None = None, path: tuple[str, ...] = ("tinkex",)
) -> Iterator[tuple[str, Any]]:
    """Every command by its full name, groups before what is in them."""
    if command is None:
        from tinkex.cli.main import cli as command
    yield " ".join(path), command
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            if inner is not None and not inner.hidden:
                yield from commands(inner, (*path, name))


def commands_page() -> str:
    """The command line, from the commands' own help."""
    lines = [
        "# Command line",
        "",
        "Every command with its options, made of the commands' own help: `tinkex COMMAND --help` "
        "says the same.",
        "",
    ]
    for name, command in commands():
        # with the names that the command line has: a command remembers what it was asked about
        # first
        context = click.Context(command, info_name=name, help_option_names=["-h", "--help"])
        lines += [
            f"## {name}",
            "",
            "```text",
            command.get_usage(context).removeprefix("Usage: "),
            "```",
            "",
        ]
        lines += [*_paragraphs(command.help or command.short_help or ""), ""]
        if isinstance(command, click.Group):
            inner = [
                (child, command.get_command(context, child))
                for child in command.list_commands(context)
            ]
            lines += ["| command | |", "|---|---|"]
            lines += [
                f"| [`{child}`](#{f'{name} {child}'.replace(' ', '-')}) | "
                f"{_cell(found.get_short_help_str(200))} |"
                for child, found in inner
                if found is not None and not found.hidden
            ]
            lines.append("")
        records = [
            record for option in command.params if (record := option.get_help_record(context))
        ]
        if records:
            lines += ["| option | |", "|---|---|"]
            lines += [
                f"| <code>{_plain(option)}</code> | {_cell(meaning)} |"
                for option, meaning in records
            ]
            lines.append("")
    return "\n".join(lines)


def endpoints_page() -> str:
    """The endpoints, from the table that client and server share."""
    from tinkex.wire.protocol import OPERATIONS, PREFIX

    lines = [
        "# Endpoints",
        "",
        "Every HTTP endpoint, made of `tinkex.wire.protocol.OPERATIONS`, the table that the client "
        "calls and the server",
        f"routes. Paths begin with `{PREFIX}/`. Where there is a result, the answer is a receipt, "
        "and the result is",
        "fetched with `retrieve_future`. What is in a request or an answer: [types](types.md); how "
        "it goes together:",
        "[wire protocol](../wire-protocol.md). A server describes itself at `/openapi.json`.",
        "",
        "| operation | method and path | request | answer | result |",
        "|---|---|---|---|---|",
    ]
    for operation in OPERATIONS:
        kinds = (_kind(kind) for kind in (operation.request, operation.response, operation.result))
        lines.append(
            f"| `{operation.name}` | `{operation.method} {operation.path}` | {' | '.join(kinds)} |"
        )
    return "\n".join([*lines, ""])


def environment_page() -> str:
    """The variables that anything in the package reads, with what the sources say they are for."""
    from tinkex.client.settings import environment

    source = inspect.getsource(environment)
    fields = dict(re.findall(r'"(\w+)": \w+\("([A-Z_]+)"', source))
    lines = [
        "# Environment variables",
        "",
        "Every variable that tinkex reads. Blank means unset. An argument wins over "
        "`tinkex.configure()`, which wins",
        "over the environment.",
        "",
        "| variable | setting of [`Config`][tinkex.Config] |",
        "|---|---|",
        *(
            f"| `{variable}` | `{field}` |"
            for field, variable in sorted(fields.items(), key=lambda item: item[1])
        ),
        "| `TINKEX_POLL_BACKOFF` | `poll_backoff`: `1` or `exponential` |",
        "| `TINKEX_POOL_SIZE`, `TINKEX_POOL_COUNT` | `pool_sizes`: connections for sampling, times "
        "so many |",
        "| `TINKEX_HTTP_CLIENT` | `http_client`: `module:callable` |",
        "",
        "Of the server and the embedded backend:",
        "",
        "| variable | |",
        "|---|---|",
        "| `TINKEX_DATA_DIR` | where checkpoints and facts are kept |",
        "| `TINKEX_SERVER_API_KEY` | one key that the server takes, besides those of `tinkex key "
        "create` |",
        "| `TINKEX_HUB_CACHE` | `0`: do not put tokenizers into the Hugging Face cache |",
        "| `TINKEX_NATIVE` | `0`: sample on a CPU by PyTorch alone, without what is compiled for "
        "that |",
        "| `CC` | the C compiler for that; else `cc`, `gcc`, `clang` or the one in ziglang |",
        "| `TINKEX_COMPAT` | `1`: `import tinker` gives tinkex, where its start-up hook is "
        "installed |",
        "",
        "Of Hugging Face, read by tokenizers, model downloads and uploads: `HF_TOKEN` or "
        "`HUGGING_FACE_HUB_TOKEN`,",
        "`HF_HOME`, `HF_TOKEN_PATH`, `HF_HUB_OFFLINE`. A variable whose name begins with `OTEL_` "
        "switches on the",
        "server's spans where OpenTelemetry is installed.",
        "",
    ]
    return "\n".join(lines)


def examples_page() -> str:
    """The programs in examples/ by what each says of itself; those of the showcase in full."""
    source = ROOT / "docs" / "examples.md"
    lines = [
        relinked(source.read_text(encoding="utf-8"), source.name, source),
        "## The short ones",
        "",
    ]
    lines += ["| program in `examples/` | |", "|---|---|"]
    for program in sorted((ROOT / "examples").glob("*.py")):
        about = ast.get_docstring(ast.parse(program.read_text(encoding="utf-8"))) or ""
        lines.append(f"| `{program.name}` | {_cell(about.partition('.')[0])} |")
    for program in sorted((ROOT / "examples" / "showcase").glob("*.py")):
        text = program.read_text(encoding="utf-8")
        lines += ["", f"## showcase/{program.name}", "", "```python", text.strip(), "```"]
    return "\n".join([*lines, ""])


MADE = {
    "examples.md": examples_page,
    "reference/commands.md": commands_page,
    "reference/endpoints.md": endpoints_page,
    "reference/environment.md": environment_page,
}
"""The pages that are made of the code; those in docs/ under these names only say so."""


def _paragraphs(text: str) -> list[str]:
    text = inspect.cleandoc(text).replace("\b\n", "").replace("\f", "")
    return [_cell(paragraph) + "\n" for paragraph in text.split("\n\n")]


def _cell(text: str) -> str:
    """Text that is nothing but text in a table's cell; what is in backquotes is code."""
    parts = re.split(r"`([^`]*)`", " ".join(text.split()))
    return "".join(
        f"<code>{_plain(part)}</code>" if index % 2 else _plain(part)
        for index, part in enumerate(parts)
    )


def _plain(text: str) -> str:
    """Text in which nothing means anything to Markdown or HTML."""
    return re.sub(
        r"[|*_\[\]`\\]", lambda found: f"&#{ord(found[0])};", html.escape(text, quote=False)
    )


def _kind(kind: type[Any] | None) -> str:
    return f"[`{kind.__name__}`][{kind.__module__}.{kind.__name__}]" if kind is not None else ""


# ── putting it together ───────────────────────────────────────────────────────────────────────────


def pages() -> dict[str, Path]:
    """The pages that are kept as files: by name on the site, where they come from."""
    docs = ROOT / "docs"
    kept = {path.relative_to(docs).as_posix(): path for path in sorted(docs.rglob("*.md"))}
    others = {
        name: ROOT / place
        for place, name in OTHERS.items()
        if name not in kept and (ROOT / place).exists()
    }
    return kept | others


def relinked(text: str, name: str, source: Path) -> str:
    """A page with its links made for its place on the site; a link to a file that is no page there
    becomes text.
    """
    homes = {path.resolve(): other for other, path in pages().items()}
    homes |= {(ROOT / place).resolve(): other for place, other in OTHERS.items()}

    def link(found: re.Match[str]) -> str:
        is_image, shown, place, anchor = found[1], found[2], found[3], found[4] or ""
        if is_image or not place or ":" in place:
            return found[0]
        target = (source.parent / place).resolve()
        other = homes.get(target)
        if other is not None:
            return f"[{shown}]({os.path.relpath(other, Path(name).parent)}{anchor})"
        return shown if target.exists() else found[0]

    parts = FENCE.split(text)
    return "".join(part if index % 2 else LINK.sub(link, part) for index, part in enumerate(parts))


def title(page: Path) -> str:
    """A page's first heading."""
    found = re.search(r"^# (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return re.sub(r"[`*]", "", found[1]) if found else page.stem


def described(text: str) -> str:
    """A page with its title and its first sentences as facts about it, for browsers and search
    engines.
    """
    # what a model card tells the hub
    text = re.sub(r"\A---\n.*?^---\n+", "", text, flags=re.DOTALL | re.MULTILINE)
    heading, _, rest = text.partition("\n")
    paragraphs = BLOCK.sub("", rest).split("\n\n")
    first = next((part for part in paragraphs if re.match(r"\s*[\w`*\[]", part)), "")
    about = ""
    for sentence in re.split(r"(?<=[.:;]) ", " ".join(_words(first).split())):
        if about and len(about) + len(sentence) > LONGEST:
            break
        about = f"{about} {sentence}".strip()
    facts = {"title": _words(heading).strip("# "), "description": about.rstrip(":;")}
    return (
        "---\n"
        + "".join(f"{key}: {json.dumps(fact)}\n" for key, fact in facts.items())
        + f"---\n\n{text}"
    )


def _words(text: str) -> str:
    """Markdown without its marks: links are what they show."""
    return re.sub(r"[`*]", "", re.sub(r"\[([^\]]*)\]\[[^\]]*\]", r"\1", LINK.sub(r"\2", text)))


def listed(nav: Any) -> Iterator[str]:
    """The pages and patterns of a navigation."""
    if isinstance(nav, str):
        yield nav
    elif isinstance(nav, dict):
        for entry in nav.values():
            yield from listed(entry)
    else:
        for entry in nav:
            yield from listed(entry)


def navigation(nav: Any, kept: dict[str, Path]) -> str:
    """A navigation as TOML, with the pages that its patterns stand for."""
    taken = set(listed(nav))

    def written(entry: Any) -> str:
        if isinstance(entry, list):
            return "[" + ", ".join(filter(None, map(written, entry))) + "]"
        if isinstance(entry, dict):
            return (
                "{ "
                + ", ".join(f"{json.dumps(key)} = {written(value)}" for key, value in entry.items())
                + " }"
            )
        if "*" not in entry:
            return json.dumps(entry)
        found = sorted(
            (title(path), name) for name, path in kept.items() if Path(name).match(entry)
        )
        return ", ".join(written({shown: name}) for shown, name in found if name not in taken)

    return written(nav)


def stage() -> Path:
    """Put all pages and the configuration into build/; returns the configuration."""
    shutil.rmtree(STAGE, ignore_errors=True)
    kept = pages()
    for name, source in kept.items():
        place = STAGE / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(
            described(relinked(source.read_text(encoding="utf-8"), name, source)), encoding="utf-8"
        )
    for name, make in MADE.items():
        (STAGE / name).write_text(described(make()), encoding="utf-8")
    shutil.copytree(ROOT / "docs" / "assets", STAGE / "assets")
    text = (ROOT / "zensical.toml").read_text(encoding="utf-8")
    nav = tomllib.loads(text)["project"]["nav"]
    missing = [name for name in listed(nav) if "*" not in name and name not in kept]
    if missing:
        sys.exit(
            f"zensical.toml: the navigation names pages that are not there: {', '.join(missing)}"
        )
    text = re.sub(
        r"^nav = \[\n.*?^\]\n",
        lambda _: f"nav = {navigation(nav, kept)}\n",
        text,
        flags=re.DOTALL | re.MULTILINE,
    )
    text = text.replace('["src"]', json.dumps([str(ROOT / "src")]))
    text = text.replace(
        '["tools/reference.py"]', json.dumps([str(ROOT / "tools" / "reference.py")])
    )
    config = STAGE.parent / "zensical.toml"
    config.write_text(text, encoding="utf-8")
    return config


def main() -> None:
    """Build the site."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--serve", action="store_true", help="show the site on a local port instead of building it"
    )
    arguments = parser.parse_args()
    tool = [sys.executable, "-m", "zensical"]
    config = ["--config-file", str(stage())]
    if arguments.serve:
        sys.exit(subprocess.run([*tool, "serve", *config], cwd=STAGE.parent).returncode)
    built = STAGE.parent / "site"
    shutil.rmtree(built, ignore_errors=True)
    done = subprocess.run(
        [*tool, "build", "--strict", "--clean", *config],
        cwd=STAGE.parent,
        capture_output=True,
        text=True,
    )
    # it says nothing that helps
    told = done.stdout + done.stderr.partition("Traceback (most recent call last)")[0]
    print(told.strip())
    if done.returncode:
        sys.exit(1)
    shutil.rmtree(ROOT / "site", ignore_errors=True)
    shutil.move(built, ROOT / "site")
    print(f"{ROOT / 'site' / 'index.html'}")


if __name__ == "__main__":
    main()
