"""Endpoints for OpenAI's clients: `/oai/api/v1/models`."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.responses import JSONResponse, Response

from tinkex.server.access.endpoints import Endpoint, Group
from tinkex.server.calls import Call
from tinkex.server.http_errors import DETAIL_CHARACTERS, Refusal
from tinkex.server.routes.model_names import NamedModel, resolve
from tinkex.server.state import State
from tinkex.wire.protocol import BY_HANDLER, OPEN

PREFIX = "/oai/api/v1"
MODELS, MODEL = "/models", "/models/{model:path}"
DEFAULT_LIMIT, MOST = 200, 1000
OWNED_BY = "tinkex"


async def models(state: State, call: Call) -> Response:
    """List base models, and the caller's checkpoints to sample from."""
    limit = _limit(call.query.get("limit"))
    bases = state.workers.models()
    found = [NamedModel(name, model) for name, model in bases.items()][:limit]
    saved = await asyncio.to_thread(
        state.database.checkpoints.samplers, call.owner, [*bases], limit - len(found)
    )
    found += [NamedModel(one.tinker_path, bases[one.base_model], one) for one in saved]
    return JSONResponse({"object": "list", "data": [_object(state, model) for model in found]})


async def model(state: State, call: Call) -> Response:
    """Describe one model."""
    return JSONResponse(_object(state, await resolve(state, call.path["model"], call.owner)))


def _refused(refusal: Refusal) -> Response:
    """Return an error in the form that OpenAI's clients read."""
    kinds = {401: "authentication_error", 403: "permission_error", 404: "not_found_error"}
    kind = kinds.get(
        refusal.status, "invalid_request_error" if refusal.status < 500 else "server_error"
    )
    code = refusal.fields.get("code")
    error = {
        "message": refusal.detail[:DETAIL_CHARACTERS],
        "type": kind,
        "param": "model" if code else None,
        "code": code,
    }
    return JSONResponse({"error": error}, status_code=refusal.status, headers=refusal.headers)


def _limit(given: str | None) -> int:
    if given is None:
        return DEFAULT_LIMIT
    if not given.isascii() or not given.isdigit() or len(given) > 9 or not 1 <= int(given) <= MOST:
        raise Refusal(400, f"limit must be between 1 and {MOST}, got {given[:20]!r}")
    return int(given)


def _object(state: State, model: NamedModel) -> dict[str, Any]:
    saved = model.checkpoint
    return {
        "id": model.id,
        "object": "model",
        "created": int(state.metrics.began) if saved is None else int(saved.created),
        "owned_by": OWNED_BY if saved is None else saved.owner,
        "root": model.base.name if saved is None else saved.tinker_path,
        "parent": None if saved is None else model.base.name,
        "max_model_len": model.base.context_length,
    }


OPENAI = Group(
    PREFIX,
    [
        Endpoint("openai_models", "GET", MODELS, models, owned_by=OPEN),
        Endpoint("openai_model", "GET", MODEL, model, owned_by=BY_HANDLER),
    ],
    takes_bearer=True,
    refused=_refused,
)
