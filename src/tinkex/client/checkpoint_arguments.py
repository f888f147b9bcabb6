"""Arguments that several clients take, checked before anything is sent."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias, TypeVar, get_args

from tinkex.types.checkpoints import SCHEME, ParsedCheckpointTinkerPath

T = TypeVar("T")
AccessScope: TypeAlias = Literal["owned", "accessible"]


def checked_id(name: str, value: str) -> str:
    """Return an id for a URL path; raise if it is empty or a dot segment."""
    if not isinstance(value, str) or value in ("", ".", ".."):
        raise ValueError(f"{name} must be an id, got {value!r}")
    return value


def checkpoint_parts(run_or_path: str, checkpoint_id: str | None = None) -> dict[str, str]:
    """Return the parts of a checkpoint's address, from its path or its run and id."""
    if checkpoint_id is not None:
        checked_id("training_run_id", run_or_path)
        run_or_path = f"{SCHEME}{run_or_path}/{checkpoint_id}"
    parsed = ParsedCheckpointTinkerPath.from_tinker_path(run_or_path)
    return {
        "training_run_id": checked_id("training_run_id", parsed.training_run_id),
        "kind": parsed.checkpoint_id.split("/", 1)[0],
        "name": checked_id("the checkpoint's name", parsed.name),
    }


def scope_query(scope: str | None) -> dict[str, object]:
    """Return the query of an access scope; raise if there is no such scope."""
    if scope is not None:
        checked_choice("access_scope", scope, AccessScope)
    return {"access_scope": scope}


def checked_choice(name: str, value: T, choices: Any) -> T:
    """Return a value; raise if it is none of those of a Literal type."""
    if value not in get_args(choices):
        raise ValueError(f"{name} is {value!r}; expected one of {', '.join(get_args(choices))}")
    return value


def checked_ttl(seconds: int | None) -> int | None:
    """Return a lifetime; raise if it is not a positive whole number or None."""
    if seconds is not None and (
        isinstance(seconds, bool) or not isinstance(seconds, int) or seconds <= 0
    ):
        raise ValueError(f"ttl_seconds must be a positive whole number or None, got {seconds!r}")
    return seconds
