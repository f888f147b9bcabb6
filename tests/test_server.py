"""Promises of the server, tested without a client: order, idempotency, checkpoints, sessions,
limits, dialects."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import tinkex
from support import Clock, Wire, pass_json, sample_json, serving, step_json, wait_until
from tinkex import ServiceClient, types
from tinkex.engine.api import EngineError, Place, Writer
from tinkex.engine.fake import FakeEngine
from tinkex.server.app import create_app
from tinkex.server.runs.journal import Journal
from tinkex.server.runs.promises import JUST_READ, KEEP_READ, KEEP_UNREAD, Promises
from tinkex.server.server_limits import Limits
from tinkex.wire import codec, protobuf_passes, protobuf_schema
from tinkex.wire.protocol import OPERATIONS, PREFIX


class Recorder:
    """Notes what the engine is asked to do, and fails or waits where it is told to."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.errors: dict[str, Exception] = {}
        self.gates: dict[str, threading.Event] = {}

    def __call__(self, method: str, subject: str) -> None:
        self.calls.append(method)
        if method in self.gates:
            assert self.gates[method].wait(20)
        if method in self.errors:
            raise self.errors.pop(method)


@dataclass
class Shared:
    """One server for most tests: sessions are independent, the recorder restarts each time."""

    wire: Wire
    engine: FakeEngine
    data_dir: Path


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    engine, data_dir = FakeEngine(), tmp_path_factory.mktemp("shared")
    with serving(engine, data_dir, limits=Limits(gap_seconds=30, poll_seconds=0.3)) as url:
        yield Shared(Wire(url), engine, data_dir)


@pytest.fixture
def engine(shared: Shared) -> FakeEngine:
    return shared.engine


@pytest.fixture
def recorder(shared: Shared) -> Recorder:
    shared.wire.model()  # whatever an earlier test left to do is done now
    shared.engine.fail = Recorder()
    return shared.engine.fail


@pytest.fixture
def wire(shared: Shared, recorder: Recorder) -> Wire:
    return shared.wire


@pytest.fixture
def files(shared: Shared) -> Callable[[str], list[Path]]:
    """The checkpoint files of a run."""
    root = shared.data_dir / "checkpoints"
    return lambda model: [
        path for path in (root / model.replace(":", "_")).rglob("[!.]*") if path.is_file()
    ]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Wire]]:
    """Starts servers on the test's data directory."""
    with ExitStack() as stack:
        yield lambda engine, **options: Wire(
            stack.enter_context(serving(engine, tmp_path, **options))
        )


def failure(outcome: Any, *words: str, category: str = "user") -> None:
    """An outcome must be an in-band error that says these things."""
    assert outcome.keys() == {"error", "category"}, outcome
    assert outcome["category"] == category
    for word in words:
        assert word in outcome["error"]


def refusal(wire: Wire, status: int, path: str, body: Any, *words: str) -> None:
    """A request must be refused with a status and these words."""
    heard = wire.send(path, body)
    assert heard.status == status, heard
    for word in words:
        assert word in heard.json["detail"]


# ── order and idempotency ─────────────────────────────────────────────────────────────────────────


@pytest.mark.covers("S5", "S12")
def test_same_request_again_gets_the_same_receipt_and_runs_once(
    wire: Wire, recorder: Recorder
) -> None:
    model = wire.model()
    bodies = [("forward_backward", pass_json(model, 1)), ("optim_step", step_json(model, 2))]
    for path, body in bodies:
        first, again = wire.post(path, body), wire.post(path, body)
        assert first == again
        assert first["model_id"] == model
    wire.result(first["request_id"])
    for path, body in bodies:  # long after it is done, too
        assert wire.result(wire.post(path, body)["request_id"]) is not None
    assert recorder.calls == ["create", "forward_backward", "optim_step"]


@pytest.mark.covers("S12")
def test_request_sent_twice_at_once_runs_once(wire: Wire, recorder: Recorder) -> None:
    model = wire.model()
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        receipts = list(pool.map(lambda _: wire.post("optim_step", step_json(model, 1)), range(16)))
    assert len({receipt["request_id"] for receipt in receipts}) == 1
    wire.result(receipts[0]["request_id"])
    assert recorder.calls.count("optim_step") == 1


@pytest.mark.covers("S12")
def test_reused_number_with_another_request_fails_in_band(wire: Wire, recorder: Recorder) -> None:
    model = wire.model()
    good = wire.post("optim_step", step_json(model, 1))["request_id"]
    other = wire.post("optim_step", step_json(model, 1, learning_rate=0.5))["request_id"]
    assert other != good
    failure(wire.result(other), "number 1", "another request")
    assert "metrics" in wire.result(good)
    assert wire.post("optim_step", step_json(model, 1, learning_rate=0.5))["request_id"] == other
    assert "metrics" in wire.run("optim_step", step_json(model, 2))
    assert recorder.calls.count("optim_step") == 2


@pytest.mark.covers("S12")
def test_same_body_for_another_operation_is_another_request(wire: Wire) -> None:
    model = wire.model()
    body = {"model_id": model, "seq_id": 1, "path": "a"}
    assert "path" in wire.run("save_weights", body)
    failure(wire.run("save_weights_for_sampler", body), "another request")


@pytest.mark.covers("S11")
def test_requests_are_executed_by_number_not_by_arrival(wire: Wire, recorder: Recorder) -> None:
    model = wire.model()
    last = wire.post("save_weights", {"model_id": model, "path": "a", "seq_id": 3})["request_id"]
    middle = wire.post("optim_step", step_json(model, 2))["request_id"]
    time.sleep(0.05)
    assert recorder.calls == ["create"]
    first = wire.post("forward_backward", pass_json(model, 1))["request_id"]
    for request_id in (last, middle, first):
        assert "error" not in wire.result(request_id)
    assert recorder.calls == ["create", "forward_backward", "optim_step", "save"]


@pytest.mark.covers("S11")
def test_run_continues_after_a_gap_times_out(serve: Callable[..., Wire]) -> None:
    recorder = Recorder()
    wire = serve(FakeEngine(fail=recorder), limits=Limits(gap_seconds=0.3))
    model = wire.model()
    waiting = [wire.post("optim_step", step_json(model, number))["request_id"] for number in (2, 4)]
    for request_id in waiting:
        failure(wire.result(request_id), "number 1", "never arrived")
    assert recorder.calls == ["create"]
    assert "metrics" in wire.run("optim_step", step_json(model, 5))
    failure(wire.run("optim_step", step_json(model, 1)), "number 1", "has passed", "next one is 6")
    failure(wire.run("optim_step", step_json(model, 3)), "number 3")
    assert recorder.calls == ["create", "optim_step"]


