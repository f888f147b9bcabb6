"""Endpoints for OpenAI's clients: `/oai/api/v1/models`.

The name of a model is a base model, a path, or both as `<base>;<path>`.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.responses import JSONResponse, Response

from tinkex.engine.api import BaseModel, EngineError
from tinkex.server.access.endpoints import Endpoint, Group
from tinkex.server.calls import Call
from tinkex.server.database.interface import SavedCheckpoint
from tinkex.server.http_errors import DETAIL_CHARACTERS, Refusal
from tinkex.server.routes.queries import whole_number
from tinkex.server.state import State
from tinkex.types.checkpoints import SCHEME
from tinkex.wire.protocol import BY_HANDLER, OPEN

PREFIX = "/oai/api/v1"
OWNED_BY = "tinkex"
MODELS, MODEL = "/models", "/models/{model:path}"
DEFAULT_LIMIT, MOST = 200, 1000
LONGEST = 1000
"""Most characters of a name."""


# ── names ─────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class NamedModel:
    """The model that a name stands for."""

    id: str
    base: BaseModel
    checkpoint: SavedCheckpoint | None = None

    @property
    def model_path(self) -> str | None:
        """The path of the checkpoint, if there is one."""
        return None if self.checkpoint is None else self.checkpoint.tinker_path


async def resolve(state: State, name: str, owner: str) -> NamedModel:
    """Return the model that a name stands for, of those that its caller may see.

    Raises:
        Refusal: 404 if there is no such model; 400 if the name is malformed, its checkpoint is of
            another kind, or its base is not the one that the checkpoint was trained on.
    """
    if len(name) > LONGEST:
        raise _malformed(f"model must have at most {LONGEST} characters, got {len(name)}")
    base, separator, path = name.partition(";")
    if not separator and base.startswith(SCHEME):
        base, path = "", base
    if separator and not (base and path):
        form = f"<base model>;{SCHEME}<run>/sampler_weights/<name>"
        raise _malformed(f"model must be a base model, a path or {form}, got {name!r}")
    if not path:
        return NamedModel(name, _base(state, base, name))
    find = partial(state.checkpoints.find, path, "sampler_weights", reader=owner)
    try:
        saved = await asyncio.to_thread(find)
    except EngineError as error:
        refuse = _unknown if str(error).startswith("there is no") else _malformed
        raise refuse(str(error)) from None
    trained_on = _base(state, saved.base_model, name)
    if base and _base(state, base, name) != trained_on:
        why = f"checkpoint {path} was trained on {trained_on.name!r}, not on {base!r}"
        raise _malformed(f"{why}: leave the base model out")
    return NamedModel(name, trained_on, saved)


def _base(state: State, base: str, name: str) -> BaseModel:
    """Return a base model by its name; a variant such as `:peft:32768` is ignored."""
    models = state.workers.models()
    found = models.get(base) or models.get(base.partition(":")[0])
    if found is None:
        known = ", ".join(sorted(models))
        raise _unknown(f"there is no model {name!r}; the base models here are {known}")
    return found


def _unknown(why: str) -> Refusal:
    return Refusal(404, why, fields={"code": "model_not_found"})


def _malformed(why: str) -> Refusal:
    return Refusal(400, why, fields={"code": "invalid_model"})


# ── endpoints ─────────────────────────────────────────────────────────────────────────────────────


async def models(state: State, call: Call) -> Response:
    """List base models, and the caller's checkpoints to sample from."""
    limit = whole_number(call, "limit", DEFAULT_LIMIT, least=1, most=MOST)
    bases = state.workers.models()
    found = [NamedModel(name, model) for name, model in bases.items()][:limit]
    find, most = state.database.checkpoints.samplers, limit - len(found)
    saved = await asyncio.to_thread(find, call.owner, [*bases], most)
    found += [NamedModel(one.tinker_path, bases[one.base_model], one) for one in saved]
    return JSONResponse({"object": "list", "data": [_object(state, model) for model in found]})


async def model(state: State, call: Call) -> Response:
    """Describe one model."""
    return JSONResponse(_object(state, await resolve(state, call.path["model"], call.owner)))


def _refused(refusal: Refusal) -> Response:
    """Return an error in the form that OpenAI's clients read."""
    kinds = {401: "authentication_error", 403: "permission_error", 404: "not_found_error"}
    other = "invalid_request_error" if refusal.status < 500 else "server_error"
    kind = kinds.get(refusal.status, other)
    code = refusal.fields.get("code")
    param, message = "model" if code else None, refusal.detail[:DETAIL_CHARACTERS]
    error = {"message": message, "type": kind, "param": param, "code": code}
    return JSONResponse({"error": error}, status_code=refusal.status, headers=refusal.headers)


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
