"""`python -m tinkex.compat …`: run `python …` with tinkex under the name tinker.

This also holds for the processes that the program starts.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

from tinkex.compat import SHIM, hook

USAGE = f"""\
usage: python -m tinkex.compat PROGRAM [ARGUMENT …]
       python -m tinkex.compat -m MODULE [ARGUMENT …]
       python -m tinkex.compat -c CODE [ARGUMENT …]
       python -m tinkex.compat --install-hook | --remove-hook

Runs a program that says `import tinker` on tinkex. Arguments and options are those of python.
With the hook in place, {hook.VARIABLE}=1 does the same for every program of this Python."""


def main(arguments: Sequence[str]) -> int:
    """Install or remove the hook, or become the Python that runs the program."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE, file=sys.stdout if arguments else sys.stderr)
        return 0 if arguments else 2
    if arguments[0] in ("--install-hook", "--remove-hook"):
        return _change_hook(arguments[0] == "--install-hook")
    if sys.flags.ignore_environment:
        print(
            "python -m tinkex.compat works by PYTHONPATH, which -E and -I forbid; import "
            "tinkex.compat instead",
            file=sys.stderr,
        )
        return 2
    paths = [SHIM, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, *subprocess._args_from_interpreter_flags(), *arguments]  # type: ignore[attr-defined]
    if sys.platform == "win32":  # where a process cannot become another
        return subprocess.run(command, env=environment, check=False).returncode
    sys.stdout.flush()
    os.execve(sys.executable, command, environment)


def _change_hook(wanted: bool) -> int:
    try:
        path = hook.put() if wanted else hook.remove()
    except OSError as error:
        print(f"cannot change {hook.place()}: {error.strerror}", file=sys.stderr)
        return 1
    if wanted:
        print(f"{path} is in place: {hook.VARIABLE}=1 lets `import tinker` find tinkex")
    else:
        print(f"{path} is gone" if path else "there was no hook")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
