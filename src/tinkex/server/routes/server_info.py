"""Report the configuration, the capabilities and the health of the server."""

from __future__ import annotations

from tinkex.engine.losses.table import LOSSES
from tinkex.server.calls import Call
from tinkex.server.routes.handler_table import handler
from tinkex.server.state import State
from tinkex.types.sessions import (
    ClientConfigRequest,
    ClientConfigResponse,
    ClientDynamicConfigResponse,
    GetServerCapabilitiesResponse,
    HealthResponse,
    SupportedModel,
    TelemetryResponse,
    TelemetrySendRequest,
)


@handler
async def client_config(state: State, call: Call) -> ClientConfigResponse:
    """Configure clients. A call is one request, so that bad data leaves no half of its gradient."""
    assert isinstance(call.request, ClientConfigRequest)
    return ClientConfigResponse(
        pjwt_auth_enabled=state.tokens,
        fwdbwd_max_chunk_len=1_000_000,
        fwdbwd_max_chunk_bytes_count=256_000_000,
        create_model_via_load_weights=True,
        sample_join_sampling_session=True,
        # without the results, a batched poll costs one more round trip
        sample_use_retrieve_futures=False,
        custom_loss_server_side=True,
        batched_results=True,
        proto_write_fwdbwd=True,
        fwd_via_fwdbwd=True,
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
