"""Bodies as JSON and as multipart forms; forms are read back with the standard library's mail
parser."""

from __future__ import annotations

import datetime as dt
import io
import re
from email.message import Message
from email.parser import BytesParser
from email.policy import HTTP
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from tinkex.client.http.multipart import body_for, multipart
from tinkex.types import AdamParams
from tinkex.wire.json_values import NOT_GIVEN, OMIT


def parts_of(content_type: str, body: bytes) -> list[tuple[str, str | None, str, bytes]]:
    """Name, file name, content type and content of each part, as another program reads them."""
    message = BytesParser(policy=HTTP.clone(max_line_length=None)).parsebytes(
        b"Content-Type: " + content_type.encode() + b"\r\n\r\n" + body
    )
    assert message.is_multipart()
    return [read(part) for part in message.get_payload()]


def read(part: Any) -> tuple[str, str | None, str, bytes]:
    """One part; its raw header is taken apart by hand, as the parser has no notion of plain UTF-8
    there."""
    assert isinstance(part, Message)
    (raw,) = [value for name, value in part.raw_items() if name == "Content-Disposition"]
    line = raw.encode("utf-8", "surrogateescape").decode()
    found = re.fullmatch(r'form-data; name="([^"]*)"(?:; filename="([^"]*)")?', line)
    assert found is not None, line
    payload = part.get_payload(decode=True)
    assert isinstance(payload, bytes)
    return found[1], found[2], part.get_content_type(), payload


def fields_of(body: Any) -> list[tuple[str, bytes]]:
    """Names and contents of a form of fields alone."""
    return [(name, content) for name, _, _, content in parts_of(*multipart(body, None))]


@pytest.mark.covers("1.17.4/1", "C17")
def test_bytes_of_a_form() -> None:
    content_type, body = multipart(
        {"note": "hi"}, {"file": ("a.txt", b"hello\n", "text/plain", {"X-A": "1"})}, "BB"
    )
    assert content_type == "multipart/form-data; boundary=BB"
    assert body == (
        b'--BB\r\nContent-Disposition: form-data; name="note"\r\n\r\nhi\r\n'
        b'--BB\r\nContent-Disposition: form-data; name="file"; filename="a.txt"\r\n'
        b"Content-Type: text/plain\r\nX-A: 1\r\n\r\nhello\n\r\n--BB--\r\n"
    )


@pytest.mark.covers("1.17.3/1", "C17")
def test_nested_fields_get_bracketed_names() -> None:
    body = {
        "user": {"name": "Alice", "age": 30, "tags": ["a", "b"]},
        "docs": [{"type": "x"}, {"type": "y"}],
        "none": None,
        "on": True,
        "off": False,
        "rate": 0.5,
        "raw": b"\x00\xff",
        "empty": {},
        "omitted": OMIT,
        "day": dt.date(2026, 3, 4),
    }
    assert fields_of(body) == [
        ("user[name]", b"Alice"),
        ("user[age]", b"30"),
        ("user[tags][]", b"a"),
        ("user[tags][]", b"b"),
        ("docs[][type]", b"x"),
        ("docs[][type]", b"y"),
        ("none", b""),
        ("on", b"true"),
        ("off", b"false"),
        ("rate", b"0.5"),
        ("raw", b"\x00\xff"),
        ("day", b"2026-03-04"),
    ]


