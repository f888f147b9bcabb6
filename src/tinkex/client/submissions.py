"""Submissions: the part of a session that submits operations."""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Callable, Container, Coroutine, Mapping
from typing import Any

from tinkex.client.futures.result_polling import Receipt
from tinkex.client.http import legacy_servers
from tinkex.client.http.exchange import Reply
from tinkex.client.http.transport import Transport
from tinkex.errors import APIStatusError, TinkerError
from tinkex.types.sessions import ClientConfigResponse
from tinkex.wire import codec
from tinkex.wire.protocol import Operation

logger = logging.getLogger("tinkex")


class Submissions:
    """A transport, and the server's configuration of what is sent over it."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.client_config = ClientConfigResponse()
        self._trials: set[asyncio.Future[Reply]] = set()

    async def submit(
        self,
        op: Operation,
        request: Any,
        *,
        headers: Mapping[str, str] | None = None,
        patience: float | None = None,
        final: Container[int] = (),
    ) -> Receipt:
        """Submit an operation; the receipt names its future, or holds the result."""
        named = ("model_id", "model_seq_id", "seq_id", "sampling_session_id")
        facts = {
            name: value for name in named if (value := getattr(request, name, None)) is not None
        }
        started = time.monotonic()

        options = {"headers": headers, "patience": patience, "final": final, "metadata": facts}
        if self.transport.is_older is None and legacy_servers.shows_dialect(op, request):
            reply = await self._try_both(functools.partial(self._post, op, request, options))
        else:
            reply = await self._post(op, request, options, self.transport.is_older or False)
        return legacy_servers.read_receipt(
            self.transport, legacy_servers.called(op, request), reply, started
        )

    async def _post(
        self, op: Operation, request: Any, options: dict[str, Any], older: bool, **other: Any
    ) -> Reply:
        spoken, body = await _written(op, request, older, self.client_config.proto_compress_fwdbwd)
        return await self.transport.request(spoken, body, **(options | other))

    async def _try_both(self, post: Callable[..., Coroutine[Any, Any, Reply]]) -> Reply:
        """Send a first pass in the newer form, else in the older one."""
        trial = asyncio.ensure_future(post(False))
        self._trials.add(trial)
        trial.add_done_callback(self._trials.discard)
        try:
            reply = await trial
        except APIStatusError as refused:
            if refused.status_code not in legacy_servers.UNREADABLE:
                raise
            # if another is read, this one was refused for its content
            if others := self._trials - {trial}:
                await asyncio.wait(others)
            if self.transport.is_older is False:
                raise
            if self.transport.is_older:
                return await post(True)
            try:
                reply = await post(True, patience=0.0)
            except TinkerError:
                raise refused from None
            self.transport.is_older = True
            logger.info("%s reads no protobuf: passes are sent to it as JSON", self.transport.place)
            return reply
        self.transport.is_older = False
        return reply


async def _written(
    op: Operation, request: Any, older: bool, compress: bool
) -> tuple[Operation, codec.Body]:
    """Encode a request; passes are large, so they are encoded in a thread."""
    if older:
        return await asyncio.to_thread(legacy_servers.for_older, op, request)
    if legacy_servers.is_pass(op):
        return legacy_servers.called(op, request), await asyncio.to_thread(
            legacy_servers.write_pass, request, compress
        )
    return op, codec.encode(request)
