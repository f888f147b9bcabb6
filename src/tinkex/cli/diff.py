"""`tinkex checkpoint diff`: compare two checkpoints. Needs numpy only."""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tinkex.cli.options import (
    Connection,
    checked_path,
    option,
    reporting,
    switch,
)
from tinkex.cli.output import Column, CommandError, Outcome, print_fields, print_table
from tinkex.cli.progress import waiting

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Sides = tuple[NDArray[np.float64], NDArray[np.float64]]

CONFIG = "adapter_config.json"
OPTIMIZER = "optimizer.safetensors"
LONGEST_HEADER = 100_000_000
DTYPES = {
    "F64": "<f8",
    "F32": "<f4",
    "F16": "<f2",
    "BF16": "<u2",
    "I64": "<i8",
    "I32": "<i4",
    "I16": "<i2",
    "I8": "i1",
    "U8": "u1",
    "BOOL": "?",
}
FACTOR = re.compile(
    r"(?P<module>.+)\.lora_(?P<kind>(?:embedding_)?)(?P<side>[AB])(?P<end>(?:\.weight)?)"
)
"""The name of one factor of an adapter in PEFT."""
BLOCK = 1 << 22
"""Numbers of a product compared at a time."""
COLUMNS = (
    Column("Tensor", folds=True),
    Column("Shape"),
    Column("Max difference", right=True),
    Column("Relative", right=True),
)


@dataclass(frozen=True, slots=True)
class Tensor:
    """The place of a tensor's numbers in a file."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int

    def read(self) -> NDArray[np.float64]:
        """Return the numbers, flat, as float64."""
        import numpy as np

        count = math.prod(self.shape)
        raw = np.fromfile(self.file, DTYPES[self.dtype], count, offset=self.begin)
        if self.dtype == "BF16":  # the upper half of a float32
            raw = (raw.astype(np.uint32) << 16).view(np.float32)
        return raw.astype(np.float64)


def read_tensors(directory: Path, *, optimizer: bool = False) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint's files by name, the optimizer's only on request."""
    found: dict[str, Tensor] = {}
    for file in sorted(directory.glob("*.safetensors")):
        if file.name != OPTIMIZER or optimizer:
            prefix = "optimizer: " if file.name == OPTIMIZER else ""
            found |= {prefix + name: tensor for name, tensor in _read_header(file)}
    if not found:
        raise CommandError(f"{directory} holds no .safetensors files")
    return found


def _read_header(file: Path) -> Iterator[tuple[str, Tensor]]:
    """Read the header of a safetensors file: its length in eight bytes, then JSON."""
    try:
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            if length > LONGEST_HEADER:
                raise ValueError("its header is too long")
            table: dict[str, Any] = json.loads(opened.read(length))
        end = file.stat().st_size - 8 - length
        for name, entry in table.items():
            if name == "__metadata__":
                continue
            if entry["dtype"] not in DTYPES:
                raise ValueError(f"{name} has the type {entry['dtype']}, which cannot be compared")
            first, last = entry["data_offsets"]
            if not 0 <= first <= last <= end:
                raise ValueError(f"{name} lies outside the file")
            shape = tuple(entry["shape"])
            yield name, Tensor(file, entry["dtype"], shape, 8 + length + first)
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CommandError(f"{file} cannot be read: {error}", error) from None


