"""The description of the server: whole, well formed, and of the server that is there."""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.routing import Route

from support import serving
from tinkex.engine.fake import FakeEngine
from tinkex.server.access.endpoints import Endpoint, Group
from tinkex.server.app import create_app
from tinkex.server.routes.openapi import PATH, WIRED, describe
from tinkex.types.inputs import Datum, ModelInput
from tinkex.types.record import Record, from_builtins, to_builtins
from tinkex.types.tensors import TensorData
from tinkex.types.training import ForwardBackwardOutput
from tinkex.wire import codec
from tinkex.wire.protocol import OPERATIONS, PREFIX

SERVED = frozenset(op.name for op in OPERATIONS)
TYPES = {"string", "integer", "number", "boolean", "null", "array", "object"}


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    state = create_app(FakeEngine(), tmp_path_factory.mktemp("described")).state.server
    state.database.close()
    return describe(SERVED, state.mounted)


def parts(value: Any, here: str = "#") -> Iterator[tuple[str, Any]]:
    """Every part of a document, and where it is."""
    yield here, value
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, item in items:
        yield from parts(item, f"{here}/{key}")


def test_exactly_the_served_routes_are_described(tmp_path: Path, document: dict[str, Any]) -> None:
    app = create_app(FakeEngine(), tmp_path)
    routed = {
        (route.path.replace("{model:path}", "{model}"), method.lower())
        for route in app.routes
        # A way out for misspelt ids, which always refuses; OpenAPI has no path that goes on over
        # slashes.
        if isinstance(route, Route) and route.name != "misnamed"
        for method in route.methods or ()
        if method != "HEAD"
    }
    app.state.server.database.close()
    described = {
        (path, method) for path, methods in document["paths"].items() for method in methods
    }
    assert described == routed


def test_server_that_lacks_an_operation_does_not_describe_it() -> None:
    assert f"{PREFIX}/telemetry" not in describe(SERVED - {"telemetry"})["paths"]


class Question(Record, frozen=True):
    model_id: str


async def answer(state: Any, call: Any) -> None: ...


def test_mounted_endpoint_is_described(tmp_path: Path) -> None:
    endpoint = Endpoint("ask", "POST", "/{kind}/ask", answer, Question, owned_by="model_id")
    app = create_app(FakeEngine(), tmp_path, groups=[Group("/mounted", [endpoint])])
    app.state.server.database.close()
    document = describe(SERVED, app.state.server.mounted)
    described = document["paths"]["/mounted/{kind}/ask"]["post"]
    assert described["operationId"] == "ask"
    assert [one["name"] for one in described["parameters"]] == ["kind"]
    assert [*described["responses"]] == ["200", "400", "401", "403", "404", "413"]
    schema = described["requestBody"]["content"][codec.JSON]["schema"]
    assert schema == {"$ref": "#/components/schemas/Question"}
    assert document["components"]["schemas"]["Question"]["required"] == ["model_id"]


def test_description_needs_no_key(tmp_path: Path, document: dict[str, Any]) -> None:
    with (
        serving(FakeEngine(), tmp_path, api_key="tml-secret") as url,
        urllib.request.urlopen(url + PATH) as answer,
    ):
        assert answer.headers["Content-Type"].startswith(codec.JSON)
        assert json.load(answer) == document


def test_references_resolve_and_every_schema_is_used(
    document: dict[str, Any],
) -> None:
    found = {
        value["$ref"]
        for _, value in parts(document)
        if isinstance(value, dict) and isinstance(value.get("$ref"), str)
    }
    known = {where for where, _ in parts(document)}
    assert found <= known
    unused = {f"#/components/schemas/{name}" for name in document["components"]["schemas"]} - found
    # The archive is redirected to: clients make this of the redirect.
    assert {name.rpartition("/")[2] for name in unused} == {"CheckpointArchiveUrlResponse"}


