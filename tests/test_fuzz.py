"""Every endpoint, from the server's own description: no 5xx, no hang, no state change by what is
refused.

More examples than the few of every run: `FUZZ_EXAMPLES=2000 pytest -m slow tests/test_fuzz.py`.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import dataclasses
import functools
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlencode, urlsplit

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings, strategies as st

from operation_examples import BASE_MODELS, GOOD
from schemas import DEEP, DEEP_OBJECT, TEXTS, Json, Place, breaks, broken, values, written
from support import Wire, pass_json, serving, sqlite, step_json
from tinkex.engine.api import ADAMW, BaseModel, EngineError, PassJob, SampleJob
from tinkex.engine.fake import FakeEngine
from tinkex.server.app import create_app
from tinkex.server.routes.openapi import describe
from tinkex.server.server_limits import Limits
from tinkex.server.state import State
from tinkex.types.optimizers import AdamParams, OptimizerConfigBase, OptimParams
from tinkex.types.training import LoraConfig
from tinkex.wire import codec, protobuf_schema
from tinkex.wire.protocol import BY_NAME, OPERATIONS, PREFIX
from tinkex.wire.redacted_http import REDACTED

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

FEW = 6
MANY = int(os.environ.get("FUZZ_EXAMPLES", "25"))
SECONDS = 20.0
"""No answer may take longer than this."""
LIMITS = Limits(poll_seconds=0.02, gap_seconds=0.05, quiet_seconds=0.5, body_bytes=1 << 21)
DOCUMENT = describe(frozenset(BY_NAME))
BODIED = [op.name for op in OPERATIONS if op.request is not None]
NAMES = [op.name for op in OPERATIONS]


class CheckedEngine(FakeEngine):
    """The fake engine with the real one's checks: what it takes, it can do."""

    def create(
        self,
        adapter: str,
        base_model: str,
        lora: LoraConfig,
        optimizer: OptimizerConfigBase = ADAMW,
    ) -> None:
        if not 1 <= lora.rank <= 512:
            raise EngineError(f"LoRA rank must be between 1 and 512, got {lora.rank}")
        super().create(adapter, base_model, lora, optimizer)

    def pass_start(self, work: PassJob) -> None:
        for index, datum in enumerate(work.data):
            if not datum.model_input.is_text or not datum.model_input.length:
                raise EngineError(f"datum {index}: model_input must be text, and not empty")
            for name, tensor in datum.loss_fn_inputs.items():
                array = tensor.to_numpy()
                if (
                    array.ndim != 1
                    or not array.size
                    or not np.isfinite(array).all()
                    or (name == "target_tokens" and array.min() < 0)
                ):
                    raise EngineError(
                        f"datum {index}: input {name!r} must be one finite number a token"
                    )
                if name == "target_tokens" and array.dtype != np.int64:
                    raise EngineError(f"datum {index}: input {name!r} must be integers")
        super().pass_start(work)

    def optim_step(self, adapter: str, params: OptimParams) -> dict[str, float]:
        if isinstance(params, AdamParams):
            try:
                params.validate()
            except ValueError as error:
                raise EngineError(str(error)) from None
            if params.learning_rate > 1e6:
                raise EngineError("learning_rate: the step overflows")
        return super().optim_step(adapter, params)

    def sample_start(self, work: SampleJob) -> None:
        request = work.request
        if not request.prompt.is_text:
            raise EngineError("prompt: only text is supported")
        for name in ("topk_prompt_logprobs", "topk_sample_logprobs", "prompt_alt_tokens_k"):
            if not 0 <= getattr(request, name) <= 64:
                raise EngineError(f"{name} must be between 0 and 64, got {getattr(request, name)}")
        if request.prompt.length + (request.sampling_params.max_tokens or 0) > 64:
            raise EngineError("max_tokens and the prompt exceed the context window of 64")
        if request.prompt_logprobs_last_n is not None and request.prompt_logprobs_last_n < 1:
            raise EngineError("prompt_logprobs_last_n must be at least 1")
        super().sample_start(work)


