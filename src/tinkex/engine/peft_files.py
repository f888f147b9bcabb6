"""Adapters in PEFT's layout: the names of their files, and their shape."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from tinkex.engine.api import EngineError
from tinkex.engine.json_files import read_object, shown
from tinkex.types.training import LoraConfig

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
OPTIMIZER = "optimizer.safetensors"
PREFIX = "base_model.model."
ALPHA = 32
MAX_RANK = 1024


def read_lora_config(directory: Path, groups: Mapping[str, Sequence[str]]) -> LoraConfig:
    """Return the shape of a saved adapter.

    `groups` are the modules of the base model that are trained together.

    Raises:
        EngineError: There is no such file, or the engine would compute another function.
    """
    path = directory / ADAPTER_CONFIG
    try:
        fields = read_object(path)
    except FileNotFoundError:
        raise EngineError(f"{directory} has no {ADAPTER_CONFIG}: not a PEFT adapter") from None
    for name, expected in {
        "lora_alpha": ALPHA,
        "alpha_pattern": {},
        "bias": "none",
        "use_dora": False,
        "use_rslora": False,
    }.items():
        if fields.get(name, expected) != expected:
            raise EngineError(
                f"{path}: {name} is {shown(fields[name])}; only {expected!r} is supported"
            )
    rank, targets = fields.get("r"), fields.get("target_modules") or []
    if isinstance(rank, bool) or not isinstance(rank, int) or not 1 <= rank <= MAX_RANK:
        raise EngineError(
            f"{path}: r must be a whole number between 1 and {MAX_RANK}, got {shown(rank)}"
        )
    if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
        raise EngineError(f"{path}: target_modules must be a list of names, got {shown(targets)}")
    modules = set(targets)
    trained = {group for group, members in groups.items() if modules & set(members)}
    missing = {name for group in trained for name in groups[group]} ^ modules
    if missing or not trained:
        raise EngineError(
            f"{path}: target_modules {sorted(modules)} are not whole groups of {groups}"
        )
    return LoraConfig(rank=rank, **{f"train_{group}": group in trained for group in groups})
