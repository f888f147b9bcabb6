"""Import PEFT adapters as training checkpoints with the same result.

Factors here are scaled by 32 / rank; another scale is multiplied into B. If an adapter leaves out a
module of a group that is trained as a whole, the module gets a new pair: B is zero, so that it adds
nothing, and A is random, so that it can learn.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from tinkex.engine.api import EngineError, Place
from tinkex.engine.families.family import families
from tinkex.engine.file_formats import (
    ADAPTER_CONFIG as CONFIG,
    ADAPTER_WEIGHTS as WEIGHTS,
    ALPHA,
    MAX_RANK,
    PIECE,
    PREFIX,
    parse_object,
    read_object,
    write_tensors,
)
from tinkex.server.database.interface import LOCAL_OWNER, Database, Run, SavedCheckpoint
from tinkex.server.files.checkpoint_files import Checkpoints, SaveSpec
from tinkex.types.tensors import Array
from tinkex.types.training import LoraConfig

MOST_ALPHA = 1e30
KNOWN = {
    module: group
    for family in families().values()
    for group, modules in family.names.groups.items()
    for module in modules
}
"""The modules that adapters can be for, in any family, and the group that trains each."""
GROUPS = tuple(dict.fromkeys(KNOWN.values()))
PLAIN = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    # other beginnings change the base model as well
    "init_lora_weights": (True, False, "gaussian", "eva"),
}
"""Required values of an adapter's settings, if present."""
READ = {
    "r",
    "lora_alpha",
    "use_rslora",
    "base_model_name_or_path",
    "target_modules",
    "exclude_modules",
}
IDLE = {
    "auto_mapping",
    "ensure_weight_tying",
    "eva_config",
    "inference_mode",
    "layers_pattern",
    "lora_dropout",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "revision",
    "task_type",
}
"""Settings that do not change the result. Any other that is not read here may change it."""
Progress: TypeAlias = Callable[[int, int], object]
FLOATS = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}


@dataclass(frozen=True, slots=True)
class Source:
    """An adapter to import."""

    directory: Path
    rank: int
    scale: float
    targets: list[str] | None
    """Names of its modules, or the ends of names; None if only its tensors name them."""
    base_model: str | None


def import_adapter(
    database: Database,
    directory: Path,
    base_model: str | None,
    base_directory: Path,
    name: str = "imported",
    *,
    owner: str = LOCAL_OWNER,
    progress: Progress | None = None,
) -> SavedCheckpoint:
    """Make a training checkpoint of a PEFT adapter, under a run of its own.

    Args:
        database: The database of the data directory; a server may be running on it.
        directory: The directory of `adapter_config.json` and `adapter_model.safetensors`.
        base_model: The server's name of the base model; by default the name in the adapter.
        base_directory: The files of the base model, whose shapes the adapter must fit.
        name: The name of the checkpoint.
        owner: The owner of the checkpoint.
        progress: Called with the bytes that are done, and the bytes of the whole import.

    Raises:
        EngineError: The adapter cannot be imported; nothing has changed.
    """
    base_model = base_model or read_source(directory).base_model
    if base_model is None:
        raise EngineError(f"{directory / CONFIG} names no base model: give its name")
    adapter = read_adapter(directory, base_directory, progress)
    lora, run_id = adapter.shape(), str(uuid.uuid4())
    run = Run(f"{run_id}:train:0", run_id, base_model, lora, {"type": "adamw"}, {}, owner)
    write = adapter.writer(base_model, lora)
    return Checkpoints(database).put_once(run, SaveSpec("weights", name), write)


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter that fits its base model, and has no NaN or infinity."""

    source: Source
    factors: Mapping[str, tuple[Array, Array]]
    """A and B of each module, B with the scale of this server."""
    shapes: Mapping[str, tuple[int, int]]
    told: _Told

    def shape(self) -> LoraConfig:
        """Return the smallest configuration that includes all its modules."""
        groups = {KNOWN[_last(module)] for module in self.factors}
        trained = {f"train_{group}": group in groups for group in GROUPS}
        return LoraConfig(rank=self.source.rank, **trained)

    def writer(self, base_model: str, lora: LoraConfig) -> Callable[[Place], None]:
        """Return a function that writes it; modules that it leaves out get new factors."""
        trained = [module for module in self.shapes if _trains(lora, module)]

        def write(target: Place) -> None:
            factors = {module: self.factors.get(module) for module in trained}
            _write(target, base_model, self.source, factors, self.shapes, self.told)

        return write


def read_adapter(
    directory: Path, base_directory: Path, progress: Progress | None = None
) -> Adapter:
    """Read PEFT files.

    Raises:
        EngineError: They cannot be trained here.
    """
    source, shapes, told = read_source(directory), module_shapes(base_directory), _Told(progress)
    return Adapter(source, _read_factors(source, shapes, told), shapes, told)


def most_bytes(base_directory: Path, lora: LoraConfig) -> int:
    """Return the largest size of an adapter's weights file."""
    shapes = module_shapes(base_directory)
    sizes = [sum(shape) for module, shape in shapes.items() if _trains(lora, module)]
    return sum(8 * lora.rank * size + 1024 for size in sizes) + (1 << 20)