@dataclass(frozen=True)
class Heard:
    """An answer."""

    status: int
    body: bytes
    content_type: str = ""
    fault: str = ""

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass(repr=False)
class Subject:
    """A server in this process, driven step by step: nothing happens in it while nobody waits for
    an answer."""

    data_dir: Path
    engine: FakeEngine = dataclasses.field(
        default_factory=functools.partial(CheckedEngine, BASE_MODELS)
    )
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    names: dict[str, Any] = dataclasses.field(default_factory=dict)
    count: int = 0
    log: list[tuple[str, int]] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.app = create_app(self.engine, self.data_dir, **{"limits": LIMITS, **self.options})
        self.state: State = self.app.state.server
        self._lifespan = self.app.router.lifespan_context(self.app)
        self.run(self._lifespan.__aenter__())
        # what is done by the clock would be taken for a change
        for task in asyncio.all_tasks(self.loop):
            if getattr(task.get_coro(), "__qualname__", "") in ("State.tend", "Meter.run"):
                task.cancel()

    def run(self, work: Any) -> Any:
        return self.loop.run_until_complete(work)

    def close(self) -> None:
        self.run(self._lifespan.__aexit__(None, None, None))
        self.loop.close()

    # ── asking ────────────────────────────────────────────────────────────────────────────────────

    def send(self, method: str, target: str, body: bytes = b"", **headers: str) -> Heard:
        """One request; a header's name may be written with underscores."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        heard: Heard = self.run(self.asking(method, target, [body], named))
        return heard

    async def asking(
        self, method: str, target: str, parts: Sequence[bytes], headers: dict[str, str]
    ) -> Heard:
        path, _, query = target.partition("?")
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": unquote(path),
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "root_path": "",
            "headers": [
                (name.lower().encode(), value.encode("latin-1")) for name, value in headers.items()
            ],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 80),
        }
        incoming = [{"type": "http.request", "body": part, "more_body": True} for part in parts]
        incoming[-1]["more_body"] = False
        done, status, kind, body, fault = asyncio.Event(), 0, "", b"", ""

        async def receive() -> Any:
            if incoming:
                return incoming.pop(0)
            await done.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            nonlocal status, kind, body
            if message["type"] == "http.response.start":
                status = message["status"]
                kind = dict(message["headers"]).get(b"content-type", b"").decode()
            else:
                body += message.get("body", b"")
                if not message.get("more_body"):
                    done.set()

        try:
            async with asyncio.timeout(SECONDS):
                await self.app(scope, receive, send)
        except TimeoutError:
            pytest.fail(f"{method} {target[:200]} was not answered within {SECONDS} s")
        except Exception as error:  # it has been answered with 500 by now
            fault = repr(error)
        return Heard(status, body, kind, fault)

    def post(self, name: str, body: Json) -> Any:
        heard = self.send("POST", f"{PREFIX}/{name}", json.dumps(body).encode())
        assert heard.status == 200, (name, heard)
        return heard.json

    def result(self, request_id: str) -> Any:
        """Return the result of an operation; it must end."""
        until = time.monotonic() + SECONDS
        while time.monotonic() < until:
            heard = self.send(
                "POST", f"{PREFIX}/retrieve_future", json.dumps({"request_id": request_id}).encode()
            )
            if heard.status != 408:
                assert heard.status == 200, (request_id, heard)
                return heard.json
        pytest.fail(f"{request_id} has no result after {SECONDS} s")

    # ── what lives in it ──────────────────────────────────────────────────────────────────────────

    def settle(self) -> None:
        """Have something of everything in the server, whatever was done to it before."""
        live = self.state.runs.get(self.names.get("@model", ""))
        if (
            live is not None
            and live.last is None
            and live.lane.next < 1_000_000
            and self.names["@session"] in self.state.sessions
            and all(
                self.state.database.checkpoints.get(self.names[name])
                for name in ("@weights", "@samplable")
            )
        ):
            return
        session = self.post("create_session", {})["session_id"]
        create = {
            "session_id": session,
            "model_seq_id": 0,
            "base_model": "fake",
            "lora_config": {"rank": 4},
        }
        model = self.result(self.post("create_model", create)["request_id"])["model_id"]
        passed = self.post("forward_backward", pass_json(model, 1))["request_id"]
        weights = self.post("save_weights", {"model_id": model, "seq_id": 2, "path": "w"})[
            "request_id"
        ]
        samplable = self.post(
            "save_weights_for_sampler", {"model_id": model, "seq_id": 3, "path": "s"}
        )["request_id"]
        sampler = self.post(
            "create_sampling_session",
            {"session_id": session, "sampling_session_seq_id": 0, "base_model": "fake"},
        )["sampling_session_id"]
        self.result(passed)
        self.names = {
            "@session": session,
            "@model": model,
            "@request": passed,
            "@sampler": sampler,
            "@weights": self.result(weights)["path"],
            "@samplable": self.result(samplable)["path"],
        }

    def filled(self, body: Json) -> Json:
        """A body with the server's own names where it has marks."""
        if isinstance(body, dict):
            return {name: self.filled(item) for name, item in body.items()}
        if isinstance(body, list):
            return [self.filled(item) for item in body]
        if body in ("@number", "@fresh"):
            self.count += 1
            return self.count if body == "@number" else f"n{self.count}"
        return self.names.get(body, body) if isinstance(body, str) else body

    async def calm(self) -> None:
        """Wait until nothing is under way."""
        promises, until = self.state.promises, time.monotonic() + SECONDS
        while (
            promises._tasks
            or any(not promise.done.is_set() for promise in promises._promises.values())
            or any(live.gap is not None for live in self.state.runs.values())
        ):
            await asyncio.sleep(0.002)
            assert time.monotonic() < until, "something hangs"
        for worker in self.state.workers:
            await worker.run(lambda: None)
        await self.state.meter.flush()

    def digest(self) -> dict[str, Any]:
        """Everything that a refused request must leave as it was."""
        self.run(self.calm())
        state, engine = self.state, self.engine
        files = {
            str(path): path.stat().st_size
            for place in ("runs", "samples", "snapshots", "checkpoints", "traces")
            for path in (self.data_dir / place).rglob("*")
        }
        return {
            "rows": sqlite(state).db.total_changes,
            "files": files,
            "promises": sorted(state.promises._promises),
            "logs": sorted(state.promises._logs),
            "sessions": sorted(state.sessions),
            "lanes": {
                name: (live.lane.next, live.lane.missing, live.last)
                for name, live in state.runs.items()
            },
            "adapters": {
                name: (
                    one.weights.tolist(),
                    None if one.grad is None else one.grad.tolist(),
                    one.step,
                )
                for name, one in engine._adapters.items()
            },
            "samplers": sorted(engine._samplers),
            "losses": sorted(engine._losses),
            "snapshots": sorted(state.samplers.nameless.directories),
        }


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    made = Subject(tmp_path_factory.mktemp("fuzzed"))
    try:
        yield made
    finally:
        made.close()


