"""Marks for what was not given, and plain data from anything a caller may hand over."""

from __future__ import annotations

import copy
import datetime as dt
import pickle
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, strategies as st

from tinkex import types
from tinkex.types.record import to_builtins, to_json
from tinkex.types.saves import SetCheckpointTtlRequest
from tinkex.wire.json_values import NOT_GIVEN, OMIT, NotGiven, Omit, coalesce, is_given, transform

MARKS = pytest.mark.parametrize(("mark", "kind"), [(NOT_GIVEN, NotGiven), (OMIT, Omit)])


@pytest.mark.covers("C18")
@MARKS
def test_mark_is_falsy_and_a_singleton(mark: Any, kind: type[Any]) -> None:
    assert not mark
    assert mark is not None
    assert isinstance(mark, kind)
    assert kind() is mark
    assert copy.copy(mark) is mark
    assert copy.deepcopy([mark])[0] is mark
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        assert pickle.loads(pickle.dumps(mark, protocol)) is mark


def test_marks_are_shown_by_their_names() -> None:
    assert f"{NOT_GIVEN} {OMIT!r}" == "NOT_GIVEN OMIT"


@pytest.mark.covers("C18")
@pytest.mark.parametrize("value", [None, False, 0, "", [], {}])
def test_falsy_values_are_given(value: Any) -> None:
    assert is_given(value)
    assert coalesce(value, "default") is value


@pytest.mark.covers("C18")
@MARKS
def test_default_stands_in_for_a_mark(mark: Any, kind: type[Any]) -> None:
    assert not is_given(mark)
    assert coalesce(mark, "default") == "default"


@pytest.mark.covers("C18")
def test_entries_that_hold_a_mark_are_dropped_at_any_depth() -> None:
    data = {"a": NOT_GIVEN, "b": {"c": OMIT, "d": [{"e": OMIT, "f": 1}, NOT_GIVEN, 2]}, "g": None}
    assert transform(data) == {"b": {"d": [{"f": 1}, 2]}, "g": None}


@pytest.mark.covers("C18")
def test_none_is_dropped_on_request_only_from_mappings() -> None:
    data = {"none": None, "false": False, "zero": 0, "empty": "", "list": [None, {"none": None}]}
    assert transform(data) == data
    dropped = transform(data, drop_none=True)
    assert dropped == {"false": False, "zero": 0, "empty": "", "list": [None, {}]}


@pytest.mark.covers("C18")
@pytest.mark.parametrize("value", [None, True, 3, 2.5, "text", b"bytes", {1, 2}])
def test_scalars_pass(value: Any) -> None:
    assert transform(value) is value


def test_missing_body_is_none() -> None:
    assert transform(NOT_GIVEN) is None
    assert transform(OMIT) is None


class Colour(Enum):
    RED = "red"


class Fruit(StrEnum):
    APPLE = "apple"


@pytest.mark.covers("C18")
def test_keys_become_strings_and_enumerations_their_values() -> None:
    made = transform({1: "a", Fruit.APPLE: Fruit.APPLE, Colour.RED: [Colour.RED]})
    assert made == {"1": "a", "apple": "apple", "red": ["red"]}
    assert {type(key) for key in made} | {type(made["apple"])} == {str}


@pytest.mark.covers("C18")
def test_aliases_rename_keys_at_any_depth() -> None:
    made = transform({"model_id": 1, "inner": [{"model_id": 2}]}, aliases={"model_id": "modelId"})
    assert made == {"modelId": 1, "inner": [{"modelId": 2}]}


@pytest.mark.parametrize("data", [{"a": 1, "b": 2}, {"b": 1, "a": 2}])
def test_two_entries_never_become_one(data: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="two entries would be sent as 'b'"):
        transform(data, aliases={"a": "b"})
    with pytest.raises(ValueError, match="two entries would be sent as '1'"):
        transform({1: "a", "1": "b"})
    assert transform(data | {"a": OMIT}, aliases={"a": "b"}) == {"b": data["b"]}


MOMENT = dt.datetime(2026, 3, 4, 5, 6, 7, tzinfo=dt.UTC)


@pytest.mark.covers("C18", "D21")
def test_times_become_text_at_any_depth() -> None:
    made = transform(
        {
            "at": MOMENT,
            "days": [dt.date(2026, 3, 4)],
            "naive": dt.datetime(2026, 3, 4),
            "t": dt.time(5, 6),
        }
    )
    assert made == {
        "at": "2026-03-04T05:06:07Z",
        "days": ["2026-03-04"],
        "naive": "2026-03-04T00:00:00",
        "t": "05:06:00",
    }


