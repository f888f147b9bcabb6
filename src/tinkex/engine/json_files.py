"""JSON files of other programs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tinkex.engine.api import EngineError


def parse_object(text: str | bytes, name: Path) -> dict[str, Any]:
    """Parse a JSON object; `name` is the file that it is from.

    Raises:
        EngineError: It is not JSON, is nested too deeply, has an endless number, or is no object.
    """
    try:
        fields = json.loads(text)
    except RecursionError:
        raise EngineError(f"{name} is not valid JSON: it is nested too deeply") from None
    except ValueError as error:  # of bad UTF-8 too, and of a number with thousands of digits
        raise EngineError(f"{name} is not valid JSON: {str(error).partition(';')[0]}") from None
    if not isinstance(fields, dict):
        raise EngineError(f"{name} is not a JSON object")
    return fields


def read_object(path: Path) -> dict[str, Any]:
    """Read a file that must hold a JSON object; FileNotFoundError if it is missing."""
    return parse_object(path.read_bytes(), path)


def shown(value: object) -> str:
    """Return a value for a message, shortened."""
    try:
        text = repr(value)
    except ValueError:  # a number with thousands of digits
        text = "a number with thousands of digits"
    return text if len(text) <= 80 else f"{text[:77]}..."