# ── what is sent ──────────────────────────────────────────────────────────────────────────────────

SAME_AS: dict[str, tuple[str, ...]] = {
    "seq_id": ("request number",),
    "model_seq_id": ("model",),
    "custom_loss_seq_id": ("request number",),
    "path": ("checkpoint",),
    "tinker_path": ("checkpoint", "kind"),
    "source_path": ("checkpoint",),
    "model_path": ("checkpoint",),
    "loss_fn": ("loss",),
    "data": ("datum",),
    "prev_cursor": ("cursor",),
    "kind": ("checkpoint", "export"),
    "name": ("checkpoint",),
    "training_run_id": ("training run",),
    "optimizer_config": ("optimizer",),
    "file": ("signed",),
    "expires": ("signed",),
    "signature": ("signed",),
}
"""What a message may say instead of a field's name."""

WHOLE_BODY = ("malformed", "body", "content encoding", "protobuf", "expected `object`")
"""What is said where no field is wrong, but all of it."""


def said(message: str, names: Sequence[str]) -> bool:
    """Return True if a message names one of these fields."""
    plain = message.replace("_", " ").lower()
    words = [
        word for name in names for word in (name, name.removesuffix("_id"), *SAME_AS.get(name, ()))
    ]
    return any(word.replace("_", " ").lower() in plain for word in words)


def fields_of(schema: Json, seen: frozenset[str] = frozenset()) -> set[str]:
    """The names of all fields that a schema has, however deep."""
    found: set[str] = set()
    if isinstance(schema, dict):
        if isinstance(ref := schema.get("$ref"), str) and ref not in seen:
            found |= fields_of(
                DOCUMENT["components"]["schemas"][ref.rpartition("/")[2]], seen | {ref}
            )
        found |= set(schema.get("properties", {}))
        for part in schema.values():
            found |= fields_of(part, seen)
    elif isinstance(schema, list):
        for part in schema:
            found |= fields_of(part, seen)
    return found


@functools.cache
def fields(name: str) -> list[str]:
    """The names of everything that a request of an operation has."""
    op = BY_NAME[name]
    described = DOCUMENT["paths"][f"{PREFIX}/{op.path}"][op.method.lower()]
    parameters = [parameter["name"] for parameter in described.get("parameters", ())]
    return [*parameters, *sorted(fields_of(described.get("requestBody", {})))]


@dataclass(frozen=True)
class Request:
    """Request to send, with marks for the server's own names."""

    name: str
    path: dict[str, str] = dataclasses.field(default_factory=dict)
    query: dict[str, str] = dataclasses.field(default_factory=dict)
    body: bytes | Json = b""
    headers: dict[str, str] = dataclasses.field(default_factory=dict)


ADDRESS = {
    "session_id": "@session",
    "sampler_id": "@sampler",
    "training_run_id": "@model",
    "kind": "weights",
    "name": "w",
}


