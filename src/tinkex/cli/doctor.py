"""`tinkex doctor`: check this machine, the key and the server.

Every check has a time limit, and none leaves a trace.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

import click

from tinkex.cli.options import Connection, option, reporting, wait
from tinkex.cli.output import Column, Outcome, counted, print_table, size
from tinkex.cli.progress import waiting

if TYPE_CHECKING:
    from tinkex.client.http.exchange import Reply
    from tinkex.client.http.transport import Transport
    from tinkex.client.settings.config import Config

Status: TypeAlias = Literal["ok", "warning", "error", "skipped"]

OLDEST_PYTHON = (3, 11)
TORCH_SECONDS = 60.0
SERVER_SECONDS = 5.0
LITTLE_MEMORY = 1 << 30
LITTLE_DISK = 1 << 30
SKEW_SECONDS, MUCH_SKEW_SECONDS = 30.0, 300.0
"""Seconds of clock difference that are reported, and at which tokens are refused."""
PORT = 8000
COLUMNS = (
    Column("Status"),
    Column("Check"),
    Column("Found", folds=True),
    Column("Fix", folds=True),
)
TORCH = """
import json, torch
found = {"version": torch.__version__, "threads": torch.get_num_threads()}
found |= {"device": "cpu", "memory": None}
if torch.cuda.is_available():
    found["device"] = torch.cuda.get_device_name(0)
    found["memory"] = torch.cuda.mem_get_info(0)
elif torch.backends.mps.is_available():
    found["device"] = "mps"
try:
    from tinkex.engine.model import matmul_check
    from tinkex.engine.native import library
    made = library.look()
    found["native"] = made if isinstance(made, str) else None
    found["products"] = matmul_check.is_safe(576, 1536)
except ImportError as error:
    found["native"], found["products"] = str(error), True
print(json.dumps(found))
"""


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check."""

    name: str
    status: Status
    detail: str
    fix: str = ""

    @classmethod
    def of(cls, name: str, good: bool, detail: str, fix: str, bad: Status = "warning") -> Finding:
        """Return a finding that is ok, or `bad` with the advice to fix it."""
        return cls(name, "ok", detail) if good else cls(name, bad, detail, fix)


# ── this machine ──────────────────────────────────────────────────────────────────────────────────


def check_python() -> Iterator[Finding]:
    """Check the interpreter."""
    detail = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    is_new = sys.version_info[:2] >= OLDEST_PYTHON
    yield Finding.of("python", is_new, detail, "install Python 3.11 or newer", "error")


def check_packages() -> Iterator[Finding]:
    """Check our own version and the packages it needs."""
    from tinkex.cli.versions import describe, installed, requirements

    needed = [name for name, extra in requirements() if extra is None]
    missing = ", ".join(name for name in needed if installed(name) is None)
    found = ", ".join(f"{name} {installed(name)}" for name in needed)
    told = f"not installed: {missing}" if missing else found
    detail = f"{describe()}; {told}" if told else describe()
    yield Finding.of("versions", not missing, detail, "pip install tinkex", "error")


def check_torch(needed: bool) -> Iterator[Finding]:
    """Check the device that models would use; a subprocess imports torch."""
    from tinkex.engine.torch.kind import require_packages
    from tinkex.errors import ConfigurationError

    status: Status = "error" if needed else "warning"
    try:
        require_packages()
        done = subprocess.run(
            [sys.executable, "-c", TORCH],
            capture_output=True,
            text=True,
            timeout=TORCH_SECONDS,
            check=True,
        )
        found = json.loads(done.stdout)
    except ConfigurationError as error:
        hint = f"{error.hint}, unless you only use servers elsewhere"
        yield Finding("torch", status, error.message, hint)
        return
    except subprocess.TimeoutExpired:
        late = f"did not load within {TORCH_SECONDS:g} s"
        yield Finding("torch", status, late, "see whether the machine is busy")
        return
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        told = str(getattr(error, "stderr", None) or error).strip().splitlines()
        reason = told[-1] if told else "does not load"
        yield Finding("torch", status, reason, "pip install --force-reinstall torch")
        return
    yield Finding("torch", "ok", f"{found['version']}, {found['threads']} threads")
    device = found["device"]
    if found["memory"]:
        free, total = found["memory"]
        device += f", {size(free)} of {size(total)} free"
    yield Finding("device", "ok", device)
    yield _native(found["native"], found["products"])


