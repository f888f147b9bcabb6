"""Makes the environment for tinker-cookbook, fetches its source, and runs its tests and loops on both clients.

Run `python tools/cookbook.py`; arguments are handed to pytest, e.g. `-k loops`. The cookbook holds transformers back,
so it has an environment of its own, `.venv-cookbook`, beside the one of our tests. What is there is not fetched
again.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tempfile
import venv
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENT = ROOT / ".venv-cookbook"
CHECKS = ROOT / "tests" / "cookbook"
VERSION = "0.5.8"
WANTED = (
    f"tinker-cookbook[math-rl,litellm]=={VERSION}",
    "tinker==0.36.0",
    "torch==2.13.0",
    "pytest",
    "pytest-asyncio",
    "pytest-timeout",
    "pytest-xdist",
)
PIP = ("-m", "pip", "--disable-pip-version-check", "--quiet")


def python() -> Path:
    """The Python of the environment."""
    return ENVIRONMENT / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")


def make_environment() -> None:
    """Install the cookbook, the official client and tinkex, unless that was done for these very versions."""
    constraints = CHECKS / "constraints.txt"
    wanted = "\n".join(WANTED) + constraints.read_text()
    mark = ENVIRONMENT / ".installed"
    if mark.is_file() and mark.read_text() == wanted:
        return
    print(f"setting up (once): installing tinker-cookbook and PyTorch into {ENVIRONMENT.name} …")
    venv.create(ENVIRONMENT, with_pip=True)
    here = f"{ROOT}[local]"
    subprocess.run([python(), *PIP, "install", "--constraint", constraints, *WANTED, "--editable", here], check=True)
    mark.write_text(wanted)


def fetch_source() -> Path:
    """The cookbook's source, whose archive has the tests that its wheel leaves out."""
    place = ENVIRONMENT / f"tinker_cookbook-{VERSION}"
    if not place.is_dir():
        with tempfile.TemporaryDirectory(dir=ENVIRONMENT) as scratch:
            download = ["download", "--no-deps", "--no-binary", ":all:", "--dest", scratch]
            subprocess.run([python(), *PIP, *download, f"tinker-cookbook=={VERSION}"], check=True)
            with tarfile.open(next(Path(scratch).glob("*.tar.gz"))) as archive:
                archive.extractall(scratch, filter="data")
            (Path(scratch) / place.name).rename(place)
    return place


def main(arguments: Sequence[str]) -> int:
    """Set up, then run what is in tests/cookbook."""
    make_environment()
    source = fetch_source()
    options = ["-q", "--noconftest", "--rootdir", str(CHECKS), "-c", str(CHECKS / "pytest.ini")]
    command = [str(python()), "-m", "pytest", *options, str(CHECKS / "checks.py"), *arguments]
    return subprocess.run(command, env={**os.environ, "COOKBOOK_SOURCE": str(source)}, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