def ask(subject: Subject, request: Request, names: Sequence[str] = ()) -> Heard:
    """Send a request and hold the answer, and what comes of it, against what is promised."""
    subject.settle()
    op = BY_NAME[request.name]
    body = (
        request.body if isinstance(request.body, bytes) else written(subject.filled(request.body))
    )
    path = {
        name: quote(str(subject.filled(request.path.get(name, value))), safe="")
        for name, value in ADDRESS.items()
    }
    target = f"{PREFIX}/{op.path.format(**path)}"
    if request.query:
        target += "?" + urlencode(subject.filled(request.query))
    before = subject.digest()
    spent = op.traffic == "train" and codec.peek(body, request.headers.get("content-type", ""))
    began = time.monotonic()
    heard = subject.send(op.method, target, body, **request.headers)
    assert heard.status < 500, (heard, target, body[:2000])
    assert time.monotonic() - began < SECONDS
    subject.log.append((request.name, heard.status))
    names = names or fields(op.name)
    if heard.status >= 400:
        detail = heard.json.get("detail") or heard.json["queue_state"]
        assert isinstance(detail, str)
        assert len(detail) < 10_000
        if not spent:  # the number of a refused request is spent: nothing behind it waits for it
            assert subject.digest() == before
        if heard.status in (400, 413) and names:
            # Where a place is within what has no fixed names, the way there is told.
            told = [*names, *WHOLE_BODY, *(["at `$."] if "[...]" in detail else [])]
            assert said(detail, told), (detail, names)
    elif op.result is not None:
        outcome = subject.result(heard.json["request_id"])
        if "error" in outcome:
            assert outcome["category"] == "user", (outcome, body[:2000])
            assert said(outcome["error"], names), (outcome, names)
    elif request.name == "stream_sample":
        events = [
            json.loads(line[6:])
            for line in heard.body.decode().split("\n")
            if line.startswith("data: {")
        ]
        assert heard.body.endswith(b"data: [DONE]\n\n")
        assert all(event.get("category", "user") == "user" for event in events), events
    return heard


def examples(count: int) -> Callable[[Any], Any]:
    """So many examples: the same ones every time for the few, others every time for the many."""
    return settings(
        max_examples=count,
        deadline=None,
        database=None,
        derandomize=count <= 6 * FEW,
        phases=(Phase.explicit, Phase.generate) if count <= 6 * FEW else tuple(Phase),
        suppress_health_check=list(HealthCheck),
    )


# ── good requests ─────────────────────────────────────────────────────────────────────────────────


NO_UPLOADS = {"external_weights_upload_start": 400, "external_weights_upload_finish": 404}
"""The fake engine has no files that an upload could fit."""
BREAKABLE = [name for name in BODIED if GOOD[name] and name not in NO_UPLOADS]


@pytest.mark.parametrize("name", NAMES)
def test_unbroken_requests_are_accepted(subject: Subject, name: str) -> None:
    query = {"starting_on": "2026-07-13T00:00:00Z", "ending_before": "2026-07-14T00:00:00Z"}
    path = (
        {"kind": "sampler_weights", "name": "s"}
        if name in ("publish_checkpoint", "unpublish_checkpoint")
        else {}
    )
    heard = ask(
        subject,
        Request(name, path, query if name == "get_billing_usage" else {}, GOOD.get(name, b"")),
    )
    refused = {
        "delete_api_key": 400,
        "get_external_weights_urls": 400,
        "get_checkpoint_archive": 302,
    } | NO_UPLOADS
    assert heard.status == refused.get(name, 200), heard
    if BY_NAME[name].result is not None:
        assert "error" not in subject.result(heard.json["request_id"])


def test_every_operation_with_a_body_has_a_valid_body() -> None:
    assert set(GOOD) == set(BODIED)


# ── broken in one place ───────────────────────────────────────────────────────────────────────────


def check_broken(subject: Subject, name: str, how: tuple[Place, Json]) -> None:
    place, wrong = how
    names = [step for step in place if isinstance(step, str)]
    extra = ["not_a_field"] if wrong == "extra" else []  # which some requests refuse
    ask(subject, Request(name, body=broken(GOOD[name], place, wrong)), [*names[-3:], *extra])


@pytest.mark.parametrize("name", BREAKABLE)
@examples(FEW)
@given(data=st.data())
def test_error_names_the_broken_field_of_a_body(
    subject: Subject, name: str, data: st.DataObject
) -> None:
    check_broken(subject, name, data.draw(breaks(GOOD[name])))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", BREAKABLE)
@examples(MANY)
@given(data=st.data())
def test_error_names_the_broken_field_of_many_bodies(
    subject: Subject, name: str, data: st.DataObject
) -> None:
    check_broken(subject, name, data.draw(breaks(GOOD[name])))


# ── of the right shape ────────────────────────────────────────────────────────────────────────────


