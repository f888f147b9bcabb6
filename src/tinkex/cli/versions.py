"""`tinkex version`: the versions of tinkex and of the packages it uses."""

from __future__ import annotations

import re
import subprocess
from importlib import metadata
from pathlib import Path

import click

from tinkex._version import __version__
from tinkex.cli.options import formatted, switch
from tinkex.cli.output import Column, Outcome, print_table

GIT_SECONDS = 5
OF_TESTS = {"test", "lint", "docs"}


def commit() -> str | None:
    """Return the commit of this checkout; None for an installed package or without git."""
    here = Path(__file__).resolve()
    commands = (["ls-files", "--error-unmatch", here.name], ["rev-parse", "--short", "HEAD"])
    found = None
    # the first makes sure that the repository is our own, not one that we are installed in
    for words in commands:
        try:
            done = subprocess.run(
                ["git", *words],
                cwd=here.parent,
                capture_output=True,
                text=True,
                timeout=GIT_SECONDS,
                check=True,
            )
        except (OSError, subprocess.SubprocessError):
            return None
        found = done.stdout.strip()
    return found or None


def describe() -> str:
    """Return the version in one line."""
    found = commit()
    return f"tinkex {__version__}" + (f" ({found})" if found else "")


def requirements() -> list[tuple[str, str | None]]:
    """Return the packages that tinkex may use, with the extra that installs each."""
    try:
        required = metadata.requires("tinkex") or []
    except metadata.PackageNotFoundError:
        return []
    found: dict[str, str | None] = {}
    for text in required:
        name, extra = re.match(r"[\w.-]+", text), re.search(r"extra\s*==\s*['\"](\w+)", text)
        if name and name[0] != "tinkex" and not (extra and extra[1] in OF_TESTS):
            found.setdefault(name[0], extra[1] if extra else None)
    return sorted(found.items(), key=lambda item: item[0].lower())


def dependencies() -> dict[str, str | None]:
    """Return the installed version of each package that tinkex may use, or None."""
    return {name: installed(name) for name, _ in requirements()}


def installed(name: str) -> str | None:
    """Return the installed version of a package, or None."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


@click.command()
@switch("--deps", help="List the packages it works with, and their installed versions.")
@formatted
def version(deps: bool) -> Outcome:
    """Show the version."""
    data: dict[str, object] = {"version": __version__, "commit": commit()}
    if deps:
        data["dependencies"] = dependencies()

    def show() -> None:
        click.echo(describe())
        if deps:
            rows = [(name, found or "not installed") for name, found in dependencies().items()]
            print_table("Packages", [Column("Package"), Column("Version")], rows)

    return Outcome(data, show=show)
