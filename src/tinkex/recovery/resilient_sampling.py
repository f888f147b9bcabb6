"""Samplers that are opened again when the server has lost them."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from tinkex.client.futures.streams import SampleStream
from tinkex.client.http.retry import RetryConfig
from tinkex.client.sampling_client import SamplingClient, open_sampler, open_sampling_client
from tinkex.client.session import Session
from tinkex.errors import RequestFailedError
from tinkex.recovery.recorder import LOST
from tinkex.types.sampled import SampleResponse
from tinkex.types.sampling import SampleRequest

T = TypeVar("T")


async def reopened(session: Session) -> None:
    """Open a session again if the server has lost it."""
    known = session.session_id
    if await session.is_lost():
        await session.renew(known)


class ResilientSamplingClient(SamplingClient):
    """A sampler of saved weights that is opened again when the server has lost it."""

    _model_path: str
    _reopening: asyncio.Lock

    async def _sample(self, request: SampleRequest, *options: Any) -> SampleResponse:
        draw = super()._sample
        return await self._again(request, lambda asked: draw(asked, *options))

    async def _stream(
        self, stream: SampleStream, request: SampleRequest, timeout: float | None
    ) -> None:
        read = super()._stream
        await self._again(request, lambda asked: read(stream, asked, timeout))

    async def _again(
        self, request: SampleRequest, call: Callable[[SampleRequest], Awaitable[T]]
    ) -> T:
        """Make a call, and once more if it failed because the sampler is gone."""
        known = self.sampling_session_id
        try:
            return await call(request.model_copy(update={"sampling_session_id": known}))
        except (*LOST, RequestFailedError) as error:
            async with self._reopening:
                if self.sampling_session_id == known:
                    if isinstance(error, RequestFailedError) and not await self._session.is_lost():
                        raise
                    await self._reopen()
            return await call(
                request.model_copy(update={"sampling_session_id": self.sampling_session_id})
            )

    async def _reopen(self) -> None:
        await reopened(self._session)
        fresh = await open_sampling_client(self._session, model_path=self._model_path)
        self.sampling_session_id, self._poller = fresh.sampling_session_id, None


async def open_resilient(
    session: Session, model_path: str, retry_config: RetryConfig | None, record_stability_info: bool
) -> ResilientSamplingClient:
    """Open a sampler of saved weights, and the session if the server has lost that."""
    make = functools.partial(
        ResilientSamplingClient,
        retry_config=retry_config,
        record_stability_info=record_stability_info,
    )
    try:
        client = await open_sampler(session, make, model_path=model_path)
    except LOST:
        await reopened(session)
        client = await open_sampler(session, make, model_path=model_path)
    client._model_path, client._reopening = model_path, asyncio.Lock()
    return client