@st.composite
def shaped(draw: st.DrawFn, name: str) -> Request:
    """A request of the shape that the description gives, with odd values."""
    op = BY_NAME[name]
    described = DOCUMENT["paths"][f"{PREFIX}/{op.path}"][op.method.lower()]
    path: dict[str, str] = {}
    query: dict[str, str] = {}
    for parameter in described.get("parameters", ()):
        parts = path if parameter["in"] == "path" else query
        if parameter["in"] != "header" and (parameter["required"] or draw(st.booleans())):
            fitting = values(parameter["schema"], DOCUMENT, parameter["name"])
            odd = st.sampled_from([*TEXTS, *NUMERALS])
            parts[parameter["name"]] = str(draw(fitting if draw(st.integers(0, 3)) else odd)) or "x"
    body: Json = b""
    if "requestBody" in described:
        body = draw(values(described["requestBody"]["content"][codec.JSON]["schema"], DOCUMENT))
        if draw(st.booleans()):  # most of a good one, and some of this
            kept = [field for field in sorted(body) if draw(st.integers(0, 3)) == 0]
            body = {**GOOD[name], **{field: body[field] for field in kept}}
    return Request(name, path, query, body)


NUMERALS = ["9" * 5000, "-1", "1e3", "²", "٣", "0x10", "1_000", "9" * 15, " 1", "NaN"]


@pytest.mark.parametrize("name", NAMES)
@examples(FEW)
@given(data=st.data())
def test_odd_values_are_harmless(subject: Subject, name: str, data: st.DataObject) -> None:
    ask(subject, data.draw(shaped(name)))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", NAMES)
@examples(MANY)
@given(data=st.data())
def test_many_odd_values_in_the_right_shape(
    subject: Subject, name: str, data: st.DataObject
) -> None:
    ask(subject, data.draw(shaped(name)))


# ── not even JSON ─────────────────────────────────────────────────────────────────────────────────

TYPES = [
    codec.JSON,
    codec.PROTOBUF,
    "text/plain",
    "",
    "application/json; charset=utf-16",
    "*/*",
    "é\x00",
]
ENCODINGS = ["", "identity", "zstd", "gzip", "zstd, zstd", "ZSTD"]


def lying_frame(size: int) -> bytes:
    """A zstd frame that says it holds so many bytes, and holds one."""
    return b"\x28\xb5\x2f\xfd\xe0" + size.to_bytes(8, "little") + b"\x0b\x00\x00x"


@st.composite
def malformed(draw: st.DrawFn, name: str) -> Request:
    """A request whose bytes are not what its headers say, or nothing at all."""
    text = written(GOOD[name])
    where = draw(st.integers(0, len(text)))
    frame = zstd.compress(text)
    body = draw(
        st.sampled_from(
            [
                text[:where],
                text[:where] + b"\xff" + text[where:],
                text[:where] + b"\x00" + text[where + 1 :],
                text.decode().encode("utf-16"),
                text + text,
                b"\xef\xbb\xbf" + text,
                b"[" * 100_000,
                b'{"a":' * 100_000,
                b'{"type": "\\ud800"}',
                b"null",
                b"[]",
                b"0",
                frame,
                frame[: where % len(frame)],
                frame + frame,
                frame[:4] + bytes([draw(st.integers(0, 255))]) + frame[5:],
                lying_frame(2**62),
                lying_frame(0),
                lying_frame(1000),
                zstd.compress(bytes(LIMITS.body_bytes + 1)),
            ]
        )
        | st.binary(max_size=64)
    )
    headers = {
        "content-type": draw(st.sampled_from(TYPES)),
        "content-encoding": draw(st.sampled_from(ENCODINGS)),
        "accept": draw(st.sampled_from(TYPES)),
    }
    return Request(name, body=body, headers={key: value for key, value in headers.items() if value})


@pytest.mark.parametrize("name", BODIED)
@examples(FEW)
@given(data=st.data())
def test_malformed_bytes_are_refused(subject: Subject, name: str, data: st.DataObject) -> None:
    ask(subject, data.draw(malformed(name)))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", BODIED)
@examples(MANY)
@given(data=st.data())
def test_many_malformed_bytes_are_refused(subject: Subject, name: str, data: st.DataObject) -> None:
    ask(subject, data.draw(malformed(name)))


# ── protobuf ──────────────────────────────────────────────────────────────────────────────────────


