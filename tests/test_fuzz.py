"""Every endpoint, from the server's own description: no 5xx, no hang, no state change by what is refused.

More examples than the few of every run: `FUZZ_EXAMPLES=2000 pytest -m slow tests/test_fuzz.py`.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlencode

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from schemas import ANY, KNOWN, TEXTS, Json, Place, breaks, broken, values, written
from support import pass_json, sample_json
from tinkex import codec
from tinkex.engine import ADAMW, EngineError, Listener
from tinkex.engine.fake import FakeEngine
from tinkex.protocol import BY_NAME, OPERATIONS, PREFIX
from tinkex.server.app import create_app
from tinkex.server.description import describe
from tinkex.server.state import Limits, State
from tinkex.types.sampling import SampleRequest
from tinkex.types.training import AdamParams, LoraConfig, OptimizerConfigBase, OptimParams

FEW = 8
MANY = int(os.environ.get("FUZZ_EXAMPLES", "300"))
SECONDS = 5.0
"""No answer may take longer than this."""
LIMITS = Limits(poll_seconds=0.02, gap_seconds=0.05, quiet_seconds=0.5, body_bytes=1 << 21)
DOCUMENT = describe(frozenset(BY_NAME))
BODIED = [op.name for op in OPERATIONS if op.request is not None]
NAMES = [op.name for op in OPERATIONS]


class CheckedEngine(FakeEngine):
    """The fake engine with the real one's checks: what it takes, it can do."""

    def create(self, adapter: str, base_model: str, lora: LoraConfig, optimizer: OptimizerConfigBase = ADAMW) -> None:
        if not 1 <= lora.rank <= 512:
            raise EngineError(f"LoRA rank must be between 1 and 512, got {lora.rank}")
        super().create(adapter, base_model, lora, optimizer)

    def forward_backward(self, adapter: str, data: Sequence[Any], *args: Any, **options: Any) -> Any:
        for index, datum in enumerate(data):
            if not datum.model_input.is_text or not datum.model_input.length:
                raise EngineError(f"datum {index}: model_input must be text, and not empty")
            for name, tensor in datum.loss_fn_inputs.items():
                array = tensor.to_numpy()
                if array.ndim != 1 or not np.isfinite(array).all() or (name == "target_tokens" and array.min() < 0):
                    raise EngineError(f"datum {index}: input {name!r} must be one finite number a token")
                if name == "target_tokens" and array.dtype != np.int64:
                    raise EngineError(f"datum {index}: input {name!r} must be integers")
        return super().forward_backward(adapter, data, *args, **options)

    def optim_step(self, adapter: str, params: OptimParams) -> dict[str, float]:
        if isinstance(params, AdamParams):
            try:
                params.validate()
            except ValueError as error:
                raise EngineError(str(error)) from None
            if params.learning_rate > 1e6:
                raise EngineError("learning_rate: the step overflows")
        return super().optim_step(adapter, params)

    def sample_start(
        self, job: str, sampler: str, request: SampleRequest, seed: int, listener: Listener | None = None
    ) -> None:
        if not request.prompt.is_text:
            raise EngineError("prompt: only text is supported")
        for name in ("topk_prompt_logprobs", "topk_sample_logprobs", "prompt_alt_tokens_k"):
            if not 0 <= getattr(request, name) <= 64:
                raise EngineError(f"{name} must be between 0 and 64, got {getattr(request, name)}")
        if request.prompt.length + (request.sampling_params.max_tokens or 0) > 64:
            raise EngineError("max_tokens and the prompt exceed the context window of 64")
        if request.prompt_logprobs_last_n is not None and request.prompt_logprobs_last_n < 1:
            raise EngineError("prompt_logprobs_last_n must be at least 1")
        super().sample_start(job, sampler, request, seed, listener)


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
    """A server in this process, driven step by step: nothing happens in it while nobody waits for an answer."""

    data_dir: Path
    engine: FakeEngine = dataclasses.field(default_factory=CheckedEngine)
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
        for task in asyncio.all_tasks(self.loop):  # what is done by the clock would be taken for a change
            if getattr(task.get_coro(), "__qualname__", "") in ("State.tend", "Meter.run"):
                task.cancel()

    def run(self, work: Any) -> Any:
        return self.loop.run_until_complete(work)

    def close(self) -> None:
        self.run(self._lifespan.__aexit__(None, None, None))
        self.loop.close()

    # ── asking ───────────────────────────────────────────────────────────────────────────────────────────────────

    def send(self, method: str, target: str, body: bytes = b"", **headers: str) -> Heard:
        """One request; a header's name may be written with underscores."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        heard: Heard = self.run(self.asking(method, target, [body], named))
        return heard

    async def asking(self, method: str, target: str, parts: Sequence[bytes], headers: dict[str, str]) -> Heard:
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
            "headers": [(name.lower().encode(), value.encode("latin-1")) for name, value in headers.items()],
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
        """What has come of an operation; it must end."""
        until = time.monotonic() + SECONDS
        while time.monotonic() < until:
            heard = self.send("POST", f"{PREFIX}/retrieve_future", json.dumps({"request_id": request_id}).encode())
            if heard.status != 408:
                assert heard.status == 200, (request_id, heard)
                return heard.json
        pytest.fail(f"{request_id} has no result after {SECONDS} s")

    # ── what lives in it ─────────────────────────────────────────────────────────────────────────────────────────

    def settle(self) -> None:
        """Have something of everything in the server, whatever was done to it before."""
        live = self.state.runs.get(self.names.get("@model", ""))
        if (
            live is not None
            and live.last is None
            and live.lane.next < 1_000_000
            and self.names["@session"] in self.state.heard
            and all(self.state.store.checkpoint(self.names[name]) for name in ("@weights", "@samplable"))
        ):
            return
        session = self.post("create_session", {})["session_id"]
        create = {"session_id": session, "model_seq_id": 0, "base_model": "fake", "lora_config": {"rank": 4}}
        model = self.result(self.post("create_model", create)["request_id"])["model_id"]
        passed = self.post("forward_backward", pass_json(model, 1))["request_id"]
        weights = self.post("save_weights", {"model_id": model, "seq_id": 2, "path": "w"})["request_id"]
        samplable = self.post("save_weights_for_sampler", {"model_id": model, "seq_id": 3, "path": "s"})["request_id"]
        sampler = self.post(
            "create_sampling_session", {"session_id": session, "sampling_session_seq_id": 0, "base_model": "fake"}
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
        await self.state.worker.run(lambda: None)
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
            "rows": state.store._db.total_changes,
            "files": files,
            "promises": sorted(state.promises._promises),
            "logs": sorted(state.promises._logs),
            "sessions": sorted(state.heard),
            "lanes": {name: (live.lane.next, live.lane.missing, live.last) for name, live in state.runs.items()},
            "adapters": {
                name: (one.weights.tolist(), None if one.grad is None else one.grad.tolist(), one.step)
                for name, one in engine._adapters.items()
            },
            "samplers": sorted(engine._samplers),
            "losses": sorted(engine._losses),
            "snapshots": sorted(state.snapshots),
        }


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    made = Subject(tmp_path_factory.mktemp("fuzzed"))
    try:
        yield made
    finally:
        made.close()


# ── what is sent ─────────────────────────────────────────────────────────────────────────────────────────────────

PASS = pass_json("@model", None, weights={"data": [1.0, 0.5, 0.0], "dtype": "float32", "shape": [3]})
GOOD: dict[str, Json] = {
    "client_config": {"sdk_version": "0.36.0"},
    "client_dynamic_config": {"sdk_version": "0.36.0"},
    "auth_token": {},
    "create_session": {"tags": ["a"], "user_metadata": {"a": "b"}, "sdk_version": "0.36.0", "display_name": "x"},
    "session_heartbeat": {"session_id": "@session"},
    "finish_session": {"reason": {"type": "success"}, "detail": "x"},
    "create_model": {
        "session_id": "@session",
        "model_seq_id": "@number",
        "base_model": "fake",
        "lora_config": {"rank": 4, "seed": 1, "train_mlp": True},
        "optimizer_config": {"type": "adamw"},
        "user_metadata": {"a": 1},
    },
    "unload_model": {"model_id": "@model"},
    "create_custom_loss": {
        "session_id": "@session",
        "custom_loss_seq_id": "@number",
        "name": "a",
        "inputs": [{"name": "logprobs", "rank": 1}],
        "graph": {"nodes": [{"op": "placeholder", "name": "logprobs", "target": "logprobs", "args": [1]}], "format": 1},
    },
    "get_info": {"model_id": "@model"},
    "forward_backward": {**PASS, "forward_only": False},
    "forward": {"model_id": "@model", "seq_id": None, "forward_input": PASS["forward_backward_input"]},
    "optim_step": {"model_id": "@model", "seq_id": None, "adam_params": {"learning_rate": 0.1, "beta1": 0.9}},
    "save_weights": {
        "model_id": "@model",
        "path": "@fresh",
        "ttl_seconds": 4000,
        "overwrite": False,
        "user_metadata": {"a": "b"},
    },
    "save_weights_for_sampler": {"model_id": "@model", "path": "@fresh", "ttl_seconds": 4000},
    "save_weights_external": {"model_id": "@model", "path": "@fresh", "ttl_seconds": 4000},
    "load_weights": {"model_id": "@model", "path": "@weights", "optimizer": True},
    "weights_info": {"tinker_path": "@weights"},
    "copy_weights": {"source_path": "@weights", "destination_project_id": "p", "ttl_seconds": 4000},
    "create_sampling_session": {
        "session_id": "@session",
        "sampling_session_seq_id": "@number",
        "model_path": "@samplable",
    },
    "join_sampling_session": {"sampling_session_id": "@sampler"},
    "asample": {
        **sample_json("@sampler", None, prompt_logprobs=True, topk_prompt_logprobs=1),
        "sampling_params": {"max_tokens": 2, "seed": 1, "temperature": 0.5, "top_k": 3, "top_p": 0.5, "stop": ["a"]},
    },
    "stream_sample": sample_json("@sampler", None),
    "retrieve_future": {"request_id": "@request", "allow_metadata_only": True},
    "retrieve_futures": {
        "target": {"type": "sampling_session", "sampling_session_id": "@sampler", "cloned_sampler_id": 0},
        "prev_cursor": 0,
        "timeout": 0.01,
        "retrieved_request_ids": ["@request"],
        "inline_bytes": 1000,
    },
    "cancel_future": {"request_id": "@request"},
    "set_checkpoint_ttl": {"ttl_seconds": 4000},
    "assign_session_project": {"project_id": "p"},
    "search_sessions": {
        "session_id": "@session",
        "project_ids": ["default"],
        "user_metadata": {"a": "b"},
        "owner": {"type": "user", "owner_urns": ["tml:user:local"]},
        "statuses": [{"type": "client_finished", "reasons": ["success"]}],
        "limit": 3,
        "cursor": {"last_created_at": "2026-07-13T00:00:00Z", "last_session_id": "x"},
    },
    "telemetry": {"events": [{"event": "GENERIC_EVENT"}], "platform": "x", "session_id": "@session"},
}
SAME_AS: dict[str, tuple[str, ...]] = {
    "seq_id": ("request number",),
    "model_seq_id": ("model",),
    "path": ("checkpoint",),
    "tinker_path": ("checkpoint",),
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


def said(message: str, names: Sequence[str]) -> bool:
    """Whether a message names one of these fields."""
    plain = message.replace("_", " ").lower()
    words = [word for name in names for word in (name, name.removesuffix("_id"), *SAME_AS.get(name, ()))]
    return any(word.replace("_", " ").lower() in plain for word in words)


def fields_of(schema: Json, seen: frozenset[str] = frozenset()) -> set[str]:
    """The names of all fields that a schema has, however deep."""
    found: set[str] = set()
    if isinstance(schema, dict):
        if isinstance(ref := schema.get("$ref"), str) and ref not in seen:
            found |= fields_of(DOCUMENT["components"]["schemas"][ref.rpartition("/")[2]], seen | {ref})
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
    """What is to be sent, with marks where the server's own names belong."""

    name: str
    path: dict[str, str] = dataclasses.field(default_factory=dict)
    query: dict[str, str] = dataclasses.field(default_factory=dict)
    body: bytes | Json = b""
    headers: dict[str, str] = dataclasses.field(default_factory=dict)


