"""OpenMP's threads: how they wait, and how many an operation gets.

On a machine with other work, a thread that spins takes the core that its partner needs, and every
small operation crawls: measured on two shared cores, a decoding step of 5 ms took 100. Threads that
sleep have to be woken, though, which takes longer than many an operation: `Threads` keeps small
ones to the thread that starts them.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_settled = threading.Lock()
_idle = threading.Event()


def calm_openmp() -> None:
    """Make waiting threads sleep; call it before torch is imported if possible.

    A user's OMP_WAIT_POLICY wins.
    """
    if "OMP_WAIT_POLICY" in os.environ or not _settled.acquire(blocking=False):
        return
    if "torch" not in sys.modules:
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"  # read once, when torch loads the OpenMP library
        return
    # Too late for the environment. GNU's library also stops spinning when it manages more threads
    # than there are cores, so a second, idle team of threads has the same effect; it must outlive
    # this call.
    ready = threading.Event()
    threading.Thread(target=_hold_team, args=(ready,), name="tinkex-openmp", daemon=True).start()
    ready.wait(10)


def _hold_team(ready: threading.Event) -> None:
    import torch

    torch.ones(1 << 18).exp_()  # large enough to be split, so that a team is made
    ready.set()
    _idle.wait()


def usable_cores(root: Path = Path("/")) -> int:
    """Return the number of cores for this process.

    A container's share of time limits it.
    """
    allowed = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    return max(1, min([allowed, *_shares(root)]))


def _shares(root: Path) -> Iterator[int]:
    """Yield the limit of cores of each control group of this process (on Linux)."""
    try:
        groups = [
            line.split(":", 2)[1:] for line in (root / "proc/self/cgroup").read_text().splitlines()
        ]
    except OSError:
        return
    for controllers, inside in groups:
        if not controllers:
            top, names = root / "sys/fs/cgroup", ["cpu.max"]
        elif "cpu" in controllers.split(","):  # the first version of control groups
            top, names = root / "sys/fs/cgroup/cpu", ["cpu.cfs_quota_us", "cpu.cfs_period_us"]
        else:
            continue
        own = top / inside.lstrip("/")
        # a container may see its own group as the top one, under another name
        for group in (own, *own.parents):
            try:
                quota, period = " ".join((group / name).read_text() for name in names).split()
                if int(quota) > 0:
                    yield -(-int(quota) // int(period))
            except (OSError, ValueError):  # "max", or none
                pass
            if group == top:
                break


class Threads:
    """A block in which operations of the calling thread use so many threads.

    Other threads keep their number, unlike with `torch.set_num_threads`. It has no effect where
    PyTorch's OpenMP cannot be reached.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._before: list[tuple[int, int]] = []

    def __enter__(self) -> None:
        if (runtime := _runtime()) is not None:
            self._before.append(runtime.set(self.count, self.count))

    def __exit__(self, *_: object) -> None:
        if (runtime := _runtime()) is not None:
            runtime.set(*self._before.pop())


class _Runtime:
    """The functions of OpenMP, and of MKL if present, that PyTorch itself uses."""

    def __init__(self, library: ctypes.PyDLL) -> None:
        self._set_mkl: Any = getattr(library, "MKL_Set_Num_Threads_Local", None)
        self._get, self._set = library.omp_get_max_threads, library.omp_set_num_threads

    def set(self, openmp: int, mkl: int) -> tuple[int, int]:
        """Set the threads of the calling thread; return its earlier numbers."""
        before = self._get()
        self._set(openmp)
        return before, 0 if self._set_mkl is None else self._set_mkl(mkl)


@functools.cache
def _runtime() -> _Runtime | None:
    import torch

    names = {"linux": "libtorch_cpu.so", "darwin": "libtorch_cpu.dylib", "win32": "torch_cpu.dll"}
    try:
        library = ctypes.PyDLL(str(Path(torch.__file__).parent / "lib" / names[sys.platform]))
        return _Runtime(library)
    except (KeyError, OSError, AttributeError):
        return None