def test_description_is_well_formed(document: dict[str, Any]) -> None:
    assert document["openapi"] == "3.1.0"
    assert set(document["info"]) >= {"title", "version"}
    names = []
    for path, methods in document["paths"].items():
        for operation in methods.values():
            names.append(operation["operationId"])
            parameters = operation.get("parameters", [])
            assert len({(one["in"], one["name"]) for one in parameters}) == len(parameters)
            in_path = [one["name"] for one in parameters if one["in"] == "path"]
            assert in_path == re.findall(r"{(\w+)}", path)
            assert all(one["required"] for one in parameters if one["in"] == "path")
            assert operation["responses"]
            for status, response in operation["responses"].items():
                assert re.fullmatch(r"[1-5]\d\d", status)
                assert "$ref" in response or response["description"]
    assert len(set(names)) == len(names)
    for where, value in parts(document["components"]["schemas"]):
        if isinstance(value, dict) and not where.endswith(("/properties", "/default")):
            assert value.get("type", "object") in TYPES or (
                "/properties/" in where and "type" in value
            ), where
            if isinstance(value.get("required"), list) and "properties" in value:
                assert set(value["required"]) <= set(value["properties"]), where


def test_description_marks_protobuf_bodies(document: dict[str, Any]) -> None:
    passes = document["paths"][f"{PREFIX}/forward_backward"]["post"]
    assert set(passes["requestBody"]["content"]) == {codec.JSON, codec.PROTOBUF}
    steps = document["paths"][f"{PREFIX}/optim_step"]["post"]
    assert set(steps["requestBody"]["content"]) == {codec.JSON}
    assert steps["x-result"]["$ref"].endswith("/OptimStepResponse")


def fits(value: Any, schema: Any, document: dict[str, Any]) -> bool:
    """Return True if a value fits a schema; as much of JSON Schema as the document uses."""
    if "$ref" in schema:
        return fits(
            value, document["components"]["schemas"][schema["$ref"].rpartition("/")[2]], document
        )
    if "anyOf" in schema:
        return any(fits(value, one, document) for one in schema["anyOf"])
    if "enum" in schema or "const" in schema:
        return value in (schema.get("enum") or [schema["const"]])
    kinds = {
        "string": str,
        "integer": int,
        "number": int | float,
        "boolean": bool,
        "null": type(None),
    }
    match schema.get("type"):
        case "array":
            return isinstance(value, list) and all(
                fits(item, schema["items"], document) for item in value
            )
        case "object":
            fields = schema.get("properties", {})
            return (
                isinstance(value, dict)
                and set(schema.get("required", ())) <= set(value)
                and all(
                    fits(item, fields[name], document)
                    for name, item in value.items()
                    if name in fields
                )
            )
        case None:
            return True
        case kind:
            return isinstance(value, kinds[kind])


DATUM = Datum(ModelInput.from_ints([1, 2]), {"target_tokens": [2, 3], "weights": [0.0, 1.0]})


@pytest.mark.parametrize(
    "value",
    [
        DATUM,
        DATUM.model_input,
        TensorData([1.0], "float32", [1]),
        ForwardBackwardOutput("a", [], {"loss:sum": 1.0}),
    ],
    ids=lambda value: type(value).__name__,
)
def test_schemas_written_by_hand_are_those_of_the_types(
    value: Any, document: dict[str, Any]
) -> None:
    schema = WIRED[type(value).__name__]
    assert fits(to_builtins(value), schema, document)
    for name in schema["required"]:
        wire = {key: item for key, item in to_builtins(value).items() if key != name}
        assert not fits(wire, schema, document)
        if name != "data":  # a tensor without data is an empty one
            with pytest.raises((ValueError, TypeError)):
                from_builtins(type(value), wire)


def test_every_request_has_the_fields_of_its_type(document: dict[str, Any]) -> None:
    for op in OPERATIONS:
        if op.request is not None and issubclass(op.request, Record):
            schema = document["components"]["schemas"][op.request.__name__]
            assert set(schema["properties"]) == set(op.request.__struct_fields__)
