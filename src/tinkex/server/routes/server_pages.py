"""Describe the server and its health; list the endpoints of other pages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from starlette.responses import JSONResponse, Response

from tinkex._version import __version__
from tinkex.engine.losses.table import LOSSES
from tinkex.engine.stepping import SAMPLING, TRAINING
from tinkex.server.access.endpoints import Access, Endpoint, Group
from tinkex.server.calls import Call
from tinkex.server.routes import openapi
from tinkex.server.routes.cluster_pages import worker_metrics
from tinkex.server.routes.exports import DOWNLOAD, download
from tinkex.server.routes.handler_table import HANDLERS, handler
from tinkex.server.routes.records import MISNAMED, misnamed
from tinkex.server.routes.session_calls import TRACE, trace
from tinkex.server.routes.uploads import UPLOAD, upload
from tinkex.server.state import State
from tinkex.types.record import to_json
from tinkex.types.server_facts import GetServerCapabilitiesResponse, HealthResponse, SupportedModel
from tinkex.types.sessions import (
    ClientConfigRequest,
    ClientConfigResponse,
    ClientDynamicConfigResponse,
)
from tinkex.types.telemetry import TelemetryResponse, TelemetrySendRequest
from tinkex.wire import codec
from tinkex.wire.prometheus import CONTENT_TYPE, family, labels
from tinkex.wire.protocol import BY_HANDLER, OPEN, PREFIX

TOKENS = {"training": "training", "prefill": "prefill", "sample": "sampled"}


FEATURES = (
    "create_model_via_load_weights",
    "sample_join_sampling_session",
    "custom_loss_server_side",
    "batched_results",
    "proto_write_fwdbwd",
    "fwd_via_fwdbwd",
)
"""Optional parts of the protocol that this server has."""


# ── operations ────────────────────────────────────────────────────────────────────────────────────


@handler
async def client_config(state: State, call: Call) -> ClientConfigResponse:
    """Configure clients.

    A call is one request, so that bad data leaves no half of its gradient.
    """
    assert isinstance(call.request, ClientConfigRequest)
    features: dict[str, Any] = dict.fromkeys(FEATURES, True)
    return ClientConfigResponse(
        pjwt_auth_enabled=state.tokens,
        fwdbwd_max_chunk_len=1_000_000,
        fwdbwd_max_chunk_bytes_count=256_000_000,
        # without the results, a batched poll costs one more round trip
        sample_use_retrieve_futures=False,
        **features,
    )


@handler
async def client_dynamic_config(state: State, call: Call) -> ClientDynamicConfigResponse:
    """Report that nothing changes while a client runs."""
    return ClientDynamicConfigResponse(sample_cancel_enabled=True)


class Capabilities(GetServerCapabilitiesResponse, frozen=True, kw_only=True):
    """The server's capabilities, with a field that the protocol does not have."""

    own_losses: dict[str, str]
    """Losses of the protocol that this server computes in its own form, with that form."""


OWN_LOSSES = {name: loss.own_form for name, loss in LOSSES.items() if loss.own_form}


@handler
async def get_server_capabilities(state: State, call: Call) -> Capabilities:
    """Report the models, and the losses that have a form of our own."""
    return Capabilities(
        own_losses=OWN_LOSSES,
        supported_models=[
            SupportedModel(
                model_name=model.name,
                max_context_length=model.context_length,
                trainable=True,
                sampleable=True,
            )
            for model in state.workers.models().values()
        ],
    )


@handler
async def healthz(state: State, call: Call) -> HealthResponse:
    """Report health: all is well unless the engine's thread has died."""
    state.workers.refuse_if_dead()
    return HealthResponse(status="ok")


@handler
async def telemetry(state: State, call: Call) -> TelemetryResponse:
    """Accept the events of a client, and do not keep them."""
    assert isinstance(call.request, TelemetrySendRequest)
    return TelemetryResponse(status="accepted")


# ── pages ─────────────────────────────────────────────────────────────────────────────────────────


async def front(state: State, call: Call) -> Response:
    """Say what this server is."""
    access = "key required" if await state.accounts.needs_key() else "open"
    return JSONResponse({"name": "tinkex", "version": __version__, "api": PREFIX, "access": access})


async def description(state: State, call: Call) -> Response:
    """Describe the operations that are served."""
    document = openapi.describe(frozenset(HANDLERS), state.mounted)
    return Response(to_json(document), media_type=codec.JSON)


async def metrics(state: State, call: Call) -> Response:
    """Report all figures."""
    return Response(metrics_text(state), media_type=CONTENT_TYPE)


def metrics_text(state: State) -> str:
    """Return all figures of a server."""
    lines = (*state.metrics.lines(), *_of_state(state), *worker_metrics(state))
    return "".join(f"{line}\n" for line in lines)


def _of_state(state: State) -> Iterator[str]:
    meter, made = state.meter, state.workers.steps()
    waiting: Counter[str] = Counter()
    for (_, operation), count in meter.open.items():
        waiting[operation] += count
    tokens = {labels(kind=name): int(meter.totals[kind]) for kind, name in TOKENS.items()}
    steps = {labels(kind=kind): made[kind] for kind in (TRAINING, SAMPLING)}
    queued = {labels(operation=operation): count for operation, count in waiting.items()}
    samplers = len(state.samplers.loaded) + len(state.samplers.nameless.in_memory())
    yield from family("tinkex_tokens_total", "counter", "Tokens, by their use.", tokens)
    yield from family("tinkex_engine_steps_total", "counter", "Engine steps, by kind.", steps)
    open_now = "Operations accepted and not ended, queued or running."
    yield from family("tinkex_open_operations", "gauge", open_now, queued)
    for name, meaning, value in (
        ("tinkex_samples_in_flight", "Sample requests that have not ended.", waiting["asample"]),
        ("tinkex_live_runs", "Training runs whose adapters are loaded.", len(state.runs)),
        ("tinkex_samplers", "Weights held in memory to sample from.", samplers),
        ("tinkex_open_sessions", "Sessions that are open.", len(state.sessions)),
        ("tinkex_kept_results", "Futures on record, ended or not.", len(state.promises)),
        ("tinkex_start_time_seconds", "When the server was started.", state.metrics.began),
    ):
        yield from family(name, "gauge", meaning, {"": value})


PUBLIC = Access.PUBLIC
"""Also for pages whose address is signed: no key is needed."""
PAGES = Group(
    "",
    [
        Endpoint("front", "GET", "/", front, access=PUBLIC, owned_by=OPEN),
        Endpoint("openapi", "GET", openapi.PATH, description, access=PUBLIC, owned_by=OPEN),
        Endpoint("metrics", "GET", "/metrics", metrics, owned_by=OPEN),
        Endpoint("trace", "GET", TRACE.path, trace, access=PUBLIC, owned_by=BY_HANDLER),
        Endpoint("download", "GET", DOWNLOAD.path, download, access=PUBLIC, owned_by=BY_HANDLER),
        Endpoint("upload", "PUT", UPLOAD.path, upload, access=PUBLIC, owned_by=OPEN),
        *(
            Endpoint("misnamed", method, MISNAMED, misnamed, access=PUBLIC, owned_by=BY_HANDLER)
            for method in ("GET", "POST", "PUT", "PATCH", "DELETE")
        ),
    ],
)