@pytest.mark.covers("S11")
def test_number_that_arrives_in_time_stops_the_clock(serve: Callable[..., Wire]) -> None:
    wire = serve(FakeEngine(), limits=Limits(gap_seconds=0.5))

    def filled(model: str, missing: int) -> tuple[str, bool]:
        """The request after a gap, and whether what was missing really came within its time."""
        began = time.monotonic()
        later = wire.post("optim_step", step_json(model, missing + 1))["request_id"]
        time.sleep(0.3)
        wire.post("optim_step", step_json(model, missing))
        return later, time.monotonic() - began < 0.5

    for number in range(20):
        model = wire.model(number=number)
        # the first one's time is over before the second is filled
        gaps = [filled(model, 1), filled(model, 3)]
        if all(in_time for _, in_time in gaps):
            for later, _ in gaps:
                assert "metrics" in wire.result(later)
            return
    pytest.fail("this machine never did two things half a second apart")


@pytest.mark.covers("S13", "S28")
def test_failed_operation_uses_its_number_up(wire: Wire, recorder: Recorder) -> None:
    model = wire.model()
    recorder.errors["forward_backward"] = EngineError("not like this")
    failure(wire.run("forward_backward", pass_json(model, 1)), "not like this")
    recorder.errors["optim_step"] = RuntimeError("the device is on fire")
    failure(wire.run("optim_step", step_json(model, 2)), "RuntimeError", category="server")
    assert "metrics" in wire.run("optim_step", step_json(model, 3))


def test_requests_without_a_number_take_the_next(wire: Wire) -> None:
    model = wire.model()
    assert wire.post("optim_step", step_json(model, None))["request_id"] == f"{model}:1"
    assert wire.post("optim_step", step_json(model, None))["request_id"] == f"{model}:2"
    assert wire.post("optim_step", step_json(model, 3))["request_id"] == f"{model}:3"


@pytest.mark.covers("S11")
@pytest.mark.parametrize("number", [0, -1])
def test_numbers_start_at_one(wire: Wire, number: int) -> None:
    model = wire.model()
    refusal(wire, 400, "optim_step", step_json(model, number), "seq_id")
    assert "metrics" in wire.run("optim_step", step_json(model, 1))


@pytest.mark.covers("S13")
def test_request_that_was_refused_does_not_hold_up_the_next(wire: Wire) -> None:
    """The client's counter has moved on, whatever the server thought of the request."""
    model = wire.model()
    bad = step_json(model, 1)
    bad["adam_params"]["learning_rate"] = "fast"
    heard = wire.send("optim_step", bad)
    assert heard.status == 400 or "error" in wire.result(heard.json["request_id"])
    # a gap would be given up, and this with it
    assert "metrics" in wire.run("optim_step", step_json(model, 2))


@pytest.mark.covers("S13")
def test_refused_protobuf_request_does_not_hold_up_the_next(wire: Wire) -> None:
    """Its tensors are damaged, but whose it is and which number it has can be read."""
    model = wire.model()
    damaged = protobuf_schema.parse("ForwardBackwardRequest", protobuf_pass(model, 1))
    damaged.data[0].loss_fn_inputs["target_tokens"].shape.append(7)
    heard = wire.send(
        "forward_backward",
        damaged.SerializeToString(),
        headers={"Content-Type": "application/x-protobuf"},
    )
    assert heard.status == 400
    assert "target_tokens" in heard.json["detail"]
    assert "metrics" in wire.run("optim_step", step_json(model, 2))
    failure(wire.result(f"{model}:1"), "target_tokens")


@pytest.mark.covers("S11")
def test_runs_do_not_wait_for_each_other(wire: Wire) -> None:
    session = wire.session()
    one, two = wire.model(session, 0), wire.model(session, 1)
    wire.post("optim_step", step_json(one, 2))  # its first never comes
    assert "metrics" in wire.run("optim_step", step_json(two, 1))


@pytest.mark.covers("S7")
def test_creating_the_same_model_again_gives_the_same(wire: Wire, recorder: Recorder) -> None:
    session = wire.session()
    assert wire.model(session) == wire.model(session) == f"{session}:train:0"
    assert recorder.calls == ["create"]


# ── what is not there ─────────────────────────────────────────────────────────────────────────────


@pytest.mark.covers("S27")
def test_unknown_things_are_not_found(wire: Wire) -> None:
    session = wire.session()
    refusal(wire, 404, "optim_step", step_json("nobody", 1), "nobody")
    refusal(wire, 404, "forward_backward", pass_json("nobody", 1), "nobody")
    refusal(wire, 404, "save_weights", {"model_id": "nobody", "path": "a"}, "nobody")
    refusal(wire, 404, "get_info", {"model_id": "nobody"}, "nobody")
    refusal(wire, 404, "retrieve_future", {"request_id": "nothing"}, "nothing")
    refusal(wire, 404, "asample", sample_json("nowhere"), "nowhere")
    refusal(wire, 404, "session_heartbeat", {"session_id": "never"}, "never")
    refusal(wire, 404, "sessions/never/finish", {"reason": {"type": "success"}}, "never")
    refusal(
        wire,
        404,
        "create_model",
        {"session_id": "never", "model_seq_id": 0, "base_model": "fake"},
        "never",
    )
    refusal(wire, 404, "weights_info", {"tinker_path": f"tinker://{session}/weights/a"}, session)
    assert wire.send("samplers/nowhere", method="GET").status == 404


@pytest.mark.covers("S8")
def test_wrong_model_name_lists_the_known_models(wire: Wire) -> None:
    session = wire.session()
    body = {"session_id": session, "model_seq_id": 0, "base_model": "flake"}
    refusal(wire, 400, "create_model", body, "'flake'", "fake")
    refusal(wire, 404, "optim_step", step_json(f"{session}:train:0", 1), "train:0")
    sampling = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "flake"}
    refusal(wire, 400, "create_sampling_session", sampling, "'flake'", "fake")
    good = wire.model(session, 1)
    assert wire.post("get_info", {"model_id": good})["model_data"]["model_name"] == "fake"


def test_unavailable_optimizer_is_refused(wire: Wire) -> None:
    body = {"session_id": wire.session(), "model_seq_id": 0, "base_model": "fake"}
    failure(
        wire.run("create_model", body | {"optimizer_config": {"type": "lion"}}),
        "lion",
        "adamw",
        "dimuon",
    )
    model = wire.model()
    failure(
        wire.run(
            "optim_step", {"model_id": model, "seq_id": 1, "optimizer_params": {"type": "dimuon"}}
        ),
        "adamw",
    )


