"""Receipts: submit a call, and wait for its result later or in another process."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from tinkex.client.futures.api_future import Future
from tinkex.client.futures.result_polling import Receipt
from tinkex.client.outbox import Fetch, Outbox
from tinkex.client.training_parts.call_arguments import (
    checked_config,
    checked_data,
    step_request,
)
from tinkex.errors import TinkerError
from tinkex.types.inputs import Datum
from tinkex.types.optimizers import AdamParams, OptimParams
from tinkex.types.training import LossFnConfig, UntypedAPIFuture
from tinkex.wire import protocol
from tinkex.wire.protocol import Operation

Retrieve: TypeAlias = Callable[[Operation, str, Any], Future[Any]]


class Receipts:
    """Calls of a training run that return receipts; see `TrainingClient.receipts`.

    Example:
        >>> [receipt] = client.receipts.forward_backward(data, "cross_entropy").result()
        >>> client.receipts.retrieve(receipt).result().metrics["loss:sum"]
        10.6...
    """

    __slots__ = ("_outbox", "_retrieve")

    def __init__(self, outbox: Outbox, retrieve: Retrieve) -> None:
        self._outbox, self._retrieve = outbox, retrieve

    def forward(
        self, data: Sequence[Datum], loss_fn: str, loss_fn_config: LossFnConfig | None = None
    ) -> Future[list[UntypedAPIFuture]]:
        """Submit a forward pass and return its receipts, one per chunk.

        Args:
            data: The examples.
            loss_fn: The name of a loss.
            loss_fn_config: Settings of that loss.

        Returns:
            A future of the receipts.

        Example:
            >>> receipts = client.receipts.forward(data, "cross_entropy").result()
            >>> client.receipts.retrieve(receipts[0], "forward").result().metrics["loss:sum"]
            10.6...
        """
        return self._pass(data, loss_fn, loss_fn_config, forward_only=True)

    def forward_backward(
        self, data: Sequence[Datum], loss_fn: str, loss_fn_config: LossFnConfig | None = None
    ) -> Future[list[UntypedAPIFuture]]:
        """Submit a pass and return its receipts, one per chunk; see `forward`.

        Example:
            >>> [receipt] = client.receipts.forward_backward(data, "cross_entropy").result()
            >>> receipt.request_id
            '...:train:0:1'
        """
        return self._pass(data, loss_fn, loss_fn_config, forward_only=False)

    def optim_step(
        self, optim_params: OptimParams | None = None, *, adam_params: AdamParams | None = None
    ) -> Future[UntypedAPIFuture]:
        """Submit a step and return its receipt.

        Args:
            optim_params: The hyper-parameters of this step.
            adam_params: The same, under its older name.

        Returns:
            A future of the receipt.

        Example:
            >>> receipt = client.receipts.optim_step(AdamParams(learning_rate=1e-4)).result()
            >>> client.receipts.retrieve(receipt, "optim_step").result()
            OptimStepResponse(metrics={...})
        """
        request = step_request(self._outbox.model_id, optim_params, adam_params)

        async def turn(outbox: Outbox, place: int) -> Fetch[UntypedAPIFuture]:
            receipt = await outbox.send(protocol.OPTIM_STEP, request)
            return functools.partial(_public, receipt)

        return self._outbox.put("optim_step", turn)

    def _pass(
        self,
        data: Sequence[Datum],
        loss_fn: str,
        config: LossFnConfig | None,
        *,
        forward_only: bool,
    ) -> Future[list[UntypedAPIFuture]]:
        items, settings = checked_data(data), checked_config(loss_fn, config)

        async def turn(outbox: Outbox, place: int) -> Fetch[list[UntypedAPIFuture]]:
            chunks = outbox.chunks(items)
            receipts = await outbox.send_pass(chunks, loss_fn, settings, forward_only)

            async def fetch() -> list[UntypedAPIFuture]:
                return [await _public(receipt) for receipt in receipts]

            return fetch

        return self._outbox.put("forward" if forward_only else "forward_backward", turn)

    def retrieve(
        self, request: UntypedAPIFuture | str, operation: str = "forward_backward", **options: Any
    ) -> Future[Any]:
        """Wait for an operation that was submitted before, here or elsewhere.

        Args:
            request: Its receipt, or the request id in it.
            operation: Its name, e.g. "forward_backward", "optim_step" or "save_weights".
            options: How to wait for the result; see `CallOptions`.

        Returns:
            A future of the operation's result.

        Raises:
            ValueError: There is no such operation, or no request id.

        Example:
            >>> [receipt] = client.receipts.forward_backward(data, "cross_entropy").result()
            >>> client.receipts.retrieve(receipt.request_id).result().metrics["loss:sum"]
            10.6...
        """
        request_id = request if isinstance(request, str) else getattr(request, "request_id", None)
        op = protocol.BY_NAME.get(operation)
        if not request_id or not isinstance(request_id, str):
            raise ValueError(f"expected a request id or a receipt with one, got {request!r}")
        if op is None or op.result is None:
            names = ", ".join(
                sorted(name for name, known in protocol.BY_NAME.items() if known.result is not None)
            )
            raise ValueError(f"{operation!r} is not an operation with a future; those are: {names}")
        return self._retrieve(op, request_id, options)


async def _public(receipt: Receipt) -> UntypedAPIFuture:
    """Return a receipt as programs see it.

    Raises:
        TinkerError: The server gave the result itself.
    """
    if receipt.request_id is None:
        raise TinkerError(
            f"{receipt.op.name}: the server answered with the result itself, there is no future to "
            "wait for",
            hint="call the method of the client instead, which takes both",
        )
    return UntypedAPIFuture(request_id=receipt.request_id)
