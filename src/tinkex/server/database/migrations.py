"""The tables of the database, as scripts that bring an older one up to date."""

MIGRATIONS = (
    """
    CREATE TABLE sessions (
        session_id TEXT PRIMARY KEY, created REAL NOT NULL, finished REAL, reason TEXT, detail TEXT,
        project_id TEXT, display_name TEXT, tags TEXT NOT NULL, user_metadata TEXT NOT NULL,
        sdk_version TEXT NOT NULL
    );
    CREATE TABLE runs (
        model_id TEXT PRIMARY KEY, session_id TEXT NOT NULL, base_model TEXT NOT NULL,
        lora TEXT NOT NULL, optimizer TEXT NOT NULL, user_metadata TEXT NOT NULL,
        created REAL NOT NULL
    );
    CREATE TABLE samplers (
        sampler_id TEXT PRIMARY KEY, session_id TEXT NOT NULL, base_model TEXT NOT NULL,
        model_path TEXT, is_snapshot INTEGER NOT NULL, created REAL NOT NULL
    );
    CREATE TABLE checkpoints (
        tinker_path TEXT PRIMARY KEY, model_id TEXT NOT NULL, directory TEXT NOT NULL,
        base_model TEXT NOT NULL, lora TEXT NOT NULL, optimizer TEXT NOT NULL,
        size_bytes INTEGER NOT NULL, created REAL NOT NULL, expires REAL,
        user_metadata TEXT NOT NULL
    );
    CREATE INDEX checkpoints_of_run ON checkpoints (model_id);
    """,
    "CREATE TABLE joins (sampler_id TEXT PRIMARY KEY, clients INTEGER NOT NULL)",
    """
    ALTER TABLE sessions ADD COLUMN owner TEXT NOT NULL DEFAULT 'local';
    ALTER TABLE runs ADD COLUMN owner TEXT NOT NULL DEFAULT 'local';
    ALTER TABLE runs ADD COLUMN last_request REAL NOT NULL DEFAULT 0;
    ALTER TABLE runs ADD COLUMN corrupted INTEGER NOT NULL DEFAULT 0;
    ALTER TABLE samplers ADD COLUMN owner TEXT NOT NULL DEFAULT 'local';
    ALTER TABLE checkpoints ADD COLUMN owner TEXT NOT NULL DEFAULT 'local';
    ALTER TABLE checkpoints ADD COLUMN public INTEGER NOT NULL DEFAULT 0;
    ALTER TABLE checkpoints ADD COLUMN project_id TEXT;
    CREATE INDEX sessions_of_owner ON sessions (owner, created);
    CREATE INDEX runs_of_owner ON runs (owner, created);
    CREATE INDEX checkpoints_of_owner ON checkpoints (owner, created)
    """,
    """
    ALTER TABLE samplers ADD COLUMN model_id TEXT;
    ALTER TABLE checkpoints ADD COLUMN request_id TEXT
    """,
    """
    CREATE TABLE keys (
        id INTEGER PRIMARY KEY AUTOINCREMENT, hash BLOB NOT NULL UNIQUE, owner TEXT NOT NULL,
        name TEXT NOT NULL, created REAL NOT NULL, last_used REAL, revoked REAL
    );
    CREATE TABLE usage (
        bucket INTEGER NOT NULL, owner TEXT NOT NULL, session_id TEXT NOT NULL,
        base_model TEXT NOT NULL, kind TEXT NOT NULL, amount REAL NOT NULL,
        PRIMARY KEY (bucket, owner, session_id, base_model, kind)
    ) WITHOUT ROWID;
    CREATE TABLE audit (
        at REAL NOT NULL, owner TEXT NOT NULL, category TEXT NOT NULL, event TEXT NOT NULL,
        model_id TEXT, tinker_path TEXT, details TEXT NOT NULL
    );
    CREATE INDEX audit_by_day ON audit (at);
    CREATE TABLE spans (
        session_id TEXT NOT NULL, request_id TEXT NOT NULL, operation TEXT NOT NULL,
        began REAL NOT NULL, ended REAL NOT NULL, error TEXT
    );
    CREATE INDEX spans_of_session ON spans (session_id, began);
    CREATE INDEX runs_of_session ON runs (session_id);
    CREATE INDEX samplers_of_session ON samplers (session_id);
    ALTER TABLE sessions ADD COLUMN heard REAL NOT NULL DEFAULT 0
    """,
    """
    CREATE TABLE saves (
        request_id TEXT PRIMARY KEY, tinker_path TEXT NOT NULL, size_bytes INTEGER NOT NULL
    );
    INSERT INTO saves SELECT request_id, tinker_path, size_bytes
        FROM checkpoints WHERE request_id IS NOT NULL;
    ALTER TABLE checkpoints DROP COLUMN request_id
    """,
    """
    ALTER TABLE runs ADD COLUMN base_digest TEXT NOT NULL DEFAULT '';
    ALTER TABLE checkpoints ADD COLUMN base_digest TEXT NOT NULL DEFAULT ''
    """,
    """
    ALTER TABLE samplers ADD COLUMN version INTEGER;
    CREATE TABLE inflight (
        model_id TEXT NOT NULL, number INTEGER NOT NULL, version INTEGER NOT NULL,
        PRIMARY KEY (model_id, number)
    ) WITHOUT ROWID
    """,
    "ALTER TABLE runs ADD COLUMN home TEXT NOT NULL DEFAULT ''",
    "CREATE TABLE lives (life INTEGER PRIMARY KEY AUTOINCREMENT, began REAL NOT NULL)",
)
