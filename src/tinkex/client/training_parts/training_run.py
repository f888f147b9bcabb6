"""TrainingRun: the base of TrainingClient, with its session and its outbox."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tinkex.client.futures.api_future import Future
from tinkex.client.futures.queue_states import QueueStateLogger, QueueStateTracker
from tinkex.client.futures.result_polling import Receipt, retrieve
from tinkex.client.outbox import Fetch, Outbox, Turn
from tinkex.client.session_client import SessionClient
from tinkex.client.training_parts.call_arguments import CallOptions, check_options
from tinkex.types.model_requests import GetInfoResponse
from tinkex.wire.protocol import Operation

if TYPE_CHECKING:
    from tinkex.client.session import Session


class TrainingRun(SessionClient):
    """One training run, and the way to call an operation of it."""

    def __init__(
        self,
        holder: Session,
        model_seq_id: int,
        model_id: str,
        *,
        info: GetInfoResponse | None = None,
        first_seq_id: int = 1,
    ) -> None:
        self._session = holder
        self.model_seq_id = model_seq_id
        self.model_id = model_id
        self._known_info = info
        self._outbox = Outbox(holder, model_id, first_seq_id)
        self._queue_states = QueueStateLogger("Training")
        self._loaded_tokenizer: Any = None
        self._asking = asyncio.Lock()

    @property
    def _base_model(self) -> str | None:
        """The name of the base model, if it is known."""
        return self._known_info.model_data.model_name if self._known_info is not None else None

    def on_queue_state_change(
        self, queue_state: Any, queue_state_reason: str | None = None
    ) -> None:
        """Log a pause of the server's queue that lasts 15 minutes, then once a minute.

        The client calls it each time the server reports its queue, and with "active" at the end of
        each request.

        Args:
            queue_state: "active", "paused_capacity" or "paused_rate_limit".
            queue_state_reason: The server's reason, if it gives one.

        Example:
            >>> client.on_queue_state_change("paused_capacity", "all machines are taken")
        """
        self._queue_states.on_queue_state_change(
            queue_state, queue_state_reason, name=self.model_id
        )

    async def _result(self, receipt: Receipt, options: CallOptions) -> Any:
        """Wait for the result of a receipt, with the options of the call."""
        facts = {"session_id": self._session.session_id, "model_id": self.model_id}
        observer, listener = options.get("queue_state_observer"), self.on_queue_state_change
        tracker = QueueStateTracker([observer], facts, listener=listener)
        try:
            return await retrieve(
                self._session.transport,
                receipt,
                timeout=options.get("timeout"),
                notice=tracker.heard,
            )
        finally:
            tracker.ended()

    def _put(
        self,
        op: Operation,
        request: Any,
        options: CallOptions,
        convert: Callable[[Any], Any] | None = None,
    ) -> Future[Any]:
        """Queue an operation of one request."""
        return self._outbox.put(op.name, self._turn(op, request, options, convert))

    def _turn(
        self,
        op: Operation,
        request: Any,
        options: CallOptions,
        convert: Callable[[Any], Any] | None = None,
    ) -> Turn[Any]:
        check_options(options)

        async def turn(outbox: Outbox, place: int) -> Fetch[Any]:
            receipt = await outbox.send(op, request)

            async def fetch() -> Any:
                result = await self._result(receipt, options)
                return convert(result) if convert else result

            return fetch

        return turn