ADDRESS = {"session_id": "@session", "sampler_id": "@sampler", "training_run_id": "@model", "kind": "weights", "name": "w"}


def ask(subject: Subject, request: Request, names: Sequence[str] = ()) -> Heard:
    """Send a request and hold the answer, and what comes of it, against what is promised."""
    subject.settle()
    op = BY_NAME[request.name]
    body = request.body if isinstance(request.body, bytes) else written(subject.filled(request.body))
    path = {name: quote(str(subject.filled(request.path.get(name, value))), safe="") for name, value in ADDRESS.items()}
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
            assert said(detail, [*names, "malformed", "body", "content encoding"]), (detail, names)
    elif op.result is not None:
        outcome = subject.result(heard.json["request_id"])
        if "error" in outcome:
            assert outcome["category"] == "user", (outcome, body[:2000])
            assert said(outcome["error"], names), (outcome, names)
    elif request.name == "stream_sample":
        events = [json.loads(line[6:]) for line in heard.body.decode().split("\n") if line.startswith("data: {")]
        assert heard.body.endswith(b"data: [DONE]\n\n")
        assert all(event.get("category", "user") == "user" for event in events), events
    return heard


def examples(count: int) -> Callable[[Any], Any]:
    """So many examples: the same ones every time for the few, others every time for the many."""
    return settings(
        max_examples=count,
        deadline=None,
        database=None,
        derandomize=count == FEW,
        phases=(Phase.explicit, Phase.generate) if count == FEW else tuple(Phase),
        suppress_health_check=list(HealthCheck),
    )


