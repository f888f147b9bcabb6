"""The families by name, and the way from a `config.json` to a decoder's configuration.

A configuration that would be computed wrongly is refused.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Mapping
from pathlib import Path

from tinkex.engine import families as package
from tinkex.engine.api import EngineError
from tinkex.engine.families.family import Family
from tinkex.engine.families.model_config import DecoderConfig, Fields
from tinkex.engine.json_files import read_object

ACTIVATIONS = ("silu", "gelu_pytorch_tanh")


@functools.cache
def families() -> Mapping[str, Family]:
    """Return every `FAMILY` that a module of this package names, by its `model_type`."""
    found = {}
    for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        family = getattr(importlib.import_module(module.name), "FAMILY", None)
        if isinstance(family, Family):
            found[family.name] = family
    return dict(sorted(found.items()))


def read_config(directory: Path) -> DecoderConfig:
    """Read the `config.json` in a checkpoint directory.

    Raises:
        EngineError: There is none, or it is of a model that is not supported.
    """
    path = directory / "config.json"
    try:
        fields = read_object(path)
    except FileNotFoundError:
        raise EngineError(
            f"{directory} has no config.json: not a Hugging Face checkpoint"
        ) from None
    try:
        return parse_config(fields)
    except KeyError as error:
        raise EngineError(f"{path} has no {error}") from None
    except (TypeError, ValueError, AttributeError, OverflowError) as error:
        raise EngineError(f"{path} holds a value of a wrong type: {error}") from None


def parse_config(fields: Fields) -> DecoderConfig:
    """Return the configuration that the contents of a `config.json` stand for.

    Raises:
        EngineError: The model is not supported.
    """
    arch = fields.get("model_type")
    covered = f"covered are {', '.join(families())}"
    family = families().get(arch) if isinstance(arch, str) else None
    if family is None:
        raise EngineError(f"model_type {arch!r} is not supported; {covered}")
    activation = family.activation(fields)
    if activation not in ACTIVATIONS:
        raise EngineError(
            f"hidden_act {activation!r} is not supported; {covered}, with "
            f"{' or '.join(ACTIVATIONS)}"
        )
    if fields.get("quantization_config"):
        raise EngineError(f"quantized checkpoints are not supported; {covered}, in floating point")
    if fields.get("use_bidirectional_attention") or fields.get("is_causal") is False:
        raise EngineError(
            f"attention to later tokens is not supported; {covered}, with causal attention"
        )
    family.check(fields)
    return family.read(fields)