def compare(first: Path, second: Path, *, optimizer: bool = False) -> dict[str, Any]:
    """Compare the checkpoints in two directories and return the result as plain data."""
    configs = [_read_config(first), _read_config(second)]
    tensors = [read_tensors(first, optimizer=optimizer), read_tensors(second, optimizer=optimizer)]
    common = [name for name in tensors[0] if name in tensors[1]]
    alike = [name for name in common if tensors[0][name].shape == tensors[1][name].shape]
    compared = [
        _compare(name, tensors[0][name].shape, [(tensors[0][name].read(), tensors[1][name].read())])
        for name in alike
    ]
    pairs = _pairs(*tensors)
    for module, names in pairs.items():
        shape = (tensors[0][names[1]].shape[0], tensors[0][names[0]].shape[1])
        compared.append(_compare(f"{module} (B·A)", shape, _products(names, tensors, configs)))
    norm = math.sqrt(sum(entry["norm"] ** 2 for entry in compared))
    whole = math.sqrt(sum(entry.pop("first_norm") ** 2 for entry in compared))
    data: dict[str, Any] = {
        "config": {
            name: [config.get(name) for config in configs]
            for name in sorted(configs[0].keys() | configs[1].keys())
            if configs[0].get(name) != configs[1].get(name)
        },
        "only_in_first": [name for name in tensors[0] if name not in tensors[1]],
        "only_in_second": [name for name in tensors[1] if name not in tensors[0]],
        "shapes": {
            name: [list(side[name].shape) for side in tensors]
            for name in common
            if name not in set(alike)
        },
        "products": sorted(pairs),
        "tensors": sorted(compared, key=_most_different),
        "summary": {
            "compared": len(compared),
            "different": sum(entry["max"] != 0 for entry in compared),
            "max": _largest([entry["max"] for entry in compared]),
            "norm": norm,
            "relative": _ratio(norm, whole) if compared else None,
        },
    }
    data["same"] = (
        not any(data[name] for name in ("config", "only_in_first", "only_in_second", "shapes"))
        and not (data["summary"]["different"])
    )
    return data


