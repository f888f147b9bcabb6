"""Messages of the search for checkpoints."""

from __future__ import annotations

import datetime as dt
from typing import TYPE_CHECKING, TypeAlias

import msgspec

from tinkex.types.checkpoints import Checkpoint, CheckpointType
from tinkex.types.record import Int64, Record
from tinkex.types.session_search import MOST_CONDITIONS, OwnerMark, OwnSearchOwner, SearchOwner

if TYPE_CHECKING:
    _Owner: TypeAlias = SearchOwner
else:
    _Owner = OwnerMark  # by which msgspec reads it


class CheckpointSearchCursor(Record, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The end of a page, from which the next one goes on. It is passed back unchanged.

    Example:
        >>> created = dt.datetime(2026, 1, 2, tzinfo=dt.UTC)
        >>> cursor = CheckpointSearchCursor(last_created_at=created, last_checkpoint_uuid="c-9")
        >>> CheckpointSearchRequest(cursor=cursor).cursor.last_checkpoint_uuid
        'c-9'
    """

    last_created_at: dt.datetime
    last_checkpoint_uuid: str

    def __post_init__(self) -> None:
        if self.last_created_at.tzinfo is None:
            raise ValueError("last_created_at must have a time zone")


class CheckpointSearchRequest(Record, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The checkpoints to look for, newest first. What is left out matches everything.

    Example:
        >>> CheckpointSearchRequest(checkpoint_type="sampler", user_metadata={"task": "add"}).limit
        50
    """

    project_ids: list[str] | None = None
    user_metadata: dict[str, str] = msgspec.field(default_factory=dict)
    checkpoint_type: CheckpointType | None = None
    owner: _Owner = msgspec.field(default_factory=OwnSearchOwner)
    base_models: list[str] | None = None
    """None matches every base model, an empty list matches none."""
    limit: Int64 = 50
    cursor: CheckpointSearchCursor | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.limit <= 200:
            raise ValueError(f"limit must be 1 to 200, got {self.limit}")
        # each of them is a condition of a query
        for name in ("project_ids", "user_metadata", "base_models"):
            if len(getattr(self, name) or ()) > MOST_CONDITIONS:
                raise ValueError(
                    f"{name} must have at most {MOST_CONDITIONS} items, got "
                    f"{len(getattr(self, name))}"
                )


class CheckpointSearchResponse(Record, frozen=True, kw_only=True):
    """A page of checkpoints.

    Example:
        >>> fields = {
        ...     "checkpoint_id": "weights/a",
        ...     "checkpoint_type": "training",
        ...     "time": "2026-01-02T00:00:00Z",
        ... }
        >>> found = {
        ...     **fields,
        ...     "tinker_path": "tinker://run-1/weights/a",
        ...     "base_model": "tinkex/tiny",
        ... }
        >>> page = CheckpointSearchResponse.model_validate({"checkpoints": [found]})
        >>> page.checkpoints[0].base_model, page.next_cursor is None
        ('tinkex/tiny', True)
    """

    checkpoints: list[Checkpoint]
    next_cursor: CheckpointSearchCursor | None = None