@pytest.mark.covers("C18")
def test_formats_are_applied_by_key_and_their_results_not_looked_into() -> None:
    made = transform(
        {"at": MOMENT, "list": [{"n": 3}], "raw": 1, "none": None, "off": OMIT, "gone": 1},
        aliases={"n": "number"},
        formats={
            "at": "iso8601",
            "n": lambda n: n * 2,
            "raw": lambda _: {"kept": NOT_GIVEN},
            "none": lambda _: 1 / 0,
            "off": lambda _: 1 / 0,
            "gone": lambda _: OMIT,
        },
    )
    assert made == {
        "at": "2026-03-04T05:06:07Z",
        "list": [{"number": 6}],
        "raw": {"kept": NOT_GIVEN},
        "none": None,
    }


@pytest.mark.covers("C18")
def test_text_and_lists_pass_the_format_of_times() -> None:
    formats: Any = {"at": "iso8601"}
    assert transform({"at": "today"}, formats=formats) == {"at": "today"}
    assert transform({"at": [MOMENT]}, formats=formats) == {"at": ["2026-03-04T05:06:07Z"]}
    with pytest.raises(ValueError, match="format of 'at' is 'rfc822'"):
        transform({}, formats={"at": "rfc822"})  # type: ignore[dict-item]


@dataclass
class Point:
    x: float
    at: dt.date
    label: str | None = None
    more: list[Any] = field(default_factory=list)


class Plain(msgspec.Struct):
    name: str
    point: Point | NotGiven = NOT_GIVEN


class Model:
    """Stand-in for a pydantic model."""

    def model_dump(self) -> dict[str, Any]:
        return {"when": MOMENT, "nothing": None}


@pytest.mark.covers("C18")
def test_objects_are_sent_field_by_field() -> None:
    point = Point(1.5, dt.date(2026, 3, 4), more=[Model(), Plain("a")])
    shown = {
        "x": 1.5,
        "at": "2026-03-04",
        "label": None,
        "more": [{"when": "2026-03-04T05:06:07Z", "nothing": None}],
    }
    shown["more"].append({"name": "a"})  # type: ignore[attr-defined]
    assert transform(point) == shown
    assert transform(Plain("b", point), drop_none=True)["point"]["more"] == [
        {"when": "2026-03-04T05:06:07Z"},
        {"name": "a"},
    ]
    assert transform({"kind": Point}) == {"kind": Point}  # a class is not an object of it


RECORDS = [
    types.AdamParams(learning_rate=1e-4),
    types.CreateSessionRequest(tags=["a"], sdk_version="x"),
    types.CreateModelRequest(
        session_id="s", model_seq_id=0, base_model="m", lora_config=types.LoraConfig(rank=4)
    ),
    types.OptimStepRequest(model_id="m", seq_id=1, adam_params=types.AdamParams()),
    types.ModelInput.from_ints([1, 2, 3]),
    types.TensorData(data=[1, 2], dtype="int64", shape=[2]),
    types.Datum(
        model_input=types.ModelInput.from_ints([1]), loss_fn_inputs={"weights": np.array([0.5])}
    ),
]


@pytest.mark.covers("C18")
@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
def test_messages_without_none_equal_the_wire(record: Any) -> None:
    assert transform({"body": record}, drop_none=True) == {"body": to_builtins(record)}
    assert transform(record) == to_builtins(record, keep_none=True)


def test_null_that_must_be_sent_is_sent() -> None:
    request = SetCheckpointTtlRequest(ttl_seconds=None)
    assert transform(request, drop_none=True) == {"ttl_seconds": None}


@pytest.mark.covers("C18")
def test_numbers_and_arrays_of_numpy_become_plain() -> None:
    data = {
        "scalar": np.float64(0.5),
        "int": np.int32(3),
        "bool": np.bool_(True),
        "text": np.str_("a"),
        "array": np.arange(4).reshape(2, 2),
        "times": np.array(["2026-03-04"], dtype="datetime64[D]"),
    }
    made = transform(data)
    assert made == {
        "scalar": 0.5,
        "int": 3,
        "bool": True,
        "text": "a",
        "array": [[0, 1], [2, 3]],
        "times": ["2026-03-04"],
    }
    assert [type(made[name]) for name in ("scalar", "int", "bool", "text")] == [
        float,
        int,
        bool,
        str,
    ]


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.text()
    | st.dates()
    | st.datetimes(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner | st.just(NOT_GIVEN)),
    max_leaves=12,
)


@given(values, st.booleans())
def test_transformed_value_can_be_sent_unchanged(value: Any, drop_none: bool) -> None:
    made = transform(value, drop_none=drop_none)
    assert transform(made, drop_none=drop_none) == made
    assert msgspec.json.decode(to_json(made)) == made
