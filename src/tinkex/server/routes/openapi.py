"""Describe the server as an OpenAPI 3.1 document.

Paths, bodies and answers follow from `tinkex.wire.protocol` and the mounted groups, schemas from
the types. Written by hand are only the types that read their own JSON, the parameters of queries,
and more about some pages.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Iterable
from typing import Any, TypeAlias, get_args

import msgspec

from tinkex._version import __version__
from tinkex.server.access.endpoints import Access, Endpoint
from tinkex.server.routes import openai
from tinkex.server.routes.exports import DOWNLOAD
from tinkex.server.routes.session_calls import TRACE
from tinkex.server.routes.uploads import UPLOAD
from tinkex.types.account import AuditEventType
from tinkex.types.chunks import DmelChunk, ImageAssetPointerChunk, ImageChunk
from tinkex.types.forms import Variant
from tinkex.types.future_requests import RequestFailedResponse
from tinkex.types.record import Record
from tinkex.types.sampling import SampleStreamChunk
from tinkex.types.server_facts import SupportedModel
from tinkex.types.sessions import Empty
from tinkex.wire import codec
from tinkex.wire.protocol import (
    ASAMPLE,
    GET_CHECKPOINT_ARCHIVE,
    HEALTHZ,
    OPERATIONS,
    PREFIX,
    RETRIEVE_FUTURE,
    RETRIEVE_FUTURES,
    STREAM_SAMPLE,
    Operation,
)

Schema: TypeAlias = dict[str, Any]
Mounted: TypeAlias = tuple[str, Endpoint]
"""An endpoint, after the prefix of its group."""

ABOUT = "A server of the Tinker training API."
CLUSTER_PATH = f"{PREFIX}/cluster"
DRAIN_PATH = f"{CLUSTER_PATH}/drain"
PATH = "/openapi.json"
"""The path of the document, which needs no key."""
BYTES = "application/octet-stream"
COMPONENTS = "#/components/schemas/"
TOKEN = {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}
COUNT = {"type": "integer", "minimum": 0}


def _ref(name: str) -> Schema:
    return {"$ref": f"{COMPONENTS}{name}"}


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _object(required: str = "", /, **properties: Schema) -> Schema:
    return {"type": "object", "properties": properties, "required": required.split()}


def _optional(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


_NAME = {"type": "string", "minLength": 1}
_SPAN = _object("sequence_id length", sequence_id=_NAME, offset=COUNT, length=COUNT)
_CHUNKS = [_ref(f"{name}Chunk") for name in ("EncodedText", "Image", "ImageAssetPointer", "Dmel")]
_NUMBERS = _optional(_list(_optional({"type": "number"})))
_TABLE = _optional(_list(_optional(_list(_list({"type": "number"})))))

WIRED: dict[str, Schema] = {
    "EncodedTextChunk": _object("tokens", tokens=_list(TOKEN), type={"const": "encoded_text"}),
    "ModelInput": _object("chunks", chunks=_list({"anyOf": _CHUNKS})),
    "TensorData": _object(
        "data dtype",
        data=_list({"type": "number"}),
        dtype={"enum": ["int64", "float32"]},
        shape=_optional(_list(COUNT)),
        sparse_crow_indices=_optional(_list(COUNT)),
        sparse_col_indices=_optional(_list(COUNT)),
    ),
    "ProvenanceSpan": {
        "anyOf": [
            _object("prompt_tokens", prompt_tokens=_SPAN),
            _object("sampled_tokens", sampled_tokens=_SPAN),
        ]
    },
    "Datum": _object(
        "model_input",
        model_input=_ref("ModelInput"),
        loss_fn_inputs={"type": "object", "additionalProperties": _ref("TensorData")},
        model_input_spans=_optional(_list(_ref("ProvenanceSpan"))),
        loss_fn_input_spans=_optional(_list(_ref("ProvenanceSpan"))),
    ),
    "OptimizerConfigBase": _object(type={"enum": ["adamw", "dimuon"]}, version={"type": "integer"}),
    "ForwardBackwardOutput": _object(
        "loss_fn_outputs",
        loss_fn_output_type={"type": "string"},
        loss_fn_outputs=_list({"type": "object", "additionalProperties": _ref("TensorData")}),
        metrics={"type": "object", "additionalProperties": {"type": "number"}},
    ),
    "SampledSequence": _object(
        "tokens", stop_reason={"enum": ["length", "stop"]}, tokens=_list(TOKEN), logprobs=_NUMBERS
    ),
    "SampleResponse": _object(
        "sequences",
        sequences=_list(_ref("SampledSequence")),
        prompt_logprobs=_NUMBERS,
        topk_prompt_logprobs=_TABLE,
        type={"const": "sample"},
    ),
}
"""Types that read and write their own JSON, by name."""

_PARAMS = _optional({"anyOf": [_ref("AdamParams"), {"type": "object"}]})
READ_BY_HAND: dict[tuple[str, str], Schema] = {
    ("ForwardBackwardInput", "data"): _list(_ref("Datum")),
    ("GetServerCapabilitiesResponse", "supported_models"): _list(_ref("SupportedModel")),
    ("OptimStepRequest", "optim_params"): _PARAMS,
    ("OptimStepRequest", "optimizer_params"): _PARAMS,
}
"""Fields whose annotation says less than what is accepted, because a record reads them itself."""

_PAGE = {"limit": (COUNT, False), "offset": (COUNT, False)}
_SCOPE = {"access_scope": ({"enum": ["owned", "accessible"]}, False)}
_HOUR = ({"type": "string", "format": "date-time"}, True)
_TEXT = ({"type": "string"}, False)

QUERIES: dict[str, dict[str, tuple[Schema, bool]]] = {
    "list_training_runs": {**_PAGE, **_SCOPE, "project_id": _TEXT},
    "get_training_run": _SCOPE,
    "list_checkpoints": _PAGE,
    "list_user_checkpoints": _PAGE,
    "list_sessions": {**_PAGE, **_SCOPE},
    "get_session": _SCOPE,
    "get_billing_usage": {"starting_on": _HOUR, "ending_before": _HOUR},
    "get_current_checkpoint_storage_usage": {"project_id": _TEXT},
    "get_audit_log": {
        "day": ({"type": "string", "format": "date"}, False),
        "event_type": ({"enum": [*get_args(AuditEventType)]}, False),
    },
}
"""Parameters of queries by operation and name: the schema, and whether one is required."""

REASONS = {
    400: "The request is not valid; `detail` names the field.",
    401: "The key is missing or not known, or the token is not valid, as WWW-Authenticate says.",
    403: "The server is open to its own machine only, or an access token is not known here.",
    404: "The object does not exist, or belongs to another account.",
    408: "There is no result yet: poll again.",
    409: "The state of the server does not allow it; `detail` says what to do first.",
    410: "The object has ended or expired.",
    413: "The body is larger than this server allows.",
    429: "Too many requests are open: wait as long as Retry-After says.",
    500: "The server failed, and logged the error.",
    503: "The server is stopping, its disk is full, or its engine has died: ask again later.",
}
NAMES_A_THING = {
    "session_id",
    "model_id",
    "sampling_session_id",
    "request_id",
    "tinker_path",
    "source_path",
    "target",
}
MAY_BE_OVER = {"session_id", "model_id", "request_id", "target"}


@functools.cache
def describe(served: frozenset[str], mounted: tuple[Mounted, ...] = ()) -> Schema:
    """Return the document of a server that has these operations and mounted endpoints."""
    operations = [op for op in OPERATIONS if op.name in served]
    paths: dict[str, Schema] = {}
    for op in operations:
        paths.setdefault(f"{PREFIX}/{op.path}", {})[op.method.lower()] = _operation(op, operations)
    return {
        "openapi": "3.1.0",
        "info": {"title": "tinkex", "version": __version__, "description": ABOUT},
        "paths": paths | _others(mounted),
        "components": {
            "schemas": _schemas(operations, mounted),
            "responses": {str(status): _refusal(status) for status in REASONS},
            "securitySchemes": {"key": {"type": "apiKey", "in": "header", "name": "X-API-Key"}},
        },
        "security": [{"key": []}, {}],
    }


# ── operations ────────────────────────────────────────────────────────────────────────────────────


def _operation(op: Operation, operations: Iterable[Operation]) -> Schema:
    described: Schema = {"operationId": op.name, "tags": [op.traffic]}
    described["responses"] = _responses(op, operations)
    if op.result is not None:
        described["x-result"] = _ref(op.result.__name__)
    parameters = _path_parameters(op.path) + [
        _parameter("query", name, schema, required)
        for name, (schema, required) in QUERIES.get(op.name, {}).items()
    ]
    if op.request is not None:
        encodings = {"enum": ["identity", "zstd"]}
        parameters.append(_parameter("header", "Content-Encoding", encodings, False))
        described["requestBody"] = {"required": True, "content": _contents(op.request)}
    return described | ({"parameters": parameters} if parameters else {})


def _path_parameters(path: str) -> list[Schema]:
    names = re.findall(r"{(\w+)}", path)
    return [_parameter("path", name, {"type": "string"}, True) for name in names]


def _parameter(place: str, name: str, schema: Schema, required: bool) -> Schema:
    return {"name": name, "in": place, "required": required, "schema": schema}


def _contents(kind: type[Any]) -> Schema:
    contents: Schema = {codec.JSON: {"schema": _ref(kind.__name__)}}
    if codec.has_protobuf(kind):
        contents |= _binary(codec.PROTOBUF, title=kind.__name__)
    return contents


def _binary(media: str, **more: str) -> Schema:
    return {media: {"schema": {"contentMediaType": media, **more}}}


def _responses(op: Operation, operations: Iterable[Operation]) -> Schema:
    said = "Done." if op.result is None else "Accepted: poll for the result with its id."
    contents = _contents(op.response)
    if op is RETRIEVE_FUTURE:
        kinds = {other.result for other in operations if other.result is not None}
        names = sorted(kind.__name__ for kind in kinds | {RequestFailedResponse})
        told = _object("status", status={"const": "complete_metadata"}, response_payload_size=COUNT)
        said = "The result, or the error instead of it; or its size, if that was asked for."
        contents = {codec.JSON: {"schema": {"anyOf": [*map(_ref, names), told]}}}
        contents |= _binary(codec.PROTOBUF)
    elif op is RETRIEVE_FUTURES:
        contents |= _binary(codec.BATCH)
    elif op is STREAM_SAMPLE:
        contents = {codec.EVENT_STREAM: {"schema": _ref(SampleStreamChunk.__name__)}}
    done: Schema = {"200": {"description": said, "content": contents}}
    if op is GET_CHECKPOINT_ARCHIVE:
        done = {"302": {"description": "The address of the archive."}}
    return done | _refusals(_statuses(op))


def _statuses(op: Operation) -> list[int]:
    fields = {field.name for field in msgspec.structs.fields(op.request)} if op.request else set()
    found = {401, 403, 500}
    if fields or QUERIES.get(op.name) or "{" in op.path:
        found.add(400)
    if op.request is not None:
        found |= {400, 413}
    if "{" in op.path or fields & NAMES_A_THING:
        found.add(404)
    if fields & MAY_BE_OVER:
        found.add(410)
    if op.traffic in ("train", "sample") or op is HEALTHZ:
        found.add(503)
    if op in (ASAMPLE, STREAM_SAMPLE):
        found.add(429)
    if op is RETRIEVE_FUTURE:
        found.add(408)
    return sorted(found)


def _refusals(statuses: Iterable[int]) -> dict[str, Schema]:
    return {str(status): {"$ref": f"#/components/responses/{status}"} for status in statuses}


def _refusal(status: int) -> Schema:
    schema = _ref("Error")
    if status == 408:
        schema = _object("queue_state", queue_state={"type": "string"})
    return {"description": REASONS[status], "content": {codec.JSON: {"schema": schema}}}


def _others(mounted: Iterable[Mounted]) -> dict[str, Schema]:
    """Describe the endpoints that are not operations."""
    text = {"type": "string"}
    signed = [_parameter("query", name, text, True) for name in ("expires", "signature")]
    limit = [_parameter("query", "limit", COUNT, False)]
    models = openai.PREFIX + openai.MODELS
    model = (openai.PREFIX + openai.MODEL).replace(":path", "")
    found = {
        path: {method: _other(path, name, media, parameters, statuses)}
        for method, path, name, media, parameters, statuses in (
            ("get", "/", "front", codec.JSON, [], ()),
            ("get", PATH, "openapi", codec.JSON, [], ()),
            ("get", "/metrics", "metrics", "text/plain", [], (401, 403)),
            ("get", "/readyz", "ready", codec.JSON, [], (503,)),
            ("get", CLUSTER_PATH, "cluster", codec.JSON, [], (401, 403)),
            ("post", DRAIN_PATH, "drain", codec.JSON, [], (400, 401, 403, 404, 409)),
            ("get", TRACE.path, "trace", codec.JSON, signed, (403,)),
            ("get", models, "openai_models", codec.JSON, limit, (400, 401, 403)),
            ("get", model, "openai_model", codec.JSON, [], (400, 401, 403, 404)),
            ("get", DOWNLOAD.path, "download", BYTES, signed, (403, 404)),
            ("put", UPLOAD.path, "upload", codec.JSON, signed, (403, 400, 408, 413, 503)),
        )
    }
    body = {"required": True, "content": {BYTES: {"schema": {}}}}
    found[UPLOAD.path]["put"]["requestBody"] = body
    for prefix, endpoint in mounted:
        path = (prefix + endpoint.path).replace(":path", "")
        methods, method = found.setdefault(path, {}), endpoint.method.lower()
        if method not in methods:
            methods[method] = _other(path, endpoint.name, "*/*", [], _statuses_of(path, endpoint))
        if (kind := endpoint.request) is not None:
            content = _contents(kind) if issubclass(kind, Record) else {BYTES: {"schema": {}}}
            methods[method]["requestBody"] = {"required": True, "content": content}
    return found


def _statuses_of(path: str, endpoint: Endpoint) -> list[int]:
    """Return the refusals that the middleware makes for an endpoint."""
    found = set() if endpoint.access is Access.PUBLIC else {401, 403}
    if endpoint.request is not None:
        found |= {400, 413}
    if endpoint.owned_fields or "{" in path:
        found.add(404)
    return sorted(found)


def _other(
    path: str, name: str, media: str, parameters: list[Schema], statuses: Iterable[int]
) -> Schema:
    answer = {"200": {"description": "Done.", "content": {media: {"schema": {}}}}}
    parameters = _path_parameters(path) + parameters
    responses = answer | _refusals(statuses)
    return {"operationId": name, "parameters": parameters, "responses": responses}


# ── schemas ───────────────────────────────────────────────────────────────────────────────────────


def _schemas(operations: Iterable[Operation], mounted: Iterable[Mounted]) -> dict[str, Schema]:
    kinds = {kind for op in operations for kind in (op.request, op.response, op.result)} - {None}
    kinds |= {endpoint.request for _, endpoint in mounted} - {None}
    kinds |= {Empty, RequestFailedResponse, SupportedModel}
    kinds |= {ImageChunk, ImageAssetPointerChunk, DmelChunk}
    kinds |= {kind for mark in Variant.__subclasses__() for kind in mark.__subclasses__()}
    records = [kind for kind in kinds if kind and issubclass(kind, Record)]
    records.sort(key=lambda kind: kind.__name__)
    template = f"{COMPONENTS}{{name}}"
    _, made = msgspec.json.schema_components(records, schema_hook=_hook, ref_template=template)
    for schema in made.values():
        if "description" in schema:
            schema["description"] = inspect.cleandoc(schema["description"])
    for (record, field), schema in READ_BY_HAND.items():
        if record in made:
            made[record]["properties"][field] = schema
    error = _object("detail", detail={"type": "string"}, queue_state={"type": "string"})
    return {**WIRED, **made, "Error": error}


def _hook(kind: type[Any]) -> Schema:
    if issubclass(kind, Variant):
        return {"anyOf": [_ref(one.__name__) for one in kind.__subclasses__()]}
    if kind.__name__ in WIRED:
        return _ref(kind.__name__)
    raise NotImplementedError