@pytest.mark.covers(
    "1.17.1/1", "1.17.1/2", "1.17.2/1", "1.17.2/2", "1.17.2/3", "1.17.2/4", "C17", "Q-21"
)
def test_files_are_taken_in_many_forms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "weights.bin"
    path.write_bytes(b"1234")
    monkeypatch.setenv("HOME", str(tmp_path))
    with path.open("rb") as opened:
        files: dict[str, Any] = {
            "bytes": b"raw",
            "array": bytearray(b"raw"),
            "view": memoryview(b"raw"),
            "pieces": [b"r", b"aw"],
            "literal": "just words",
            "path": path,
            "text path": str(path),
            "home": "~/weights.bin",
            "open": opened,
            "stream": io.BytesIO(b"raw"),
            "renamed": ("other.bin", path),
            "nameless": (None, path),
            "typed": ("a.json", b"{}", "application/json"),
            "untyped": ("a", b"", None, None),
            "header": ("a", b"", None, [("content-type", "image/png"), ("X-B", "2")]),
            "both": ("a", b"", "image/jpeg", {"Content-Type": "image/png"}),
        }
        made = parts_of(*multipart(None, files))
    binary = "application/octet-stream"
    assert made == [
        ("bytes", None, binary, b"raw"),
        ("array", None, binary, b"raw"),
        ("view", None, binary, b"raw"),
        ("pieces", None, binary, b"raw"),
        ("literal", None, binary, b"just words"),
        ("path", "weights.bin", binary, b"1234"),
        ("text path", "weights.bin", binary, b"1234"),
        ("home", "weights.bin", binary, b"1234"),
        ("open", "weights.bin", binary, b"1234"),
        ("stream", None, binary, b"raw"),
        ("renamed", "other.bin", binary, b"1234"),
        ("nameless", None, binary, b"1234"),
        ("typed", "a.json", "application/json", b"{}"),
        ("untyped", "a", binary, b""),
        ("header", "a", "image/png", b""),
        ("both", "a", "image/jpeg", b""),
    ]


@pytest.mark.covers("1.17.2/5")
def test_pairs_may_repeat_a_name_and_keep_their_order() -> None:
    made = parts_of(*multipart({"z": 1}, [("f", b"1"), ("e", b"2"), ("f", b"3")]))
    assert [(name, content) for name, _, _, content in made] == [
        ("z", b"1"),
        ("f", b"1"),
        ("e", b"2"),
        ("f", b"3"),
    ]


@pytest.mark.covers("1.17.1/2", "Q-21")
def test_text_that_names_a_file_here_is_that_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert parts_of(*multipart(None, {"f": "note"}))[0][3] == b"note"
    (tmp_path / "note").write_bytes(b"inside")
    assert parts_of(*multipart(None, {"f": "note"}))[0] == (
        "f",
        "note",
        "application/octet-stream",
        b"inside",
    )


@pytest.mark.covers("1.17.1/3", "1.17.2/7", "C17")
@pytest.mark.parametrize(
    ("files", "error", "words"),
    [
        ({"f": "./missing.bin"}, ValueError, "no file ./missing.bin to send as 'f'"),
        ({"f": Path("missing.bin")}, ValueError, "no file missing.bin"),
        ({"f": "."}, ValueError, "'f' is a directory"),
        ({"f": "a/" + "x" * 10_000}, ValueError, "'f' cannot be read from a/x{198}…: .*too long"),
        ({"f": "a/\0"}, ValueError, "'f' cannot be read .*null"),
        ({"f": 3}, TypeError, "cannot be made of a int"),
        ({"f": None}, TypeError, "cannot be made of a NoneType"),
        ({"f": ["text"]}, TypeError, "cannot be made of a list"),
        ({"f": io.StringIO("text")}, TypeError, "binary mode"),
        ({"f": ("a", ("b", b""))}, TypeError, "cannot be made of a tuple"),
        ({"f": (b"",)}, TypeError, "must be \\(file name, content"),
        ({"f": (1, b"")}, TypeError, "must be \\(file name, content"),
        ({"f": ("a", b"", 1)}, TypeError, "must be \\(file name, content"),
        ({"f": ("a", b"", None, {}, 1)}, TypeError, "must be \\(file name, content"),
        ([b"content"], TypeError, "pairs of a name and a file"),
        ([("f", b"", 1)], TypeError, "pairs of a name and a file"),
        (b"content", TypeError, "files must be a mapping"),
    ],
)
def test_unsendable_files_give_the_reason(files: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=f"^Failed to prepare request: .*{words}"):
        multipart({}, files)
    with pytest.raises(error, match=f"^Failed to prepare request: .*{words}"):
        body_for({}, files)


