"""Names of models for OpenAI's clients: a base model, a path, or both as `<base>;<path>`."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from tinkex.engine.api import BaseModel, EngineError
from tinkex.server.database.entities import SavedCheckpoint
from tinkex.server.http_errors import Refusal
from tinkex.server.state import State
from tinkex.types.checkpoints import SCHEME

LONGEST = 1000
"""Most characters of a name."""


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
        raise _malformed(f"the name of a model has at most {LONGEST} characters, got {len(name)}")
    base, separator, path = name.partition(";")
    if not separator and base.startswith(SCHEME):
        base, path = "", base
    if separator and not (base and path):
        raise _malformed(
            f"{name!r} is no model; expected <base model>;{SCHEME}<run>/sampler_weights/<name>"
        )
    if not path:
        return NamedModel(name, _base(state, base, name))
    try:
        saved = await asyncio.to_thread(
            state.checkpoints.find, path, "sampler_weights", reader=owner
        )
    except EngineError as error:
        raise (_unknown if str(error).startswith("there is no") else _malformed)(
            str(error)
        ) from None
    trained_on = _base(state, saved.base_model, name)
    if base and _base(state, base, name) != trained_on:
        raise _malformed(
            f"checkpoint {path} was trained on {trained_on.name!r}, not on {base!r}; name that, or "
            "none"
        )
    return NamedModel(name, trained_on, saved)


def _base(state: State, base: str, name: str) -> BaseModel:
    """Return a base model by its name; a variant such as `:peft:32768` is ignored."""
    models = state.workers.models()
    found = models.get(base) or models.get(base.partition(":")[0])
    if found is None:
        raise _unknown(
            f"there is no model {name!r}; this server has the base models "
            f"{', '.join(sorted(models))}"
        )
    return found


def _unknown(why: str) -> Refusal:
    return Refusal(404, why, fields={"code": "model_not_found"})


def _malformed(why: str) -> Refusal:
    return Refusal(400, why, fields={"code": "invalid_model"})
