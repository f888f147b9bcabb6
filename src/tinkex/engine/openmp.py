"""Keeps OpenMP's threads from spinning while they wait.

On a machine with anything else to do, a thread that spins takes the core its partner needs, and every small operation
crawls: measured on two shared cores, a decoding step of 5 ms took 100. Spinning gains next to nothing on a quiet one.
"""

from __future__ import annotations

import os
import sys
import threading

_settled = threading.Lock()
_idle = threading.Event()


def calm_openmp() -> None:
    """Make waiting threads sleep; call it before torch is imported if possible. A user's OMP_WAIT_POLICY wins."""
    if "OMP_WAIT_POLICY" in os.environ or not _settled.acquire(blocking=False):
        return
    if "torch" not in sys.modules:
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"  # read once, when torch loads the OpenMP library
        return
    # Too late for the environment. GNU's library also stops spinning when it manages more threads than there are
    # cores, so a second, idle team of threads has the same effect; it must outlive this call.
    ready = threading.Event()
    threading.Thread(target=_hold_team, args=(ready,), name="tinkex-openmp", daemon=True).start()
    ready.wait(10)


def _hold_team(ready: threading.Event) -> None:
    import torch

    torch.ones(1 << 18).exp_()  # large enough to be split, so that a team is made
    ready.set()
    _idle.wait()
