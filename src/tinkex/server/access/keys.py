"""Keys on record: making, revoking and counting them."""

from __future__ import annotations

import hashlib
import json
import secrets
import time

from tinkex.server.database.interface import LOCAL_OWNER, AuditEntry, Database
from tinkex.server.files.data_dir import is_keyed, mark_keyed

PREFIX = "tml-"


def hash_of(key: str) -> bytes:
    """Return the hash of a key, which is kept instead of it."""
    return hashlib.sha256(key.encode()).digest()


def create_key(database: Database, name: str, owner: str = LOCAL_OWNER) -> tuple[int, str]:
    """Make a key; return its number and the key, which is not kept and cannot be shown again."""
    mark_keyed(database.root)
    key = PREFIX + secrets.token_urlsafe(32)
    number = database.keys.add(hash_of(key), owner, name)
    _audit(database, owner, "api_key_created", number, name)
    return number, key


def revoke_key(database: Database, number: int) -> bool:
    """Revoke a key; return False if there is no valid key of that number."""
    revoked = database.keys.revoke(number)
    if revoked is not None:
        owner, name = revoked
        _audit(database, owner, "api_key_revoked", number, name)
    return revoked is not None


def _audit(database: Database, owner: str, event: str, number: int, name: str) -> None:
    details = json.dumps({"key_id": number, "name": name})
    entry = AuditEntry(time.time(), owner, "organizations", event, None, None, details)
    database.activity.add({}, [], [entry])


def has_keys(database: Database) -> bool:
    """Return whether a key was ever made.

    Neither revoking the last key nor losing the database opens a server to everyone.
    """
    return is_keyed(database.root) or bool(database.keys.all())
