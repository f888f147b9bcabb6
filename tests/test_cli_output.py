"""Output of the command line: sizes, times, tables of any width, lists page by page."""

from __future__ import annotations

import datetime as dt
import io
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console
from rich.progress import Progress, TextColumn

from tinkex.cli import output, progress
from tinkex.cli.output import (
    Column,
    CommandError,
    expiry,
    lora,
    plain_console,
    print_fields,
    print_table,
    printable,
    size,
    status,
    when,
    write_file,
)
from tinkex.cli.progress import fetch_pages, remaining, transfer
from tinkex.types.checkpoints import Cursor

NOW = dt.datetime(2026, 3, 11, tzinfo=dt.UTC)


def ago(**span: float) -> dt.datetime:
    return NOW - dt.timedelta(**span)


@pytest.mark.covers("1.16.7", "Q-20")
@pytest.mark.parametrize(
    ("count", "words"),
    [
        (None, "N/A"),
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KB"),
        (1536, "1.5 KB"),
        (5 << 20, "5.0 MB"),
        (3 << 30, "3.0 GB"),
        (1 << 40, "1.0 TB"),
        (2000 << 40, "2000.0 TB"),
    ],
)
def test_sizes_have_the_largest_unit_up_to_terabytes(count: int | None, words: str) -> None:
    assert size(count) == words


@pytest.mark.covers("1.16.7")
@pytest.mark.parametrize(
    ("moment", "words"),
    [
        (None, "N/A"),
        (ago(hours=2), "2 hours ago"),
        (NOW + dt.timedelta(hours=2), "in 2 hours"),
        ("2026-01-01T00:00:00Z", "2026-01-01"),
        (NOW, "just now"),
        (ago(seconds=60), "just now"),
        (ago(seconds=61), "1 minute ago"),
        (ago(minutes=59), "59 minutes ago"),
        (ago(seconds=3600), "60 minutes ago"),
        (ago(seconds=3601), "1 hour ago"),
        (ago(hours=23), "23 hours ago"),
        (ago(days=1), "1 day ago"),
        (ago(days=7), "7 days ago"),
        (ago(days=8), "1 week ago"),
        (ago(days=30), "4 weeks ago"),
        (ago(days=31), "2026-02-08"),
        (NOW + dt.timedelta(seconds=30), "in less than a minute"),
        (NOW + dt.timedelta(days=3), "in 3 days"),
        (NOW + dt.timedelta(days=90), "2026-06-09"),
        ("2026-03-10 22:00:00", "2 hours ago"),
        ("when it rains", "when it rains"),
    ],
)
def test_times_are_seen_from_now(moment: dt.datetime | str | None, words: str) -> None:
    assert when(moment, NOW) == words


@pytest.mark.covers("1.16.7")
def test_expiry_adapters_and_states_are_words() -> None:
    assert expiry(None) == "Never"
    assert expiry(NOW + dt.timedelta(days=2), NOW) == "in 2 days"
    assert (lora(True, 8), lora(True), lora(False, 8)) == ("Yes (rank 8)", "Yes", "No")
    assert (status(True), status(False), status(True, False)) == ("Failed", "Active", "Failed")
    assert (status(False, True), status(False, False)) == ("Active", "Finished")


def test_foreign_text_cannot_control_the_terminal() -> None:
    assert printable("a\x1b[31mb\tc\nd") == "a [31mb c d"


# ── tables ────────────────────────────────────────────────────────────────────────────────────────

