"""Fetches the official clients, one directory per version, for the tests that run each of them
against our server.

Run `python tools/clients.py` for all of them, or name versions. A client is installed without its
dependencies: those come from the environment it is run in, with `DIRECTORY/VERSION` first on
PYTHONPATH. What is there is not fetched again, so that nothing needs the network afterwards.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

DIRECTORY = Path(__file__).resolve().parent.parent / ".venv-clients"
VERSIONS = (
    "0.15.0",
    "0.16.1",
    "0.18.1",
    "0.22.0",
    "0.24.1",
    "0.25.0",
    "0.26.2",
    "0.28.1",
    "0.30.4",
    "0.36.0",
    "0.38.0",
)
"""The versions at which what a client says, or expects to hear, changed."""
QUICK = ("0.15.0", "0.36.0", "0.38.0")
"""The oldest and the newest two, which are always tried."""
ALSO = {"0.22.0": ("grpcio==1.85.1",)}
"""What a version imports and no other part of the environment does."""


class FetchError(Exception):
    """A client could not be fetched."""


def fetch(version: str, directory: Path = DIRECTORY, pip_options: Sequence[str] = ()) -> Path:
    """The directory of a client, which is fetched if it is not there yet.

    Raises:
        FetchError: The package index cannot be reached, or does not have it.
    """
    place = directory / version
    if place.is_dir():
        return place
    directory.mkdir(parents=True, exist_ok=True)
    wanted = [f"tinker=={version}", *ALSO.get(version, ())]
    with tempfile.TemporaryDirectory(dir=directory, prefix=f"{version}-") as name:
        unfinished = Path(name) / version
        pip = [
            sys.executable,
            "-m",
            "pip",
            "--disable-pip-version-check",
            "install",
            "--quiet",
            "--no-deps",
        ]
        done = subprocess.run(
            [*pip, *pip_options, "--target", str(unfinished), *wanted],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise FetchError(
                f"cannot fetch {' and '.join(wanted)} from the package "
                f"index:\n{done.stderr.strip()}"
            )
        try:
            unfinished.rename(place)
        except OSError:
            if not place.is_dir():  # else another process was quicker, and its copy is as good
                raise
    return place


def main(arguments: Sequence[str] | None = None) -> int:
    """Fetch what is named, or everything."""
    parser = argparse.ArgumentParser(
        description="Fetch the official clients that our server is tried with."
    )
    parser.add_argument(
        "versions",
        nargs="*",
        metavar="VERSION",
        help=f"any of {', '.join(VERSIONS)}; all by default",
    )
    parser.add_argument("--quick", action="store_true", help=f"only {', '.join(QUICK)}")
    parser.add_argument("--clean", action="store_true", help="remove what was fetched before")
    options = parser.parse_args(arguments)
    if options.clean:
        shutil.rmtree(DIRECTORY, ignore_errors=True)
    for version in options.versions or (QUICK if options.quick else VERSIONS):
        try:
            fetch(version)
        except FetchError as error:
            print(error, file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