@pytest.mark.covers("1.17.4/1", "Q-22")
@pytest.mark.parametrize("evil", ["a\r\nX-Evil: 1", "a\nb", "a\rb", "a\0b", "\x7f"])
@pytest.mark.parametrize(
    "place", ["name", "filename", "field", "content type", "header", "header name"]
)
def test_no_header_is_smuggled_in(evil: str, place: str) -> None:
    fields: dict[str, Any] = {}
    file: Any = ("a", b"", "text/plain", {})
    name = "f"
    if place == "name":
        name = evil
    elif place == "field":
        fields = {"a": {evil: 1}}
    else:
        named = {"filename": 0, "content type": 2, "header": 3, "header name": 3}[place]
        value: Any = {"header": {"X": evil}, "header name": {evil: "x"}}.get(place, evil)
        file = (*file[:named], value, *file[named + 1 :])
    with pytest.raises(ValueError, match="Failed to prepare request"):
        multipart(fields, {name: file})


@pytest.mark.parametrize("name", ["Content-Disposition", "", "a b", "a:b", "é"])
def test_headers_of_a_file_must_be_headers(name: str) -> None:
    with pytest.raises(ValueError, match="cannot have the header"):
        multipart({}, {"f": ("a", b"", None, {name: "x"})})


@pytest.mark.covers("1.17.4/1", "Q-22")
def test_quotes_and_backslashes_end_no_name() -> None:
    _, body = multipart({'a"; filename="x': 1}, {"f\\": ('b"\\', b"")}, "B")
    assert b'name="a%22; filename=%22x"\r\n' in body
    assert b'name="f%5C"; filename="b%22%5C"\r\n' in body


names = st.text(st.characters(exclude_categories=["Cc", "Cs"]), min_size=1)


@pytest.mark.covers("C17")
@given(
    st.dictionaries(
        names, st.text(st.characters(exclude_categories=["Cs"])) | st.binary(), max_size=4
    ),
    st.lists(st.tuples(names, st.tuples(st.none() | names, st.binary())), max_size=4),
)
def test_multipart_body_is_read_by_another_parser(fields: dict[str, Any], files: list[Any]) -> None:
    def quoted(name: str | None) -> str | None:
        return None if name is None else name.replace('"', "%22").replace("\\", "%5C")

    content_type, body = multipart(fields, files)
    if not fields and not files:
        assert re.fullmatch(rb"--[0-9a-f]{32}--\r\n", body)
        return
    made = [
        (name, filename, content) for name, filename, _, content in parts_of(content_type, body)
    ]
    sent = [(quoted(n), None, v if isinstance(v, bytes) else v.encode()) for n, v in fields.items()]
    assert made == sent + [
        (quoted(name), quoted(filename), content) for name, (filename, content) in files
    ]


@pytest.mark.covers("1.17.4/1", "C17")
def test_boundaries_are_random_and_never_occur_in_the_content() -> None:
    first, second = multipart({}, {})[0], multipart({}, {})[0]
    assert first != second
    assert re.fullmatch(r"multipart/form-data; boundary=[0-9a-f]{32}", first)
    for fields, files in [({"a": "x--BB"}, {}), ({"--BB": 1}, {}), ({}, {"f": b"\r\n--BB--\r\n"})]:
        with pytest.raises(ValueError, match="boundary 'BB' occurs"):
            multipart(fields, files, "BB")
    assert multipart({"a": "BB"}, {}, "BB")[1].count(b"--BB") == 2


@pytest.mark.parametrize("boundary", ["", "a" * 71, "a ", "a\r\nb", 'a"', "é"])
def test_boundaries_must_be_boundaries(boundary: str) -> None:
    with pytest.raises(ValueError, match=r"Failed to prepare request: .* cannot be a boundary"):
        multipart({}, {}, boundary)


def test_boundary_with_signs_is_quoted() -> None:
    content_type, body = multipart({"a": 1}, {}, "a:b c")
    assert content_type == 'multipart/form-data; boundary="a:b c"'
    assert parts_of(content_type, body)[0][0] == "a"
    assert body_for({"a": 1}, headers={"Content-Type": content_type}) == (content_type, body)


