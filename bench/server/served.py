"""The server under load, in a process of its own: `tinkex serve`, with the engine that is asked
for.

With `--watch FILE` a thread looks every few milliseconds whether the event loop still turns, and
notes what it and the engine are at when it does not. SIGUSR1 begins with that anew, SIGUSR2 writes
to the file what was seen since. The watching itself takes some time: the figures of a watched run
are not those of the table.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import signal
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from types import FrameType

from tinkex.cli import serve as command

LATE = 0.02
"""A loop that has not turned for so long is stopped by something."""
DEPTH = 8


class Watch:
    """Notes what holds the event loop up."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.beat = time.perf_counter()
        self.late: list[float] = []
        self.flushes: list[float] = []
        self.collections: list[float] = []
        self.seen: Counter[str] = Counter()
        self._began = 0.0
        gc.callbacks.append(self.collect)
        self._flush, os.fdatasync = os.fdatasync, self.flush

    async def tick(self) -> None:
        """Turn with the loop."""
        while True:
            await asyncio.sleep(0.005)
            now = time.perf_counter()
            if now - self.beat > LATE:
                self.late.append(now - self.beat)
            self.beat = now

    def look(self) -> None:
        """Until the process ends: see where the threads are while the loop does not turn."""
        main = threading.main_thread().ident
        while True:
            time.sleep(0.005)
            if time.perf_counter() - self.beat > LATE:
                frames = sys._current_frames()
                named = {thread.ident: thread.name for thread in threading.enumerate()}
                for ident, frame in frames.items():
                    if ident == main or "engine" in named.get(ident, ""):
                        self.seen[f"{'loop' if ident == main else 'engine'}: {_place(frame)}"] += 1

    def collect(self, phase: str, facts: object) -> None:
        """Note how long the collector of garbage holds everything up."""
        if phase == "start":
            self._began = time.perf_counter()
        else:
            self.collections.append(time.perf_counter() - self._began)

    def flush(self, handle: int) -> None:
        """Flush a file of a journal, and note how long the disk took."""
        begun = time.perf_counter()
        self._flush(handle)
        self.flushes.append(time.perf_counter() - begun)

    def begin(self, *_: object) -> None:
        """Forget what was seen."""
        for seen in (self.late, self.flushes, self.collections, self.seen):
            seen.clear()

    def write(self, *_: object) -> None:
        """Say what was seen."""
        late, flushes, collections = (
            sorted(found, reverse=True) for found in (self.late, self.flushes, self.collections)
        )
        lines = [
            f"{len(late)} stops of the loop over {1000 * LATE:.0f} ms; longest "
            f"{_milliseconds(late[:20])}",
            f"{len(flushes)} flushes, median {_milliseconds(flushes[len(flushes) // 2 :][:1])}; "
            "longest "
            f"{_milliseconds(flushes[:20])}",
            f"{len(collections)} collections of garbage; longest {_milliseconds(collections[:20])}",
        ]
        lines += [f"{count:6d} {place}" for place, count in self.seen.most_common(60)]
        self.path.write_text("\n".join(lines) + "\n")


def _milliseconds(seconds: list[float]) -> str:
    return f"{', '.join(f'{1000 * each:.0f}' for each in seconds)} ms"


def _place(frame: FrameType | None) -> str:
    places: list[str] = []
    while frame is not None and len(places) < DEPTH:
        places.append(
            f"{Path(frame.f_code.co_filename).stem}.{frame.f_code.co_name}:{frame.f_lineno}"
        )
        frame = frame.f_back
    return " < ".join(places)


def main() -> None:
    """Serve until told to stop."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--engine", choices=("torch", "fake"), default="torch")
    parser.add_argument("--delay", type=float, default=0.0)
    parser.add_argument("--watch", type=Path)
    args, rest = parser.parse_known_args()
    if args.engine == "fake":
        from tinkex.engine.fake import FakeEngine

        command.make_engine = lambda *_: FakeEngine(delay=args.delay, step_delay=args.delay)  # type: ignore[assignment]
    if args.watch is None:
        command.serve(rest)
        return
    watch = Watch(args.watch)
    serve = command._serve

    async def watched(*given: object) -> None:
        turning = asyncio.create_task(watch.tick())
        threading.Thread(target=watch.look, daemon=True).start()
        signal.signal(signal.SIGUSR1, watch.begin)
        signal.signal(signal.SIGUSR2, watch.write)
        try:
            await serve(*given)  # type: ignore[arg-type]
        finally:
            turning.cancel()

    command._serve = watched  # type: ignore[assignment]
    command.serve(rest)


if __name__ == "__main__":
    main()