@st.composite
def damaged(draw: st.DrawFn) -> Callable[[str], bytes]:
    """A pass as protobuf with something wrong in it, for whatever run."""
    shape = draw(st.lists(st.sampled_from([0, 1, 3, 2**16, 2**40, 2**62]), max_size=3))
    tokens, dtype = draw(st.binary(max_size=16)), draw(st.sampled_from([0, 1, 2, 3, 4, 77]))
    values = draw(st.sampled_from([b"", bytes(3), bytes(12), bytes(24), b"\xff" * 24]))
    at, what = draw(st.integers(1, 200)), draw(st.sampled_from([b"", b"\xff", b"\x7f\x00"]))

    def made(model_id: str) -> bytes:
        wire = protobuf_schema.message("ForwardBackwardRequest")(
            model_id=model_id, loss_fn="cross_entropy"
        )
        datum = wire.data.add()
        datum.model_input.add().encoded_text.tokens = tokens
        tensor = datum.loss_fn_inputs["target_tokens"]
        tensor.dense, tensor.dtype = values, dtype
        tensor.shape.extend(shape)
        data = bytes(wire.SerializeToString())
        start = len(model_id) + 2  # the run's name stays as it is
        return data[: start + at] + what + data[start + at + len(what) :]

    return made


def check_damaged(subject: Subject, made: Callable[[str], bytes]) -> None:
    subject.settle()
    body = made(subject.names["@model"])
    names = [*fields("forward_backward"), "model input"]
    ask(
        subject,
        Request("forward_backward", body=body, headers={"content-type": codec.PROTOBUF}),
        names,
    )


@examples(6 * FEW)
@given(made=damaged())
def test_damaged_pass_in_protobuf_is_refused_or_fails_by_name(
    subject: Subject, made: Callable[[str], bytes]
) -> None:
    check_damaged(subject, made)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@examples(20 * MANY)
@given(made=damaged())
def test_many_damaged_passes_in_protobuf(subject: Subject, made: Callable[[str], bytes]) -> None:
    check_damaged(subject, made)


# ── what was found ────────────────────────────────────────────────────────────────────────────────