# ── good requests ────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", NAMES)
def test_the_requests_that_are_going_to_be_broken_are_good(subject: Subject, name: str) -> None:
    query = {"starting_on": "2026-07-13T00:00:00Z", "ending_before": "2026-07-14T00:00:00Z"}
    path = {"kind": "sampler_weights", "name": "s"} if name in ("publish_checkpoint", "unpublish_checkpoint") else {}
    heard = ask(subject, Request(name, path, query if name == "get_billing_usage" else {}, GOOD.get(name, b"")))
    refused = {"delete_api_key": 400, "get_external_weights_urls": 400, "get_checkpoint_archive": 302}
    assert heard.status == refused.get(name, 200), heard
    if BY_NAME[name].result is not None:
        assert "error" not in subject.result(heard.json["request_id"])


def test_every_operation_with_a_body_has_a_good_one() -> None:
    assert set(GOOD) == set(BODIED)


# ── broken in one place ──────────────────────────────────────────────────────────────────────────────────────────


def check_broken(subject: Subject, name: str, how: tuple[Place, Json]) -> None:
    place, wrong = how
    names = [step for step in place if isinstance(step, str)]
    holders = {"weights", "target_tokens", "loss_fn_inputs"}
    ask(subject, Request(name, body=broken(GOOD[name], place, wrong)), [n for n in names[-2:] if n not in holders] or names)


