"""What a description allows, and what it does not: values made from JSON schemas, and good bodies
broken in one place.

A text that begins with `@` stands for something of the server under test (`@model` for a live run);
`@raw:` is put into the JSON as it is, for what no writer of JSON would write.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any, TypeAlias

from hypothesis import strategies as st

Json: TypeAlias = Any
Place: TypeAlias = tuple[str | int, ...]

RAW = "@raw:"
DEEP = RAW + "[" * 400 + "]" * 400
DEEP_OBJECT = RAW + '{"a":' * 400 + "1" + "}" * 400
TEXTS = [
    "",
    " ",
    "\x00",
    "é\u202e😀",
    "../../etc/passwd",
    "'; DROP TABLE runs; --",
    "x" * 5000,
    "a:b:c",
    "tinker://a/b/c",
]
WHOLE = [
    0,
    1,
    -1,
    2,
    255,
    256,
    2**31 - 1,
    2**31,
    2**53,
    2**63 - 1,
    2**63,
    2**64,
    -(2**63),
    -(2**63) - 1,
    10**30,
    10**400,
]
REAL = [0.0, -0.0, 0.5, -1.5, 1e-320, 1e308, -1e308, f"{RAW}1e400", f"{RAW}-1E+999", f"{RAW}1e-999"]
KNOWN: dict[str, list[str]] = {
    "session_id": ["@session"],
    "model_id": ["@model"],
    "training_run_id": ["@model"],
    "sampling_session_id": ["@sampler"],
    "sampler_id": ["@sampler"],
    "request_id": ["@request"],
    "base_model": ["fake"],
    "tinker_path": ["@weights", "@samplable"],
    "source_path": ["@weights", "@samplable"],
    "model_path": ["@samplable", "@weights"],
    "path": ["@fresh", "@weights"],
    "kind": ["weights", "sampler_weights", "external_weights"],
    "name": ["w", "s", "@fresh"],
    "file": ["archive.tar", "fake.json"],
    "loss_fn": ["cross_entropy", "custom"],
    "model_seq_id": ["@number"],
    "custom_loss_seq_id": ["@number"],
    "sampling_session_seq_id": ["@number"],
}
"""What makes a request reach something that is there, by the name of a field or parameter."""
INPUTS = ["target_tokens", "weights", "advantages", "odd"]


def anything() -> st.SearchStrategy[Json]:
    """Any JSON, odd or not."""
    plain = st.one_of(
        st.none(),
        st.booleans(),
        st.sampled_from(WHOLE),
        st.sampled_from(REAL),
        st.sampled_from([*TEXTS, DEEP, DEEP_OBJECT]),
        st.text(st.characters(codec="utf-8"), max_size=8),
    )
    return st.recursive(
        plain,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_names(), inner, max_size=3),
    )


def _names() -> st.SearchStrategy[str]:
    return st.sampled_from(["type", "a", "", "\x00", "self", "x" * 300])


def values(schema: Json, document: Json, name: str = "", depth: int = 0) -> st.SearchStrategy[Json]:
    """Values of a schema's shape, with odd contents: it says what is allowed, the server must bear
    what is not."""
    if "$ref" in schema:
        found = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
        return values(found, document, name, depth)
    if "anyOf" in schema:
        return st.one_of([values(one, document, name, depth) for one in schema["anyOf"]])
    if "enum" in schema or "const" in schema:
        return st.sampled_from(schema.get("enum") or [schema["const"]])
    known = KNOWN.get(name, []) * 12
    match schema.get("type"):
        case "string" if "format" in schema:
            return st.sampled_from(
                ["2026-07-13T00:00:00Z", "0001-01-01T00:00:00+14:00", "9999-12-31", "2026-07-13"]
            )
        case "string" if schema.get("contentEncoding") == "base64":
            return st.sampled_from(["", "AAAA", "iVBORw0KGgo=", "/gABAg==", "*"])
        case "string":
            return st.sampled_from([*known, *TEXTS])
        case "integer":
            return st.sampled_from([*known, *WHOLE, *range(20)])
        case "number":
            return (
                st.integers(0, 300)
                | st.sampled_from(REAL)
                | st.floats(allow_nan=False, allow_infinity=False)
            )
        case "boolean":
            return st.booleans()
        case "null":
            return st.none()
        case "array":
            return (
                st.lists(values(schema["items"], document, name, depth + 1), max_size=3)
                if "items" in schema
                else ANY
            )
        case "object":
            return _objects(schema, document, name, depth)
    return ANY


ANY = st.deferred(anything)


def _objects(schema: Json, document: Json, name: str, depth: int) -> st.SearchStrategy[Json]:
    needed = set(schema.get("required", ()))
    fields = {
        key: values(one, document, key, depth + 1)
        for key, one in schema.get("properties", {}).items()
    }
    rest = schema.get("additionalProperties")
    if not fields:
        keys = st.sampled_from(INPUTS) if name == "loss_fn_inputs" else _names()
        return st.dictionaries(
            keys, values(rest, document, "", depth + 1) if rest else ANY, max_size=3
        )
    return st.fixed_dictionaries(
        {key: field for key, field in fields.items() if key in needed},
        optional={key: field for key, field in fields.items() if key not in needed},
    )


# ── broken in one place ───────────────────────────────────────────────────────────────────────────

WRONG: list[Json] = [
    None,
    True,
    "",
    "text",
    "\x00",
    "x" * 100_000,
    0,
    -1,
    1.5,
    10**30,
    10**400,
    -(10**30),
    1e308,
    [],
    {},
    [None],
    [[1], [1, 2]],
    {"a": {"b": 1}},
    ["x"] * 40_000,
    DEEP,
    DEEP_OBJECT,
    *(
        f"{RAW}{token}"
        for token in (
            "NaN",
            "-Infinity",
            "1e999",
            "9" * 5000,
            "01",
            '"\\ud800"',
            "'x'",
            "[1,]",
            "nul",
        )
    ),
]
MISSING, EXTRA, TWICE = "missing", "extra", "twice"


def places(body: Json, here: Place = ()) -> Iterator[Place]:
    """Every place in a JSON value."""
    if here:
        yield here
    items = (
        body.items()
        if isinstance(body, dict)
        else enumerate(body)
        if isinstance(body, list)
        else ()
    )
    for key, item in items:
        yield from places(item, (*here, key))


def at(body: Json, place: Place) -> Json:
    """Return the value at a place."""
    for step in place:
        body = body[step]
    return body


def broken(body: Json, place: Place, how: Json) -> Json:
    """A copy of a body in which one place is wrong."""
    body = copy.deepcopy(body)
    holder, last = at(body, place[:-1]), place[-1]
    if how == MISSING:
        del holder[last]
    elif how == EXTRA:
        if isinstance(holder, dict):
            holder["not_a_field"] = holder[last]
        else:
            holder.append({"not_a_field": 1})
    elif how == TWICE:
        holder[last] = [holder[last], holder[last]]
    else:
        holder[last] = how
    return body


@st.composite
def breaks(draw: st.DrawFn, body: Json) -> tuple[Place, Json]:
    """A place of a body, and how to break it."""
    return draw(st.sampled_from(sorted(places(body), key=str))), draw(
        st.sampled_from([MISSING, EXTRA, TWICE, *WRONG])
    )


def written(body: Json) -> bytes:
    """A body as bytes, with what cannot be written in it."""
    text = json.dumps(body)
    parts = text.split(f'"{RAW}')
    for index, part in enumerate(parts[1:], 1):
        decoded, end = json.decoder.scanstring(part, 0)  # type: ignore[attr-defined]
        parts[index] = decoded + part[end:]
    return "".join(parts).encode()