def _trains(lora: LoraConfig, module: str) -> bool:
    return bool(getattr(lora, f"train_{KNOWN[_last(module)]}"))


def read_source(directory: Path) -> Source:
    """Return an adapter's settings; refuse those that change the result."""
    path = directory / CONFIG
    try:
        fields = read_object(path)
    except (FileNotFoundError, NotADirectoryError):
        raise EngineError(f"{directory} has no {CONFIG}: not a PEFT adapter") from None
    for name, value in fields.items():
        if name in PLAIN and value is not None and value not in PLAIN[name]:
            raise EngineError(f"{path}: {name} is {value!r}; it must be {PLAIN[name][0]!r}")
        if value and name not in PLAIN and name not in READ | IDLE:
            raise EngineError(f"{path}: {name} is {value!r}, which cannot be imported")
    rank, alpha = fields.get("r"), fields.get("lora_alpha")
    if isinstance(rank, bool) or not isinstance(rank, int) or not 1 <= rank <= MAX_RANK:
        raise EngineError(f"{path}: r must be a whole number from 1 to {MAX_RANK}, got {rank!r}")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not 0 < alpha < MOST_ALPHA:
        raise EngineError(f"{path}: lora_alpha must be a positive number, got {alpha!r}")
    scale = alpha / (math.sqrt(rank) if fields.get("use_rslora") else rank)
    targets = None if fields.get("exclude_modules") else fields.get("target_modules")
    return Source(
        directory=directory,
        rank=rank,
        scale=scale,
        targets=[str(target) for target in targets] if isinstance(targets, list) else None,
        base_model=fields.get("base_model_name_or_path"),
    )


def module_shapes(directory: Path) -> dict[str, tuple[int, int]]:
    """Return the outputs and inputs of each module that adapters can change."""
    shapes: dict[str, tuple[int, int]] = {}
    for path in sorted(directory.glob("model*.safetensors")):
        for name, about in _header(path).items():
            module = name.removesuffix(".weight")
            if name == "model.embed_tokens.weight":
                # they may be one and the same
                shapes.setdefault("lm_head", (about["shape"][0], about["shape"][1]))
            if name.endswith(".weight") and _last(module) in KNOWN:
                shapes[module] = (about["shape"][0], about["shape"][1])
    if not shapes:
        raise EngineError(f"{directory} is not a base model with layers that can be trained here")
    return shapes


