"""TrainingPasses: the base of TrainingClient, with the methods that compute losses and train."""

from __future__ import annotations

import asyncio
import functools
import time
import warnings
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Unpack

from tinkex.client.futures.api_future import Future, unlisted, users_level
from tinkex.client.futures.queue_states import QueueStateLogger, QueueStateTracker
from tinkex.client.futures.reductions import combine
from tinkex.client.futures.result_polling import Receipt, retrieve
from tinkex.client.futures.twins import twin
from tinkex.client.losses import loss_graphs
from tinkex.client.losses.custom_passes import CustomLoss, CustomPass
from tinkex.client.losses.loss_graphs import LossHandle
from tinkex.client.outbox import PARTIAL, Fetch, Outbox, Poison, Turn
from tinkex.client.receipts import Receipts
from tinkex.client.session_client import SessionClient
from tinkex.client.training_parts.call_arguments import (
    CallOptions,
    check_options,
    checked_config,
    checked_data,
    step_request,
)
from tinkex.errors import RequestFailedError
from tinkex.types.custom_losses import RegularizerSpec
from tinkex.types.inputs import Datum
from tinkex.types.optimizers import AdamParams, OptimParams
from tinkex.types.sessions import (
    DropGradientsRequest,
    DropGradientsResponse,
    GetInfoRequest,
    GetInfoResponse,
    UnloadModelRequest,
    UnloadModelResponse,
)
from tinkex.types.training import ForwardBackwardOutput, LossFnConfig, OptimStepResponse
from tinkex.wire import protocol
from tinkex.wire.protocol import Operation

if TYPE_CHECKING:
    from tinkex.client.session import Session

T = TypeVar("T")