def _native(reason: str | None, is_safe: bool) -> Finding:
    """Check how this CPU samples, and that no result depends on the rest of a batch."""
    if reason is None:
        return Finding("cpu", "ok", "samples in C; a row gets the same bits alone and among others")
    fix = "install a C compiler, or pip install 'tinkex[native]'"
    if is_safe:
        return Finding("cpu", "warning", f"samples by PyTorch, and is slower: {reason}", fix)
    found = (
        f"samples by PyTorch: {reason}; requests that run together may change each other's "
        "last bits"
    )
    return Finding("cpu", "warning", found, fix)


def check_memory() -> Iterator[Finding]:
    """Check the memory."""
    available, total = memory()
    if available is None or total is None:
        yield Finding("memory", "skipped", "this system does not tell")
        return
    detail = f"{size(available)} of {size(total)} available"
    fix = "end other programs before training or serving here"
    yield Finding.of("memory", available >= LITTLE_MEMORY, detail, fix)


def memory() -> tuple[int | None, int | None]:
    """Return the available and the total bytes of memory, or None if unknown."""
    with contextlib.suppress(OSError, ValueError), open("/proc/meminfo", encoding="ascii") as file:
        kilobytes = {
            match[1]: int(match[2]) for match in re.finditer(r"(\w+):\s+(\d+) kB", file.read())
        }
        return kilobytes["MemAvailable"] * 1024, kilobytes["MemTotal"] * 1024
    with contextlib.suppress(OSError, ValueError, AttributeError):
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return total, total
    return None, None


def check_disk(needed: bool) -> Iterator[Finding]:
    """Check that the data directory is writable, unlocked and has room."""
    from tinkex.local import default_data_dir
    from tinkex.server.files.data_dir import DataDirError

    place = default_data_dir()
    status: Status = "error" if needed else "warning"
    try:
        free = _try_directory(place)
    except DataDirError:
        fix = (
            "set TINKER_BASE_URL to the address of that server, or TINKEX_DATA_DIR to another "
            "directory"
        )
        yield Finding("disk", status, f"{place} is in use by a tinkex server", fix)
    except OSError as error:
        told = f"{place} cannot be written: {error.strerror or error}"
        fix = "set TINKEX_DATA_DIR to a directory that you may write to"
        yield Finding("disk", status, told, fix)
    else:
        fix = "make room, or set TINKEX_DATA_DIR"
        yield Finding.of("disk", free >= LITTLE_DISK, f"{size(free)} free at {place}", fix)


def _try_directory(place: Path) -> int:
    """Make a directory, write and lock it, and leave no trace; return the free bytes.

    Raises:
        OSError: The directory cannot be made or written.
        DataDirError: A server has it for itself.
    """
    from tinkex.server.files.data_dir import LOCK_FILE, Lock

    missing = [path for path in (place, *place.parents) if not path.exists()]
    try:
        place.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=place) as file:
            file.write(b"written by tinkex doctor")
            file.flush()
        if (place / LOCK_FILE).exists():
            Lock(place, shared=True).close()
        return shutil.disk_usage(place).free
    finally:
        # one that is not empty, or was never made, stays as it is
        with contextlib.suppress(OSError):
            for path in missing:
                path.rmdir()


