"""Plans of a fleet: `--workers`, and the file of `--cluster`."""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

from tinkex.cluster.link import Launch, Recipe
from tinkex.cluster.process import Role, WorkerProcess
from tinkex.cluster.remote import RemoteEngine
from tinkex.errors import ConfigurationError

Shared: TypeAlias = Literal["auto", "yes", "no"]
FORMS = "local, local:N, ray or ray:HOST:PORT"


@dataclass(frozen=True, slots=True)
class WorkersOption:
    """A parsed `--workers`.

    Attributes:
        kind: `local` for processes on this machine, `ray` for actors.
        count: The number of workers; 0 means the engine is in the server's own process.
        address: The address of a Ray cluster; None starts one on this machine.
    """

    kind: Literal["local", "ray"] = "local"
    count: int = 0
    address: str | None = None

    @classmethod
    def parse(cls, text: str) -> WorkersOption:
        """Read the value of `--workers`.

        Raises:
            ConfigurationError: It has another form.
        """
        kind, colon, rest = text.partition(":")
        if colon and not rest:
            kind = ""
        if kind == "local" and (not rest or (rest.isdigit() and int(rest) > 0)):
            return cls("local", int(rest or 0))
        if kind == "ray" and (not rest or re.fullmatch(r"\S+:\d+", rest)):
            return cls("ray", 1, rest or None)
        raise ConfigurationError(f"workers {text!r} is not understood", hint=f"give {FORMS}")


@dataclass(frozen=True, slots=True)
class ReplicaPlan:
    """One worker of a fleet."""

    name: str
    recipe: Recipe
    role: Role = "both"
    gpus: float = 0


@dataclass(frozen=True, slots=True)
class Group:
    """The workers of one role for a base model."""

    replicas: int
    gpus: float = 0


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """The workers of a base model."""

    name: str
    directory: str = ""
    dtype: str | None = None
    trainers: Group = field(default_factory=lambda: Group(1))
    samplers: Group = field(default_factory=lambda: Group(0))


def read_plan(path: Path) -> list[ModelPlan]:
    """Read the file of `--cluster`.

    Raises:
        ConfigurationError: It cannot be read, or something in it is not understood.
    """
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigurationError(
            f"the cluster file {path} cannot be read: {error.strerror or error}"
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"the cluster file {path} is not TOML: {error}") from None
    at = f"{path}:"
    _check_keys(at, content, {"models"})
    models = content.get("models", {})
    if not isinstance(models, dict) or not models:
        raise ConfigurationError(f"{at} names no model", hint='add a table [models."NAME"]')
    return [_model(f"{at} models.{name!r}", name, fields) for name, fields in models.items()]


def _model(at: str, name: str, fields: Any) -> ModelPlan:
    _check_table(at, fields)
    _check_keys(at, fields, {"directory", "dtype", "trainers", "samplers"})
    for key in ("directory", "dtype"):
        if not isinstance(fields.get(key, ""), str):
            raise ConfigurationError(f"{at}.{key} must be a text, got {fields[key]!r}")
    trainers = _group(f"{at}.trainers", fields.get("trainers", {}), 1)
    samplers = _group(f"{at}.samplers", fields.get("samplers", {"replicas": 0}), 0)
    if not trainers.replicas:
        raise ConfigurationError(
            f"{at}.trainers.replicas is 0: nothing could be trained",
            hint="give at least one trainer; it samples too while there are no samplers",
        )
    return ModelPlan(name, fields.get("directory", ""), fields.get("dtype"), trainers, samplers)