LONG = "9" * 5000
FOUND: dict[str, tuple[Request, str]] = {
    "a number that no journal holds": (
        Request("optim_step", body=GOOD["optim_step"] | {"seq_id": 10**30}),
        "seq_id",
    ),
    "a number that no file's name holds": (
        Request("create_model", body=GOOD["create_model"] | {"model_seq_id": 10**400}),
        "model_seq_id",
    ),
    "a lifetime that cannot be written as JSON again": (
        Request(
            "save_weights_for_sampler",
            body=GOOD["save_weights_for_sampler"] | {"ttl_seconds": 2**70},
        ),
        "ttl_seconds",
    ),
    "a seed that no engine takes": (
        Request(
            "asample", body=GOOD["asample"] | {"sampling_params": {"max_tokens": 1, "seed": 2**70}}
        ),
        "seed",
    ),
    "metadata that recursion does not get through": (
        Request("create_session", body={"user_metadata": {"a": DEEP_OBJECT}}),
        "user_metadata",
    ),
    "metadata of a run, as deep": (
        Request("create_model", body=GOOD["create_model"] | {"user_metadata": {"a": DEEP}}),
        "user_metadata",
    ),
    "a number out of range where text belongs": (
        Request("client_config", body={"sdk_version": "@raw:1e999"}),
        "sdk_version",
    ),
    "a page of more digits than Python reads": (
        Request("list_sessions", query={"limit": LONG}),
        "limit",
    ),
    "an hour before all years": (
        Request(
            "get_billing_usage",
            query={"starting_on": "0001-01-01T00:00:00+14:00", "ending_before": "2026-01-01"},
        ),
        "starting_on",
    ),
    "too many days": (
        Request(
            "get_billing_usage", query={"starting_on": "2026-01-01", "ending_before": "9999-12-31"}
        ),
        "ending_before",
    ),
    "more conditions than a query may have": (
        Request(
            "search_sessions", body={"user_metadata": {str(number): "x" for number in range(3000)}}
        ),
        "user_metadata",
    ),
    "more statuses than a query may have": (
        Request("search_sessions", body={"statuses": [{"type": "active"}] * 3000}),
        "statuses",
    ),
    "a target that int64 does not hold": (
        Request("forward_backward", body=pass_json("@model", None, target_tokens=[1e308, 1, 1])),
        "target_tokens",
    ),
    "a target that would wrap around": (
        Request(
            "forward_backward",
            body=pass_json("@model", None, target_tokens={"data": [2**63] * 3, "dtype": "int64"}),
        ),
        "target_tokens",
    ),
    "a weight that float32 does not hold": (
        Request(
            "forward_backward",
            body=pass_json("@model", None, weights={"data": [1e308] * 3, "dtype": "float32"}),
        ),
        "weights",
    ),
    "a shape of an empty tensor that no array has": (
        Request(
            "forward_backward",
            body=pass_json(
                "@model", None, weights={"data": [], "dtype": "float32", "shape": [0, 2**62]}
            ),
        ),
        "shape",
    ),
    "a shape of more dimensions than an array has": (
        Request(
            "forward_backward",
            body=pass_json(
                "@model", None, weights={"data": [1.0], "dtype": "float32", "shape": [1] * 100}
            ),
        ),
        "shape",
    ),
    "a kind of chunk that is a list": (
        Request(
            "asample", body=GOOD["asample"] | {"prompt": {"chunks": [{"tokens": [1], "type": []}]}}
        ),
        "chunks",
    ),
    "a sample of nothing": (
        Request("asample", body=GOOD["asample"] | {"sampling_session_id": None}),
        "sampling_session_id",
    ),
    "a length that is no number": (
        Request("telemetry", body=b"{}", headers={"content-length": "²"}),
        "events",
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_known_attacks_are_refused_by_name(subject: Subject, name: str) -> None:
    request, field = FOUND[name]
    heard = ask(subject, request)
    assert heard.status == 400, heard
    assert field in heard.json["detail"]


@pytest.mark.parametrize("length", ["9" * 18, LONG])
def test_length_beyond_all_limits_is_refused_before_the_body_is_read(
    subject: Subject, length: str
) -> None:
    heard = ask(subject, Request("telemetry", body=b"{}", headers={"content-length": length}))
    assert heard.status == 413
    assert "body_bytes" in heard.json["detail"]


def test_frame_that_declares_too_large_a_size_is_refused(subject: Subject) -> None:
    heard = ask(
        subject, Request("telemetry", body=lying_frame(2**62), headers={"content-encoding": "zstd"})
    )
    assert heard.status == 413
    assert "body_bytes" in heard.json["detail"]


def test_long_name_is_shortened_in_errors(subject: Subject) -> None:
    heard = ask(subject, Request("get_info", body={"model_id": "x" * 100_000}))
    assert heard.status == 404
    assert len(heard.body) < 5000


@pytest.mark.parametrize("header", ["host", "origin"])
@pytest.mark.parametrize("place", ["[", "[::1", "http://[", "example.com", "//"])
def test_invalid_address_is_not_local(subject: Subject, header: str, place: str) -> None:
    for path in (f"{PREFIX}/healthz", "/metrics"):
        heard = subject.send("GET", path, b"", **{header: place})
        assert heard.status == 403
        assert header in heard.json["detail"]


@pytest.mark.parametrize("path", ["/traces/x.json", f"{PREFIX}/downloads/a/weights/b/c"])
@pytest.mark.parametrize("expires", ["", LONG, "²", "-1", "1e9"])
def test_link_with_an_odd_time_is_not_signed(subject: Subject, path: str, expires: str) -> None:
    heard = subject.send("GET", f"{path}?{urlencode({'expires': expires, 'signature': 'é'})}")
    assert heard.status == 403
    assert "signed" in heard.json["detail"]


def token(said: str) -> str:
    return f"eyJ9.{base64.urlsafe_b64encode(said.encode()).decode()}.AAAA"


TOKENS = [
    token('{"sub": "tml:user:a", "key": 1e999, "exp": 1}'),
    token('{"sub": "tml:user:a", "key": 1, "exp": 1' + "0" * 400 + "}"),
    token("[" * 5000),
    token('{"sub": 1}'),
    token("[]"),
    "eyJ",
    "eyJ.é.é",
    "eyJ.\xff.",
    "tml-é\x00",
]


def test_odd_keys_and_tokens_are_not_known(tmp_path: Path) -> None:
    subject = Subject(tmp_path, options={"api_key": "tml-secret"})
    try:
        before = subject.digest()
        for key in TOKENS:
            heard = subject.send("GET", f"{PREFIX}/get_server_capabilities", x_api_key=key)
            assert heard.status == 401, (key[:80], heard)
        assert subject.digest() == before
    finally:
        subject.close()


# ── over a socket ─────────────────────────────────────────────────────────────────────────────────


def raw(url: str, data: bytes, *, hang_up: bool = False) -> bytes:
    """Return what a server answers to some bytes, within ten seconds."""
    address = urlsplit(url)
    with socket.create_connection(
        (address.hostname or "", address.port or 0), timeout=10
    ) as connection:
        connection.sendall(data)
        if hang_up:
            return b""
        heard = b""
        with contextlib.suppress(TimeoutError, ConnectionError):
            while part := connection.recv(65536):
                heard += part
        return heard


def head(path: str, *headers: str) -> bytes:
    return "\r\n".join(
        [f"POST {PREFIX}/{path} HTTP/1.1", "Host: 127.0.0.1", *headers, "", ""]
    ).encode()


def test_wrong_lengths_and_half_requests_are_harmless(tmp_path: Path) -> None:
    with serving(CheckedEngine(), tmp_path, limits=LIMITS) as url:
        wire = Wire(url)
        model = wire.model()
        body = json.dumps(step_json(model, 1)).encode()
        runs = tmp_path / "runs"
        before = {path: path.stat().st_size for path in runs.rglob("*")}
        json_type = f"Content-Type: {codec.JSON}"
        refused = [
            (
                head("optim_step", json_type, "Content-Length: 10", "Connection: close") + body,
                b" 400 ",
            ),
            (
                head("optim_step", json_type, f"Content-Length: {2**40}", "Connection: close")
                + body,
                b" 413 ",
            ),
            (head("optim_step", json_type, "Content-Length: -1") + body, b" 400 "),
            (
                head("optim_step", json_type, "Content-Length: 5", "Content-Length: 6") + body,
                b" 400 ",
            ),
            (head("optim_step", "Transfer-Encoding: chunked") + b"zz\r\n" + body, b" 400 "),
            (b"\x16\x03\x01 not HTTP\r\n\r\n", b" 400 "),
        ]
        for data, status in refused:
            assert status in raw(url, data).partition(b"\r\n")[0], data[:200]
        for data in (
            head("optim_step", json_type, f"Content-Length: {len(body) + 10}") + body,
            head("optim_step", "Transfer-Encoding: chunked") + b"5\r\n" + body[:3],
            head("optim_step", json_type, "Expect: 100-continue", f"Content-Length: {len(body)}"),
            head("optim_step", json_type, f"Content-Length: {len(body)}")[:-3],
        ):
            raw(url, data, hang_up=True)
        assert {path: path.stat().st_size for path in runs.rglob("*")} == before
        # the number is still free
        assert "error" not in wire.run("optim_step", step_json(model, 1))


# ── genuine faults ────────────────────────────────────────────────────────────────────────────────

SECRET = "tml-do-not-tell"
TOLD = f"internal error: RuntimeError: the device said {REDACTED}"


class BrokenEngine(CheckedEngine):
    """Fails in a way that nobody foresaw, once it is told to."""

    broken = False

    def models(self) -> Sequence[BaseModel]:
        self._break()
        return super().models()

    def optim_step(self, adapter: str, params: OptimParams) -> dict[str, float]:
        self._break()
        return super().optim_step(adapter, params)

    def sample_start(self, work: SampleJob) -> None:
        self._break()
        super().sample_start(work)

    def _break(self) -> None:
        if self.broken:
            raise RuntimeError(f"the device said {SECRET}")


@pytest.fixture
def faulty(tmp_path: Path) -> Iterator[Subject]:
    made = Subject(tmp_path, BrokenEngine())
    made.settle()
    try:
        yield made
    finally:
        made.close()


def logged(caplog: pytest.LogCaptureFixture) -> None:
    """The log has the whole of it."""
    records = [record for record in caplog.records if record.exc_info]
    assert len(records) == 1
    assert records[0].levelname == "ERROR"
    assert SECRET in caplog.text
    assert "_break" in caplog.text


def test_fault_of_an_engine_is_a_500_and_logged(
    faulty: Subject, caplog: pytest.LogCaptureFixture
) -> None:
    faulty.engine.broken = True  # type: ignore[attr-defined]
    heard = faulty.send("GET", f"{PREFIX}/get_server_capabilities")
    assert (heard.status, heard.json) == (500, {"detail": "internal error: RuntimeError"})
    logged(caplog)


def test_fault_of_a_store_is_a_500_and_logged(
    faulty: Subject, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def _break(*_: object) -> list[str]:
        # no kind of error makes a fault the caller's
        raise ValueError(f"not what was asked for, but {SECRET}")

    monkeypatch.setattr(faulty.state.database.sessions, "ids", _break)
    heard = faulty.send("GET", f"{PREFIX}/sessions")
    assert (heard.status, heard.json) == (500, {"detail": "internal error: ValueError"})
    logged(caplog)


def test_fault_in_band_is_of_the_server_and_logged(
    faulty: Subject, caplog: pytest.LogCaptureFixture
) -> None:
    faulty.engine.broken = True  # type: ignore[attr-defined]
    taken = faulty.post("optim_step", faulty.filled(GOOD["optim_step"]))
    assert faulty.result(taken["request_id"]) == {"error": TOLD, "category": "server"}
    logged(caplog)


def test_fault_in_a_stream_is_of_the_server_and_logged(
    faulty: Subject, caplog: pytest.LogCaptureFixture
) -> None:
    body = written(faulty.filled({**GOOD["stream_sample"]}))
    faulty.post("asample", faulty.filled(GOOD["asample"]))  # the weights are there
    faulty.run(faulty.calm())
    faulty.engine.broken = True  # type: ignore[attr-defined]
    heard = faulty.send("POST", f"{PREFIX}/stream_sample", body)
    assert heard.status == 200
    assert SECRET not in heard.body.decode()
    event = json.loads(heard.body.decode().partition("data: ")[2].partition("\n")[0])
    assert event == {"error": TOLD, "category": "server", "event_type": "error"}
    logged(caplog)