def check_port(port: int) -> Iterator[Finding]:
    """Check that `tinkex serve` could listen."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", port))
        except OSError as error:
            fix = "fine if that is your server; else `tinkex serve --port 0` picks a free one"
            yield Finding("port", "warning", f"127.0.0.1:{port}: {error.strerror or error}", fix)
        else:
            yield Finding("port", "ok", f"127.0.0.1:{port} is free")


# ── the server ────────────────────────────────────────────────────────────────────────────────────


def check_key(connection: Connection, config: Config) -> Iterator[Finding]:
    """Check where the key comes from."""
    from tinkex.cli.login import credential_source
    from tinkex.client.settings.config import is_open_address, mask_api_key

    source = credential_source(connection)
    if config.api_key or config.credential_cmd:
        shown = f" ({mask_api_key(config.api_key)})" if config.api_key else ""
        yield Finding("key", "ok", f"from {source}{shown}")
    elif is_open_address(config.base_url):
        yield Finding("key", "ok", f"none, and {config.base_url} may need none")
    else:
        yield Finding("key", "error", "none", "set TINKER_API_KEY, or run `tinkex auth login`")


def check_server(config: Config) -> Iterator[Finding]:
    """Check that the server answers, accepts the key, and agrees on the time."""
    from tinkex.client.futures.api_future import start
    from tinkex.client.http.transport import Transport
    from tinkex.client.settings.config import is_embedded
    from tinkex.errors import AuthenticationError, PermissionDeniedError, TinkerError

    if is_embedded(config.base_url):
        yield Finding("server", "ok", "inside this process")
        yield Finding("clock", "skipped", "it is this process's own")
        return
    transport = Transport(config)
    try:
        began = dt.datetime.now(dt.UTC)
        reply = wait(start(_capabilities(transport)), config.timeout + 1)
        spent = (dt.datetime.now(dt.UTC) - began).total_seconds()
        models = len(json.loads(reply.body).get("supported_models") or [])
        found = f"{config.base_url} answers in {spent * 1000:.0f} ms; models: {models}"
        yield Finding("server", "ok", found)
        yield _clock(reply, began + (dt.datetime.now(dt.UTC) - began) / 2)
    except (AuthenticationError, PermissionDeniedError) as error:
        has_key = config.api_key or config.credential_cmd
        refused = "refuses the key" if has_key else "refuses requests without a key"
        found = f"{config.base_url} answers, but {refused}: {error.message}"
        yield Finding("server", "error", found, "check TINKER_API_KEY, or run `tinkex auth login`")
    except (TinkerError, ValueError, AttributeError) as error:
        message = (
            error.message if isinstance(error, TinkerError) else f"its answer is malformed: {error}"
        )
        fix = "check TINKER_BASE_URL, the network, and whether the server runs"
        yield Finding("server", "error", f"{config.base_url}: {message}", fix)
        yield Finding("clock", "skipped", "the server sends no time")
    finally:
        with contextlib.suppress(TinkerError, TimeoutError):
            start(transport.close()).result(1)


async def _capabilities(transport: Transport) -> Reply:
    from tinkex.wire import protocol

    return await transport.request(protocol.GET_SERVER_CAPABILITIES, patience=0, max_retries=0)


def _clock(reply: Reply, now: dt.datetime) -> Finding:
    try:
        skew = abs((parsedate_to_datetime(reply.headers.get("date", "")) - now).total_seconds())
    except (ValueError, TypeError):
        return Finding("clock", "skipped", "the server sends no time")
    if skew <= SKEW_SECONDS:
        return Finding("clock", "ok", f"within {max(1, round(skew))} s of the server's")
    status: Status = "error" if skew > MUCH_SKEW_SECONDS else "warning"
    return Finding(
        "clock", status, f"{skew:.0f} s off the server's", "set this machine's clock: turn on NTP"
    )


# ── the command ───────────────────────────────────────────────────────────────────────────────────


@click.command()
@option(
    "--port",
    "The port that `tinkex serve` would listen on.",
    default=PORT,
    type=click.IntRange(1, 65535),
)
@reporting
def doctor(port: int, connection: Connection) -> Outcome:
    """Check this machine, the key and the server; say what to fix.

    Checks Python, packages, torch and its device, memory, disk, the port, the key, the server and
    its clock. Exits with 1 if something important is broken. Without --timeout the server has five
    seconds to answer.
    """
    from tinkex.client.settings.config import is_embedded
    from tinkex.errors import ConfigurationError

    config: Config | None = None
    trouble = None
    try:
        config = replace(connection, timeout=connection.timeout or SERVER_SECONDS).config()
    except ConfigurationError as error:  # the setting that prevents a connection
        trouble = Finding("key", "error", error.message, error.hint or "")
    local = config is not None and is_embedded(config.base_url)
    checks: list[Callable[[], Iterator[Finding]]] = [
        check_python,
        check_packages,
        lambda: check_torch(local),
        check_memory,
        lambda: check_disk(local),
        lambda: check_port(port),
    ]
    if config is not None:
        settings = config
        checks += [lambda: check_key(connection, settings), lambda: check_server(settings)]
    findings: list[Finding] = []
    with waiting("checking"):
        for check in checks:
            findings += check()
    if trouble is not None:
        findings.append(trouble)
    broken = [finding for finding in findings if finding.status == "error"]
    data = {"ok": not broken, "checks": [asdict(finding) for finding in findings]}
    rows = [(finding.status, finding.name, finding.detail, finding.fix) for finding in findings]
    return Outcome(
        data,
        exit_code=1 if broken else 0,
        show=lambda: print_table(_summary(findings), COLUMNS, rows),
    )


def _summary(findings: list[Finding]) -> str:
    counts = Counter(finding.status for finding in findings)
    told = [counted(counts[kind], kind) for kind in ("error", "warning") if counts[kind]]
    return f"{len(findings)} checks: {', '.join(told) or 'all is well'}"