def _read_config(directory: Path) -> Mapping[str, Any]:
    try:
        found = json.loads((directory / CONFIG).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise CommandError(f"{directory / CONFIG} cannot be read: {error}", error) from None
    return found if isinstance(found, dict) else {}


def _compare(name: str, shape: Sequence[int], blocks: Iterable[Sides]) -> dict[str, Any]:
    """Compare the numbers of a tensor, block by block."""
    import numpy as np

    largest = norm = whole = 0.0
    for ours, theirs in blocks:
        with np.errstate(invalid="ignore"):  # infinities that are equal
            difference = np.where(ours == theirs, 0.0, ours - theirs)
        largest = _largest([largest, float(np.abs(difference).max(initial=0.0))])
        norm = math.hypot(norm, float(np.linalg.norm(difference)))
        whole = math.hypot(whole, float(np.linalg.norm(ours)))
    return {
        "name": name,
        "shape": list(shape),
        "max": largest,
        "norm": norm,
        "relative": _ratio(norm, whole),
        "first_norm": whole,
    }


# ── adapters of different ranks ───────────────────────────────────────────────────────────────────


def _pairs(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> dict[str, tuple[str, str]]:
    """Return the names of A and B by module, where both have them and only ranks differ."""
    found = {}
    for name in first:
        match = FACTOR.fullmatch(name)
        if match is None or match["side"] != "A":
            continue
        names = (name, f"{match['module']}.lora_{match['kind']}B{match['end']}")
        factors = [side.get(factor) for side in (first, second) for factor in names]
        shapes = [factor.shape for factor in factors if factor is not None]
        if [len(shape) for shape in shapes] != [2, 2, 2, 2]:
            continue
        a, b, other_a, other_b = shapes
        fits = a[0] == b[1] and other_a[0] == other_b[1]
        if fits and a[0] != other_a[0] and (b[0], a[1]) == (other_b[0], other_a[1]):
            found[match["module"]] = names
    return found


def _products(
    names: tuple[str, str],
    sides: Sequence[Mapping[str, Tensor]],
    configs: Sequence[Mapping[str, Any]],
) -> Iterator[Sides]:
    """Yield the scaled products B·A of both, some rows at a time to save memory."""
    factors = []
    for side, config in zip(sides, configs, strict=True):
        a, b = (side[name].read().reshape(side[name].shape) for name in names)
        factors.append((a, b * _scale(config, a.shape[0])))
    (a, b), (other_a, other_b) = factors
    rows = max(1, BLOCK // max(a.shape[1], 1))
    for start in range(0, b.shape[0], rows):
        yield b[start : start + rows] @ a, other_b[start : start + rows] @ other_a


def _scale(config: Mapping[str, Any], rank: int) -> float:
    """Return the factor of an adapter's product: alpha over the rank or its root, else 1."""
    alpha = config.get("lora_alpha")
    if not isinstance(alpha, int | float) or not rank:
        return 1.0
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _ratio(norm: float, whole: float) -> float | None:
    """Return the relative difference, or None if there is nothing to compare with."""
    if norm == 0:
        return 0.0
    return norm / whole if whole else None


def _most_different(entry: Mapping[str, Any]) -> float:
    relative = entry["relative"]
    return -math.inf if relative is None or math.isnan(relative) else -float(relative)


def _largest(values: Sequence[float]) -> float:
    return math.nan if any(math.isnan(value) for value in values) else max(values, default=0.0)


@click.command(short_help="Compare two checkpoints.")
@click.argument("first", metavar="FIRST")
@click.argument("second", metavar="SECOND")
@option("--limit", "Number of tensors to list; 0 means all.", default=20, least=0)
@switch("--optimizer", help="Compare the optimizer states too.")
@switch("--exit-code", help="Exit with 1 if they differ.")
@reporting
def diff(
    first: str,
    second: str,
    limit: int,
    optimizer: bool,
    exit_code: bool,
    connection: Connection,
) -> Outcome:
    """Compare two checkpoints: settings, tensors that only one has, and relative differences.

    Each is a tinker:// path, which is downloaded first, or a directory. The relative difference is
    the norm of the difference over the norm of the first. Adapters of different ranks are compared
    by what they add to the weights: the scaled products B·A.
    """
    import tempfile

    remote = [checked_path(place) for place in (first, second) if place.startswith("tinker://")]
    with contextlib.ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tinkex-diff-")))
        fetched = _fetch(connection, dict.fromkeys(remote), scratch)
        places = [fetched.get(place) or _local(place) for place in (first, second)]
        with waiting("comparing"):
            data = {"first": first, "second": second, **compare(*places, optimizer=optimizer)}
    return Outcome(
        data,
        exit_code=1 if exit_code and not data["same"] else 0,
        show=lambda: _print(data, limit),
    )


def _fetch(connection: Connection, paths: Mapping[str, None], scratch: Path) -> dict[str, Path]:
    if not paths:
        return {}
    from tinkex.cli.transfers import fetch

    with connection.rest() as rest:
        return {path: fetch(rest, path, scratch, resume=False).destination for path in paths}


def _local(place: str) -> Path:
    directory = Path(place).expanduser()
    if not directory.is_dir():
        raise CommandError(f"{place} is neither a tinker:// path nor a directory")
    return directory


def _print(data: Mapping[str, Any], limit: int) -> None:
    for name, (ours, theirs) in data["config"].items():
        click.echo(f"Config {name}: {json.dumps(ours)} -> {json.dumps(theirs)}")
    for side, label in (("only_in_first", "first"), ("only_in_second", "second")):
        for name in data[side]:
            click.echo(f"Only in the {label}: {name}")
    if data["products"]:
        click.echo(
            f"Of different ranks, compared by their products B·A: {len(data['products'])} modules"
        )
    for name, (ours, theirs) in data["shapes"].items():
        if (match := FACTOR.fullmatch(name)) is not None and match["module"] in data["products"]:
            continue
        click.echo(f"Shape of {name}: {ours} -> {theirs}")
    different = [entry for entry in data["tensors"] if entry["max"] != 0]
    shown = different[:limit] if limit else different
    if shown:
        rows = [
            (
                entry["name"],
                "x".join(map(str, entry["shape"])),
                f"{entry['max']:.3e}",
                _percent(entry["relative"]),
            )
            for entry in shown
        ]
        print_table(f"Tensors that differ ({len(shown)}/{len(different)})", COLUMNS, rows)
    summary = data["summary"]
    if data["same"]:
        click.echo(f"No difference: {summary['compared']} tensors are equal.")
        return
    print_fields(
        {
            "Compared": f"{summary['compared']} tensors, {summary['different']} differ",
            "Largest difference": f"{summary['max']:.3e}",
            "Norm of the difference": f"{summary['norm']:.6g}",
            "Relative": _percent(summary["relative"]),
        }
    )


def _percent(ratio: float | None) -> str:
    return "N/A" if ratio is None else f"{ratio:.3%}"
