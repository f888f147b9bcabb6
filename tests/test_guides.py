"""The examples of the documentation run as they stand, and print what they say they print; `pages`
says how."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest

import tinkex
import tinkex.telemetry
from pages import (
    DOCS,
    ROOT,
    blocks,
    commands,
    is_written,
    matches,
    name_of,
    pages,
    quoted_messages,
    run,
)
from tinkex import events, metrics

MOST_NOT_RUN = 8
SLOW = {"docs/guides/platforms.md"}
"""Pages that take more than a few seconds: this one imports peft and transformers."""

NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e-?\d+)?")

RUNNABLE = [page for page in pages() if any(block.is_run for block in blocks(page))]
ALL = [ROOT / "README.md", *pages()]


def _parameters() -> list[object]:
    marks = {name: [pytest.mark.slow] for name in SLOW}
    return [
        pytest.param(page, id=name_of(page), marks=marks.get(name_of(page), []))
        for page in RUNNABLE
    ]


@pytest.fixture(scope="module")  # no longer: others count the backends that are there
def backend() -> Iterator[None]:
    """The embedded backend of `base_url="local"`, kept from one page to the next."""
    with tinkex.ServiceClient(base_url="local") as keeper:
        keeper.get_server_capabilities()
        yield


@pytest.fixture
def clean_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A directory of its own, and nothing left behind in the process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(metrics, "_shared", None)
    heard = {known.handler_id for known in events.handlers()}
    # A page may put tinkex in place of tinker, which other tests have imported.
    theirs = {
        name: sys.modules.pop(name)
        for name in list(sys.modules)
        if re.match(r"tinker(\.|$)|tinkex\.compat", name)
    }
    yield
    if "tinkex.compat" in sys.modules:
        sys.modules["tinkex.compat"].uninstall()
    sys.modules.update(theirs)
    tinkex.configure()
    for known in events.handlers():
        if known.handler_id not in heard:
            events.detach(known.handler_id)


@pytest.mark.parametrize("page", _parameters())
def test_page_examples_run_and_print_their_output(
    page: Path, backend: None, clean_process: None
) -> None:
    run(page)


@pytest.mark.parametrize("page", ALL, ids=name_of)
def test_blocks_have_their_titles(page: Path) -> None:
    """A Python block that nobody runs, and nobody says why, would rot."""
    for block in blocks(page):
        if block.language == "python":
            assert block.is_run or block.reason, f"{name_of(page)}:{block.line}: {block.info!r}"
        if block.reason is not None:
            assert len(block.reason.split()) >= 3, (
                f"{name_of(page)}:{block.line}: this is no reason: {block.reason!r}"
            )
            compile(block.text, name_of(page), "exec")
        if block.language == "text":
            assert block.info == "text" or block.is_output, (
                f"{name_of(page)}:{block.line}: {block.info!r}"
            )


def test_few_blocks_are_not_run() -> None:
    left_out = [
        f"{name_of(page)}:{block.line}" for page in ALL for block in blocks(page) if block.reason
    ]
    assert len(left_out) <= MOST_NOT_RUN, left_out


@pytest.mark.parametrize("page", ALL, ids=name_of)
def test_command_lines_of_a_page_are_understood(page: Path) -> None:
    from tinkex.cli.main import cli

    for line, words in commands(page):
        try:
            _parse(cli, words)
        except click.ClickException as error:
            if "does not exist" not in error.message:  # files of the reader's
                raise AssertionError(
                    f"{name_of(page)}:{line}: {' '.join(words)}: {error.message}"
                ) from error
        except click.exceptions.Exit:
            pass  # --help, --version


def _parse(command: click.Command, words: list[str], parent: click.Context | None = None) -> None:
    context = command.make_context(command.name, list(words), parent=parent)
    rest = [*context._protected_args, *context.args]
    if isinstance(command, click.Group) and (rest or not command.invoke_without_command):
        name, found, rest = command.resolve_command(context, rest)
        assert found is not None, name
        _parse(found, rest, context)


@pytest.mark.parametrize("page", pages(), ids=name_of)
def test_messages_of_errors_in_a_page_are_those_of_the_sources(page: Path) -> None:
    assert [message for message in quoted_messages(page) if not is_written(message)] == []


# ── what a page lists is all there is ─────────────────────────────────────────────────────────────


def _defaults(kind: Any) -> dict[str, Any]:
    """Parameters of a callable that may be left out, and what they are then."""
    known = inspect.signature(kind).parameters.values()
    return {item.name: item.default for item in known if item.default is not item.empty}


@pytest.mark.parametrize(
    ("guide", "kind", "omitted"),
    [
        ("advanced-configuration", tinkex.Config, {"feature_gates"}),
        ("retry-and-error-handling", tinkex.RetryConfig, set()),
        ("recovery", tinkex.RecoveryPolicy, set()),
        ("recovery", tinkex.resilient, set()),
        ("training-loop", tinkex.AdamParams, set()),
        ("optimizers", tinkex.AdamParams, set()),
        ("optimizers", tinkex.DimuonParams, {"type"}),
        ("downloads", tinkex.download, set()),
        ("telemetry", tinkex.telemetry.Reporter, {"owner", "secrets", "handler_id"}),
        ("api-tour", tinkex.SamplingParams, set()),
        ("streaming", tinkex.HttpClient.stream_get, set()),
        ("training-persistence", tinkex.TrainingClient.save_state, {"options"}),
    ],
)
def test_every_option_is_in_its_guide_with_its_default(
    guide: str, kind: Any, omitted: set[str]
) -> None:
    text = (DOCS / "guides" / f"{guide}.md").read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    for name, default in _defaults(kind).items():
        if name in omitted:
            continue
        about = [row for row in rows if re.search(rf"`{name}\b", row.split("|")[1])]
        assert about, f"{guide}: {name} is in no table"
        if isinstance(default, int | float) and not isinstance(default, bool):
            shown = {
                float(number) for row in about for number in NUMBER.findall(row.replace("−", "-"))
            }
            assert default in shown, (
                f"{guide}: the default of {name} is {default}, its row has {shown}"
            )


def test_every_variable_is_in_the_guide_to_the_environment() -> None:
    text = (DOCS / "guides" / "environment-configuration.md").read_text(encoding="utf-8")
    source = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py"))
    for name in set(re.findall(r"\"((?:TINKER|TINKEX)_[A-Z_]+)\"", source)):
        assert f"`{name}`" in text, name


def test_cluster_file_of_the_guide_is_the_example_and_is_understood() -> None:
    from tinkex.cluster.layout import read_plan

    example = ROOT / "examples" / "cluster.toml"
    shown = [block for block in blocks(DOCS / "guides" / "fleet.md") if block.language == "toml"]
    assert [block.text for block in shown] == [example.read_text(encoding="utf-8")]
    gpus = [
        group.replicas * group.gpus
        for model in read_plan(example)
        for group in (model.trainers, model.samplers)
    ]
    assert sum(gpus) == 8


def test_every_key_of_a_cluster_file_is_in_its_guide() -> None:
    from tinkex.cluster.layout import Group, ModelPlan

    text = (DOCS / "guides" / "fleet.md").read_text(encoding="utf-8")
    fields = {*ModelPlan.__dataclass_fields__, *Group.__dataclass_fields__, "kind"} - {"name"}
    for name in fields:
        assert f"| `{name}` |" in text, name


def test_every_event_is_in_the_guide_to_telemetry() -> None:
    text = (DOCS / "guides" / "telemetry.md").read_text(encoding="utf-8")
    for name in events.CATALOGUE:
        family, _, last = name.rpartition(".")
        assert (
            f"`{name}`" in text
            or f"`{family}.*`" in text
            or (f"`{family}." in text and f"`.{last}`" in text)
        ), name


def test_every_command_is_in_the_guide_to_the_command_line() -> None:
    from tinkex.cli.commands import COMMANDS

    text = (DOCS / "guides" / "cli-guide.md").read_text(encoding="utf-8")
    for name in COMMANDS:
        assert re.search(rf"`{name}\b", text), name
    called = {words[0] for _, words in commands(DOCS / "guides" / "cli-guide.md")}
    assert COMMANDS.keys() - called <= {"billing", "demo", "model", "version"}


# ── what runs the pages can fail ──────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("```python\nprint(1 + 1)  # → 3\n```\n", "expected '3'"),
        ("```python\n1 + 1  # → 3\n```\n", "expected '3'"),
        (
            "```python\nprint('a')\nprint('b')\n```\n\n```text title=\"Output\"\na\nc\n```\n",
            "it printed",
        ),
        ("```python\nx = 1\n```\n\n```python\nassert x == 2, x\n```\n", "1"),
        ("```python\nfor word in 'ab':\n    print(word)  # → c\n```\n", "expected 'c'"),
    ],
)
def test_wrong_page_is_found(
    text: str, said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("pages.ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text(text)
    with pytest.raises(AssertionError, match=said):
        run(page)


def test_page_is_one_program_with_the_lines_of_the_page(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("pages.ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text(
        "words\n\n```python\nfor x in (1, 2):\n    print(x)  # → 1\n```\nwords\n```python\n    "
        "print(-x)\n```\n"
        '```text title="Output"\n1\n…\n-2\n```\n```python title="Not run: needs the hosted '
        'service"\nnothing()\n```\n'
        "```python\nx  # → 2\n{'a': 1.5}  # → {'a': …}\n```\n"
    )
    assert run(page).output == "1\n-1\n2\n-2\n"
    assert [block.line for block in blocks(page)] == [4, 9, 12, 17, 20]


def test_commands_are_found_in_shell_blocks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "```sh\nmake x\nA=1 tinkex serve \\\n  --port 1 | cat  # words\ntinkex run 'a b' && tinkex "
        "x > y\n```\n"
    )
    assert commands(page) == [(3, ["serve", "--port", "1"]), (5, ["run", "a b"]), (5, ["x"])]


def test_ellipsis_stands_for_anything() -> None:
    assert matches("a … c", "a b c")
    assert matches("…\nb", "1\n2\nb")
    assert not matches("a\nb", "a\nb\nc")


def test_unknown_message_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "| you see | do |\n|---|---|\n| `ValueError: data is empty` | x |\n| `ValueError: nobody … "
        "writes this` | x |\n"
    )
    assert [(message, is_written(message)) for message in quoted_messages(page)] == [
        ("data is empty", True),
        ("nobody … writes this", False),
    ]
