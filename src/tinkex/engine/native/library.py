"""Compile `step.c` once for this machine, keep it in the user's cache, and load it.

Compilers: `$CC`, `cc`, `gcc`, `clang`, or the one in the Python package `ziglang` (the extra
`tinkex[native]`). Without any, or with `TINKEX_NATIVE=0`, there is no library and the engine uses
PyTorch alone.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import logging
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from tinkex.client.settings import environment
from tinkex.engine.native import self_check
from tinkex.engine.native.bindings import Library

SOURCE = Path(__file__).with_name("step.c")
SWITCH = "TINKEX_NATIVE"
COMPILE_SECONDS = 60
FLAGS = ("-std=gnu11", "-O3", "-ffp-contract=off", "-fPIC", "-shared", "-pthread")

logger = logging.getLogger("tinkex.engine")


@functools.cache
def load() -> Library | None:
    """Return the library, or None without one; the first call compiles for some seconds."""
    found = look()
    if isinstance(found, Library):
        return found
    if environment.flag(SWITCH) is not False and sys.platform != "win32":  # expected there
        logger.info("sampling on the CPU uses PyTorch alone and is slower: %s", found)
    return None


def look() -> Library | str:
    """Return the library, or the reason why there is none."""
    if environment.flag(SWITCH) is False:
        return f"it is switched off by {SWITCH}"
    if sys.platform == "win32":
        return "it does not support Windows"  # threads and compilers differ there
    reason = "there is no C compiler (cc, gcc, clang, or the package ziglang)"
    try:
        with _cache() as directory:
            for compiler in compilers():
                try:
                    return _checked(compiled(compiler, directory))
                except (OSError, subprocess.SubprocessError, AttributeError) as error:
                    reason = _message(error)
    except OSError as error:  # not even a temporary file can be written
        reason = str(error)
    return reason


def _checked(path: Path) -> Library:
    """Load a library from a file and check it; delete a broken one."""
    try:
        library = Library(path)
        self_check.check_product(library)
    except (OSError, AttributeError):
        path.unlink(missing_ok=True)
        raise
    if not self_check.remembered(library, path, _machine()):
        raise OSError("as this compiler built it, a row gets different bits alone than in a batch")
    return library


def compilers() -> Iterator[Sequence[str]]:
    """Yield the commands of the C compilers found, the best first."""
    if (chosen := environment.text("CC")) is not None:
        try:
            yield shlex.split(chosen)
        except ValueError:  # an unclosed quote: a program of that name does not exist
            yield [chosen]
    seen = set()  # several names are often one program
    for name in ("cc", "gcc", "clang"):
        path = shutil.which(name)
        if (
            path is not None
            and (real := os.path.realpath(path)) not in seen
            and not _is_offer(path)
        ):
            seen.add(real)
            yield [path]
    if importlib.util.find_spec("ziglang") is not None:
        yield [sys.executable, "-m", "ziglang", "cc"]


def _is_offer(path: str) -> bool:
    """Return whether this is the stub of a Mac without a compiler.

    Such a stub opens a window that offers to install one.
    """
    if sys.platform != "darwin" or not path.startswith("/usr/bin/"):
        return False
    try:
        return subprocess.run(["/usr/bin/xcode-select", "-p"], capture_output=True).returncode != 0
    except OSError:
        return False


def compiled(compiler: Sequence[str], directory: Path) -> Path:
    """Return the path of the library this compiler builds here; build it if it is not there."""
    command = [*compiler, *FLAGS, _tuning()]
    made_of = [SOURCE.read_bytes(), *map(os.fsencode, command), _machine(), _identity(compiler[0])]
    digest = hashlib.blake2b(b"\0".join(made_of), digest_size=12).hexdigest()
    for path in directory.glob(f"step-{digest}-*.so"):
        if path.name == _name(digest, path):
            return path
        path.unlink(missing_ok=True)
    logger.info("compiling the CPU sampling step, once, with %s", " ".join(compiler))
    handle, unfinished = tempfile.mkstemp(dir=directory, suffix=".so")
    os.close(handle)
    try:
        subprocess.run(
            [*command, "-o", unfinished, str(SOURCE), "-lm"],
            check=True,
            stdin=subprocess.DEVNULL,  # keep the user's input from it
            capture_output=True,
            timeout=COMPILE_SECONDS,
        )
        path = directory / _name(digest, Path(unfinished))
        os.replace(unfinished, path)
    finally:
        Path(unfinished).unlink(missing_ok=True)
    return path


def _tuning() -> str:
    """Return the tuning flag: this processor; on ARM any, as all have the vectors used here.

    There clang and zig go by a processor's name and emit instructions that a virtual machine may
    not allow. Running them would end this process.
    """
    return "-mcpu=generic" if platform.machine() in ("arm64", "aarch64") else "-march=native"


def _name(made_of: str, path: Path) -> str:
    """Return a name with the file's digest: loading a truncated file would end this process."""
    return f"step-{made_of}-{hashlib.blake2b(path.read_bytes(), digest_size=12).hexdigest()}.so"


@contextmanager
def _cache() -> Iterator[Path]:
    """Yield a directory only this user can write to, as its files are run; else a temporary one."""
    from platformdirs import user_cache_path

    path = user_cache_path("tinkex") / "native"
    private = False
    # without a home it begins with "~" and would be created in the working directory
    if path.is_absolute():
        with suppress(OSError):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            about = path.stat()
            private = (
                about.st_uid == os.getuid()
                and not about.st_mode & 0o022
                and os.access(path, os.W_OK)
            )
    if private:
        yield path
    else:
        with tempfile.TemporaryDirectory(
            prefix="tinkex-native-", ignore_cleanup_errors=True
        ) as temporary:
            yield Path(temporary)


def _machine() -> bytes:
    """Return the processor's features: several machines may share a home directory."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    flags = [line for line in lines if line.startswith(("flags", "Features", "model name"))]
    return "\n".join([platform.machine(), platform.processor(), *sorted(set(flags))]).encode()


def _identity(program: str) -> bytes:
    """Return a value that changes when the compiler does."""
    try:
        about = os.stat(shutil.which(program) or program)
    except OSError:
        return b""
    return f"{about.st_size} {about.st_mtime_ns}".encode()


def _message(error: Exception) -> str:
    if isinstance(error, subprocess.CalledProcessError):
        lines = error.stderr.decode(errors="replace").strip().splitlines() or [
            f"exit {error.returncode}"
        ]
        return f"{Path(error.cmd[0]).name} fails: {lines[-1]}"
    return str(error)
