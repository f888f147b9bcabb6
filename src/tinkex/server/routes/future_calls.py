"""Poll for many samples at once, and cancel samples."""

from __future__ import annotations

from tinkex.server.access.ownership import is_own
from tinkex.server.calls import Call
from tinkex.server.routes.batch_poll import poll
from tinkex.server.routes.handler_table import handler
from tinkex.server.state import State
from tinkex.server.workers.sample_jobs import CANCELLED
from tinkex.types.sessions import (
    CancelFutureRequest,
    Empty,
    FuturesRetrieveResponse,
)
from tinkex.wire.codec import Body


@handler
async def retrieve_futures(state: State, call: Call) -> FuturesRetrieveResponse | Body:
    """Say which samples of a client have ended, and bring their results along if that is asked for."""
    return await poll(state, call.request)


@handler
async def cancel_future(state: State, call: Call) -> Empty:
    """Give a sample up. Whatever has a place in a run's order is carried out all the same, and what
    has ended stays.
    """
    request: CancelFutureRequest = call.request
    promise = state.promises.get(request.request_id)
    if (
        promise is not None
        and promise.cancel is not None
        and await is_own(state, call.owner, "request_id", request.request_id)
    ):
        promise.cancel()
        promise.fail(CANCELLED)
    return Empty()
