"""The formats of files: JSON, safetensors, and adapters in PEFT's layout.

The library `safetensors` writes a file in one call, from memory that shares nothing, and to a path
only. Here it is written piece by piece with numpy alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from tinkex.engine.api import EngineError
from tinkex.types.tensors import Array
from tinkex.types.training import LoraConfig


def parse_object(text: str | bytes, name: Path) -> dict[str, Any]:
    """Parse a JSON object; `name` is the file that it is from.

    Raises:
        EngineError: It is not JSON, is nested too deeply, has an endless number, or is no object.
    """
    try:
        fields = json.loads(text)
    except RecursionError:
        raise EngineError(f"{name} is not valid JSON: it is nested too deeply") from None
    except ValueError as error:  # of bad UTF-8 too, and of a number with thousands of digits
        raise EngineError(f"{name} is not valid JSON: {str(error).partition(';')[0]}") from None
    if not isinstance(fields, dict):
        raise EngineError(f"{name} is not a JSON object")
    return fields


def read_object(path: Path) -> dict[str, Any]:
    """Read a file that must hold a JSON object; FileNotFoundError if it is missing."""
    return parse_object(path.read_bytes(), path)


def shown(value: object) -> str:
    """Return a value for a message, shortened."""
    try:
        text = repr(value)
    except ValueError:  # a number with thousands of digits
        text = "a number with thousands of digits"
    return text if len(text) <= 80 else f"{text[:77]}..."


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


PIECE = 1 << 23
"""The most bytes that are written at a time."""


def write_tensors(
    file: BinaryIO,
    tensors: Mapping[str, Array],
    metadata: Mapping[str, str],
    wrote: Callable[[int], object] | None = None,
) -> None:
    """Write contiguous tensors as float32, in the order given.

    `wrote` is called with the number of bytes of each piece.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + 4 * tensor.size
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the numbers are aligned
    file.write(len(text).to_bytes(8, "little") + text)
    for tensor in tensors.values():
        data = tensor.astype("<f4", copy=False).data.cast("B")
        for start in range(0, len(data), PIECE):
            count = file.write(data[start : start + PIECE])
            if wrote is not None:
                wrote(count)
