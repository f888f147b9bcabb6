"""`step.c` as a library: compiled once for this machine by whatever C compiler it has, and kept in
the user's cache.

Compilers: `$CC`, `cc`, `gcc`, `clang`, or the one in the Python package `ziglang` (the extra
`tinkex[native]`). Without any, or with `TINKEX_NATIVE=0`, there is no library, and the engine goes
without.
"""

from __future__ import annotations

import ctypes
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
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tinkex.client.settings import environment
from tinkex.engine.native import self_check

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

SOURCE = Path(__file__).with_name("step.c")
PANEL = 16
"""Outputs that lie side by side; as in step.c."""
PARTS = 3
SWITCH = "TINKEX_NATIVE"
COMPILE_SECONDS = 60
FLAGS = ("-std=gnu11", "-O3", "-ffp-contract=off", "-fPIC", "-shared", "-pthread")

Pointer, Int, Real = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float

logger = logging.getLogger("tinkex.engine")


class Linear(ctypes.Structure):
    """A linear layer: packed weights, a bias or none, and the projections it consists of."""

    _fields_ = (
        ("weight", Pointer),
        ("bias", Pointer),
        ("inputs", Int),
        ("parts", Int),
        ("sizes", Int * PARTS),
    )


class Layer(ctypes.Structure):
    """A layer; norms that a family does not have are null."""

    _fields_ = (
        *(
            (f"{name}_norm", Pointer)
            for name in ("input", "mlp", "q", "k", "post_attention", "post_mlp")
        ),
        *((name, Linear) for name in ("qkv", "o", "gate_up", "down")),
        ("rotary", Int),
        ("window", Int),
        ("scale", Real),
        ("softcap", Real),
    )


class Model(ctypes.Structure):
    """A model, and where its keys and values lie."""

    _fields_ = (
        *(
            (name, Int)
            for name in ("layers", "hidden", "heads", "groups", "channels", "mlp", "vocab", "gelu")
        ),
        *((name, Int) for name in ("blocks", "block", "kinds")),
        *((name, Real) for name in ("eps", "embed_scale", "logit_cap")),
        *((name, Pointer) for name in ("embed", "norm", "frequencies")),
        ("head", Linear),
        ("layer", ctypes.POINTER(Layer)),
        ("cache", Pointer),
    )


class Factors(ctypes.Structure):
    """What an adapter has for one linear layer; `a` is null if nothing."""

    _fields_ = (("a", Pointer), ("b", Pointer * PARTS), ("rank", Int))


class Span(ctypes.Structure):
    """Rows that have the same adapter."""

    _fields_ = (("start", Int), ("stop", Int), ("factors", ctypes.POINTER(Factors)))


class Step(ctypes.Structure):
    """What a step is about."""

    _fields_ = (
        *((name, Int) for name in ("rows", "spans", "width")),
        *((name, Pointer) for name in ("tokens", "positions", "tables")),
        ("span", ctypes.POINTER(Span)),
        ("hidden", Pointer),
        ("logits", Pointer),
    )


class Matrices(ctypes.Structure):
    """A product of matrices, as they lie in memory."""

    _fields_ = (
        *((name, Pointer) for name in ("x", "w", "bias", "y")),
        *(
            (name, Int)
            for name in ("rows", "inputs", "outputs", "x_row", "w_input", "w_output", "y_row")
        ),
        ("scale", ctypes.c_double),
        ("onto", Int),
    )


