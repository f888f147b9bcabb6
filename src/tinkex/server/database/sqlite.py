"""The database in SQLite: one file of the data directory.

Tensors are files beside it.
"""

from __future__ import annotations

from pathlib import Path

from tinkex.server.database.interface import (
    ActivityTable,
    CheckpointTable,
    KeyTable,
    RunTable,
    SamplerTable,
    SessionTable,
)
from tinkex.server.database.sqlite_activity import SqliteActivity, SqliteKeys
from tinkex.server.database.sqlite_connection import Connection
from tinkex.server.database.sqlite_runs import SqliteCheckpoints, SqliteRuns, SqliteSamplers
from tinkex.server.database.sqlite_sessions import SqliteSessions

DATABASE = "tinkex.sqlite3"
"""The file of a data directory that holds its facts."""


class SqliteDatabase:
    """The database of a data directory, in SQLite.

    Args:
        root: The data directory. Checkpoints are recorded relative to it, so that it can be moved.

    Raises:
        DataDirError: The database is damaged, or of a newer version.
        DatabaseError: It cannot be opened.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.connection = connection = Connection(root / DATABASE)
        checkpoints = SqliteCheckpoints(connection, root)
        self.sessions: SessionTable = SqliteSessions(connection)
        self.checkpoints: CheckpointTable = checkpoints
        self.runs: RunTable = SqliteRuns(connection, checkpoints)
        self.samplers: SamplerTable = SqliteSamplers(connection)
        self.keys: KeyTable = SqliteKeys(connection)
        self.activity: ActivityTable = SqliteActivity(connection)
        self.verify, self.close = connection.verify, connection.close


def is_database(root: Path) -> bool:
    """Return whether a directory has a database."""
    return (root / DATABASE).exists()
