"""The hook at Python's start: with TINKEX_COMPAT=1, all programs of this Python find tinkex under
the name tinker.
"""

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
"""All that is run at the start: without the variable one look into the environment, and never an
error."""


def place() -> Path:
    """Where the hook is put: among the packages of this Python."""
    return Path(sysconfig.get_path("purelib")) / "tinkex-compat.pth"


def put() -> Path:
    """Put the hook in place; what TINKEX_COMPAT says holds for every Python that starts from now
    on.
    """
    path = place()
    path.write_text(LINE)
    return path


def remove() -> Path | None:
    """Take the hook away; None when there was none."""
    path = place()
    if not path.exists():
        return None
    path.unlink()
    return path
