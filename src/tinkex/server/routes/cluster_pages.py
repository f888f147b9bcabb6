"""Workers: list them, drain them, and say which of them is not ready."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
from starlette.responses import JSONResponse, Response

from tinkex.engine.api import EngineError
from tinkex.server.access.endpoints import Access, Endpoint, Group
from tinkex.server.calls import Call
from tinkex.server.database.interface import LOCAL_OWNER
from tinkex.server.http_errors import Refusal
from tinkex.server.state import State
from tinkex.server.workers.worker import Worker
from tinkex.wire.prometheus import family, labels
from tinkex.wire.protocol import OPEN, PREFIX

THIS_PROCESS = "this process"


class DrainRequest(msgspec.Struct):
    """The workers to drain: one by its name, or all of a machine."""

    node: str


async def readiness(state: State, call: Call) -> Response:
    """Say whether every base model has a worker, and which workers are not ready."""
    failures = {
        name_of(worker): str(worker.failure)
        for worker in state.workers
        if worker.failure is not None and not _is_drained(state, worker)
    }
    is_ready = not state.is_draining and all(
        any(worker.failure is None for worker in state.workers.of_model(model))
        for model in state.workers.models()
    )
    body = {"status": "ready" if is_ready else "not ready", "workers": failures}
    return JSONResponse(body, 200 if is_ready else 503)


async def cluster(state: State, call: Call) -> Response:
    """List the workers."""
    return JSONResponse({"workers": [_about(state, worker) for worker in state.workers]})


async def drain(state: State, call: Call) -> Response:
    """Move what is at home on a machine's workers to others, and end them."""
    if call.owner != LOCAL_OWNER:
        raise Refusal(403, "draining workers needs the key of the server's operator")
    if state.fleet is None:
        raise Refusal(400, "this server has no workers in other processes; see --workers")
    node: str = call.request.node
    names = [
        name
        for name, replica in state.fleet.replicas.items()
        if node == name
        or (replica.engine.process.info is not None and node == replica.engine.process.info.node)
    ]
    if not names:
        known = sorted({*state.fleet.replicas, *_nodes(state)})
        raise Refusal(404, f"there is no worker or machine {node!r}; there are {', '.join(known)}")
    try:
        await state.fleet.drain(names)
    except EngineError as error:
        raise Refusal(409, str(error)) from None
    return JSONResponse({"drained": names})


def _nodes(state: State) -> set[str]:
    assert state.fleet is not None
    infos = (replica.engine.process.info for replica in state.fleet.replicas.values())
    return {info.node for info in infos if info is not None}


def name_of(worker: Worker) -> str:
    """Return the name of a worker, as people read it."""
    return worker.name or THIS_PROCESS


def _is_drained(state: State, worker: Worker) -> bool:
    replica = state.fleet.replicas.get(worker.name) if state.fleet is not None else None
    return replica is not None and replica.is_drained


def _about(state: State, worker: Worker) -> Mapping[str, Any]:
    about = {
        "name": name_of(worker),
        "role": worker.role,
        "models": [model.name for model in worker.engine.models()],
        "runs": len(worker.runs),
        "samples": worker.samples.open,
        "weights": state.loaded.count(worker),
        "state": "ready" if worker.failure is None else "failed",
        "reason": None if worker.failure is None else str(worker.failure),
    }
    replica = state.fleet.replicas.get(worker.name) if state.fleet is not None else None
    if replica is not None:
        info = replica.engine.process.info
        about |= {
            "state": replica.state,
            "node": None if info is None else info.node,
            "place": None if info is None else info.place,
            "epoch": replica.engine.process.epoch,
            "starts": replica.starts,
            "since": replica.since,
            "sees_data": None if info is None else info.sees,
        }
    return about


def worker_metrics(state: State) -> Iterator[str]:
    """Yield the figures of each worker, for Prometheus."""
    workers = list(state.workers)
    steps = {
        labels(replica=name_of(worker), kind=kind): count
        for worker in workers
        for kind, count in worker.stepper.steps.items()
    }
    yield from family(
        "tinkex_worker_steps_total", "counter", "Steps of a worker's engine, by kind.", steps
    )
    for name, kind, told, value in (
        ("up", "gauge", "1 if the worker's engine is there.", lambda one: one.failure is None),
        ("runs", "gauge", "Runs at home on the worker.", lambda one: len(one.runs)),
        ("samples", "gauge", "Samples on the worker that have not ended.", _samples),
        ("starts_total", "counter", "Starts of the worker's process.", _starts(state)),
    ):
        found = {labels(replica=name_of(worker)): int(value(worker)) for worker in workers}
        yield from family(f"tinkex_worker_{name}", kind, told, found)


def _samples(worker: Worker) -> int:
    return worker.samples.open


def _starts(state: State) -> Any:
    replicas = {} if state.fleet is None else state.fleet.replicas

    def starts(worker: Worker) -> int:
        return replicas[worker.name].starts if worker.name in replicas else 1

    return starts


async def waiting_reason(state: State, request_id: str) -> str | None:
    """Return why a request waits for a worker, if it does."""
    if not any(worker.is_lost for worker in state.workers):
        return None
    owner = request_id.rpartition(":")[0]
    found = await asyncio.to_thread(
        lambda: state.database.runs.get(owner) or state.database.samplers.get(owner)
    )
    models = state.workers.models() if found is None else [found.base_model]
    return next(filter(None, map(state.workers.waiting_for, models)), None)


CLUSTER = Group(
    "",
    [
        Endpoint("ready", "GET", "/readyz", readiness, access=Access.PUBLIC, owned_by=OPEN),
        Endpoint("cluster", "GET", f"{PREFIX}/cluster", cluster, owned_by=OPEN),
        Endpoint(
            "drain", "POST", f"{PREFIX}/cluster/drain", drain, request=DrainRequest, owned_by=OPEN
        ),
    ],
)
