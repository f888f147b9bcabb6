"""What is read from elsewhere: paths, lifetimes, events, forms, environments. No input breaks a
parser."""

from __future__ import annotations

import itertools
import logging
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

import tinkex
from tinkex import RestClient, types
from tinkex.client.http.multipart import multipart
from tinkex.client.settings import environment
from tinkex.client.settings.config import maybe_set_level
from tinkex.hub.downloads import DownloadError, target_of
from tinkex.types.checkpoints import KINDS
from tinkex.wire.protocol import PROTOCOL_VERSION
from tinkex.wire.sse import Decoder

ANYTHING = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.binary()
    | st.lists(st.integers())
)
parse = types.ParsedCheckpointTinkerPath.from_tinker_path

# ── tinker paths ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.covers("1.15/2")
@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("http://run/weights/a", "does not begin with tinker://"),
        ("run/weights/a", "does not begin with tinker://"),
        (None, "does not begin with tinker://"),
        (7, "does not begin with tinker://"),
        ("tinker://run/weights", "is not a checkpoint path; expected"),
        ("tinker://run/weights/a/b", "is not a checkpoint path; expected"),
        ("tinker:///weights/a", "is not a checkpoint path; expected"),
        ("tinker://run/weights/", "is not a checkpoint path; expected"),
        ("tinker://run/other/a", "has kind 'other'; expected one of"),
    ],
)
def test_scheme_shape_and_kind_are_three_different_mistakes(path: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        parse(path)


@pytest.mark.covers("1.15/1", "1.15/3")
def test_run_ids_may_contain_colons() -> None:
    parsed = parse("tinker://uuid:train:0/sampler_weights/0001")
    assert (parsed.training_run_id, parsed.checkpoint_type) == ("uuid:train:0", "sampler")
    assert parsed.checkpoint_id == "sampler_weights/0001"
    assert parse("tinker://r/weights/1").checkpoint_type == "training"


@pytest.mark.covers("1.15/1", "Q-13")
@given(
    st.text()
    | st.lists(st.sampled_from(["tinker://", "/", "..", ".", "weights", "a", ":", "\\", "\0"])).map(
        "".join
    )
)
def test_path_is_parsed_or_refused_and_never_escapes(path: str) -> None:
    try:
        parsed = parse(path)
    except ValueError:
        with pytest.raises(DownloadError):
            target_of(path, Path("/out"))
        return
    assert f"tinker://{parsed.training_run_id}/{parsed.checkpoint_id}" == path
    assert parsed.checkpoint_id.partition("/")[0] in KINDS
    try:
        target = target_of(path, Path("/out"))
    except DownloadError:
        return
    assert target.parent == Path("/out")
    assert target.name not in ("", ".", "..")


# ── lifetimes ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.covers("1.15/4")
@given(ANYTHING)
@settings(max_examples=60, deadline=None)
def test_lifetime_is_a_positive_integer_or_none(value: Any) -> None:
    rest = RestClient(base_url="http://127.0.0.1:1")
    good = value is None or (type(value) is int and value > 0)
    if not good:
        with pytest.raises(ValueError, match="ttl_seconds"):
            rest.set_checkpoint_ttl_from_tinker_path("tinker://r/weights/a", value)
    else:
        rest.set_checkpoint_ttl_from_tinker_path("tinker://r/weights/a", value).future().cancel()


# ── events ────────────────────────────────────────────────────────────────────────────────────────

LINE = st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"]))


@pytest.mark.covers("Q-25", "4.1/2")
@given(
    st.lists(st.lists(LINE, min_size=1, max_size=3), max_size=5),
    st.lists(st.integers(0, 400), max_size=8),
    st.booleans(),
)
def test_events_survive_any_split_of_the_stream(
    blocks: list[list[str]], cuts: list[int], comments: bool
) -> None:
    note = ": still here\n\n" if comments else ""
    text = "".join(note + "".join(f"data: {line}\n" for line in block) + "\n" for block in blocks)
    stream, decoder, found = text.encode(), Decoder(), []
    places = sorted({0, len(stream), *(cut for cut in cuts if cut < len(stream))})
    for begin, end in itertools.pairwise(places):
        found += decoder.feed(stream[begin:end])
    found += decoder.close()
    assert [event.data for event in found] == ["\n".join(block) for block in blocks]


# ── forms ─────────────────────────────────────────────────────────────────────────────────────────

NAME = st.text(min_size=1, max_size=20)
LEAF = st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.binary(max_size=5)
FIELD = (
    LEAF
    | st.lists(LEAF, max_size=2)
    | st.dictionaries(NAME, LEAF | st.lists(LEAF, max_size=2), max_size=2)
)


@pytest.mark.covers("1.17.4/1", "Q-22")
@given(NAME, st.none() | NAME, st.binary(max_size=100), NAME)
def test_names_cannot_add_headers_or_parts(
    name: str, filename: str | None, content: bytes, field: str
) -> None:
    try:
        _, body = multipart({field: "v"}, {name: (filename, content)}, boundary="B0undary")
    except ValueError:
        evil = re.search(r"[\x00-\x1f\x7f\ud800-\udfff]", f"{name}{filename or ''}{field}")
        assert evil or b"--B0undary" in content or "--B0undary" in f"{name}{filename}{field}"
        return
    head, middle, tail = body.split(b"--B0undary\r\n")
    assert head == b""
    assert middle.count(b"\r\n") == 3  # the disposition, a blank line, the value
    lines, _, rest = tail.partition(b"\r\n\r\n")
    assert len(lines.split(b"\r\n")) == 2
    assert rest == content + b"\r\n--B0undary--\r\n"


@pytest.mark.covers("1.17.3/1")
@given(st.dictionaries(NAME, FIELD, max_size=3))
@settings(max_examples=50, deadline=None)
def test_any_fields_become_a_form_or_a_reason(fields: dict[str, Any]) -> None:
    refusal = None
    try:
        content_type, body = multipart(fields, None)
    except (TypeError, ValueError) as error:
        refusal = str(error)
    if refusal is None:
        assert body.endswith(b"--" + content_type.rpartition("=")[2].encode() + b"--\r\n")
    else:
        assert refusal.startswith("Failed to prepare request")


# ── the environment ───────────────────────────────────────────────────────────────────────────────

NAMES = [
    "TINKER_API_KEY",
    "TINKER_BASE_URL",
    "TINKER_TAGS",
    "TINKER_TELEMETRY",
    "TINKER_LOG",
    "TINKEX_OTEL_PROPAGATE",
    "TINKEX_DEFAULT_HEADERS",
    "TINKEX_PROXY_HEADERS",
    "TINKEX_POOL_SIZE",
    "TINKEX_HTTP_CLIENT",
    "TINKEX_PARITY",
    "TINKEX_POLL_BACKOFF",
    "HF_TOKEN",
    "HF_HOME",
]
VALUE = st.text(
    st.characters(exclude_characters="\0", exclude_categories=["Cs"])
) | st.sampled_from(
    [
        "1",
        " TRUE ",
        "off",
        "{}",
        "[]",
        '{"a": 1}',
        '[["a", "b"]]',
        "debug",
        "warning",
        "a,b,,c",
        "-1",
        "9" * 400,
        "x:y",
    ]
)


@pytest.mark.covers("1.9/1", "1.9/2", "1.9/3", "1.9/6")
@given(st.dictionaries(st.sampled_from(NAMES), VALUE))
@settings(deadline=None)
def test_reading_the_environment_never_fails(variables: dict[str, str]) -> None:
    read = environment.snapshot(variables)
    for name, variable in (("api_key", "TINKER_API_KEY"), ("base_url", "TINKER_BASE_URL")):
        assert read[name] == (variables.get(variable, "").strip() or None)
    for name in ("telemetry", "otel_propagate"):
        assert read[name] in (True, False, None)
    assert read["log_level"] in ("debug", "info", "warn", "error", None)
    assert environment.hf_token(variables) == (variables.get("HF_TOKEN", "").strip() or None)
    assert isinstance(environment.hf_token_path(variables), Path)
    assert environment.redact(read)["api_key"] == ("[REDACTED]" if read["api_key"] else None)


# ── logging and versions ──────────────────────────────────────────────────────────────────────────


@pytest.mark.covers("1.18/1")
def test_levels_set_the_packages_own_logger_and_no_other() -> None:
    logger, root = logging.getLogger("tinkex"), logging.getLogger()
    before, of_root = logger.level, root.level
    try:
        for text, level in (
            ("debug", 10),
            ("info", 20),
            ("warn", 30),
            ("WARNING", 30),
            ("error", 40),
        ):
            maybe_set_level(text)
            assert logger.level == level
        maybe_set_level(None)
        assert logger.level == 40
        with pytest.raises(ValueError, match="level must be one of"):
            maybe_set_level("loud")
        assert root.level == of_root
    finally:
        logger.setLevel(before)


@pytest.mark.covers("1.18/2")
def test_versions_differ() -> None:
    assert tinkex.__version__ != PROTOCOL_VERSION
