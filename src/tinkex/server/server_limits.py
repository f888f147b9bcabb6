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
    sequence_tokens: int = _limit(1_000_000, "Longest sequence, whatever a model's window is.")
    samples: int = _limit(1024, "Most samples that one request may ask for.")
    adapters: int = _limit(1024, "Most training runs an owner may have loaded at once.")
    open_requests: int = _limit(20_000, "Most requests of an owner that have not ended.")
    samplers: int = _limit(64, "Saved weights kept in memory; the longest unused make room.")
    snapshots: int = _limit(64, "Nameless samplers kept in memory; the oldest are put on disk.")
    recordings_memory_bytes: int = _limit(256 << 20, "Recordings of samples kept in memory.")
    recordings_disk_bytes: int = _limit(16 << 30, "Recordings on disk; the oldest make room.")
    unread_bytes: int = _limit(2 << 30, "Most bytes of an owner's unread and expected results.")
    announced_bytes: int = _limit(4 << 20, "Larger results are announced before they are sent.")
    inline_bytes: int = _limit(64 << 20, "Most bytes of results in one batched poll.")
    poll_seconds: float = _limit(25.0, "How long a poll waits for a result.")
    quiet_seconds: float = _limit(10.0, "How long a stream is silent before it says that it waits.")
    held_bytes: int = _limit(4 << 30, "Most bytes of an owner's requests that have not ended.")
    gap_seconds: float = _limit(3600.0, "How long a missing request holds up those after it.")
    gap_bytes: int = _limit(256 << 20, "Most bytes of a run's requests behind a missing one.")
    journal_bytes: int = _limit(16 << 30, "Most bytes of a run's requests since its last state.")
    connections: int = _limit(4096, "Most connections, if the system allows as many open files.")
    connections_per_address: int = _limit(2048, "Most connections from an address or a proxy.")
    header_seconds: float = _limit(20.0, "How long the header of a request may take to arrive.")
    body_seconds: float = _limit(30.0, "How long a body may pause, or fall behind 10 kB/s in all.")
    session_seconds: float = _limit(1800.0, "How long a session may be silent before it ends.")
    drain_seconds: float = _limit(30.0, "How long a stopping server waits for open requests.")

    def __post_init__(self) -> None:
        for limit in fields(self):
            value = getattr(self, limit.name)
            if value < 0 or (isinstance(limit.default, int) and value == 0):
                least = "at least 1" if value == 0 else "positive"
                raise ValueError(f"{limit.name} must be {least}, got {value}")
