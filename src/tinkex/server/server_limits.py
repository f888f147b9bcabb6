"""The limits of a server."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any


def _limit(default: Any, meaning: str) -> Any:
    return field(default=default, metadata={"help": meaning})


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of a server; `tinkex serve` has an option for each, with this help."""

    body_bytes: int = _limit(1 << 30, "Largest body of a request.")
    sequence_tokens: int = _limit(
        1_000_000, "Longest sequence of a request, whatever a model's window is."
    )
    samples: int = _limit(1024, "Most samples that one request may ask for.")
    adapters: int = _limit(1024, "Most training runs an owner may have loaded at once.")
    open_requests: int = _limit(20_000, "Most requests an owner may have taken and not ended.")
    samplers: int = _limit(
        64, "Saved weights kept in memory for sampling; the longest unused make room."
    )
    snapshots: int = _limit(64, "Nameless samplers kept in memory; the oldest are put on disk.")
    recordings_memory_bytes: int = _limit(
        256 << 20, "Recordings of samples kept in memory; all are on disk."
    )
    recordings_disk_bytes: int = _limit(
        16 << 30, "Recordings of samples kept on disk; the oldest make room."
    )
    unread_bytes: int = _limit(
        2 << 30,
        "Most bytes of results that wait to be read by an owner, with those of open samples.",
    )
    announced_bytes: int = _limit(
        4 << 20, "Results beyond this are announced to readers before they are sent."
    )
    inline_bytes: int = _limit(64 << 20, "Most that one batched poll brings along.")
    poll_seconds: float = _limit(25.0, "How long a poll is held when there is no result yet.")
    quiet_seconds: float = _limit(
        10.0, "How long a stream says nothing before it says that it waits."
    )
    held_bytes: int = _limit(
        4 << 30, "Most bytes of an owner's requests that arrive or have not ended."
    )
    gap_seconds: float = _limit(3600.0, "How long a missing request holds up those after it.")
    gap_bytes: int = _limit(
        256 << 20, "Most bytes of a run's requests that wait for a missing one."
    )
    journal_bytes: int = _limit(
        16 << 30, "Most bytes of a run's requests on disk since its last state."
    )
    connections: int = _limit(
        4096, "Most connections at a time, as far as the system allows as many open files."
    )
    connections_per_address: int = _limit(
        2048, "Most connections from one address; a proxy is one."
    )
    header_seconds: float = _limit(
        20.0, "How long a connection may take to send the header of a request."
    )
    body_seconds: float = _limit(
        30.0, "How long the body of a request may pause, or fall behind 10 kB/s in all."
    )
    session_seconds: float = _limit(
        1800.0, "How long nothing may be heard of a session before it is ended."
    )
    drain_seconds: float = _limit(
        30.0, "How long a server that is told to stop waits for what is under way."
    )

    def __post_init__(self) -> None:
        for limit in fields(self):
            value = getattr(self, limit.name)
            if value < 0 or (isinstance(limit.default, int) and value == 0):
                raise ValueError(
                    f"{limit.name} must be {'at least 1' if value == 0 else 'positive'}, got "
                    f"{value}"
                )