class TrainingPasses(SessionClient):
    """One training run: passes over data, optimizer steps and receipts."""

    _takes_foreign_losses = False
    """True if a `LossHandle` of another session may be used, with a second pass."""

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

    def forward(
        self,
        data: Sequence[Datum],
        loss_fn: str,
        loss_fn_config: LossFnConfig | None = None,
        **options: Unpack[CallOptions],
    ) -> Future[ForwardBackwardOutput]:
        """Compute the loss and log-probabilities of data, without a gradient.

        Args:
            data: The examples.
            loss_fn: The name of a loss, e.g. "cross_entropy".
            loss_fn_config: Settings of that loss.
            options: How to wait for the result; see `CallOptions`.

        Returns:
            A future of one record of tensors per datum, and metrics.

        Raises:
            ValueError: The data is empty, or there is no such loss.

        Example:
            >>> result = client.forward(data, "cross_entropy").result()
            >>> result.loss_fn_outputs[0]["logprobs"].tolist()
            [-4..., -2..., ...]
        """
        return self._pass(data, loss_fn, loss_fn_config, options, forward_only=True)

    def forward_backward(
        self,
        data: Sequence[Datum],
        loss_fn: str,
        loss_fn_config: LossFnConfig | None = None,
        **options: Unpack[CallOptions],
    ) -> Future[ForwardBackwardOutput]:
        """Compute the loss of data and add its gradient for the next `optim_step`.

        Args:
            data: The examples. Their losses are summed, never averaged.
            loss_fn: The name of a loss, e.g. "cross_entropy", "importance_sampling" or "ppo".
            loss_fn_config: Settings of that loss.
            options: How to wait for the result; see `CallOptions`.

        Returns:
            A future of one record of tensors per datum, and metrics.

        Raises:
            ValueError: The data is empty, or there is no such loss.

        Example:
            >>> tokens = client.encode("12+34=46")
            >>> datum = Datum(ModelInput.from_ints(tokens[:-1]), {"target_tokens": tokens[1:]})
            >>> client.forward_backward([datum], "cross_entropy").result().metrics["loss:sum"]
            10.6...
        """
        return self._pass(data, loss_fn, loss_fn_config, options, forward_only=False)

    forward_async = twin(forward)
    forward_backward_async = twin(forward_backward)

    @property
    def receipts(self) -> Receipts:
        """The calls that return receipts, to wait for results later or elsewhere.

        Example:
            >>> [receipt] = client.receipts.forward_backward(data, "cross_entropy").result()
            >>> client.receipts.retrieve(receipt).result().metrics["loss:sum"]
            10.6...
        """
        return Receipts(self._outbox, self._retrieve)

    def _retrieve(self, op: Operation, request_id: str, options: CallOptions) -> Future[Any]:
        check_options(options)
        future: Future[Any] = self._session.call(
            self._result, Receipt(op, time.monotonic(), request_id), options
        )
        self._session.track(future)
        return future

    def _pass(
        self,
        data: Sequence[Datum],
        loss_fn: str,
        config: LossFnConfig | None,
        options: CallOptions,
        *,
        forward_only: bool,
    ) -> Future[ForwardBackwardOutput]:
        items, settings = checked_data(data), checked_config(loss_fn, config)
        check_options(options)
        return self._outbox.put(
            "forward" if forward_only else "forward_backward",
            lambda outbox, _: self._send_pass(
                outbox, outbox.chunks(items), loss_fn, settings, options, forward_only
            ),
        )

    async def _send_pass(
        self,
        outbox: Outbox,
        chunks: list[list[Datum]],
        loss_fn: str,
        config: LossFnConfig | None,
        options: CallOptions,
        forward_only: bool = False,
    ) -> Fetch[ForwardBackwardOutput]:
        receipts = await outbox.send_pass(chunks, loss_fn, config, forward_only)

        async def fetch() -> ForwardBackwardOutput:
            try:
                return combine(
                    await _in_order([self._result(receipt, options) for receipt in receipts])
                )
            except RequestFailedError as error:
                if len(receipts) > 1 and not forward_only and error.hint is None:
                    error.hint = (
                        f"the call was sent in {len(receipts)} chunks; "
                        f"{PARTIAL.format('those that succeed')}"
                    )
                raise

        return fetch

    def forward_backward_custom(
        self,
        data: Sequence[Datum],
        loss_fn: CustomLoss | LossHandle,
        *,
        loss_type_input: Literal["logprobs"] | None = None,
        regularizers: Sequence[RegularizerSpec] = (),
        **options: Unpack[CallOptions],
    ) -> Future[ForwardBackwardOutput]:
        """Train on any loss written in torch, with a second pass over the data.

        A `LossHandle` may need no second pass.

        Args:
            data: The examples; each needs `target_tokens`.
            loss_fn: Takes the data and the list of their log-probability tensors; returns the loss
                and metrics. Or what `ServiceClient.create_custom_loss` returned.
            loss_type_input: Deprecated; log-probabilities are the only input there is.
            regularizers: Terms to add to the loss; `tinkex.regularizers.regularized` has more
                settings.
            options: How to wait for the result; see `CallOptions`.

        Returns:
            A future of the outputs; `metrics["loss:sum"]` is the custom loss.

        Raises:
            ValueError: The data is empty, a datum has no target tokens, the handle belongs to
                another session, or two regularizers have the same name.

        Example:
            >>> loss = lambda data, logprobs: (
            ...     -sum(one.sum() for one in logprobs),
            ...     {"texts": float(len(data))},
            ... )
            >>> result = client.forward_backward_custom(data, loss).result()
            >>> result.metrics["loss:sum"], result.metrics["texts"]
            (10.6..., 1.0)
        """
        if loss_type_input is not None:
            if loss_type_input != "logprobs":
                raise ValueError(f"loss_type_input must be 'logprobs', got {loss_type_input!r}")
            warnings.warn(
                "loss_type_input has no effect and will go: leave it out",
                DeprecationWarning,
                stacklevel=users_level(),
            )
        originals = checked_data(data)
        check_options(options)
        if isinstance(loss_fn, LossHandle):
            is_ours = self._has_loss(loss_fn)
            loss_graphs.check_inputs(loss_fn, originals)
            # Regularizers are computed by the client.
            if is_ours and loss_fn.loss_id is not None and not regularizers:
                return self._put_handle(originals, loss_fn, options)
            loss_fn = loss_graphs.per_datum(loss_fn)
        if regularizers:
            from tinkex.regularizers.pipeline import regularized  # needs torch

            loss_fn = regularized(loss_fn, regularizers)
        custom = CustomPass(originals, loss_fn)

        def turn(outbox: Outbox, place: int) -> Awaitable[Fetch[ForwardBackwardOutput]]:
            return self._send_custom(outbox, custom, place, options)

        return self._outbox.put("forward_backward_custom", turn, spoils=True)

    forward_backward_custom_async = twin(forward_backward_custom)

    def _has_loss(self, handle: LossHandle) -> bool:
        """Tell whether a handle belongs to this session; raise if it must and does not."""
        is_ours = handle.session_id == self._session.session_id
        if not is_ours and not self._takes_foreign_losses:
            raise ValueError(
                f"the loss {handle.name!r} belongs to another session: create it again in this one"
            )
        return is_ours

    def _put_handle(
        self, data: list[Datum], handle: LossHandle, options: CallOptions
    ) -> Future[ForwardBackwardOutput]:
        """Queue a pass whose loss the server computes."""
        settings = checked_config("custom", {"loss_id": handle.loss_id or ""})

        def turn(outbox: Outbox, place: int) -> Awaitable[Fetch[ForwardBackwardOutput]]:
            if self._has_loss(handle):
                chunks = outbox.chunks(data)
                return self._send_pass(outbox, chunks, "custom", settings, options)
            # The server's copy went with its session.
            custom = CustomPass(data, loss_graphs.per_datum(handle))
            return self._send_custom(outbox, custom, place, options)

        return self._outbox.put("forward_backward_custom", turn)

    async def _send_custom(
        self, outbox: Outbox, custom: CustomPass, place: int, options: CallOptions
    ) -> Fetch[ForwardBackwardOutput]:
        def submit(
            chunks: list[list[Datum]], forward_only: bool
        ) -> Awaitable[Fetch[ForwardBackwardOutput]]:
            return self._send_pass(outbox, chunks, "cross_entropy", None, options, forward_only)

        spoil = functools.partial(outbox.poison.spread, place)
        return await custom.run(outbox.chunks(custom.prepared), submit, spoil)

    def optim_step(
        self,
        optim_params: OptimParams | None = None,
        *,
        adam_params: AdamParams | None = None,
        **options: Unpack[CallOptions],
    ) -> Future[OptimStepResponse]:
        """Apply the accumulated gradient and clear it.

        Args:
            optim_params: The hyper-parameters of this step.
            adam_params: The same, under its older name.
            options: How to wait for the result; see `CallOptions`.

        Returns:
            A future of the step's metrics, if the server gives any.

        Raises:
            ValueError: Both were given.
            TypeError: Neither was given, or something else.

        Example:
            >>> passed = client.forward_backward(data, "cross_entropy")
            >>> client.optim_step(AdamParams(learning_rate=1e-4)).result().metrics
            {'grad_norm:mean': ..., 'learning_rate:mean': 0.0001}
        """
        request = step_request(self.model_id, optim_params, adam_params)
        return self._put(protocol.OPTIM_STEP, request, options)

    optim_step_async = twin(
        optim_step, "call TrainingClient.optim_step() before waiting for the passes of the step"
    )

    def drop_gradients(self) -> DropGradientsResponse:
        """Drop the gradient gathered since the last step, on servers that offer it.

        A run that cannot step goes on afterwards.

        Example:
            >>> passed = client.forward_backward(data, "cross_entropy")
            >>> client.drop_gradients()
            DropGradientsResponse(model_id='...:train:0', ...)
            >>> client.optim_step(AdamParams(learning_rate=1e-3)).result().metrics["grad_norm:mean"]
            0.0
        """
        return self._dropping().result()

    @unlisted
    async def drop_gradients_async(self) -> DropGradientsResponse:
        """Like `drop_gradients`."""
        return await self._dropping()

    def _dropping(self) -> Future[DropGradientsResponse]:
        return self._put(protocol.DROP_GRADIENTS, DropGradientsRequest(model_id=self.model_id), {})

    def unload_model(self) -> UnloadModelResponse:
        """Let the server forget the live state of this run, on servers that offer it.

        The run's checkpoints stay.

        Example:
            >>> client.unload_model()
            UnloadModelResponse(model_id='...:train:0', ...)
        """
        return self._unloading().result()

    @unlisted
    async def unload_model_async(self) -> UnloadModelResponse:
        """Like `unload_model`."""
        return await self._unloading()

    def _unloading(self) -> Future[UnloadModelResponse]:
        async def turn(outbox: Outbox, place: int) -> Fetch[UnloadModelResponse]:
            request = UnloadModelRequest(model_id=outbox.model_id)
            receipt = await self._session.submit(protocol.UNLOAD_MODEL, request)
            return functools.partial(retrieve, self._session.transport, receipt)

        return self._outbox.put(protocol.UNLOAD_MODEL.name, turn, Poison.ALWAYS)


async def info_of(session: Session, model_id: str) -> GetInfoResponse:
    """Ask the server for the description of a run."""
    info: GetInfoResponse = await session.transport.call(
        protocol.GET_INFO, GetInfoRequest(model_id=model_id)
    )
    return info


async def _in_order(work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Return all results; on the first failure raise it and cancel the rest."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return [await task for task in tasks]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
