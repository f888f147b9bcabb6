"""Faults that repeat: logged once, then seldom."""

from __future__ import annotations

import logging
import time

from tinkex.server.files.data_dir import is_full_disk

logger = logging.getLogger("tinkex.server")

SECONDS = 600.0
"""Seconds until a fault of the same kind is logged again."""
MOST_KINDS = 1000
FULL_DISK = "the server's disk is full"

_told: dict[tuple[str, str], float] = {}


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
        wait = f"not logged again for {SECONDS / 60:.0f} minutes"
        logger.error("%s: %s (%s); %s", text, FULL_DISK, error, wait)
    else:
        logger.error("%s", text, exc_info=error)