@pytest.mark.covers("1.17.4/1")
@pytest.mark.parametrize("fields", ["text", 3, ["a"], b"bytes"])
def test_fields_of_a_form_must_have_names(fields: Any) -> None:
    with pytest.raises(
        TypeError, match="Failed to prepare request: the fields of a form must be a mapping"
    ):
        multipart(fields, {})


def test_field_that_a_form_cannot_hold_is_named() -> None:
    with pytest.raises(
        TypeError, match=re.escape("Failed to prepare request: the field 'a[b]' is a set")
    ):
        multipart({"a": {"b": {1}}}, {})
    with pytest.raises(ValueError, match=r"Failed to prepare request: .*surrogates"):
        multipart({"a": "\ud800"}, {})


@pytest.mark.covers("1.17.2/6", "1.17.5/1", "1.17.5/2", "C17")
@pytest.mark.parametrize("files", [None, {}, [], NOT_GIVEN])
def test_body_without_files_is_json(files: Any) -> None:
    assert body_for({"a": OMIT, "b": None, "c": [1, 2]}, files, {}) == (
        "application/json",
        b'{"b":null,"c":[1,2]}',
    )
    assert body_for({"b": None}, files, drop_none=True) == ("application/json", b"{}")
    assert body_for(AdamParams(learning_rate=0.5), files, drop_none=True)[1].startswith(
        b'{"learning_rate":0.5'
    )


@pytest.mark.covers("C17")
def test_text_and_bytes_are_sent_as_they_are() -> None:
    assert body_for('{"a": 1 }') == ("application/json", b'{"a": 1 }')
    assert body_for("é", headers={"content-type": "text/plain"}) == ("text/plain", "é".encode())
    assert body_for(b"\x00", headers={"CONTENT-TYPE": "x/y"}) == ("x/y", b"\x00")
    assert body_for(None) == (None, b"")
    assert body_for(NOT_GIVEN) == (None, b"")


@pytest.mark.covers("1.17.5/1", "C17")
@pytest.mark.parametrize("name", ["content-type", "Content-Type"])
def test_form_is_sent_for_files_or_form_headers(name: str) -> None:
    content_type, body = body_for({"a": 1}, {"f": b"x"}, {name: "application/json"})
    assert [part[0] for part in parts_of(content_type or "", body)] == ["a", "f"]
    content_type, body = body_for({"a": [1]}, None, {name: "Multipart/Form-Data; charset=utf-8"})
    assert [part[0] for part in parts_of(content_type or "", body)] == ["a[]"]
    content_type, body = body_for(
        {"a": 1}, {"f": b"x"}, {name: "multipart/form-data; Boundary=mine"}
    )
    assert content_type == "multipart/form-data; boundary=mine"
    assert body.endswith(b"\r\n--mine--\r\n")
    assert [part[0] for part in parts_of(content_type, body)] == ["a", "f"]
    assert body_for(None, None, {name: "multipart/form-data; boundary=b"})[1] == b"--b--\r\n"
    assert parts_of(*multipart({"a": 1, "b": None}, None))[1][0] == "b"
    assert b'name="b"' not in body_for({"a": 1, "b": None}, {"f": b""}, drop_none=True)[1]


@pytest.mark.covers("1.17.5/2", "C17")
def test_text_cannot_be_a_form() -> None:
    for files, headers in [({"f": b""}, {}), (None, {"content-type": "multipart/form-data"})]:
        with pytest.raises(
            TypeError, match=r"Failed to prepare request: the fields .* must be a mapping, got str"
        ):
            body_for("a=1", files, headers)


@pytest.mark.covers("C17")
def test_unwritable_json_reports_the_reason() -> None:
    with pytest.raises(
        TypeError, match="Failed to prepare request: cannot put a object on the wire"
    ):
        body_for({"a": object()})
    with pytest.raises(ValueError, match="Failed to prepare request: a is nan"):
        body_for({"a": float("nan")})
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(ValueError, match=r"Failed to prepare request: .*recursion"):
        body_for(endless)
