"""Describe the server as an OpenAPI 3.1 document, made of the operations and the messages.

Paths, bodies and answers follow from `tinkex.wire.protocol`, schemas from the types. Written by
hand are only the types that read their own JSON, and the parameters of queries.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Iterable
from typing import Any, TypeAlias

import msgspec

from tinkex._version import __version__
from tinkex.server.routes import openai
from tinkex.server.routes.exports import DOWNLOAD
from tinkex.server.routes.session_calls import TRACE
from tinkex.server.routes.uploads import UPLOAD
from tinkex.types.chunks import DmelChunk, ImageAssetPointerChunk, ImageChunk
from tinkex.types.forms import Variant
from tinkex.types.future_requests import RequestFailedResponse
from tinkex.types.record import Record
from tinkex.types.sampling import SampleStreamChunk
from tinkex.types.sessions import Empty, SupportedModel
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

PATH = "/openapi.json"
"""The path of the document, which needs no key."""
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


_SPAN = _object(
    "sequence_id length", sequence_id={"type": "string", "minLength": 1}, offset=COUNT, length=COUNT
)
_NUMBERS = _optional(_list(_optional({"type": "number"})))
_TABLE = _optional(_list(_optional(_list(_list({"type": "number"})))))

WIRED: dict[str, Schema] = {
    "EncodedTextChunk": _object("tokens", tokens=_list(TOKEN), type={"const": "encoded_text"}),
    "ModelInput": _object(
        "chunks",
        chunks=_list(
            {
                "anyOf": [
                    _ref(f"{name}Chunk")
                    for name in ("EncodedText", "Image", "ImageAssetPointer", "Dmel")
                ]
            }
        ),
    ),
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

READ_BY_HAND: dict[tuple[str, str], Schema] = {
    ("ForwardBackwardInput", "data"): _list(_ref("Datum")),
    ("GetServerCapabilitiesResponse", "supported_models"): _list(_ref("SupportedModel")),
    ("OptimStepRequest", "optim_params"): _optional(
        {"anyOf": [_ref("AdamParams"), {"type": "object"}]}
    ),
    ("OptimStepRequest", "optimizer_params"): _optional(
        {"anyOf": [_ref("AdamParams"), {"type": "object"}]}
    ),
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
        "event_type": (
            {"enum": ["all", "checkpoints", "projects", "teams", "organizations"]},
            False,
        ),
    },
}
"""Parameters of queries by operation and name: the schema, and whether one is required."""

REASONS = {
    400: "What was sent is not what this operation takes; `detail` names the field.",
    401: "There is no key, or it is not known here; or the token is not valid, as WWW-Authenticate "
    "then says.",
    403: "The server is open, and to this machine only; or the access token of a checkpoint is not "
    "known here.",
    404: "What is named is not there, or belongs to somebody else.",
    408: "There is no result yet: ask again.",
    410: "What is named was there and is over.",
    413: "The body is larger than this server takes.",
    429: "Too much is under way: wait as long as Retry-After says.",
    500: "A fault of the server, which has logged it.",
    503: "The server is shutting down, or cannot write to its disk: ask again later. Or its engine "
    "has died.",
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
def describe(served: frozenset[str]) -> Schema:
    """Return the document of a server that has these operations."""
    operations = [op for op in OPERATIONS if op.name in served]
    paths: dict[str, Schema] = {}
    for op in operations:
        paths.setdefault(f"{PREFIX}/{op.path}", {})[op.method.lower()] = _operation(op, operations)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "tinkex",
            "version": __version__,
            "description": "A server of the Tinker training API.",
        },
        "paths": paths | _others(),
        "components": {
            "schemas": _schemas(operations),
            "responses": {str(status): _refusal(status) for status in REASONS},
            "securitySchemes": {"key": {"type": "apiKey", "in": "header", "name": "X-API-Key"}},
        },
        "security": [{"key": []}, {}],
    }


# ── operations ────────────────────────────────────────────────────────────────────────────────────


def _operation(op: Operation, operations: Iterable[Operation]) -> Schema:
    described: Schema = {
        "operationId": op.name,
        "tags": [op.traffic],
        "responses": _responses(op, operations),
    }
    if op.result is not None:
        described["x-result"] = _ref(op.result.__name__)
    parameters = _path_parameters(op.path) + [
        _parameter("query", name, schema, required)
        for name, (schema, required) in QUERIES.get(op.name, {}).items()
    ]
    if op.request is not None:
        parameters.append(
            _parameter("header", "Content-Encoding", {"enum": ["identity", "zstd"]}, False)
        )
        described["requestBody"] = {"required": True, "content": _contents(op.request)}
    return described | ({"parameters": parameters} if parameters else {})


def _path_parameters(path: str) -> list[Schema]:
    return [
        _parameter("path", name, {"type": "string"}, True) for name in re.findall(r"{(\w+)}", path)
    ]


def _parameter(place: str, name: str, schema: Schema, required: bool) -> Schema:
    return {"name": name, "in": place, "required": required, "schema": schema}


def _contents(kind: type[Any]) -> Schema:
    contents: Schema = {codec.JSON: {"schema": _ref(kind.__name__)}}
    if codec.has_protobuf(kind):
        contents[codec.PROTOBUF] = {
            "schema": {"contentMediaType": codec.PROTOBUF, "title": kind.__name__}
        }
    return contents


def _responses(op: Operation, operations: Iterable[Operation]) -> Schema:
    answer: Schema = {
        "description": "Done."
        if op.result is None
        else "Taken: the result can be asked for by its id."
    }
    answer["content"] = _contents(op.response)
    if op is RETRIEVE_FUTURE:
        kinds = {other.result for other in operations if other.result is not None}
        names = sorted(kind.__name__ for kind in kinds | {RequestFailedResponse})
        told = _object("status", status={"const": "complete_metadata"}, response_payload_size=COUNT)
        answer["description"] = (
            "The result, or why there is none; or how large it is, if that was asked for."
        )
        answer["content"] = {
            codec.JSON: {"schema": {"anyOf": [*map(_ref, names), told]}},
            codec.PROTOBUF: {"schema": {"contentMediaType": codec.PROTOBUF}},
        }
    elif op is RETRIEVE_FUTURES:
        answer["content"][codec.BATCH] = {"schema": {"contentMediaType": codec.BATCH}}
    elif op is STREAM_SAMPLE:
        answer["content"] = {codec.EVENT_STREAM: {"schema": _ref(SampleStreamChunk.__name__)}}
    done = (
        {"302": {"description": "Where the archive is."}}
        if op is GET_CHECKPOINT_ARCHIVE
        else {"200": answer}
    )
    return done | _refusals(_statuses(op))


def _statuses(op: Operation) -> list[int]:
    fields = (
        set()
        if op.request is None
        else {field.name for field in msgspec.structs.fields(op.request)}
    )
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
    schema = (
        _object("queue_state", queue_state={"type": "string"}) if status == 408 else _ref("Error")
    )
    return {"description": REASONS[status], "content": {codec.JSON: {"schema": schema}}}


def _others() -> dict[str, Schema]:
    """Endpoints that are not operations."""
    link = [
        _parameter("query", name, {"type": "string"}, True) for name in ("expires", "signature")
    ]
    found = {
        "/": ("front", codec.JSON, [], ()),
        PATH: ("openapi", codec.JSON, [], ()),
        "/metrics": ("metrics", "text/plain", [], (401, 403)),
        TRACE.path: ("trace", codec.JSON, link, (403,)),
        openai.PREFIX + openai.MODELS: (
            "openai_models",
            codec.JSON,
            [_parameter("query", "limit", COUNT, False)],
            (400, 401, 403),
        ),
        (openai.PREFIX + openai.MODEL).replace(":path", ""): (
            "openai_model",
            codec.JSON,
            [],
            (400, 401, 403, 404),
        ),
        DOWNLOAD.path: ("download", "application/octet-stream", link, (403, 404)),
    }
    upload = _read(UPLOAD.path, "upload", codec.JSON, link, (403,))
    upload["requestBody"] = {
        "required": True,
        "content": {"application/octet-stream": {"schema": {}}},
    }
    upload["responses"] |= _refusals((400, 408, 413, 503))
    return {path: {"get": _read(path, *facts)} for path, facts in found.items()} | {
        UPLOAD.path: {"put": upload}
    }


def _read(
    path: str, name: str, content_type: str, link: list[Schema], statuses: Iterable[int]
) -> Schema:
    answer = {"200": {"description": "Here it is.", "content": {content_type: {"schema": {}}}}}
    responses = answer | _refusals(statuses)
    return {
        "operationId": name,
        "parameters": _path_parameters(path) + link,
        "responses": responses,
    }


# ── schemas ───────────────────────────────────────────────────────────────────────────────────────


def _schemas(operations: Iterable[Operation]) -> dict[str, Schema]:
    kinds = {
        kind
        for op in operations
        for kind in (op.request, op.response, op.result)
        if kind is not None
    }
    kinds |= {
        Empty,
        RequestFailedResponse,
        SupportedModel,
        ImageChunk,
        ImageAssetPointerChunk,
        DmelChunk,
    }
    kinds |= {kind for mark in Variant.__subclasses__() for kind in mark.__subclasses__()}
    records = sorted(
        (kind for kind in kinds if issubclass(kind, Record)), key=lambda kind: kind.__name__
    )
    _, made = msgspec.json.schema_components(
        records, schema_hook=_hook, ref_template=f"{COMPONENTS}{{name}}"
    )
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