@pytest.mark.covers("S14")
def test_bad_request_has_no_effect(wire: Wire) -> None:
    """Two runs get the same good calls, one also gets bad ones. They must stay equal."""
    session = wire.session()
    clean, tried = wire.model(session, 0), wire.model(session, 1)
    numbers = {clean: iter(range(1, 100)), tried: iter(range(1, 100))}
    bad: list[tuple[str, Callable[[int], Any]]] = [
        (
            "forward_backward",
            lambda n: pass_json(tried, n, weights={"data": [1.0], "dtype": "float32"}),
        ),
        ("forward_backward", lambda n: pass_json(tried, n, tokens=())),
        ("optim_step", lambda n: {"model_id": tried, "seq_id": n}),
        (
            "load_weights",
            lambda n: {
                "model_id": tried,
                "seq_id": n,
                "path": "tinker://x/weights/y",
                "optimizer": True,
            },
        ),
        (
            "load_weights",
            lambda n: {"model_id": tried, "seq_id": n, "path": "nonsense", "optimizer": True},
        ),
        ("save_weights", lambda n: {"model_id": tried, "seq_id": n, "path": "../up"}),
    ]
    for path, make in bad:
        losses = []
        for model in (clean, tried):
            wire.run("forward_backward", pass_json(model, next(numbers[model])))
        heard = wire.send(path, make(next(numbers[tried])))
        assert (
            heard.status == 400
            or "error" in wire.result(heard.json["request_id"])
            or path == "forward_backward"
        )
        for model in (clean, tried):
            wire.run("optim_step", step_json(model, next(numbers[model])))
            losses.append(
                wire.run("forward_backward", pass_json(model, next(numbers[model])))["metrics"]
            )
        assert losses[0] == losses[1]


# ── checkpoints ───────────────────────────────────────────────────────────────────────────────────


def save(
    wire: Wire, model: str, number: int, name: str | None, kind: str = "save_weights", **fields: Any
) -> Any:
    return wire.run(kind, {"model_id": model, "seq_id": number, "path": name, **fields})


def test_saving_a_run_does_not_stop_other_work(serve: Callable[..., Wire]) -> None:
    """… other runs, samples and its own passes; the rest of the run waits, and a load finds what
    was saved."""
    writing, gate, recorder = threading.Event(), threading.Event(), Recorder()

    def slow(method: str, subject: str) -> None:
        recorder(method, subject)
        if method == "save" and not gate.is_set():
            writing.set()
            assert gate.wait(20)

    wire = serve(FakeEngine(fail=slow))
    session = wire.session()
    saved, other = wire.model(session), wire.model(session, number=1)
    wire.run("forward_backward", pass_json(saved, 1))
    wire.run("optim_step", step_json(saved, 2))
    try:
        asked = {
            "save": wire.post("save_weights", {"model_id": saved, "seq_id": 3, "path": "x"})[
                "request_id"
            ],
            "pass": wire.post("forward_backward", pass_json(saved, 4))["request_id"],
            "step": wire.post("optim_step", step_json(saved, 5))["request_id"],
            "load": wire.post(
                "load_weights",
                {
                    "model_id": saved,
                    "seq_id": 6,
                    "path": f"tinker://{saved}/weights/x",
                    "optimizer": True,
                },
            )["request_id"],
        }
        assert writing.wait(5)
        assert "metrics" in wire.result(asked["pass"])
        wire.run("forward_backward", pass_json(other, 1))
        assert "metrics" in wire.run("optim_step", step_json(other, 2))
        assert "sequences" in wire.run("asample", sample_json(sampler_of(wire)))
        assert recorder.calls.count("optim_step") == 2, "the saved run's own step waits"
    finally:
        gate.set()
    assert wire.result(asked["save"])["path"].endswith("/weights/x")
    assert "metrics" in wire.result(asked["step"])
    assert "error" not in wire.result(asked["load"])
    fresh = wire.model(session, number=2)
    wire.run("forward_backward", pass_json(fresh, 1))
    wire.run("optim_step", step_json(fresh, 2))
    assert loss(wire, saved, 7) == loss(wire, fresh, 3), (
        "what was saved is what there was before the pass"
    )


def test_failed_save_does_not_delay_others(serve: Callable[..., Wire]) -> None:
    errors = iter([EngineError("not now"), RuntimeError("the device is on fire"), SystemExit()])

    def fail(method: str, subject: str) -> None:
        if method == "save" and (error := next(errors, None)) is not None:
            raise error

    wire = serve(FakeEngine(fail=fail))
    model = wire.model()
    failure(save(wire, model, 1, "x"), "not now")
    failure(save(wire, model, 2, "x"), "RuntimeError", category="server")
    failure(save(wire, model, 3, "x"), "stopped", category="server")
    assert save(wire, model, 4, "x")["path"].endswith("/weights/x")


def loss(wire: Wire, model: str, number: int) -> float:
    body = pass_json(model, number) | {"forward_only": True}
    return float(wire.run("forward_backward", body)["metrics"]["loss:sum"])


@pytest.mark.covers("S25")
def test_name_is_used_once_unless_overwrite_is_set(
    wire: Wire, files: Callable[[str], list[Path]]
) -> None:
    model = wire.model()
    first = save(wire, model, 1, "a")["path"]
    assert first == f"tinker://{model}/weights/a"
    failure(save(wire, model, 2, "a", ttl_seconds=3600), first, "exists", "overwrite=True")
    before = loss(wire, model, 3)
    wire.run("forward_backward", pass_json(model, 4))
    wire.run("optim_step", step_json(model, 5))
    assert save(wire, model, 6, "a", overwrite=True)["path"] == first
    after = loss(wire, model, 7)
    assert after != before
    other = wire.model()
    wire.run("load_weights", {"model_id": other, "seq_id": 1, "path": first, "optimizer": True})
    assert loss(wire, other, 2) == after
    assert len(files(model)) == 1


@pytest.mark.covers("S25")
def test_training_and_sampler_checkpoints_do_not_collide(wire: Wire) -> None:
    model = wire.model()
    assert save(wire, model, 1, "a")["path"].endswith("/weights/a")
    assert save(wire, model, 2, "a", "save_weights_for_sampler")["path"].endswith(
        "/sampler_weights/a"
    )
    failure(save(wire, model, 3, "a", "save_weights_for_sampler", ttl_seconds=3600), "exists")


def test_nameless_checkpoint_is_named_after_its_number(wire: Wire) -> None:
    model = wire.model()
    assert save(wire, model, 1, None)["path"] == f"tinker://{model}/weights/step-1"


@pytest.mark.parametrize(
    "name",
    [
        "../up",
        "a/b",
        "/etc",
        "..",
        ".",
        ".hidden",
        "",
        "a b",
        "a\n",
        "a\0b",
        "ä",
        "x" * 201,
        "-x",
        "a\\b",
        "~",
    ],
    ids=repr,
)
@pytest.mark.parametrize("kind", ["save_weights", "save_weights_for_sampler"])
def test_bad_names_are_refused(
    wire: Wire, files: Callable[[str], list[Path]], name: str, kind: str
) -> None:
    model = wire.model()
    outcome = save(wire, model, 1, name, kind)
    if name == "" and kind == "save_weights":
        assert outcome["path"].endswith("/step-1")
        return
    failure(outcome, "name")
    assert files(model) == []


