"""The one way to answer a request with an HTTP error."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from starlette.responses import JSONResponse, Response

from tinkex.engine.api import EngineError
from tinkex.server.complaints import FULL_DISK, complain
from tinkex.server.files.data_dir import is_full_disk

logger = logging.getLogger("tinkex.server")

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
