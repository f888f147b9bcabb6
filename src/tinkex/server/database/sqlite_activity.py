"""Keys, usage, the audit log and timelines in SQLite."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from tinkex.server.database.interface import AuditEntry, Key, Span, Use, Used
from tinkex.server.database.sqlite_connection import Table

AUDIT = "at, owner, category, event, model_id, tinker_path, details"
ADD_USE = """
    INSERT INTO usage VALUES (?, ?, ?, ?, ?, ?)
    ON CONFLICT (bucket, owner, session_id, base_model, kind)
    DO UPDATE SET amount = amount + excluded.amount
"""


class SqliteKeys(Table):
    """API keys, by their hashes."""

    def add(self, digest: bytes, owner: str, name: str) -> int:
        """Record a key; return its number."""
        sql = "INSERT INTO keys (hash, owner, name, created) VALUES (?, ?, ?, ?) RETURNING id"
        return int(self._connection.rows(sql, digest, owner, name, time.time())[0]["id"])

    def all(self) -> list[Key]:
        """Return all keys, revoked ones too."""
        sql = "SELECT id, owner, name, created, last_used, revoked FROM keys ORDER BY id"
        return [Key(*row) for row in self._connection.rows(sql)]

    def revoke(self, number: int) -> tuple[str, str] | None:
        """Revoke a key; return its owner and name, or None if there is no such valid key."""
        sql = "UPDATE keys SET revoked = ? WHERE id = ? AND revoked IS NULL RETURNING owner, name"
        rows = self._connection.rows(sql, time.time(), number)
        return (rows[0]["owner"], rows[0]["name"]) if rows else None

    def use(self, digest: bytes) -> tuple[int, str] | None:
        """Return number and owner of a valid key, and note its use; None if there is none."""
        row = self._connection.one("SELECT * FROM keys WHERE hash = ? AND revoked IS NULL", digest)
        if row is None or row["hash"] != digest:  # the index may be damaged
            return None
        used = "UPDATE keys SET last_used = ? WHERE id = ?"
        self._connection.change((used, [(time.time(), row["id"])]), flush=False)
        return row["id"], row["owner"]

    def is_valid(self, number: int) -> bool:
        """Return whether a key is on record and not revoked."""
        sql = "SELECT 1 FROM keys WHERE id = ? AND revoked IS NULL"
        return self._connection.one(sql, number) is not None

    def name(self, number: int) -> str:
        """Return the name of a key."""
        return str(self._connection.rows("SELECT name FROM keys WHERE id = ?", number)[0]["name"])


class SqliteActivity(Table):
    """Usage by the hour, the audit log, and the timelines of sessions."""

    def begin_life(self) -> int:
        """Count a start of the server; return its number, which is above all earlier ones."""
        sql = "INSERT INTO lives (began) VALUES (?) RETURNING life"
        return int(self._connection.rows(sql, time.time())[0]["life"])

    def add(
        self, uses: Mapping[Use, float], spans: Sequence[Span], entries: Sequence[AuditEntry]
    ) -> None:
        """Record uses, spans and audit entries, all or none."""
        self._connection.change(
            (ADD_USE, [(*use, amount) for use, amount in uses.items()]),
            ("INSERT INTO spans VALUES (?, ?, ?, ?, ?, ?)", spans),
            (f"INSERT INTO audit ({AUDIT}) VALUES (?, ?, ?, ?, ?, ?, ?)", entries),
            flush=bool(entries),
        )

    def used(
        self, start: int, end: int, owner: str | None
    ) -> tuple[list[Used], dict[str, dict[str, Any]]]:
        """Return the uses between two times, and the metadata of their sessions."""
        rows = self._connection.read(
            """
            SELECT usage.*, sessions.project_id, sessions.user_metadata
            FROM usage LEFT JOIN sessions USING (session_id)
            WHERE bucket >= :start AND bucket < :end AND (:owner IS NULL OR usage.owner = :owner)
            ORDER BY bucket, usage.owner, session_id, kind
            """,
            {"start": start, "end": end, "owner": owner},
        )
        texts = {row["session_id"]: row["user_metadata"] for row in rows}
        metadata = {session: json.loads(text) for session, text in texts.items() if text}
        return [Used(*tuple(row)[:-1]) for row in rows], metadata

    def audit(
        self, start: float, end: float, owner: str | None, category: str | None
    ) -> list[AuditEntry]:
        """Return the audit log between two times; None means all owners or categories."""
        rows = self._connection.read(
            f"""
            SELECT {AUDIT} FROM audit
            WHERE at >= :start AND at < :end AND (:owner IS NULL OR owner = :owner)
                AND (:category IS NULL OR category = :category) ORDER BY at
            """,
            {"start": start, "end": end, "owner": owner, "category": category},
        )
        return [AuditEntry(*row) for row in rows]

    def spans(self, session_id: str) -> list[Span]:
        """Return the timeline of a session."""
        sql = "SELECT * FROM spans WHERE session_id = ? ORDER BY began"
        return [Span(*row) for row in self._connection.read(sql, [session_id])]

    def forget_spans(self, before: float) -> None:
        """Delete the spans that began before a time."""
        self._connection.rows("DELETE FROM spans WHERE began < ?", before)