def _header(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = parse_object(file.read(min(size, 100_000_000)), path)
    except OSError as error:
        raise EngineError(f"{path} cannot be read: {error}") from None
    header.pop("__metadata__", None)
    return header


def _last(module: str) -> str:
    return module.rpartition(".")[2]


class _Told:
    """The progress of an import, in bytes read and written."""

    def __init__(self, progress: Progress | None) -> None:
        self._progress = progress
        self._done = self._read = self._write = 0

    def expect(self, *, read: int | None = None, write: int | None = None) -> None:
        """Set how many bytes there are to read or write."""
        self._read, self._write = read or self._read, write or self._write

    def add(self, count: int) -> None:
        """Add bytes that were read or written."""
        self._done += count
        if self._progress is not None:
            self._progress(self._done, self._read + self._write)


def _read_factors(
    source: Source, shapes: Mapping[str, tuple[int, int]], told: _Told
) -> dict[str, tuple[Array, Array]]:
    """Return A and B of each module, B scaled for us; refuse tensors that do not fit."""
    path = source.directory / WEIGHTS
    tensors = _read_tensors(path, told)
    sides: dict[str, dict[str, Array]] = {}
    for key, tensor in sorted(tensors.items()):
        name = key.removeprefix(PREFIX).removesuffix(".weight")
        module, _, side = name.rpartition(".")
        if _last(module) == "unembed_tokens":  # the name in the hosted service's files
            module = "lm_head"
        if _last(name.removesuffix(".base_layer")) in ("embed_tokens", "lm_head"):
            why = f"{key} belongs to the base model, which cannot be changed here"
            raise EngineError(f"{path}: {why}: save it with save_embedding_layers=False")
        if key != f"{PREFIX}{name}.weight" or side not in ("lora_A", "lora_B"):
            raise EngineError(f"{path}: {key} is not a LoRA factor, which is all that is imported")
        if module not in shapes:
            why = f"{key} changes a module that cannot be trained here"
            raise EngineError(f"{path}: {why}; those that can are {', '.join(KNOWN)}")
        outputs, inputs = shapes[module]
        expected = (source.rank, inputs) if side == "lora_A" else (outputs, source.rank)
        if tensor.shape != expected:
            found = f"has shape {list(tensor.shape)}, the base model wants {list(expected)}"
            raise EngineError(f"{path}: {key} {found}")
        if not np.isfinite(tensor).all():
            raise EngineError(f"{path}: {key} holds NaN or infinity")
        sides.setdefault(module, {})[side] = tensor
    lost = [module for module, pair in sides.items() if len(pair) != 2]
    lost += [name for name in shapes if name not in sides and _is_target(name, source.targets)]
    if lost or not sides:
        raise EngineError(f"{path} lacks factors of {min(lost, default='any module')}")
    factor = source.scale / (ALPHA / source.rank)
    pairs = ((module, pair["lora_A"], pair["lora_B"]) for module, pair in sides.items())
    return {module: (a, _scaled(b, factor)) for module, a, b in pairs}


def _is_target(module: str, targets: list[str] | None) -> bool:
    """Return whether a module is a target, by full name or its end, as in PEFT."""
    return any(module == target or module.endswith(f".{target}") for target in targets or ())


def _scaled(b: Array, factor: float) -> Array:
    scaled: Array = (b.astype(np.float64) * factor).astype(np.float32)
    if not np.isfinite(scaled).all():
        raise EngineError(f"the factors scaled by {factor:g} are too large for float32")
    return scaled


def _read_tensors(path: Path, told: _Told) -> dict[str, Array]:
    """Return all tensors of a file as float32."""
    from safetensors import SafetensorError, deserialize

    if not path.exists():
        if pickles := sorted(file.name for file in path.parent.glob("*.bin")):
            why = f"{path.parent} has its weights in {pickles[0]}, a pickle, which can run any code"
            raise EngineError(f"{why}: save it as safetensors where you trust it")
        raise EngineError(f"{path.parent} has no {WEIGHTS}")
    told.expect(read=path.stat().st_size, write=path.stat().st_size)
    try:
        found = deserialize(_read(path, told))  # type: ignore[no-untyped-call]
    except SafetensorError as error:
        raise EngineError(f"{path} cannot be read: {error}") from None
    tensors = {}
    for name, about in found:
        if about["dtype"] not in FLOATS:
            known = ", ".join(FLOATS)
            raise EngineError(f"{path}: {name} has type {about['dtype']}; expected one of {known}")
        raw = np.frombuffer(about["data"], FLOATS[about["dtype"]])
        if about["dtype"] == "BF16":  # the upper half of a float
            raw = (raw.astype("<u4") << 16).view("<f4")
        tensors[name] = raw.astype(np.float32).reshape(about["shape"])
    return tensors


def _read(path: Path, told: _Told) -> bytes:
    """Return the contents of a file; only one copy is in memory."""
    whole = io.BytesIO()
    with path.open("rb") as file:
        while piece := file.read(PIECE):
            whole.write(piece)
            told.add(len(piece))
    return whole.getvalue()


def _write(
    target: Place,
    base_model: str,
    source: Source,
    factors: Mapping[str, tuple[Array, Array] | None],
    shapes: Mapping[str, tuple[int, int]],
    told: _Told,
) -> None:
    tensors = {}
    for module, pair in factors.items():
        a, b = pair or _fresh(module, source.rank, *shapes[module])
        tensors[f"{PREFIX}{module}.lora_A.weight"] = np.ascontiguousarray(a)
        tensors[f"{PREFIX}{module}.lora_B.weight"] = np.ascontiguousarray(b)
    told.expect(write=sum(tensor.nbytes for tensor in tensors.values()))
    with target.file(WEIGHTS) as file:
        write_tensors(file, tensors, {"format": "pt"}, told.add)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": source.rank,
        "lora_alpha": ALPHA,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted({_last(module) for module in factors}),
        "inference_mode": True,
    }
    with target.file(CONFIG) as file:
        file.write(f"{json.dumps(config, indent=2)}\n".encode())


def _fresh(module: str, rank: int, outputs: int, inputs: int) -> tuple[Array, Array]:
    """Return factors that add nothing: A is uniform in ±1/sqrt(inputs), B is zero.

    A module of the same name always gets the same factors.
    """
    seed = int.from_bytes(hashlib.sha256(module.encode()).digest()[:8], "little")
    bound = 1 / math.sqrt(inputs)
    a = np.random.default_rng(seed).uniform(-bound, bound, (rank, inputs)).astype(np.float32)
    return a, np.zeros((outputs, rank), dtype=np.float32)
