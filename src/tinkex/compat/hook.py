"""The hook at Python's start: with TINKEX_COMPAT=1, `import tinker` finds tinkex."""

from __future__ import annotations

import sysconfig
from pathlib import Path

VARIABLE = "TINKEX_COMPAT"
LINE = (
    f"import os; os.environ.get({VARIABLE!r}, '0') not in ('', '0') and exec("
    '"try:\\n import tinkex.compat\\n'
    "except Exception as error:\\n import sys\\n print('TINKEX_COMPAT has no effect:', error, "
    'file=sys.stderr)")\n'
)
"""The code at each start. Without the variable it only reads the environment; it never raises."""


def place() -> Path:
    """Return the path of the hook, among the packages of this Python."""
    return Path(sysconfig.get_path("purelib")) / "tinkex-compat.pth"


def put() -> Path:
    """Install the hook, for every Python of this environment that starts from now on."""
    path = place()
    path.write_text(LINE)
    return path


def remove() -> Path | None:
    """Remove the hook; return its path, or None if there was none."""
    path = place()
    if not path.exists():
        return None
    path.unlink()
    return path
