"""The table of endpoints: complete on both sides, and answered by the server in the forms the
protocol names."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
from starlette.routing import Route

from operation_examples import BASE_MODELS, GIVES, MINIMAL_ANSWERS, MINIMAL_RESULTS, requests
from support import Wire, serving
from tinkex.engine.fake import FakeEngine
from tinkex.server.app import create_app
from tinkex.server.routes.handler_table import collect
from tinkex.types.record import Record, Wired, from_json
from tinkex.wire import codec, protocol
from tinkex.wire.protocol import OPERATIONS, PREFIX, Operation

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

CLIENT_ONLY: set[str] = set()
"""What our client can ask of other servers and ours does not answer yet; a handler takes its name
off this list."""
SERVED = [op for op in OPERATIONS if op.name not in CLIENT_ONLY]

each = pytest.mark.parametrize("op", OPERATIONS, ids=lambda op: str(op.name))
each_with_body = pytest.mark.parametrize(
    "op", [op for op in SERVED if op.request is not None], ids=lambda op: str(op.name)
)


@pytest.fixture(scope="module")
def wire(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Wire]:
    with serving(FakeEngine(BASE_MODELS), tmp_path_factory.mktemp("server")) as url:
        yield Wire(url)


def test_names_and_paths_are_unique() -> None:
    assert len({op.name for op in OPERATIONS}) == len(OPERATIONS)
    assert len({(op.method, op.path) for op in OPERATIONS}) == len(OPERATIONS)
    listed = {value for value in vars(protocol).values() if isinstance(value, Operation)}
    assert listed == set(OPERATIONS)


def test_operation_without_ownership_does_not_import() -> None:
    with pytest.raises(TypeError, match="owned_by"):
        Operation("x", "GET", "x", None, Record)  # type: ignore[call-arg]
    for path, owned_by, wrong in (
        ("runs/{model_id}", protocol.OPEN, "does not name ['model_id']"),
        ("runs", "model_id", "there is no such field"),
        ("runs/{name}", "name", "expected some of"),
    ):
        with pytest.raises(ValueError, match=re.escape(wrong)):
            Operation("x", "GET", path, None, Record, owned_by=owned_by)


def test_operation_declares_every_owned_field_of_its_body() -> None:
    request = protocol.SESSION_HEARTBEAT.request
    with pytest.raises(ValueError, match="session_id"):
        Operation("x", "POST", "x", request, Record, owned_by=protocol.OPEN)
    assert protocol.LOAD_WEIGHTS.owned_fields == ("session_id", "model_id")
    assert protocol.RETRIEVE_FUTURES.owned_fields == ("target.sampling_session_id",)


def test_server_has_exactly_the_known_routes(tmp_path: Path) -> None:
    app = create_app(FakeEngine(), tmp_path)
    # where signed addresses lead, and where misnamed checkpoints end up
    apart = {"download", "misnamed", "upload"}
    named = [route for route in app.routes if isinstance(route, Route) and route.name not in apart]
    others = [route for route in app.routes if route not in named]
    assert {route.name for route in others if isinstance(route, Route)} == apart
    assert all(isinstance(route, Route) for route in others)
    routes = {(route.path, *(route.methods or ())) for route in named}
    expected = {
        (f"{PREFIX}/{op.path}", op.method, *(["HEAD"] if op.method == "GET" else []))
        for op in SERVED
    }
    expected |= {
        (path, "GET", "HEAD")
        for path in (
            "/",
            "/metrics",
            "/openapi.json",
            "/readyz",
            "/traces/{session_id}.json",
            f"{PREFIX}/cluster",
        )
    }
    expected |= {
        (path, "GET", "HEAD") for path in ("/oai/api/v1/models", "/oai/api/v1/models/{model:path}")
    }
    expected |= {(f"{PREFIX}/cluster/drain", "POST")}
    assert {frozenset(route) for route in routes} == {frozenset(route) for route in expected}


@each
def test_each_operation_has_a_handler_and_types(op: Operation) -> None:
    assert (op is protocol.RETRIEVE_FUTURE or op.name in collect()) == (op.name not in CLIENT_ONLY)
    bodiless = op.method in ("GET", "DELETE") or op is protocol.PUBLISH_CHECKPOINT
    assert bodiless == (op.request is None)
    assert op.request is None or issubclass(op.request, Record | Wired)
    assert issubclass(op.response, Record)
    if op.result is not None:
        assert op.request_type
        assert op.response.__name__ == "UntypedAPIFuture"


def test_every_handler_has_an_operation() -> None:
    assert {op.name for op in SERVED} == collect().keys()
    assert {op.name for op in OPERATIONS} >= CLIENT_ONLY


@each
def test_minimal_and_extended_answers_are_accepted(op: Operation) -> None:
    text = MINIMAL_ANSWERS.get(op.name, '{"request_id":"r1"}')
    codec.decode(op.response, text.encode())
    more = text[:-1] + (", " if len(text) > 2 else "") + '"news":{"x":[1]}}'
    codec.decode(op.response, more.encode())
    if op.name in MINIMAL_RESULTS:
        assert op.result is not None
        codec.decode(op.result, MINIMAL_RESULTS[op.name].encode())
    elif op.result is not None:
        assert codec.has_protobuf(op.result)


QUERIES = {
    "get_billing_usage": "?starting_on=2026-07-13T00:00:00Z&ending_before=2026-07-14T00:00:00Z"
}
NEEDING_FILES = {"external_weights_upload_start", "external_weights_upload_finish"}
"""Operations that the fake engine cannot do, having no files of a base model."""
NEEDING_A_KEY = {"delete_api_key"}
"""An open server has no key to revoke; see test_accounts.py."""


def test_server_answers_every_operation_in_its_form(wire: Wire) -> None:
    bodies = requests(wire)
    session = bodies["session_heartbeat"]["session_id"]
    assert bodies.keys() == {op.name for op in SERVED} - NEEDING_A_KEY - NEEDING_FILES
    for name, body in bodies.items():
        op = next(op for op in OPERATIONS if op.name == name)
        path = op.path.format(
            session_id=session,
            sampler_id=bodies["get_sampler"],
            training_run_id=bodies["get_training_run"],
            kind="external_weights" if "external" in op.path else "weights",
            name="a",
        ) + QUERIES.get(op.name, "")
        heard = wire.send(path, None if op.method == "GET" else body, method=op.method)
        if op is protocol.GET_CHECKPOINT_ARCHIVE:
            assert (heard.status, heard.headers["location"].startswith(wire.url)) == (302, True)
            continue
        assert heard.status == 200, (op.name, heard)
        if op is protocol.STREAM_SAMPLE:
            assert heard.headers["content-type"] == codec.EVENT_STREAM
            continue
        assert heard.headers["content-type"].startswith("application/json"), op.name
        assert name not in GIVES or heard.json == GIVES[name], name
        answer = from_json(op.response, heard.body)
        if op.result is not None:
            outcome = wire.result(answer.request_id)
            assert "error" not in outcome, (op.name, outcome)
            codec.decode(
                op.result, wire.send("retrieve_future", {"request_id": answer.request_id}).body
            )


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"5", b'"x"', b"\xff", b'{"a":'], ids=repr)
@each_with_body
def test_malformed_bodies_are_the_callers_fault(wire: Wire, op: Operation, body: bytes) -> None:
    path = re.sub(r"\{\w+\}", "nothing", op.path)
    for content_type in ("application/json", "application/x-protobuf", "text/plain"):
        heard = wire.send(path, body, method=op.method, headers={"Content-Type": content_type})
        assert heard.status < 500, (op.name, content_type, heard)
        assert "detail" in heard.json or heard.status == 200


@each_with_body
def test_fields_of_the_wrong_type_are_named(wire: Wire, op: Operation) -> None:
    path = re.sub(r"\{\w+\}", "nothing", op.path)
    assert op.request is not None
    names = op.request.__struct_fields__ if issubclass(op.request, Record) else op.request.FIELDS
    fields = {name: {"surprising": ["thing"]} for name in names}
    if not fields:  # nothing is asked, so nothing can be wrong
        return
    heard = wire.send(path, fields, method=op.method)
    assert heard.status == 400
    assert op.name in heard.json["detail"]
    assert any(name in heard.json["detail"] for name in fields)


@pytest.mark.parametrize(
    ("method", "path"),
    [("POST", "nothing"), ("GET", "create_session"), ("DELETE", "healthz"), ("GET", "")],
)
def test_unknown_routes_are_not_found(wire: Wire, method: str, path: str) -> None:
    heard = wire.send(path, method=method)
    assert heard.status == 404
    assert path in heard.json["detail"]
