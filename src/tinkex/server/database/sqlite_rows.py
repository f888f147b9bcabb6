"""Rows of SQLite: a column for each field of a record, with JSON in place of structures."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any, TypeVar

from tinkex.types.training import LoraConfig

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")

DECODERS: Mapping[str, Callable[[Any], Any]] = {
    "lora": LoraConfig.model_validate_json,
    "optimizer": json.loads,
    "user_metadata": json.loads,
    "is_snapshot": bool,
    "public": bool,
}
"""The columns that are not as their fields."""


def row_of(record: DataclassInstance, **others: Any) -> dict[str, Any]:
    """Return the columns of a record, and others."""
    return {field.name: _encoded(getattr(record, field.name)) for field in fields(record)} | others


def _encoded(value: Any) -> Any:
    if isinstance(value, LoraConfig):
        return value.model_dump_json()
    return json.dumps(value) if isinstance(value, dict) else value


def record_of(kind: type[T], row: sqlite3.Row, **others: Any) -> T:
    """Return the record of a row; `others` are fields that are not as their column."""
    found = {
        field.name: DECODERS[field.name](row[field.name])
        if field.name in DECODERS
        else row[field.name]
        for field in fields(kind)
    }
    return kind(**found | others)