class Library:
    """The functions of `step.c`. Python's other threads run meanwhile."""

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        self.team_new = _function(library.team_new, Pointer, ctypes.c_int)
        self.team_free = _function(library.team_free, None, Pointer)
        self.run_rows = _function(
            library.run_rows, ctypes.c_int, ctypes.POINTER(Model), ctypes.POINTER(Step), Pointer
        )
        self.draw = _function(library.draw, ctypes.c_int, Pointer, Int, Int, *([Pointer] * 5))
        self.share = Int.in_dll(library, "share")
        """What is worth a thread, in multiplications."""
        self.product = _function(
            library.product, None, ctypes.POINTER(Linear), Pointer, Int, Pointer, Pointer
        )
        self.matrices = _function(library.matrices, ctypes.c_int, ctypes.POINTER(Matrices), Pointer)

    def check(self) -> None:
        """See that a product comes out right: a compiler can be wrong about a machine."""
        random = np.random.default_rng(0)
        rows, outputs, inputs = 11, 37, 29
        weight, x = (
            random.normal(size=(count, inputs)).astype(np.float32) for count in (outputs, rows)
        )
        y = np.empty((rows, outputs), np.float32)
        panels = np.zeros((-(-outputs // PANEL), inputs, PANEL), np.float32)
        for output, values in enumerate(weight):
            panels[output // PANEL, :, output % PANEL] = values
        linear = Linear(panels.ctypes.data, None, inputs, 1, (Int * PARTS)(outputs))
        team = self.team_new(2)
        self.product(linear, x.ctypes.data, rows, y.ctypes.data, team)
        self.team_free(team)
        if not np.allclose(y, x @ weight.T, atol=1e-4):
            raise OSError("its products are wrong on this machine")


def _function(function: Any, result: Any, *arguments: Any) -> Any:
    function.restype, function.argtypes = result, arguments
    return function


@functools.cache
def load() -> Library | None:
    """The library, if this machine can have it; compiled the first time, which takes a second or a
    few.
    """
    found = look()
    if isinstance(found, Library):
        return found
    if environment.flag(SWITCH) is not False and sys.platform != "win32":  # there it is no surprise
        logger.info("sampling on the CPU goes by PyTorch alone, and is slower: %s", found)
    return None


def look() -> Library | str:
    """The library, or the reason why there is none."""
    if environment.flag(SWITCH) is False:
        return f"it is switched off by {SWITCH}"
    if sys.platform == "win32":
        return "it is not made for Windows"  # threads and compilers are others there
    reason = "there is no C compiler (cc, gcc, clang, or the package ziglang)"
    try:
        with _cache() as directory:
            for compiler in compilers():
                try:
                    return _checked(compiled(compiler, directory))
                except (OSError, subprocess.SubprocessError, AttributeError) as error:
                    reason = _message(error)
    except OSError as error:  # nothing can be written, not even for the moment
        reason = str(error)
    return reason


def _checked(path: Path) -> Library:
    """The library in a file; one that does not do is not kept."""
    try:
        library = Library(path)
        library.check()
    except (OSError, AttributeError):
        path.unlink(missing_ok=True)
        raise
    if not self_check.remembered(library, path, _machine()):
        raise OSError("as this compiler made it, a row gets other bits alone than among others")
    return library


def compilers() -> Iterator[Sequence[str]]:
    """The commands of the C compilers there are, the best first."""
    if (chosen := environment.text("CC")) is not None:
        try:
            yield shlex.split(chosen)
        except ValueError:  # a quote that is not closed: no command, but a name nothing has
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
    """A Mac without a compiler has programs of its name, which open a window that offers to install
    one.
    """
    if sys.platform != "darwin" or not path.startswith("/usr/bin/"):
        return False
    try:
        return subprocess.run(["/usr/bin/xcode-select", "-p"], capture_output=True).returncode != 0
    except OSError:
        return False


def compiled(compiler: Sequence[str], directory: Path) -> Path:
    """The library as this compiler makes it for this machine, unless it is in the directory
    already.
    """
    command = [*compiler, *FLAGS, _tuning()]
    made_of = [SOURCE.read_bytes(), *map(os.fsencode, command), _machine(), _identity(compiler[0])]
    digest = hashlib.blake2b(b"\0".join(made_of), digest_size=12).hexdigest()
    for path in directory.glob(f"step-{digest}-*.so"):
        if path.name == _name(digest, path):
            return path
        path.unlink(missing_ok=True)
    logger.info("compiling what samples on this CPU, once, with %s", " ".join(compiler))
    handle, unfinished = tempfile.mkstemp(dir=directory, suffix=".so")
    os.close(handle)
    try:
        subprocess.run(
            [*command, "-o", unfinished, str(SOURCE), "-lm"],
            check=True,
            stdin=subprocess.DEVNULL,  # what the user types is not for it
            capture_output=True,
            timeout=COMPILE_SECONDS,
        )
        path = directory / _name(digest, Path(unfinished))
        os.replace(unfinished, path)
    finally:
        Path(unfinished).unlink(missing_ok=True)
    return path


def _tuning() -> str:
    """For this processor; on ARM for any, as all have the vectors that are used.

    There clang and zig go by a processor's name, and make what a virtual machine does not let it
    do: to run it would end this process.
    """
    return "-mcpu=generic" if platform.machine() in ("arm64", "aarch64") else "-march=native"


def _name(made_of: str, path: Path) -> str:
    """Tells what is in a file: to load one that a crash or a full disk has cut off would end this
    process.
    """
    return f"step-{made_of}-{hashlib.blake2b(path.read_bytes(), digest_size=12).hexdigest()}.so"


@contextmanager
def _cache() -> Iterator[Path]:
    """A directory that is this user's alone, for what lies in it is run; one for the moment if
    there is no such.
    """
    from platformdirs import user_cache_path

    path = user_cache_path("tinkex") / "native"
    private = False
    # without a home it begins with "~", and would be made wherever the program runs
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
    """What the processor can do: a home directory may be shared by several machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    flags = [line for line in lines if line.startswith(("flags", "Features", "model name"))]
    return "\n".join([platform.machine(), platform.processor(), *sorted(set(flags))]).encode()


def _identity(program: str) -> bytes:
    """Changes when the compiler does."""
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
