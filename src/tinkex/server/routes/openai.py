"""Routes that OpenAI's clients know, beside those of the Tinker API: `/oai/api/v1/models`."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tinkex.server.access.accounts import Account
from tinkex.server.http_errors import Refusal
from tinkex.server.routes.model_names import NamedModel, resolve
from tinkex.server.state import State

logger = logging.getLogger("tinkex.server")

PREFIX = "/oai/api/v1"
MODELS = f"{PREFIX}/models"
MODEL = f"{MODELS}/{{model:path}}"
DEFAULT_LIMIT, MOST = 200, 1000
OWNED_BY = "tinkex"
DETAIL_CHARACTERS = 4_000

Authorize: TypeAlias = Callable[[Request, State], Awaitable[Account]]
Answer: TypeAlias = Callable[[State, Request, str], Awaitable[dict[str, Any]]]


def routes(state: State, authorize: Authorize) -> list[Route]:
    """The routes, each with the check of keys and hosts that all others have."""
    began = int(time.time())

    async def models(state: State, request: Request, owner: str) -> dict[str, Any]:
        limit = _limit(request.query_params.get("limit"))
        found = [
            _object(NamedModel(model.name, model), began)
            for model in state.workers.models().values()
        ][:limit]
        bases = state.workers.models()
        saved = await asyncio.to_thread(
            state.database.checkpoints.samplers, owner, [*bases], limit - len(found)
        )
        found += [
            _object(NamedModel(one.tinker_path, bases[one.base_model], one), began) for one in saved
        ]
        return {"object": "list", "data": found}

    async def model(state: State, request: Request, owner: str) -> dict[str, Any]:
        return _object(await resolve(state, request.path_params["model"], owner), began)

    return [
        Route(
            MODELS,
            _endpoint(state, authorize, "openai_models", models),
            methods=["GET"],
            name="openai_models",
        ),
        Route(
            MODEL,
            _endpoint(state, authorize, "openai_model", model),
            methods=["GET"],
            name="openai_model",
        ),
    ]


def _endpoint(
    state: State, authorize: Authorize, name: str, answer: Answer
) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        began, account, response = time.perf_counter(), None, Response(status_code=500)
        try:
            account = await authorize(request, state)
            response = JSONResponse(await answer(state, request, account.owner))
        except Refusal as refusal:
            response = _refused(refusal)
        except Exception as error:
            logger.exception("%s failed", name)
            response = _refused(Refusal(500, f"internal error: {type(error).__name__}"))
        request.state.owner, request.state.request_id = account.owner if account else None, None
        seconds = time.perf_counter() - began
        state.metrics.observe(name, "GET", response.status_code, seconds, request.state.owner, None)
        return response

    return endpoint


def _refused(refusal: Refusal) -> Response:
    """An error in the form that OpenAI's clients read."""
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


def _object(model: NamedModel, began: int) -> dict[str, Any]:
    saved = model.checkpoint
    return {
        "id": model.id,
        "object": "model",
        "created": began if saved is None else int(saved.created),
        "owned_by": OWNED_BY if saved is None else saved.owner,
        "root": model.base.name if saved is None else saved.tinker_path,
        "parent": None if saved is None else model.base.name,
        "max_model_len": model.base.context_length,
    }
