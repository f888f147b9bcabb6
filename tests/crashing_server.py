"""A server in a process of its own that can kill itself at the n-th write to disk. Run as a program."""

from __future__ import annotations

import itertools
import os
import signal
import sys
from pathlib import Path
from typing import Any


def crash_at(event: int) -> None:
    """Die, as by kill -9, just before or after the n-th flush or rename: even ones before it, odd ones after."""
    count = itertools.count(1)

    def around(function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            number = next(count)
            if number == event // 2 and event % 2 == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            result = function(*args, **kwargs)
            if number == event // 2 and event % 2 == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return call

    os.fsync, os.fdatasync, os.rename, os.replace = map(around, (os.fsync, os.fdatasync, os.rename, os.replace))


def main() -> None:
    """Serve: PORT DATA_DIR EVENT [MODEL_DIR]."""
    port, data_dir, event = int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    import uvicorn

    from tinkex.engine import Engine
    from tinkex.server import submission
    from tinkex.server.app import create_app

    submission.STATE_OPERATIONS = 5
    engine: Engine
    if len(sys.argv) > 4:
        from tinkex.engine.torch_engine import TorchEngine

        engine = TorchEngine({"test/small": Path(sys.argv[4])})
    else:
        from tinkex.engine.fake import FakeEngine

        engine = FakeEngine()
    app = create_app(engine, data_dir)
    if event:
        crash_at(event)
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning")


if __name__ == "__main__":
    main()