LONG = "tinker://0123456789abcdef0123456789abcdef:train:0/weights/final"
COLUMNS = [Column("ID", folds=True), Column("Size", right=True), Column("Note")]


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Pretends that stdout is a terminal of some width."""

    def begin(width: int) -> None:
        monkeypatch.setattr(output, "is_terminal", lambda: True)
        monkeypatch.setenv("COLUMNS", str(width))
        monkeypatch.setenv("NO_COLOR", "1")
        monkeypatch.setenv("TERM", "xterm")

    return begin


@pytest.mark.covers("1.16.5")
def test_pipe_gets_tab_separated_lines(capsys: pytest.CaptureFixture[str]) -> None:
    print_table("Things (2/3)", COLUMNS, [(LONG, "1 B", "a\tb"), ("x", "2 B", "")])
    assert capsys.readouterr().out == f"Things (2/3)\nID\tSize\tNote\n{LONG}\t1 B\ta b\nx\t2 B\t\n"


def test_wide_terminal_gets_a_table(
    terminal: Callable[[int], None], capsys: pytest.CaptureFixture[str]
) -> None:
    terminal(100)
    print_table("Things (1/1)", COLUMNS, [(LONG, "1 B", "fine")])
    title, header, row = capsys.readouterr().out.splitlines()
    assert title == "Things (1/1)"
    assert header.split() == ["ID", "Size", "Note"]
    assert row.split() == [LONG, "1", "B", "fine"]


def test_narrow_terminal_folds_ids_without_cutting(
    terminal: Callable[[int], None], capsys: pytest.CaptureFixture[str]
) -> None:
    terminal(50)
    print_table("Things (1/1)", COLUMNS, [(LONG, "1 B", "fine")])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 3
    assert all(len(line) <= 50 for line in lines)
    assert "".join(line.split()[0] for line in lines[2:]) == LONG
    assert "…" not in "".join(lines)


def test_narrow_terminal_shows_records_with_whole_ids(
    terminal: Callable[[int], None], capsys: pytest.CaptureFixture[str]
) -> None:
    terminal(30)
    print_table("Things (2/2)", COLUMNS, [(LONG, "1 B", "fine"), ("x", "2 B", "")])
    assert capsys.readouterr().out == (
        f"Things (2/2)\n\nID    {LONG}\nSize  1 B\nNote  fine\n\nID    x\nSize  2 B\n"
    )


def test_row_with_a_heading_takes_few_lines_and_its_heading_is_never_folded(
    terminal: Callable[[int], None], capsys: pytest.CaptureFixture[str]
) -> None:
    columns = (
        Column("ID", folds=True, repeats=True),
        Column("Size"),
        Column("Made"),
        Column("Path", heads=True),
    )
    rows = [("one", "1 B", "just now", f"{LONG}/one"), ("two", "2 B", "2 hours ago", f"{LONG}/two")]
    terminal(60)
    print_table("Things (2/2)", columns, rows)
    few = f"{LONG}/one\n  Size 1 B  Made just now\n{LONG}/two\n  Size 2 B  Made 2 hours ago\n"
    assert capsys.readouterr().out == f"Things (2/2)\n{few}"
    terminal(20)
    print_table("Things (1/1)", columns, rows[1:])
    assert capsys.readouterr().out == f"Things (1/1)\n{LONG}/two\n  Size 2 B\n  Made 2 hours ago\n"


def test_console_shows_the_id_of_a_run_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    plain_console().print("0a1b:train:0 and :smile:", markup=False)
    assert capsys.readouterr().out == "0a1b:train:0 and :smile:\n"


def test_colour_is_omitted_if_not_wanted(
    terminal: Callable[[int], None], capsys: pytest.CaptureFixture[str]
) -> None:
    terminal(80)
    print_fields({"ID": "x"})
    print_table("Things", COLUMNS, [("x", "1 B", "fine")])
    shown = capsys.readouterr().out
    assert shown.startswith("ID  x\nThings\n")
    assert "\x1b" not in shown


def test_text_in_fields_is_broken_between_words_only(
    terminal: Callable[[int], None], capsys: pytest.CaptureFixture[str]
) -> None:
    terminal(40)
    print_fields({"Path": LONG, "Note": "one two three four five six seven"})
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"Path  {LONG}"
    assert lines[1:] == ["Note  one two three four five six seven"]


def test_file_is_written_atomically(tmp_path: Path) -> None:
    write_file(tmp_path / "a" / "b.txt", "text")
    assert (tmp_path / "a" / "b.txt").read_text() == "text"
    with pytest.raises(CommandError, match="cannot be written"):
        write_file(tmp_path / "a" / "b.txt" / "c", "text")
    (tmp_path / "directory").mkdir()
    with pytest.raises(CommandError, match="cannot be written"):
        write_file(tmp_path / "directory", "text")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "directory"]


# ── pages ─────────────────────────────────────────────────────────────────────────────────────────


class Pages:
    """A list of numbers, given page by page."""

    def __init__(self, count: int, *, tells: bool = True, most: int | None = None) -> None:
        self.items, self.tells, self.most = list(range(count)), tells, most
        self.asked: list[tuple[int, int]] = []

    def __call__(self, limit: int, offset: int) -> tuple[list[int], Cursor | None]:
        self.asked.append((limit, offset))
        found = self.items[offset : offset + min(limit, self.most or limit)]
        return found, Cursor(
            offset=offset, limit=limit, total_count=len(self.items)
        ) if self.tells else None


@pytest.mark.covers("1.16.5")
@pytest.mark.parametrize(
    ("count", "page", "limit", "offset", "asked"),
    [
        (3, 2, 0, 0, [(2, 0), (1, 2)]),
        (3, 2, 1, 0, [(1, 0)]),
        (10, 4, 7, 2, [(4, 2), (3, 6)]),
        (10, 4, 0, 8, [(4, 8)]),
        (3, 2, -5, -1, [(2, 0), (1, 2)]),
        (0, 2, 0, 0, [(2, 0)]),
        (3, 2, 5, 9, [(2, 9)]),
    ],
)
def test_lists_are_fetched_page_by_page(
    count: int, page: int, limit: int, offset: int, asked: list[tuple[int, int]]
) -> None:
    pages = Pages(count)
    items, total = fetch_pages(pages, "things", page, limit, offset)
    start = max(offset, 0)
    assert pages.asked == asked
    assert items == pages.items[start : start + limit if limit > 0 else None]
    assert total == count


@pytest.mark.covers("Q-19")
@pytest.mark.parametrize(
    ("count", "asked"), [(3, [(2, 0), (2, 2)]), (4, [(2, 0), (2, 2), (2, 4)]), (0, [(2, 0)])]
)
def test_short_or_empty_page_without_a_total_is_the_last(
    count: int, asked: list[tuple[int, int]]
) -> None:
    pages = Pages(count, tells=False)
    assert fetch_pages(pages, "things", 2, 50, 0) == (pages.items, count)
    assert pages.asked == asked


@pytest.mark.covers("Q-19")
def test_total_that_is_too_large_does_not_make_it_loop() -> None:
    pages = Pages(3)

    def liar(limit: int, offset: int) -> tuple[list[int], Cursor | None]:
        found, _ = pages(limit, offset)
        return found, Cursor(offset=offset, limit=limit, total_count=99)

    assert fetch_pages(liar, "things", 2, 0, 0) == ([0, 1, 2], 99)


def test_smaller_pages_still_give_the_whole_list() -> None:
    pages = Pages(5, most=2)
    assert fetch_pages(pages, "things", 100, 0, 0) == ([0, 1, 2, 3, 4], 5)


@pytest.mark.covers("1.16.5", "Q-18")
def test_progress_goes_to_stderr_only(capsys: pytest.CaptureFixture[str]) -> None:
    fetch_pages(Pages(5), "training runs", 2, 0, 0)
    shown = capsys.readouterr()
    assert shown.out == ""
    lines = shown.err.splitlines()
    assert lines[0].startswith("Fetching training runs: 2/5")
    assert lines[1].startswith("Fetching training runs: 4/5")


def test_time_left_is_estimated() -> None:
    assert remaining(1, 4, 60.0) == "about 3 min left"
    assert remaining(3, 4, 6.0) == "about 2 s left"
    assert remaining(1, 100, 600.0) == "about 16.5 h left"
    assert remaining(0, 4, 1.0) == remaining(4, 4, 1.0) == ""


def test_transfer_without_a_terminal_prints_progress_at_intervals(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = [0.0]
    monkeypatch.setattr("tinkex.cli.progress.time.monotonic", lambda: clock[0])
    with transfer("Downloading it") as meter:
        for second in range(13):
            clock[0] = float(second)
            meter(second * 1024, 12 * 1024)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err == (
        "Downloading it: 5.0 KB of 12.0 KB, about 7 s left\nDownloading it: 10.0 KB of 12.0 KB, "
        "about 2 s left\n"
    )


def test_terminal_shows_a_bar_on_stderr(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with transfer("Downloading it") as meter:
        meter(1, 2)
    with progress.waiting("thinking"):
        pass
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "Downloading it" in shown.err
    assert "thinking" in shown.err


def test_display_prints_lines_above_its_bar() -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=60)
    bar = Progress(
        TextColumn("{task.completed} of {task.total}: {task.fields[text]}"), console=console
    )
    with progress.Display(bar, total=9, done=3) as display:
        display.show(4, text="loss 0.5", line=lambda: "a line, which a terminal never gets")
        display.say("evaluated")
    assert "4 of 9: loss 0.5" in screen.getvalue()
    assert "evaluated" in screen.getvalue()
    assert "never" not in screen.getvalue()


def test_display_without_a_terminal_prints_urgent_lines_at_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with progress.Display(total=9) as display:
        display.show(1, line=lambda: "the first", at_once=True)
        display.show(2, line=lambda: "too soon")
        display.say("evaluated")
    assert capsys.readouterr() == ("", "the first\nevaluated\n")


@pytest.mark.parametrize(
    "module", sorted(Path(progress.__file__).parent.glob("*.py")), ids=lambda path: path.name
)
def test_progress_is_drawn_by_display_alone(module: Path) -> None:
    text = module.read_text(encoding="utf-8")
    assert not re.search(r"\.status\(|\bLive\(|\btrack\(", text)
    assert "rich.progress" not in text or "Display" in text


def test_json_output_is_valid(capsys: pytest.CaptureFixture[str]) -> None:
    output.print_json({"name": "ü", "when": NOW})
    assert json.loads(capsys.readouterr().out) == {"name": "ü", "when": "2026-03-11 00:00:00+00:00"}