def _group(at: str, fields: Any, fewest: int) -> Group:
    _check_table(at, fields)
    _check_keys(at, fields, {"kind", "replicas", "gpus"})
    if (kind := fields.get("kind", "own")) != "own":
        raise ConfigurationError(
            f"{at}.kind {kind!r} is not supported", hint='leave it out, or give "own"'
        )
    replicas, gpus = fields.get("replicas", 1), fields.get("gpus", 0)
    if not isinstance(replicas, int) or isinstance(replicas, bool) or replicas < 0:
        raise ConfigurationError(f"{at}.replicas must be a whole number, got {replicas!r}")
    if isinstance(gpus, bool) or not isinstance(gpus, int | float) or not 0 <= gpus <= 1:
        raise ConfigurationError(
            f"{at}.gpus must be between 0 and 1, got {gpus!r}",
            hint="a worker uses one GPU or a part of one; ask for more replicas",
        )
    return Group(replicas, gpus)


def _check_table(at: str, fields: Any) -> None:
    if not isinstance(fields, dict):
        raise ConfigurationError(f"{at} must be a table, got {fields!r}")


def _check_keys(at: str, fields: Mapping[str, Any], known: set[str]) -> None:
    for key in fields:
        if key not in known:
            near = difflib.get_close_matches(key, known, 1)
            raise ConfigurationError(
                f"{at} has an unknown key {key!r}",
                hint=f"did you mean {near[0]!r}?"
                if near
                else f"known are {', '.join(sorted(known))}",
            )


def plan_replicas(
    workers: WorkersOption,
    models: Mapping[str, str | Path],
    *,
    engine: str,
    device: str,
    dtype: str | None,
    cluster: Sequence[ModelPlan] = (),
) -> list[ReplicaPlan]:
    """List the workers of a fleet: those of a cluster file, or equal ones of all models."""
    if not cluster:
        gpus = 1 if workers.kind == "ray" and device == "cuda" else 0
        threads = max(1, (os.cpu_count() or 1) // max(1, workers.count))
        recipe = Recipe(engine, models, device, dtype, threads if device == "cpu" else None)
        return [
            ReplicaPlan(f"worker-{number}", recipe, gpus=gpus)
            for number in range(max(1, workers.count))
        ]
    found = []
    for model in cluster:
        short = re.sub(r"[^a-z0-9.]+", "-", model.name.lower()).strip("-")
        for role, group in (("trainer", model.trainers), ("sampler", model.samplers)):
            place = "cuda" if group.gpus else "cpu" if device == "auto" else device
            recipe = Recipe(engine, {model.name: model.directory}, place, model.dtype or dtype)
            shown: Role = "sampler" if role == "sampler" else "trainer"
            if role == "trainer" and not model.samplers.replicas:
                shown = "both"
            found += [
                ReplicaPlan(f"{short}-{role}-{number}", recipe, shown, group.gpus)
                for number in range(group.replicas)
            ]
    return found


def make_engines(
    workers: WorkersOption,
    plans: Sequence[ReplicaPlan],
    data_dir: Path,
    shared: Shared = "auto",
) -> list[RemoteEngine]:
    """Return the engines of a fleet, which have not been connected.

    Raises:
        ConfigurationError: Ray is not installed, or its cluster cannot be joined.
    """
    gpus = iter(range(len(plans)))
    visible = data_dir.expanduser().resolve() if shared != "no" else None
    engines = []
    if workers.kind == "ray":
        try:
            from tinkex.cluster.ray_link import StartActor, join
        except ImportError as error:
            raise ConfigurationError(
                f"Ray cannot be imported: {error}",
                hint="pip install 'tinkex[ray]', on every machine of the cluster",
            ) from error
        join(workers.address)
    for plan in plans:
        launch: Launch
        if workers.kind == "ray":
            name = f"{data_dir.resolve()}/{plan.name}"
            launch = StartActor(name, plan.recipe, plan.gpus)
        else:
            from tinkex.cluster.processes import StartProcess

            on_gpu = plan.gpus or plan.recipe.device == "cuda"
            launch = StartProcess(plan.recipe, next(gpus) if on_gpu else None)
        process = WorkerProcess(plan.name, launch, visible, must_share=shared == "yes")
        engines.append(RemoteEngine(process, plan.role))
    return engines
