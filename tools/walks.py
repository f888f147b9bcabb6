"""The walks of docs/architecture.md: the functions that a call passes in a running program.

`python tools/walks.py forward_backward` prints every function of the package that one
`forward_backward` enters, in the order of their first calls; `sample` and `restart` likewise.
`tests/test_walks.py` compares the walks of the page with them.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).parent.parent
PACKAGE = f"{ROOT / 'src' / 'tinkex'}/"


@contextmanager
def noted(calls: dict[str, None]) -> Iterator[Callable[[], None]]:
    """Note the functions that any new thread enters; the value begins with this thread."""

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and (name := place(frame)) is not None:
            calls.setdefault(name)

    threading.setprofile(note)
    try:
        yield lambda: sys.setprofile(note)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def place(frame: FrameType) -> str | None:
    """Name a frame's function by file and qualified name; None outside the package."""
    code = frame.f_code
    if not code.co_filename.startswith(PACKAGE) or code.co_name.startswith("<"):
        return None
    return f"{code.co_filename.removeprefix(PACKAGE)}:{code.co_qualname.replace('.<locals>', '')}"


def trace(walk: str) -> list[str]:
    """Carry out a walk in this process, and return what it entered."""
    sys.path.insert(0, str(ROOT / "src"))
    from tinkex import Datum, HttpClient, LocalBackend, ModelInput, SamplingParams, ServiceClient
    from tinkex.engine.fake import FakeEngine

    calls: dict[str, None] = {}
    prompt = ModelInput.from_ints([1, 2, 3])
    data = [Datum(prompt, {"target_tokens": [2, 3, 4]})]
    params = SamplingParams(max_tokens=4, seed=1)
    with noted(calls) as begin, tempfile.TemporaryDirectory() as folder:
        before, after = Path(folder, "before"), Path(folder, "after")
        with (
            LocalBackend(data_dir=before, engine=FakeEngine()) as backend,
            ServiceClient(base_url=backend.base_url) as service,
        ):
            training = service.create_lora_training_client("fake", rank=4).result()
            sampling = training.save_weights_and_get_sampling_client().result()
            for _ in range(2):
                training.forward_backward(data, "cross_entropy").result()
                sampling.sample(prompt, 1, params).result()
            time.sleep(0.3)
            shutil.copytree(before, after)  # what a kill -9 leaves behind
            calls.clear()
            begin()
            if walk == "forward_backward":
                training.forward_backward(data, "cross_entropy").result()
            elif walk == "sample":
                sampling.sample(prompt, 1, params).result()
            sys.setprofile(None)
            made = list(calls)
        if walk == "restart":
            calls.clear()
            begin()
            with (
                LocalBackend(data_dir=after, engine=FakeEngine()) as backend,
                HttpClient(base_url=backend.base_url) as client,
            ):
                poll = {"request_id": f"{training.model_id}:3"}
                client.post("/api/v1/retrieve_future", poll).result()
                made = list(calls)
    return made


def main() -> None:
    """Print a walk."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("walk", choices=["forward_backward", "sample", "restart"])
    print("\n".join(trace(parser.parse_args().walk)))


if __name__ == "__main__":
    main()