@pytest.mark.parametrize("ttl", [0, -1, 3599, 10**9])
def test_times_to_live_out_of_bounds_are_refused(wire: Wire, ttl: int) -> None:
    model = wire.model()
    failure(save(wire, model, 1, "a", ttl_seconds=ttl), "ttl_seconds", "3600", str(ttl))
    assert "path" in save(wire, model, 2, "a", ttl_seconds=3600)


def test_expired_checkpoint_is_gone_and_its_name_is_free(
    wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = wire.model()
    path = save(wire, model, 1, "a", ttl_seconds=3600)["path"]
    assert wire.post("weights_info", {"tinker_path": path})["lora_rank"] == 4
    later = time.time() + 3601
    monkeypatch.setattr("tinkex.server.database.sqlite_runs.time.time", lambda: later)
    refusal(wire, 404, "weights_info", {"tinker_path": path}, "a")
    load = {"model_id": model, "seq_id": 2, "path": path, "optimizer": True}
    failure(wire.run("load_weights", load), "no checkpoint", "expired")
    assert save(wire, model, 3, "a")["path"] == path
    assert wire.post("weights_info", {"tinker_path": path})["base_model"] == "fake"


@dataclass
class Stopping(Writer):
    """A writer that fails when its files are written."""

    whole: Writer

    def write(self, place: Place) -> None:
        self.whole.write(place)
        raise OSError("no space left on device")


@pytest.mark.parametrize("overwrite", [False, True])
def test_interrupted_save_leaves_no_files(
    wire: Wire,
    engine: FakeEngine,
    files: Callable[[str], list[Path]],
    monkeypatch: pytest.MonkeyPatch,
    overwrite: bool,
) -> None:
    model = wire.model()
    path = f"tinker://{model}/weights/a"
    if overwrite:
        save(wire, model, 1, "a")
    real = engine.writer

    def half(adapter: str, *, optimizer: bool) -> Writer:
        return Stopping(real(adapter, optimizer=optimizer))

    with monkeypatch.context() as patch:
        patch.setattr(engine, "writer", half)
        failure(
            save(wire, model, 2 if overwrite else 1, "a", overwrite=overwrite),
            "no space",
            category="server",
        )
    assert len(files(model)) == (1 if overwrite else 0)
    assert wire.send("weights_info", {"tinker_path": path}).status == (200 if overwrite else 404)
    assert "path" in save(wire, model, 3 if overwrite else 2, "a", overwrite=overwrite)


def test_sample_is_drawn_during_the_write_and_acknowledged_after_it(
    wire: Wire, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler, begun, gate = sampler_of(wire), threading.Event(), threading.Event()
    start, append = engine.sample_start, Journal.append

    def starting(*given: Any, **options: Any) -> None:
        start(*given, **options)
        begun.set()

    async def slowly(self: Journal, *given: Any) -> None:
        await asyncio.to_thread(gate.wait, 30)
        await append(self, *given)

    monkeypatch.setattr(engine, "sample_start", starting)
    monkeypatch.setattr(Journal, "append", slowly)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        receipt = pool.submit(wire.post, "asample", sample_json(sampler, 0))
        try:
            assert begun.wait(30)
            wait_until(lambda: not engine.sampling())
            assert not receipt.done()
            assert wire.send("retrieve_future", {"request_id": f"{sampler}:0"}).status == 408
        finally:
            gate.set()
        assert len(wire.result(receipt.result(30)["request_id"])["sequences"]) == 1


def test_sample_that_cannot_be_put_on_disk_was_not_taken(
    wire: Wire, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler = sampler_of(wire)

    async def refuse(*_: Any) -> None:
        raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "append", refuse)
        patch.setattr(engine, "sample_step", list)  # what was begun does not end by itself
        words = ("cannot be written to disk", "no space left")
        refusal(wire, 503, "asample", sample_json(sampler, 0), *words)
        wait_until(lambda: not engine.sampling())
    assert len(wire.run("asample", sample_json(sampler, 0))["sequences"]) == 1


def test_wrong_kind_of_path_is_recognized(wire: Wire) -> None:
    session = wire.session()
    model = wire.model(session)
    training = save(wire, model, 1, "a")["path"]
    sampler = save(wire, model, 2, "a", "save_weights_for_sampler")["path"]
    body = {"session_id": session, "sampling_session_seq_id": 0, "model_path": training}
    refusal(wire, 400, "create_sampling_session", body, "training checkpoint", "sampler_weights")
    load = {"model_id": model, "seq_id": 3, "path": sampler, "optimizer": False}
    failure(wire.run("load_weights", load), "sampler checkpoint", "weights")
    for bad in ("tinker://a/b", "nonsense", "tinker://a/other/b", "tinker:///weights/x"):
        refusal(wire, 400, "create_sampling_session", body | {"model_path": bad}, bad)
        refusal(wire, 400, "weights_info", {"tinker_path": bad}, bad)


def test_checkpoint_of_another_shape_is_refused(wire: Wire) -> None:
    session = wire.session()
    path = save(wire, wire.model(session, 0, rank=4), 1, "a")["path"]
    other = wire.model(session, 1, rank=8)
    failure(
        wire.run("load_weights", {"model_id": other, "seq_id": 1, "path": path, "optimizer": True}),
        "rank",
    )


@pytest.mark.covers("S24")
def test_run_can_be_made_by_loading(wire: Wire) -> None:
    session = wire.session()
    model = wire.model(session, 0)
    wire.run("forward_backward", pass_json(model, 1))
    wire.run("optim_step", step_json(model, 2))
    path = save(wire, model, 3, "a")["path"]
    body = {"session_id": session, "model_seq_id": 1, "path": path, "optimizer": True}
    made = wire.run("load_weights", body)
    assert made["model_id"] == f"{session}:train:1"
    assert loss(wire, made["model_id"], 1) == loss(wire, model, 4)
    refusal(wire, 400, "load_weights", {"path": path, "optimizer": True}, "model_id")


def test_unloadable_run_is_not_found(wire: Wire, recorder: Recorder) -> None:
    session = wire.session()
    path = save(wire, wire.model(session, 0), 1, "a")["path"]
    recorder.errors["load"] = EngineError("the file is damaged")
    body = {"session_id": session, "model_seq_id": 1, "path": path, "optimizer": True}
    failure(wire.run("load_weights", body), "damaged")
    assert wire.send("forward_backward", pass_json(f"{session}:train:1", 1)).status in (404, 410)


# ── sampling ──────────────────────────────────────────────────────────────────────────────────────


def sampler_of(wire: Wire, session: str | None = None, **source: Any) -> str:
    body = {
        "session_id": session or wire.session(),
        "sampling_session_seq_id": 0,
        "base_model": "fake",
        **source,
    }
    return str(wire.post("create_sampling_session", body)["sampling_session_id"])


@pytest.mark.covers("S33")
def test_sample_sent_again_is_not_drawn_again(wire: Wire, recorder: Recorder) -> None:
    sampler = sampler_of(wire)
    body = sample_json(sampler, 7, num_samples=3)
    del body["sampling_params"]["seed"]
    first, again = wire.post("asample", body), wire.post("asample", body)
    assert first == again
    assert len(set(first["sample_sequence_ids"])) == 3
    assert wire.result(first["request_id"]) == wire.result(again["request_id"])
    assert recorder.calls.count("sample_start") == 1
    other = wire.post("asample", body | {"seq_id": 8})
    assert other["request_id"] != first["request_id"]
    assert wire.result(other["request_id"]) != wire.result(first["request_id"])


@pytest.mark.covers("S33")
def test_reused_number_with_another_sample_fails_in_band(wire: Wire) -> None:
    sampler = sampler_of(wire)
    drawn = wire.run("asample", sample_json(sampler, 0))
    failure(wire.run("asample", sample_json(sampler, 0, num_samples=2)), "number 0", "used before")
    assert wire.run("asample", sample_json(sampler, 0)) == drawn


@pytest.mark.covers("S27")
def test_results_of_a_finished_session_are_gone(wire: Wire) -> None:
    session = wire.session()
    request_id = wire.post("optim_step", step_json(wire.model(session), 1))["request_id"]
    wire.result(request_id)
    wire.post(f"sessions/{session}/finish", {"reason": {"type": "success"}, "detail": None})
    refusal(wire, 410, "retrieve_future", {"request_id": request_id}, "expired")


@pytest.mark.parametrize("count", [0, -1, 1025])
def test_number_of_samples_is_bounded(wire: Wire, count: int) -> None:
    refusal(
        wire,
        400,
        "asample",
        sample_json(sampler_of(wire), num_samples=count),
        "num_samples",
        "1024",
        str(count),
    )


def test_sampling_without_a_session_names_its_source(wire: Wire) -> None:
    body = sample_json("", None, base_model="fake")
    del body["sampling_session_id"]
    assert len(wire.run("asample", body)["sequences"]) == 1
    refusal(wire, 400, "asample", body | {"base_model": None}, "base_model")
    refusal(wire, 400, "asample", body | {"base_model": "flake"}, "flake", "fake")


@pytest.mark.covers("S38")
def test_prompt_beyond_the_window_fails_in_band(wire: Wire) -> None:
    prompt = {"chunks": [{"tokens": [1] * 65, "type": "encoded_text"}]}
    failure(wire.run("asample", sample_json(sampler_of(wire), prompt=prompt)), "65", "64")


@pytest.mark.covers("S31", "S32")
def test_sampler_keeps_its_weights_during_training(wire: Wire) -> None:
    session = wire.session()
    model = wire.model(session)
    snapshot = wire.run(
        "save_weights_for_sampler", {"model_id": model, "seq_id": 1, "sampling_session_seq_id": 5}
    )["sampling_session_id"]
    assert snapshot == f"{session}:sample:5"
    assert wire.get(f"samplers/{snapshot}")["base_model"] == "fake"
    before = wire.run("asample", sample_json(snapshot, 0))
    for number in (2, 4):
        wire.run("forward_backward", pass_json(model, number, tokens=tuple(range(64))))
        wire.run("optim_step", step_json(model, number + 1))
    assert wire.run("asample", sample_json(snapshot, 1)) == before
    fresh = wire.run(
        "save_weights_for_sampler", {"model_id": model, "seq_id": 6, "sampling_session_seq_id": 6}
    )
    assert wire.run("asample", sample_json(fresh["sampling_session_id"], 0)) != before


@pytest.mark.covers("S32")
def test_nameless_save_needs_a_number(wire: Wire) -> None:
    model = wire.model()
    failure(
        wire.run("save_weights_for_sampler", {"model_id": model, "seq_id": 1}),
        "sampling_session_seq_id",
    )


def test_unloadable_sampler_reports_the_reason(wire: Wire, recorder: Recorder) -> None:
    session = wire.session()
    path = save(wire, wire.model(session), 1, "a", "save_weights_for_sampler")["path"]
    sampler = sampler_of(wire, session, base_model=None, model_path=path)
    recorder.errors["load_sampler"] = EngineError("the file is damaged")
    failure(wire.run("asample", sample_json(sampler, 0)), "damaged")
    assert len(wire.run("asample", sample_json(sampler, 1))["sequences"]) == 1  # and is tried anew


def test_samplers_that_were_not_used_for_long_make_room(serve: Callable[..., Wire]) -> None:
    engine = FakeEngine(fail=Recorder())
    wire = serve(engine, limits=Limits(samplers=2))
    session = wire.session()
    model = wire.model(session)
    samplers = []
    for number in range(3):
        wire.run("forward_backward", pass_json(model, 3 * number + 1, tokens=tuple(range(64))))
        wire.run("optim_step", step_json(model, 3 * number + 2))
        path = save(wire, model, 3 * number + 3, f"s{number}", "save_weights_for_sampler")["path"]
        samplers.append(
            sampler_of(
                wire, session, base_model=None, model_path=path, sampling_session_seq_id=number
            )
        )
    drawn = [wire.run("asample", sample_json(sampler, 0)) for sampler in samplers]
    assert drawn[0] != drawn[1] != drawn[2]
    assert [wire.run("asample", sample_json(sampler, 1)) for sampler in samplers] == drawn
    assert len(engine._samplers) <= 2


# ── futures ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.covers("S26")
def test_poll_is_held_and_then_answers_try_again(
    wire: Wire, recorder: Recorder, serve: Callable[..., Wire]
) -> None:
    model = wire.model()
    gate = recorder.gates["optim_step"] = threading.Event()
    request_id = wire.post("optim_step", step_json(model, 1))["request_id"]
    began = time.monotonic()
    heard = wire.send("retrieve_future", {"request_id": request_id})
    assert heard.status == 408
    assert heard.json == {"queue_state": "active"}
    assert 0.28 < time.monotonic() - began < 20
    gate.set()
    recorder = Recorder()
    gate = recorder.gates["optim_step"] = threading.Event()
    # longer than a request may take here
    wire = serve(FakeEngine(fail=recorder), limits=Limits(poll_seconds=60))
    request_id = wire.post("optim_step", step_json(wire.model(), 1))["request_id"]
    threading.Timer(0.1, gate.set).start()
    assert wire.send("retrieve_future", {"request_id": request_id}).status == 200


@pytest.mark.covers("S27")
def test_result_can_be_read_twice(wire: Wire) -> None:
    model = wire.model()
    request_id = wire.post("forward_backward", pass_json(model, 1))["request_id"]
    assert wire.result(request_id) == wire.result(request_id)


@pytest.mark.covers("S27")
def test_results_are_kept_for_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        now = [1000.0]
        monkeypatch.setattr("tinkex.server.runs.promises.time.monotonic", lambda: now[0])
        promises = Promises(clock=lambda: now[0])
        unread, read, pending = (
            promises.add(name, b"", "s") for name in ("unread", "read", "pending")
        )
        unread.settle(1)
        read.settle(2)
        read.touch()
        now[0] += KEEP_READ - 1
        promises.sweep()
        assert promises.get("read") is read
        now[0] += 2
        promises.sweep()
        assert promises.get("read") is None
        assert promises.is_gone("read")
        assert promises.get("unread") is unread
        now[0] += KEEP_UNREAD
        promises.sweep()
        assert promises.is_gone("unread")
        assert promises.get("pending") is pending
        assert not promises.is_gone("other")

    asyncio.run(run())


def test_read_results_are_kept_within_a_byte_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those read last stay; what was read just now stays whatever its size, and so does what nobody
    has read."""
    monkeypatch.setattr("tinkex.server.runs.promises.KEEP_READ_BYTES", 100)

    async def run() -> None:
        now = [1000.0]
        monkeypatch.setattr("tinkex.server.runs.promises.time.monotonic", lambda: now[0])
        promises = Promises(clock=lambda: now[0])
        for name, size in (("first", 60), ("second", 60), ("unread", 0), ("third", 30)):
            promise = promises.add(name, b"", "s")
            promise.settle(name)
            promise.size = size
            now[0] += 1
            if name != "unread":
                promise.touch()
        promises.sweep()
        assert len(promises) == 4
        now[0] += 2 * JUST_READ
        late = promises.add("late", b"", "s")
        late.settle("late")
        late.size = 1000
        late.touch()
        now[0] += 1
        first = promises.get("first")
        promises.sweep()
        assert promises.is_gone("first")
        assert first is not None
        assert first.result is None
        assert all(promises.get(name) is not None for name in ("second", "unread", "third", "late"))

    asyncio.run(run())


def test_result_that_is_read_has_its_size_noted(tmp_path: Path) -> None:
    from tinkex import LocalBackend

    with (
        LocalBackend(data_dir=tmp_path, engine=FakeEngine()) as backend,
        ServiceClient(base_url=backend.base_url) as s,
    ):
        s.create_lora_training_client("fake").result().save_state("a").result(10)
        app = backend._exchange._app  # type: ignore[union-attr]
        sizes = [promise.size for promise in app.state.server.promises._promises.values()]
    assert len(sizes) == 2
    assert min(sizes) > 10


@pytest.mark.covers("S2")
@pytest.mark.parametrize(
    ("accept", "kind"),
    [
        (None, "application/json"),
        ("application/json", "application/json"),
        ("application/x-protobuf", "application/x-protobuf"),
        ("application/x-protobuf, application/json", "application/x-protobuf"),
    ],
)
def test_results_come_in_the_form_that_is_asked_for(
    wire: Wire, accept: str | None, kind: str
) -> None:
    model = wire.model()
    headers = {} if accept is None else {"Accept": accept}

    def fetch(path: str, body: Any) -> Any:
        request_id = wire.post(path, body)["request_id"]
        wire.result(request_id)
        return wire.send("retrieve_future", {"request_id": request_id}, headers=headers)

    passed = fetch("forward_backward", pass_json(model, 1))
    assert passed.headers["content-type"] == kind
    assert len(codec.decode(types.ForwardBackwardOutput, passed.body, kind).loss_fn_outputs) == 1
    drawn = fetch("asample", sample_json(sampler_of(wire), 0))
    assert drawn.headers["content-type"] == kind
    assert len(codec.decode(types.SampleResponse, drawn.body, kind).sequences) == 1
    for path, body in (
        ("optim_step", step_json(model, 2)),
        ("forward_backward", pass_json(model, 3, weights={"data": [1.0], "dtype": "float32"})),
    ):
        small = fetch(path, body)
        assert small.headers["content-type"] == "application/json"
        assert small.json


@pytest.mark.covers("S2", "S26")
def test_pending_poll_stays_json_under_protobuf(wire: Wire, recorder: Recorder) -> None:
    model = wire.model()
    gate = recorder.gates["forward_backward"] = threading.Event()
    request_id = wire.post("forward_backward", pass_json(model, 1))["request_id"]
    heard = wire.send(
        "retrieve_future", {"request_id": request_id}, headers={"Accept": "application/x-protobuf"}
    )
    gate.set()
    assert (heard.status, heard.headers["content-type"]) == (408, "application/json")


# ── dialects ──────────────────────────────────────────────────────────────────────────────────────


def protobuf_pass(model: str, number: int, **fields: Any) -> bytes:
    datum = types.Datum(types.ModelInput.from_ints([1, 2, 3]), {"target_tokens": [2, 3, 4]})
    return codec.encode(
        types.ForwardBackwardRequest(
            model_id=model,
            seq_id=number,
            forward_backward_input=types.ForwardBackwardInput(
                data=[datum], loss_fn="cross_entropy"
            ),
            **fields,
        )
    ).data


@pytest.mark.covers("S1")
def test_all_dialects_of_a_pass_mean_the_same(wire: Wire, recorder: Recorder) -> None:
    model = wire.model()
    as_protobuf = {"Content-Type": "application/x-protobuf"}
    zstd_body = codec.encode(
        protobuf_passes.decode_forward_backward(protobuf_pass(model, 3)), compress=True
    )
    forward = pass_json(model, 4)
    forward["forward_input"] = forward.pop("forward_backward_input")
    sent = [
        wire.send("forward_backward", pass_json(model, 1)),
        wire.send("forward_backward", protobuf_pass(model, 2), headers=as_protobuf),
        wire.send("forward_backward", zstd_body.data, headers=zstd_body.headers),
        wire.send("forward", forward),
        wire.send(
            "forward_backward", protobuf_pass(model, 5, forward_only=True), headers=as_protobuf
        ),
        wire.send("forward_backward", pass_json(model, 6) | {"forward_only": True}),
    ]
    results = [wire.result(heard.json["request_id"]) for heard in sent]
    assert all(result == results[0] for result in results)
    assert results[0]["loss_fn_outputs"][0]["logprobs"]["dtype"] == "float32"
    norm = wire.run("optim_step", step_json(model, 7))["metrics"]["grad_norm:mean"]
    assert norm == pytest.approx(3 * 3**0.5)  # three of the six left a gradient


@pytest.mark.parametrize(
    ("body", "headers"),
    [
        (b"\xff\xff\xff", {"Content-Type": "application/x-protobuf"}),
        (protobuf_pass("m", 1)[:-1], {"Content-Type": "application/x-protobuf"}),
        (
            protobuf_pass("m", 1),
            {"Content-Type": "application/x-protobuf", "Content-Encoding": "zstd"},
        ),
        (
            protobuf_pass("m", 1),
            {"Content-Type": "application/x-protobuf", "Content-Encoding": "gzip"},
        ),
        (protobuf_pass("m", 1), {"Content-Type": "application/json"}),
    ],
)
def test_malformed_passes_are_refused(wire: Wire, body: bytes, headers: dict[str, str]) -> None:
    heard = wire.send("forward_backward", body, headers=headers)
    assert heard.status == 400
    assert heard.json["detail"].startswith("forward_backward: ")
    assert len(heard.json["detail"]) > 30


@pytest.mark.covers("S4")
def test_bodies_over_the_limit_are_refused(serve: Callable[..., Wire]) -> None:
    wire = serve(FakeEngine(), limits=Limits(body_bytes=2000))
    model = wire.model()
    refusal(wire, 413, "forward_backward", pass_json(model, 1, tokens=(7,) * 1000), "limit is 2000")
    datum = types.Datum(types.ModelInput.from_ints([7] * 100_000))
    body = types.ForwardBackwardInput(data=[datum], loss_fn="cross_entropy")
    request = types.ForwardBackwardRequest(model_id=model, seq_id=1, forward_backward_input=body)
    bomb = codec.encode(request, compress=True)
    assert len(bomb.data) < 2000
    heard = wire.send("forward_backward", bomb.data, headers=bomb.headers)
    assert heard.status in (400, 413)
    assert "2000" in heard.json["detail"]


def test_body_of_unknown_length_is_counted(serve: Callable[..., Wire]) -> None:
    import http.client

    wire = serve(FakeEngine(), limits=Limits(body_bytes=2000))
    connection = http.client.HTTPConnection(wire.url.removeprefix("http://"), timeout=10)
    connection.request(
        "POST", "/api/v1/create_session", iter([b" " * 1000] * 5), encode_chunked=True
    )
    response = connection.getresponse()
    assert response.status == 413
    assert b"2000" in response.read()
    connection.close()


# ── keys ──────────────────────────────────────────────────────────────────────────────────────────


def test_key_is_asked_for_and_checked(serve: Callable[..., Wire]) -> None:
    wire = serve(FakeEngine(), api_key="tml-right")
    body = {"sdk_version": "x"}
    missing = wire.send("client/config", body)
    assert missing.status == 401
    assert "X-API-Key" in missing.json["detail"]
    for wrong in ("tml-wrong", "tml-righ", "tml-right2", "é"):
        heard = wire.send("client/config", body, headers={"X-API-Key": wrong})
        assert heard.status == 401
        assert "tml-right" not in heard.body.decode()
    assert wire.send("client/config", body, headers={"X-API-Key": "tml-right"}).status == 200
    assert wire.send("samplers/x", method="GET").status == 401


# ── sessions ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.covers("S6", "S32")
def test_finished_session_frees_its_runs(wire: Wire, engine: FakeEngine) -> None:
    session, other = wire.session(), wire.session()
    model, kept = wire.model(session), wire.model(other)
    path = save(wire, model, 1, "a")["path"]
    snapshot = wire.run(
        "save_weights_for_sampler", {"model_id": model, "seq_id": 2, "sampling_session_seq_id": 0}
    )["sampling_session_id"]
    assert wire.post("session_heartbeat", {"session_id": session}) == {"type": "session_heartbeat"}
    finish = {"reason": {"type": "success"}, "detail": None}
    assert wire.send(f"sessions/{session}/finish", finish).status == 200
    assert wire.send(f"sessions/{session}/finish", finish).status == 200
    refusal(wire, 410, "session_heartbeat", {"session_id": session}, "finished")
    refusal(
        wire,
        410,
        "optim_step",
        step_json(model, 3),
        "create_training_client_from_state_with_optimizer",
    )
    refusal(wire, 410, "asample", sample_json(snapshot), "session")
    refusal(
        wire,
        410,
        "create_model",
        {"session_id": session, "model_seq_id": 1, "base_model": "fake"},
        "finished",
    )
    assert wire.post("weights_info", {"tinker_path": path})["base_model"] == "fake"
    assert "metrics" in wire.run("optim_step", step_json(kept, 1))
    assert model not in engine._adapters
    assert kept in engine._adapters
    assert snapshot not in engine._samplers


def test_waiter_fails_when_its_session_ends(serve: Callable[..., Wire]) -> None:
    recorder = Recorder()
    # longer than a request may take here
    wire = serve(FakeEngine(fail=recorder), limits=Limits(poll_seconds=60))
    session = wire.session()
    model = wire.model(session)
    gate = recorder.gates["optim_step"] = threading.Event()
    request_id = wire.post("optim_step", step_json(model, 1))["request_id"]
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(wire.send, "retrieve_future", {"request_id": request_id})
        time.sleep(0.1)
        wire.post(f"sessions/{session}/finish", {"reason": {"type": "interrupted"}})
        failure(waiting.result(20).json, "session", "ended")
        gate.set()


@pytest.mark.covers("S6")
def test_silent_session_is_ended(
    serve: Callable[..., Wire], monkeypatch: pytest.MonkeyPatch
) -> None:
    real, clock = asyncio.sleep, Clock()
    for module in ("state", "open_sessions"):
        monkeypatch.setattr(f"tinkex.server.{module}.time", clock)
    monkeypatch.setattr(
        "tinkex.server.state.asyncio.sleep", lambda seconds: real(min(seconds, 0.05))
    )
    engine = FakeEngine()
    wire = serve(engine, limits=Limits(session_seconds=60))
    silent, lively = wire.session(), wire.session()
    model = wire.model(silent)
    for seconds in (20, 40, 60, 80):
        wire.post("session_heartbeat", {"session_id": lively})
        clock.ahead = seconds
    wait_until(lambda: engine._adapters == {})
    time.sleep(0.1)
    wire.post("session_heartbeat", {"session_id": lively})
    refusal(wire, 410, "session_heartbeat", {"session_id": silent}, "finished")
    refusal(wire, 410, "optim_step", step_json(model, 1), "session")
    assert engine._adapters == {}


def test_restart_keeps_saved_checkpoints(serve: Callable[..., Wire], tmp_path: Path) -> None:
    with serving(FakeEngine(), tmp_path) as url:
        first = Wire(url)
        session = first.session()
        model = first.model(session)
        first.run("forward_backward", pass_json(model, 1))
        first.run("optim_step", step_json(model, 2))
        path = save(first, model, 3, "a")["path"]
        sampler_path = save(first, model, 4, "a", "save_weights_for_sampler")["path"]
        expected = loss(first, model, 5)
        drawn = first.run(
            "asample",
            sample_json(sampler_of(first, session, base_model=None, model_path=sampler_path)),
        )
    second = serve(FakeEngine())
    assert "error" not in second.run("optim_step", step_json(model, 6))  # the run itself goes on
    assert second.post("get_info", {"model_id": model})["lora_rank"] == 4
    assert second.post("session_heartbeat", {"session_id": session})
    fresh = second.model()
    second.run("load_weights", {"model_id": fresh, "seq_id": 1, "path": path, "optimizer": True})
    assert loss(second, fresh, 2) == expected
    sampler = sampler_of(second, base_model=None, model_path=sampler_path)
    assert second.run("asample", sample_json(sampler)) == drawn
    again = second.run("asample", sample_json(f"{session}:sample:0", 1))
    assert again == drawn


def test_requests_of_an_earlier_life_are_answered(
    serve: Callable[..., Wire], tmp_path: Path
) -> None:
    with serving(FakeEngine(), tmp_path) as url:
        first = Wire(url)
        session = first.session()
        trained = first.post("optim_step", step_json(first.model(session), 1))["request_id"]
        sampled = first.post("asample", sample_json(sampler_of(first, session)))["request_id"]
        expected = first.result(trained), first.result(sampled)
    second = serve(FakeEngine())
    assert (second.result(trained), second.result(sampled)) == expected
    refusal(second, 404, "retrieve_future", {"request_id": "nobody:1"}, "nobody:1")


def test_model_of_an_earlier_life_is_not_made_again(
    serve: Callable[..., Wire], tmp_path: Path
) -> None:
    with serving(FakeEngine(), tmp_path) as url:
        first = Wire(url)
        session = first.session()
        model = first.model(session)
        first.run("forward_backward", pass_json(model, 1))
        first.run("optim_step", step_json(model, 2))
        expected = loss(first, model, 3)
    second = serve(FakeEngine())
    body = {
        "session_id": session,
        "model_seq_id": 0,
        "base_model": "fake",
        "lora_config": {"rank": 4},
    }
    assert second.run("create_model", body)["model_id"] == model
    assert loss(second, model, 4) == expected
    assert second.model(session, 1) == f"{session}:train:1"


def test_data_of_a_newer_version_is_left_alone(tmp_path: Path) -> None:
    import sqlite3

    from tinkex.server.database.sqlite import SqliteDatabase

    SqliteDatabase(tmp_path).close()
    database = sqlite3.connect(tmp_path / "tinkex.sqlite3")
    database.execute("PRAGMA user_version=99")
    database.close()
    with pytest.raises(RuntimeError, match="newer version of tinkex wrote it"):
        SqliteDatabase(tmp_path)


def test_rest(wire: Wire) -> None:
    assert wire.get("healthz") == {"status": "ok"}
    [model] = wire.get("get_server_capabilities")["supported_models"]
    assert model == {
        "model_name": "fake",
        "max_context_length": 1 << 20,
        "trainable": True,
        "sampleable": True,
    }
    assert wire.post("telemetry", {"events": [{"event": "X", "n": 1}], "session_id": "any"}) == {
        "status": "accepted"
    }
    config = wire.post("client/config", {"sdk_version": "0.36.0"})
    assert config["sample_use_retrieve_futures"] is False
    assert config["proto_compress_fwdbwd"] is False
    assert (
        wire.post("client/dynamic_config", {"sdk_version": "0.36.0"})["sample_cancel_enabled"]
        is True
    )


def test_internal_fault_reveals_no_details(
    wire: Wire, monkeypatch: pytest.MonkeyPatch, engine: FakeEngine
) -> None:
    def broken() -> Any:
        raise RuntimeError("path /secret/place")

    monkeypatch.setattr(engine, "models", broken)
    heard = wire.send("get_server_capabilities", method="GET")
    assert heard.status == 500
    assert heard.json == {"detail": "internal error: RuntimeError"}


def test_far_ahead_number_is_refused_alone(wire: Wire) -> None:
    model = wire.model()
    heard = wire.send("forward_backward", pass_json(model, 2**40))
    assert heard.status == 400
    assert "too far ahead" in heard.json["detail"]
    assert "seq_id" in heard.json["detail"]
    assert "loss_fn_outputs" in wire.run("forward_backward", pass_json(model, 1))


@pytest.mark.covers("S24")
@pytest.mark.parametrize("strict", [True, False])
def test_strict_server_loads_weights_as_the_first_operation_only(
    tmp_path: Path, strict: bool
) -> None:
    with serving(FakeEngine(), tmp_path, strict=strict) as url:
        wire = Wire(url)
        model = wire.model()
        path = wire.run("save_weights", {"model_id": model, "path": "w", "seq_id": 1})["path"]
        load = {"path": path, "optimizer": False}
        late = wire.run("load_weights", {"model_id": model, "seq_id": 2, **load})
        assert ("LoadWeights is not permitted" in late.get("error", "")) is strict
        fresh = wire.model(number=1)
        assert wire.run("load_weights", {"model_id": fresh, "seq_id": 1, **load})["path"] == path


# ── the engine's end ──────────────────────────────────────────────────────────────────────────────


def test_server_with_a_dead_engine_answers_at_once(tmp_path: Path) -> None:
    engine, prompt = FakeEngine(step_delay=0.002), types.ModelInput.from_ints([1, 2])

    def gone() -> Any:
        raise SystemExit("driver gone")

    with serving(engine, tmp_path) as url, ServiceClient(base_url=url) as service:
        wire = Wire(url)
        client, sampler = (
            service.create_lora_training_client("fake").result(),
            service.create_sampling_client(base_model="fake").result(),
        )
        assert wire.get("healthz") == {"status": "ok"}
        drawing = sampler.sample(prompt, 1, types.SamplingParams(max_tokens=10_000))
        engine.sample_step = gone  # type: ignore[method-assign]
        with pytest.raises(tinkex.RequestFailedError, match="engine has died"):
            drawing.result(10)
        assert wire.send("healthz", method="GET").status == 503
        for call in (
            lambda: client.save_state("late").result(10),
            lambda: sampler.compute_logprobs(prompt).result(10),
        ):
            with pytest.raises(
                tinkex.InternalServerError, match="503: the server's engine has died"
            ):
                call()


def test_operations_answer_to_their_own_method_alone(wire: Wire) -> None:
    gets = {op.path for op in OPERATIONS if op.method == "GET"}
    for path in {op.path for op in OPERATIONS if op.method == "POST" and "{" not in op.path} - gets:
        assert wire.send(path, method="GET").status == 404
    assert wire.send("asample", method="GET").json == {
        "detail": "there is no GET /api/v1/asample here"
    }


def test_server_below_a_path_prefix_answers(tmp_path: Path) -> None:
    """Behind a proxy that names its part of the path."""
    app = create_app(FakeEngine(), tmp_path)
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b'{"sdk_version": "0.36.0"}'}

    async def send(message: Any) -> None:
        sent.append(dict(message))

    async def ask(root: str, path: str) -> int:
        scope = {
            "type": "http",
            "method": "POST",
            "scheme": "http",
            "query_string": b"",
            "headers": [],
        }
        sent.clear()
        await app({**scope, "root_path": root, "path": path}, receive, send)
        return int(sent[0]["status"])

    path = f"{PREFIX}/client/config"
    assert asyncio.run(ask("", path)) == 200
    assert asyncio.run(ask("/below", f"/below{path}")) == 200
    assert asyncio.run(ask("", f"/below{path}")) == 404
