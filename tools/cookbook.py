"""Run tinker-cookbook's own tests and loops with the official client and with tinkex.

`python tools/cookbook.py` tries every version in `EDITIONS`, each in an environment of its own
(`.venv-cookbook-VERSION`), because each needs other versions of transformers and tinker. Name
versions to try only those. What follows `--` goes to pytest, e.g. `0.6.1 -- -k loop`. Nothing that
is installed already is fetched again.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tarfile
import tempfile
import venv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CHECKS = ROOT / "tests" / "cookbook"
TOOLS = ("torch==2.13.0", "pytest", "pytest-asyncio", "pytest-timeout", "pytest-xdist")
PIP = ("-m", "pip", "--disable-pip-version-check", "--quiet")


@dataclass(frozen=True)
class Edition:
    """A version of the cookbook and what is installed with it."""

    version: str
    packages: tuple[str, ...]
    without_dependencies: tuple[str, ...] = ()
    """Packages whose own requirements the package index cannot meet."""

    @property
    def environment(self) -> Path:
        """The directory of its virtual environment."""
        return ROOT / f".venv-cookbook-{self.version}"

    @property
    def constraints(self) -> Path:
        """The exact versions of everything in the environment."""
        return CHECKS / f"constraints-{self.version}.txt"

    @property
    def python(self) -> Path:
        """The Python of the environment."""
        return self.environment / (
            "Scripts/python.exe" if sys.platform == "win32" else "bin/python"
        )


EDITIONS = {
    edition.version: edition
    for edition in (
        Edition("0.5.8", ("tinker-cookbook[math-rl,litellm]==0.5.8", "tinker==0.36.0")),
        Edition(
            "0.6.1",
            (
                "tinker==0.38.0",
                *(
                    "aiohttp",
                    "anyio",
                    "blobfile",
                    "chz",
                    "cloudpickle",
                    "datasets",
                    "huggingface-hub",
                    "numpy",
                ),
                *(
                    "pillow",
                    "pydantic",
                    "pyrage",
                    "rich",
                    "safetensors",
                    "termcolor",
                    "tiktoken",
                    "tqdm",
                ),
                *("transformers", "litellm", "math-verify", "pylatexenc", "sympy"),
                # it asks for 0.4.1, which is not on the index; few models need it
                "tml-renderers==0.2.1",
            ),
            without_dependencies=("tinker-cookbook==0.6.1",),
        ),
    )
}


def make_environment(edition: Edition) -> None:
    """Install the cookbook, the official client and tinkex, unless these versions are there."""
    wanted = "\n".join(
        (*edition.packages, *edition.without_dependencies, *TOOLS, edition.constraints.read_text())
    )
    mark = edition.environment / ".installed"
    if mark.is_file() and mark.read_text() == wanted:
        return
    print(
        f"setting up (once): installing tinker-cookbook {edition.version} into "
        f"{edition.environment.name} …"
    )
    venv.create(edition.environment, with_pip=True)
    install = (edition.python, *PIP, "install", "--constraint", edition.constraints)
    subprocess.run(
        [*install, *edition.packages, *TOOLS, "--editable", f"{ROOT}[local]"], check=True
    )
    if edition.without_dependencies:
        subprocess.run([*install, "--no-deps", *edition.without_dependencies], check=True)
    mark.write_text(wanted)


def fetch_source(edition: Edition) -> Path:
    """Fetch the cookbook's source archive, which has the tests that its wheel leaves out."""
    place = edition.environment / f"tinker_cookbook-{edition.version}"
    if not place.is_dir():
        with tempfile.TemporaryDirectory(dir=edition.environment) as scratch:
            download = [
                "download",
                "--no-deps",
                "--no-binary",
                "tinker-cookbook",
                "--dest",
                scratch,
            ]
            subprocess.run(
                [edition.python, *PIP, *download, f"tinker-cookbook=={edition.version}"], check=True
            )
            with tarfile.open(next(Path(scratch).glob("*.tar.gz"))) as archive:
                archive.extractall(scratch, filter="data")
            (Path(scratch) / place.name).rename(place)
    return place


def check(edition: Edition, pytest_arguments: Sequence[str]) -> int:
    """Set up an edition and run tests/cookbook/checks.py in its environment; return the exit
    status.
    """
    make_environment(edition)
    source = fetch_source(edition)
    options = ["-q", "--noconftest", "--rootdir", str(CHECKS), "-c", str(CHECKS / "pytest.ini")]
    command = [
        str(edition.python),
        "-m",
        "pytest",
        *options,
        str(CHECKS / "checks.py"),
        *pytest_arguments,
    ]
    known = {"COOKBOOK_SOURCE": str(source), "COOKBOOK_VERSION": edition.version}
    return subprocess.run(command, env={**os.environ, **known}, check=False).returncode


def main(arguments: Sequence[str]) -> int:
    """Check the editions that are named, or all; return the first exit status that is not 0."""
    parser = argparse.ArgumentParser(
        description="Run tinker-cookbook's tests and loops on both clients."
    )
    parser.add_argument(
        "versions",
        nargs="*",
        metavar="VERSION",
        help=f"any of {', '.join(EDITIONS)}; all by default",
    )
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    options = parser.parse_args(arguments[:cut])
    if unknown := set(options.versions) - set(EDITIONS):
        parser.error(f"there is no edition {min(unknown)!r}; there are {', '.join(EDITIONS)}")
    statuses = [
        check(EDITIONS[version], arguments[cut + 1 :]) for version in options.versions or EDITIONS
    ]
    return next((status for status in statuses if status), 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