@pytest.mark.parametrize("name", [name for name in BODIED if GOOD[name]])
@examples(FEW)
@given(data=st.data())
def test_a_body_that_is_broken_in_one_place_is_refused_by_the_name_of_it(
    subject: Subject, name: str, data: st.DataObject
) -> None:
    check_broken(subject, name, data.draw(breaks(GOOD[name])))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", [name for name in BODIED if GOOD[name]])
@examples(MANY)
@given(data=st.data())
def test_many_bodies_that_are_broken_in_one_place(subject: Subject, name: str, data: st.DataObject) -> None:
    check_broken(subject, name, data.draw(breaks(GOOD[name])))


# ── of the right shape ───────────────────────────────────────────────────────────────────────────────────────────


@st.composite
def shaped(draw: st.DrawFn, name: str) -> Request:
    """A request of the shape that the description gives, with odd values."""
    op = BY_NAME[name]
    described = DOCUMENT["paths"][f"{PREFIX}/{op.path}"][op.method.lower()]
    path, query = {}, {}
    for parameter in described.get("parameters", ()):
        known = st.sampled_from(KNOWN.get(parameter["name"], ["@session"]))
        odd = values(parameter["schema"], DOCUMENT, parameter["name"]) | st.sampled_from(TEXTS) | st.sampled_from(NUMERALS)
        if parameter["in"] == "path":
            path[parameter["name"]] = str(draw(known | known | odd)) or "x"
        elif parameter["in"] == "query" and (parameter["required"] or draw(st.booleans())):
            query[parameter["name"]] = str(draw(odd))
    body = b""
    if "requestBody" in described:
        body = draw(values(described["requestBody"]["content"][codec.JSON]["schema"], DOCUMENT))
    return Request(name, path, query, body)


NUMERALS = ["9" * 5000, "-1", "1e3", "²", "٣", "0x10", "1_000", "9" * 15, " 1", "NaN"]


@pytest.mark.parametrize("name", NAMES)
@examples(FEW)
@given(data=st.data())
def test_odd_values_in_the_right_shape_do_no_harm(subject: Subject, name: str, data: st.DataObject) -> None:
    ask(subject, data.draw(shaped(name)))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", NAMES)
@examples(MANY)
@given(data=st.data())
def test_many_odd_values_in_the_right_shape(subject: Subject, name: str, data: st.DataObject) -> None:
    ask(subject, data.draw(shaped(name)))
