"""The rotary parameters of a `config.json`, in the form of transformers 5."""

from __future__ import annotations

import math
from typing import Any

from tinkex.engine.api import EngineError
from tinkex.engine.families.model_config import Fields

TRAINED = "original_max_position_embeddings"
ROPE_TYPES = ("default", "linear", "llama3")
ROPE_NEEDS = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", TRAINED),
}


def read_rope(fields: Fields, theta: float, parameters: Fields | None) -> Fields:
    """Return rotary parameters, from the form before transformers 5 or the one after.

    The older form is `rope_theta` and `rope_scaling` in `fields`, the newer one `parameters`.
    """
    scaling, given = _typed(fields.get("rope_scaling") or {}), _typed(parameters or {})
    if scaling and given and not scaling.items() <= given.items():
        raise EngineError(
            "rope_scaling and rope_parameters say different things: keep the one that is meant"
        )
    rope = {"rope_theta": fields.get("rope_theta") or theta, **scaling, **given}
    kind = rope.get("rope_type", "default")
    if kind not in ROPE_TYPES:
        raise EngineError(
            f"rope type {kind!r} is not supported; covered are {', '.join(ROPE_TYPES)}"
        )
    if (rope.get("partial_rotary_factor") or fields.get("partial_rotary_factor") or 1.0) != 1.0:
        raise EngineError("partial rotary embeddings are not supported")
    if kind == "llama3":  # what stands outside comes first, as in transformers
        rope[TRAINED] = (
            fields.get(TRAINED) or rope.get(TRAINED) or fields.get("max_position_embeddings")
        )
    for name in ("rope_theta", *ROPE_NEEDS.get(kind, ())):
        rope[name] = _positive(rope, name, kind)
    return {**rope, "rope_type": kind}


def _typed(rope: Fields) -> dict[str, Any]:
    """Return rotary parameters whose type has its present name, `rope_type`."""
    older = {"rope_type": rope["type"]} if "type" in rope else {}
    return {**older, **{name: value for name, value in rope.items() if name != "type"}}


def _positive(rope: Fields, name: str, kind: str) -> float:
    try:
        value = float(rope[name])
    except (KeyError, TypeError, ValueError):
        value = 0.0
    if not 0 < value < math.inf:
        raise EngineError(
            f"rope type {kind!r} needs {name}, a positive number, and has {rope.get(name)!r}"
        )
    return value
