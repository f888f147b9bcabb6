"""The one way to answer a request with an HTTP error, and to log what fails again and again."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping

from starlette.responses import JSONResponse, Response

from tinkex.engine.api import EngineError
from tinkex.server.files.data_dir import is_full_disk
from tinkex.wire.redaction import Scrubber

logger = logging.getLogger("tinkex.server")
_scrubber = Scrubber()

SECONDS = 600.0
"""Seconds until a fault of the same kind is logged again."""
MOST_KINDS = 1000
FULL_DISK = "the server's disk is full"

_told: dict[tuple[str, str], float] = {}

DETAIL_CHARACTERS = 4_000
"""Longest text of an error."""


class Refusal(Exception):
    """An HTTP error as an answer; `fields` join `detail` in its body."""

    def __init__(
        self,
        status: int,
        detail: str,
        *,
        headers: Mapping[str, str] | None = None,
        fields: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail
        self.headers = dict(headers or {})
        self.fields = dict(fields or {})


def refusal_of(error: Exception, name: str, conceal: Callable[[str], str]) -> Refusal:
    """Return the HTTP error for a failure of an endpoint.

    Args:
        error: The failure. One that is neither a refusal nor of the engine is a fault, and logged.
        name: The endpoint.
        conceal: Removes what callers must not see from a text.
    """
    if isinstance(error, Refusal):
        error.detail = conceal(error.detail)
        return error
    if isinstance(error, EngineError):
        return Refusal(400 if error.category == "user" else 500, conceal(str(error)))
    if is_full_disk(error):
        complain("a request failed", error, about=name)
        why = f"{FULL_DISK}; ask again when there is room"
        return Refusal(503, why, headers={"Retry-After": "5"})
    logger.error("%s failed", name, exc_info=error)
    return Refusal(500, f"internal error: {type(error).__name__}")


def refused(refusal: Refusal) -> Response:
    """Return an HTTP error as JSON."""
    body = {"detail": shortened(refusal.detail), **refusal.fields}
    return JSONResponse(body, status_code=refusal.status, headers=refusal.headers)


def shortened(detail: str) -> str:
    """Return a text without most of a long passage that it quotes."""
    half = DETAIL_CHARACTERS // 2
    return detail if len(detail) <= DETAIL_CHARACTERS else f"{detail[:half]} … {detail[-half:]}"


def internal(error: Exception) -> str:
    """Return the text for clients after a fault of the server, without secrets."""
    if is_full_disk(error):
        return f"{FULL_DISK}; ask again when there is room"
    return f"internal error: {type(error).__name__}: {_scrubber.text(str(error))}"


def complain(what: str, error: BaseException, *, about: str = "") -> None:
    """Log a failure: a full disk in one line, anything else with its traceback.

    Args:
        what: What failed.
        error: The reason.
        about: The object it was done to. On a full disk the same `what` is logged once in ten
            minutes, whatever the object.
    """
    is_full = is_full_disk(error)
    kind = (what, FULL_DISK) if is_full else (f"{what} {about}", type(error).__name__)
    now = time.monotonic()
    if now - _told.get(kind, -SECONDS) < SECONDS:
        return
    if len(_told) >= MOST_KINDS:
        _told.clear()
    _told[kind] = now
    text = f"{what} ({about})" if about else what
    if is_full:
        logger.error(
            "%s: %s (%s); this is not logged again for %d minutes",
            text,
            FULL_DISK,
            error,
            SECONDS // 60,
        )
    else:
        logger.error("%s", text, exc_info=error)
