"""TrainingClient: passes, optimizer steps and checkpoints of one training run, in the order they
were called.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
import warnings
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import (
    TYPE_CHECKING,
    Any,
    Literal,
    NoReturn,
    TypeAlias,
    TypedDict,
    TypeVar,
    Unpack,
    get_args,
)
from urllib.parse import quote

import numpy as np

from tinkex.client.futures.api_future import Future, start, unlisted, users_level
from tinkex.client.futures.loop_thread import runtime
from tinkex.client.futures.queue_states import Observer, QueueStateLogger, QueueStateTracker
from tinkex.client.futures.reductions import combine
from tinkex.client.futures.sampling_future import BackcompatSamplingClientFuture, open_later
from tinkex.client.futures.twins import deprecated, twin, value_twin
from tinkex.client.http.legacy_servers import Receipt
from tinkex.client.http.limits import ByteBudget
from tinkex.client.http.request_names import name_requests
from tinkex.client.http.retry import RetryConfig
from tinkex.client.losses import caller_losses, loss_graphs
from tinkex.client.losses.custom_passes import CustomPass, Poison, check_torch
from tinkex.client.losses.loss_graphs import LossHandle
from tinkex.client.receipts import Receipts, public
from tinkex.client.sampling_client import SamplingClient, checked_kind, open_sampling_client
from tinkex.errors import (
    APIConnectionError,
    APIResponseValidationError,
    RequestFailedError,
    TinkerError,
)
from tinkex.tokenizers import LoadFunction, get_or_load_tokenizer, tokenizer_id_of
from tinkex.types.checkpoints import (
    CONSOLE,
    LoadWeightsRequest,
    LoadWeightsResponse,
    SamplingClientKind,
    SaveWeightsExternalRequest,
    SaveWeightsExternalResponse,
    SaveWeightsForSamplerRequest,
    SaveWeightsForSamplerResponse,
    SaveWeightsForSamplerResponseInternal,
    SaveWeightsRequest,
    SaveWeightsResponse,
)
from tinkex.types.custom_losses import RegularizerSpec
from tinkex.types.inputs import Datum
from tinkex.types.training import (
    AdamParams,
    DimuonParams,
    DropGradientsRequest,
    DropGradientsResponse,
    ForwardBackwardInput,
    ForwardBackwardOutput,
    ForwardBackwardRequest,
    GetInfoRequest,
    GetInfoResponse,
    LossFnConfig,
    LossFnType,
    OptimParams,
    OptimParamsBase,
    OptimStepRequest,
    OptimStepResponse,
    UnloadModelRequest,
    UnloadModelResponse,
    UntypedAPIFuture,
)
from tinkex.wire import protocol
from tinkex.wire.protocol import Operation

if TYPE_CHECKING:
    from tinkex.client.session import Session
    from tinkex.telemetry import Reporter

T = TypeVar("T")

LOSS_FNS: tuple[str, ...] = get_args(LossFnType)
PARTIAL = "the gradient of {} counts in the next optim_step: load a saved state to be rid of it"
SPEND_PATIENCE = 5.0
TEXTS = frozenset({"loss_id"})
"""Settings of losses that are text, whatever it looks like."""

Fetch: TypeAlias = Callable[[], Awaitable[T]]
Turn: TypeAlias = Callable[[], Awaitable[Fetch[T]]]
"""Submits a call when its turn comes, and returns what fetches its result."""


class Outbox:
    """Lets calls out one at a time, in the order they were made; each result is then fetched on its
    own.

    A request takes its number when it is sent, so a call cancelled while it waits leaves no gap. A
    submission that has begun is always carried through (`_carried`), so the server never waits for
    a number that was taken and not sent; and a call that fails or is cancelled gives its turn up
    like any other.
    """

    def __init__(self, session: Session, first_seq_id: int = 1) -> None:
        self._session = session
        self._next = first_seq_id
        self._turn = asyncio.Lock()  # hands over in the order of asking
        self.poison = Poison()
        # Chunks being encoded and sent are all in memory a second time: two or so at once keep the
        # line busy.
        config = session.client_config
        self.budget = ByteBudget(
            min(config.fwdbwd_dispatch_bytes_semaphore_size, config.fwdbwd_max_chunk_bytes_count)
        )

    def take(self) -> int:
        """The next request number; only a call whose turn it is may ask."""
        self._next += 1
        return self._next - 1

    def put(self, turn: Turn[T], place: int | None = None) -> Future[T]:
        """Queue a call made now; its place among all calls says which failures are in front of it."""
        if self._session.closed:
            raise RuntimeError("ServiceClient is closed")
        future = start(self._go(turn, self.poison.place() if place is None else place))
        self._session.track(future)
        return future

    async def _go(self, turn: Turn[T], place: int) -> T:
        with self._session.reporting():
            return await self._take_turn(turn, place)
        raise AssertionError("unreachable")

    async def _take_turn(self, turn: Turn[T], place: int) -> T:
        async with self._turn:
            self.poison.check(place)
            fetch = await turn()
        return await fetch()


async def _carried(submission: Coroutine[Any, Any, T]) -> T:
    """Carry a submission through, even when its caller gives up meanwhile; that is then heeded
    afterwards.
    """
    task = runtime().task(submission)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise


def _checked(data: Sequence[Datum]) -> list[Datum]:
    """The data of a call, if it is any."""
    if isinstance(data, Datum):
        raise TypeError("data must be a list of Datum, not a single one")
    items = list(data)
    if not items:
        raise ValueError("data is empty: there is nothing to compute")
    for index, item in enumerate(items):
        if not isinstance(item, Datum):
            raise TypeError(
                f"data must be a list of Datum; item {index} is a {type(item).__name__}"
            )
    return items


class CallOptions(TypedDict, total=False):
    """How a call waits for its result.

    Example:
        >>> options: CallOptions = {"timeout": 60.0}
        >>> client.forward(data, "cross_entropy", **options).result().metrics["loss:sum"]
        10.6...
    """

    timeout: float | None
    """Seconds after which waiting is given up with APITimeoutError; the server carries the call out
    all the same."""
    queue_state_observer: Observer
    """Is told when the server's queue pauses or goes on, besides the log."""


def _check_options(options: CallOptions) -> None:
    """Refuse options that do not exist, and times that are none."""
    if unknown := set(options) - CallOptions.__annotations__.keys():
        raise TypeError(
            f"unknown option {min(unknown)!r}; known are {', '.join(CallOptions.__annotations__)}"
        )
    timeout = options.get("timeout")
    if timeout is not None and (
        isinstance(timeout, bool) or not isinstance(timeout, int | float) or not timeout > 0
    ):
        raise ValueError(f"timeout must be a positive number of seconds or None, got {timeout!r}")


def checked_config(loss_fn: str, config: LossFnConfig | None) -> LossFnConfig | None:
    """A loss's settings in one form: numbers as floats, also those given as text.

    A loss that does not exist, and a setting that is neither number nor text, are refused before
    anything is sent.
    """
    if not isinstance(loss_fn, str):
        raise TypeError(f"loss_fn must be the name of a loss, got {type(loss_fn).__name__}")
    if loss_fn not in LOSS_FNS:
        raise ValueError(
            f"there is no loss {loss_fn!r}; loss_fn must be one of {', '.join(LOSS_FNS)}"
        )
    if config is None:
        return None
    if not isinstance(config, Mapping):
        raise TypeError(f"loss_fn_config must be a mapping, got {type(config).__name__}")
    return {str(name): _setting(str(name), value) for name, value in config.items()}


def _setting(name: str, value: Any) -> float | str:
    if isinstance(value, bool) or not isinstance(value, str | int | float | np.number):
        raise ValueError(f"loss_fn_config[{name!r}] must be a number or text, got {value!r}")
    if isinstance(value, str):
        return value if name in TEXTS else _number_in(value)
    if not math.isfinite(value):
        raise ValueError(f"loss_fn_config[{name!r}] must be a finite number, got {value!r}")
    return float(value)


def _number_in(text: str) -> float | str:
    try:
        number = float(text)
    except ValueError:
        return text
    return number if math.isfinite(number) else text


def _checked_ttl(seconds: int | None) -> int | None:
    if seconds is not None and (
        isinstance(seconds, bool) or not isinstance(seconds, int) or seconds <= 0
    ):
        raise ValueError(f"ttl_seconds must be a positive whole number or None, got {seconds!r}")
    return seconds


async def _outcome(work: Awaitable[T]) -> T | Exception:
    """What some work gives, or the error that it ends with."""
    try:
        return await work
    except Exception as error:
        return error


async def _in_order(work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """All results, or the error of the first that fails; those after it are then waited for no
    longer.
    """
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return [await task for task in tasks]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@name_requests
class TrainingClient:
    """One training run. Calls return at once; the server executes them in the order they were made.

    In the examples `client` is one; `help(tinkex)` shows how the others, such as `data`, are made.

    Example:
        >>> client = service.create_lora_training_client("tinkex/tiny", rank=16).result()
        >>> tokens = client.encode("12+34=46")
        >>> data = [Datum(ModelInput.from_ints(tokens[:-1]), {"target_tokens": tokens[1:]})]
        >>> passed = client.forward_backward(data, "cross_entropy")
        >>> stepped = client.optim_step(AdamParams(learning_rate=1e-3))
        >>> passed.result().metrics["loss:sum"], stepped.result().metrics["learning_rate:mean"]
        (10.6..., 0.001)
    """

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
        self._outbox = Outbox(holder, first_seq_id)
        self._queue_states = QueueStateLogger("Training")
        self._loaded_tokenizer: Any = None
        self._asking = asyncio.Lock()

    @property
    def holder(self) -> Session:
        """The session behind this client; what it offers may change in any release."""
        return self._session

    def get_telemetry(self) -> Reporter | None:
        """What reports this session's events to the hosted service; None when nothing does.

        Example:
            >>> from tinkex import telemetry
            >>> telemetry.log(
            ...     client.get_telemetry(), "evaluated", {"accuracy": 0.9}
            ... )  # False: nobody is told
            False
        """
        return self._session.telemetry

    def on_queue_state_change(
        self, queue_state: Any, queue_state_reason: str | None = None
    ) -> None:
        """Log a pause of the server's queue that lasts 15 minutes, then once a minute.

        It is called for every word about the queue, and with "active" at the end of each request.

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
        """The result behind a receipt, waited for as the call asked."""
        facts = {"session_id": self._session.session_id, "model_id": self.model_id}
        observer, listener = options.get("queue_state_observer"), self.on_queue_state_change
        tracker = QueueStateTracker([observer], facts, listener=listener)
        try:
            return await self._session.result(
                receipt, timeout=options.get("timeout"), notice=tracker.heard
            )
        finally:
            tracker.ended()

    # ── passes ────────────────────────────────────────────────────────────────────────────────────

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
            ValueError: There is no data, or no such loss.

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
        """Compute the loss of data and add its gradient to what the next `optim_step` applies.

        Args:
            data: The examples. Their losses are summed, never averaged.
            loss_fn: The name of a loss, e.g. "cross_entropy", "importance_sampling" or "ppo".
            loss_fn_config: Settings of that loss.
            options: How to wait for the result; see `CallOptions`.

        Returns:
            A future of one record of tensors per datum, and metrics.

        Raises:
            ValueError: There is no data.

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
        """The calls that give receipts, to wait for a result later or in another process.

        Example:
            >>> [receipt] = client.receipts.forward_backward(data, "cross_entropy").result()
            >>> client.receipts.retrieve(receipt).result().metrics["loss:sum"]
            10.6...
        """
        return Receipts(self)

    def _receipts_of_pass(
        self,
        data: Sequence[Datum],
        loss_fn: str,
        config: LossFnConfig | None,
        *,
        forward_only: bool,
    ) -> Future[list[UntypedAPIFuture]]:
        items, settings = _checked(data), checked_config(loss_fn, config)

        async def turn() -> Fetch[list[UntypedAPIFuture]]:
            receipts = await self._submit_data(self._chunks(items), loss_fn, settings, forward_only)

            async def fetch() -> list[UntypedAPIFuture]:
                return [public(receipt) for receipt in receipts]

            return fetch

        return self._outbox.put(turn)

    def _pass(
        self,
        data: Sequence[Datum],
        loss_fn: str,
        config: LossFnConfig | None,
        options: CallOptions,
        *,
        forward_only: bool,
    ) -> Future[ForwardBackwardOutput]:
        items, settings = _checked(data), checked_config(loss_fn, config)
        _check_options(options)
        return self._outbox.put(
            lambda: self._submit_pass(self._chunks(items), loss_fn, settings, forward_only, options)
        )

    async def _submit_pass(
        self,
        chunks: list[list[Datum]],
        loss_fn: str,
        config: LossFnConfig | None,
        forward_only: bool,
        options: CallOptions,
    ) -> Fetch[ForwardBackwardOutput]:
        receipts = await self._submit_data(chunks, loss_fn, config, forward_only)

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

    async def _submit_data(
        self,
        chunks: list[list[Datum]],
        loss_fn: str,
        config: LossFnConfig | None,
        forward_only: bool,
    ) -> list[Receipt]:
        requests = [
            ForwardBackwardRequest(
                model_id=self.model_id,
                seq_id=self._outbox.take(),
                forward_only=forward_only,
                forward_backward_input=ForwardBackwardInput(
                    data=chunk, loss_fn=loss_fn, loss_fn_config=dict(config) if config else None
                ),
            )
            for chunk in chunks
        ]
        return await _carried(self._submit_chunks(requests))

    def _chunks(self, data: list[Datum]) -> list[list[Datum]]:
        """Cut data so that no chunk holds too many datums or bytes; a datum that is too big goes
        alone.
        """
        config = self._session.client_config
        chunks: list[list[Datum]] = [[]]
        size = 0
        for datum in data:
            full, added = len(chunks[-1]) >= config.fwdbwd_max_chunk_len, datum.nbytes
            if chunks[-1] and (full or size + added > config.fwdbwd_max_chunk_bytes_count):
                chunks.append([])
                size = 0
            chunks[-1].append(datum)
            size += added
        return chunks

    async def _submit_chunks(self, requests: list[ForwardBackwardRequest]) -> list[Receipt]:
        """Send the chunks of one call, the first one last: the server can then take them in
        together.

        Every chunk is sent even when another is refused, so that no number is left out.
        """
        if not self._session.client_config.parallel_fwdbwd_chunks:
            outcomes = [
                await _outcome(self._submit(protocol.FORWARD_BACKWARD, request))
                for request in requests
            ]
        else:
            first, *others = [
                _outcome(self._submit(protocol.FORWARD_BACKWARD, request)) for request in requests
            ]
            later = await asyncio.gather(*others)
            outcomes = [await first, *later]
        failures = [outcome for outcome in outcomes if isinstance(outcome, Exception)]
        if failures:
            error, accepted = failures[0], len(outcomes) - len(failures)
            if (
                accepted
                and not requests[0].forward_only
                and isinstance(error, TinkerError)
                and error.hint is None
            ):
                error.hint = (
                    f"{accepted} of the call's {len(outcomes)} chunks were accepted; "
                    f"{PARTIAL.format('those')}"
                )
            raise error
        return [outcome for outcome in outcomes if isinstance(outcome, Receipt)]

    async def _submit(self, op: Operation, request: Any) -> Receipt:
        """Send a numbered request. One that cannot be sent, or is refused, has its number spent all
        the same.
        """
        try:
            async with self._outbox.budget.taken(self._size(request)):
                return await self._session.submit(op, request)
        except APIConnectionError:
            # It may have arrived or not. Whoever made the call need not wait until that is settled.
            runtime().task(self._spend(request.seq_id))
            raise
        except Exception:
            await self._spend(request.seq_id)
            raise

    @staticmethod
    def _size(request: Any) -> int:
        return (
            sum(d.nbytes for d in request.forward_backward_input.data)
            if hasattr(request, "forward_only")
            else 0
        )

    async def _spend(self, seq_id: int) -> None:
        """Use a number up with a pass over nothing, which fails: what comes after it would wait for
        it otherwise.
        """
        nothing = ForwardBackwardInput(data=[], loss_fn="cross_entropy")
        request = ForwardBackwardRequest(
            model_id=self.model_id, seq_id=seq_id, forward_only=True, forward_backward_input=nothing
        )
        with contextlib.suppress(TinkerError):
            await self._session.submit(protocol.FORWARD_BACKWARD, request, patience=SPEND_PATIENCE)

    def forward_backward_custom(
        self,
        data: Sequence[Datum],
        loss_fn: caller_losses.CustomLoss | LossHandle,
        *,
        loss_type_input: Literal["logprobs"] | None = None,
        regularizers: Sequence[RegularizerSpec] = (),
        **options: Unpack[CallOptions],
    ) -> Future[ForwardBackwardOutput]:
        """Train on any loss written in torch, at the price of a second pass; a `LossHandle` may
        save that.

        Args:
            data: The examples; each needs `target_tokens`.
            loss_fn: Takes the data and the list of their log-probability tensors; returns the loss
                and metrics. Or what `ServiceClient.create_custom_loss` gave.
            loss_type_input: Deprecated; log-probabilities are the only input there is.
            regularizers: Terms to add to the loss; `tinkex.regularizers.regularized` has more to
                set.
            options: How to wait for the result; see `CallOptions`.

        Returns:
            A future of the outputs; `metrics["loss:sum"]` is the custom loss.

        Raises:
            ValueError: There is no data, a datum has no target tokens, the handle is another
                session's, or the regularizers' names are not different.

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
        originals = _checked(data)
        _check_options(options)
        if isinstance(loss_fn, LossHandle):
            if loss_fn.session_id != self._session.session_id:
                raise ValueError(
                    f"the loss {loss_fn.name!r} belongs to another session: create it anew in this "
                    "one"
                )
            loss_graphs.check_inputs(loss_fn, originals)
            # those are the client's to compute
            if loss_fn.loss_id is not None and not regularizers:
                return self._pass(
                    originals, "custom", {"loss_id": loss_fn.loss_id}, options, forward_only=False
                )
            loss_fn = loss_graphs.per_datum(loss_fn)
        chosen: caller_losses.CustomLoss = loss_fn
        if regularizers:
            from tinkex.regularizers.pipeline import regularized  # needs torch

            chosen = regularized(loss_fn, regularizers)
        check_torch()
        custom = CustomPass(originals, chosen, self._outbox.poison)

        def submit(
            chunks: list[list[Datum]], forward_only: bool
        ) -> Awaitable[Fetch[ForwardBackwardOutput]]:
            return self._submit_pass(chunks, "cross_entropy", None, forward_only, options)

        future = self._outbox.put(
            lambda: custom.run(self._chunks(custom.prepared), submit), custom.place
        )
        custom.watch(future)
        return future

    forward_backward_custom_async = twin(forward_backward_custom)

    # ── steps and checkpoints ─────────────────────────────────────────────────────────────────────

    def _step_request(
        self, optim_params: OptimParams | None, adam_params: AdamParams | None
    ) -> OptimStepRequest:
        if optim_params is not None and adam_params is not None:
            raise ValueError("give optim_params or adam_params, not both")
        params = optim_params if optim_params is not None else adam_params
        if isinstance(params, AdamParams):
            return OptimStepRequest(model_id=self.model_id, adam_params=params)
        if isinstance(params, DimuonParams | OptimParamsBase):
            return OptimStepRequest(model_id=self.model_id, optimizer_params=params.model_dump())
        raise TypeError(f"optim_step needs AdamParams or DimuonParams, got {type(params).__name__}")

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
            A future of the step's metrics, as far as the server gives any.

        Raises:
            ValueError: Both were given.
            TypeError: Neither was given, or something else.

        Example:
            >>> passed = client.forward_backward(data, "cross_entropy")
            >>> client.optim_step(AdamParams(learning_rate=1e-4)).result().metrics
            {'grad_norm:mean': ..., 'learning_rate:mean': 0.0001}
        """
        return self._put(
            protocol.OPTIM_STEP, self._step_request(optim_params, adam_params), options
        )

    optim_step_async = twin(
        optim_step, "call TrainingClient.optim_step() before waiting for the passes of the step"
    )

    def _receipt_of_step(
        self, optim_params: OptimParams | None, adam_params: AdamParams | None
    ) -> Future[UntypedAPIFuture]:
        request = self._step_request(optim_params, adam_params)

        async def turn() -> Fetch[UntypedAPIFuture]:
            receipt = await _carried(self._submit(protocol.OPTIM_STEP, self._numbered(request)))

            async def fetch() -> UntypedAPIFuture:
                return public(receipt)

            return fetch

        return self._outbox.put(turn)

    def _retrieve(self, op: Operation, request_id: str, options: CallOptions) -> Future[Any]:
        _check_options(options)
        future: Future[Any] = self._session.start(
            self._result(Receipt(op, time.monotonic(), request_id), options)
        )
        self._session.track(future)
        return future

    def _numbered(self, request: Any) -> Any:
        return request.model_copy(update={"seq_id": self._outbox.take()})

    def _put(
        self,
        op: Operation,
        request: Any,
        options: CallOptions,
        convert: Callable[[Any], Any] | None = None,
    ) -> Future[Any]:
        """Queue an operation of one request; it gets its number when its turn comes."""
        _check_options(options)

        async def turn() -> Fetch[Any]:
            receipt = await _carried(self._submit(op, self._numbered(request)))

            async def fetch() -> Any:
                result = await self._result(receipt, options)
                return convert(result) if convert else result

            return fetch

        return self._outbox.put(turn)

    def save_state(
        self,
        name: str,
        ttl_seconds: int | None = None,
        overwrite: bool = False,
        user_metadata: dict[str, str] | None = None,
        **options: Unpack[CallOptions],
    ) -> Future[SaveWeightsResponse]:
        """Save weights and optimizer state under a name, to resume from.

        Args:
            name: Unique among this run's training checkpoints.
            ttl_seconds: Seconds after which the checkpoint expires; None keeps it.
            overwrite: Replace a checkpoint of that name.
            user_metadata: Kept beside the checkpoint.
            options: How to wait for the result; see `CallOptions`.

        Returns:
            A future of the answer; its `path` is what
            `ServiceClient.create_training_client_from_state` takes.

        Raises:
            ValueError: `ttl_seconds` is no positive whole number.

        Example:
            >>> client.save_state("step-100", ttl_seconds=86400).result().path
            'tinker://.../weights/step-100'
        """
        request = SaveWeightsRequest(
            model_id=self.model_id,
            path=name,
            ttl_seconds=_checked_ttl(ttl_seconds),
            overwrite=overwrite,
            user_metadata=user_metadata,
        )
        return self._put(protocol.SAVE_WEIGHTS, request, options)

    save_state_async = twin(save_state)

    def save_weights_for_sampler(
        self,
        name: str,
        ttl_seconds: int | None = None,
        user_metadata: dict[str, str] | None = None,
        **options: Unpack[CallOptions],
    ) -> Future[SaveWeightsForSamplerResponse]:
        """Save weights under a name, to sample from.

        Args:
            name: Unique among this run's sampler checkpoints.
            ttl_seconds: Seconds after which the checkpoint expires; None keeps it.
            user_metadata: Kept beside the checkpoint.
            options: How to wait for the result; see `CallOptions`.

        Returns:
            A future of the answer; its `path` is what `create_sampling_client` takes.

        Raises:
            ValueError: `ttl_seconds` is no positive whole number.

        Example:
            >>> path = client.save_weights_for_sampler("final").result().path
            >>> path
            'tinker://.../sampler_weights/final'
            >>> sampler = service.create_sampling_client(model_path=path).result()
        """
        request = SaveWeightsForSamplerRequest(
            model_id=self.model_id,
            path=name,
            ttl_seconds=_checked_ttl(ttl_seconds),
            user_metadata=user_metadata,
        )
        return self._put(
            protocol.SAVE_WEIGHTS_FOR_SAMPLER,
            request,
            options,
            lambda saved: SaveWeightsForSamplerResponse(
                path=self._path_of("save_weights_for_sampler", saved)
            ),
        )

    save_weights_for_sampler_async = twin(save_weights_for_sampler)

    def save_weights_external(
        self,
        name: str,
        ttl_seconds: int | None = None,
        age_encryption_recipients: list[str] | None = None,
        **options: Unpack[CallOptions],
    ) -> Future[SaveWeightsExternalResponse]:
        """Export weights as files that can be downloaded, on servers that offer it.

        Args:
            name: Unique among this run's exports.
            ttl_seconds: Seconds after which the export expires; None keeps it.
            age_encryption_recipients: Public keys to encrypt the files for.
            options: How to wait for the result; see `CallOptions`.

        Returns:
            A future of the answer; its `path` is what `tinkex.download` takes.

        Raises:
            ValueError: `ttl_seconds` is no positive whole number.

        Example:
            >>> client.save_weights_external("final").result().path
            'tinker://.../external_weights/final'
        """
        request = SaveWeightsExternalRequest(
            model_id=self.model_id,
            path=name,
            ttl_seconds=_checked_ttl(ttl_seconds),
            age_encryption_recipients=age_encryption_recipients,
        )
        return self._put(
            protocol.SAVE_WEIGHTS_EXTERNAL,
            request,
            options,
            lambda saved: SaveWeightsExternalResponse(
                path=self._path_of("save_weights_external", saved), type=saved.type
            ),
        )

    save_weights_external_async = twin(save_weights_external)

    def _path_of(self, operation: str, saved: Any) -> str:
        if not saved.path:
            raise APIResponseValidationError(
                f"{operation} at {self._session.transport.place}: the answer has no path"
            )
        return str(saved.path)

    def _sampler_of_now(
        self,
        retry_config: RetryConfig | None,
        record_stability_info: bool,
        kind: SamplingClientKind,
    ) -> Future[SamplingClient]:
        # The number is taken once: a request that is sent again must be the same request.
        request = SaveWeightsForSamplerRequest(
            model_id=self.model_id,
            sampling_session_seq_id=next(self._session.sampling_session_seq_ids),
            kind=kind,
        )

        async def turn() -> Fetch[SamplingClient]:
            checked_kind(kind)
            receipt = await _carried(
                self._submit(protocol.SAVE_WEIGHTS_FOR_SAMPLER, self._numbered(request))
            )

            async def fetch() -> SamplingClient:
                saved: SaveWeightsForSamplerResponseInternal = await self._result(receipt, {})
                if saved.sampling_session_id is None and saved.path is None:
                    raise APIResponseValidationError(
                        f"save_weights_for_sampler at {self._session.transport.place}: "
                        "the answer names neither a sampling session nor a path"
                    )
                return await open_sampling_client(
                    self._session,
                    model_path=saved.path,
                    sampling_session_id=saved.sampling_session_id,
                    retry_config=retry_config,
                    record_stability_info=record_stability_info,
                    known_model=self._base_model,
                )

            return fetch

        return self._outbox.put(turn)

    def save_weights_and_get_sampling_client(
        self,
        name: str | None = None,
        retry_config: RetryConfig | None = None,
        record_stability_info: bool = False,
        kind: SamplingClientKind = "snapshot",
    ) -> BackcompatSamplingClientFuture:
        """A sampler of the weights as they are after the calls made so far; it lives as long as the
        session.

        Args:
            name: Deprecated; it has no effect.
            retry_config: How samples that fail for a passing reason are treated.
            record_stability_info: Ask the server to keep what `stable_reinforce` needs.
            kind: "snapshot" stays on these weights. "inflight" goes on to the weights of later such
                saves.

        Returns:
            A future of the sampler; it fails with ValueError if there is no such kind.

        Example:
            >>> sampler = client.save_weights_and_get_sampling_client().result()
            >>> sampler.sample(prompt, 1, SamplingParams(max_tokens=8)).result()
            SampleResponse([SampledSequence(...)])
        """
        if name is not None:
            warnings.warn(
                "save_weights_and_get_sampling_client makes a nameless sampler, name has no "
                "effect: "
                "save_weights_for_sampler(name) saves under a name",
                DeprecationWarning,
                stacklevel=users_level(),
            )
        return BackcompatSamplingClientFuture(
            self._sampler_of_now(retry_config, record_stability_info, kind)
        )

    save_weights_and_get_sampling_client_async = value_twin(save_weights_and_get_sampling_client)

    def create_sampling_client(
        self,
        model_path: str,
        retry_config: RetryConfig | None = None,
        record_stability_info: bool = False,
    ) -> BackcompatSamplingClientFuture:
        """A sampler of a saved checkpoint.

        Args:
            model_path: A `tinker://…/sampler_weights/…` path.
            retry_config: How samples that fail for a passing reason are treated.
            record_stability_info: Ask the server to keep what `stable_reinforce` needs.

        Returns:
            A future of the sampler.

        Example:
            >>> path = client.save_weights_for_sampler("final").result().path
            >>> client.create_sampling_client(path).result()
            SamplingClient('...:sample:0')
        """
        return open_later(
            self._session,
            model_path=model_path,
            retry_config=retry_config,
            record_stability_info=record_stability_info,
        )

    create_sampling_client_async = value_twin(create_sampling_client)

    @deprecated("ServiceClient.create_training_client_from_state() makes a new run of a checkpoint")
    def load_state(
        self, path: str, weights_access_token: str | None = None, **options: Unpack[CallOptions]
    ) -> Future[LoadWeightsResponse]:
        """Replace this run's weights by a checkpoint's; the optimizer starts afresh.

        Deprecated: `ServiceClient.create_training_client_from_state` makes a new run of a
            checkpoint, which works on
        every server; replacing the weights of a run that has begun does not.

        Args:
            path: A `tinker://…/weights/…` path.
            weights_access_token: The key of the account that may read the checkpoint, when it is
                another one.
            options: How to wait for the result; see `CallOptions`.

        Returns:
            A future of the answer; its `path` is the checkpoint's.

        Example:
            >>> path = client.save_state("step-100").result().path
            >>> client.load_state(path).result().path
            'tinker://.../weights/step-100'
        """
        return self._load(path, False, weights_access_token, options)

    @deprecated(
        "ServiceClient.create_training_client_from_state_with_optimizer() makes a new run of a "
        "checkpoint"
    )
    def load_state_with_optimizer(
        self, path: str, weights_access_token: str | None = None, **options: Unpack[CallOptions]
    ) -> Future[LoadWeightsResponse]:
        """Replace this run's weights and optimizer state by a checkpoint's. Deprecated as
        `load_state` is.

        Args:
            path: A `tinker://…/weights/…` path.
            weights_access_token: The key of the account that may read the checkpoint, when it is
                another one.
            options: How to wait for the result; see `CallOptions`.

        Returns:
            A future of the answer; its `path` is the checkpoint's.

        Example:
            >>> path = client.save_state("step-100").result().path
            >>> client.load_state_with_optimizer(path).result().path
            'tinker://.../weights/step-100'
        """
        return self._load(path, True, weights_access_token, options)

    @deprecated("ServiceClient.create_training_client_from_state() makes a new run of a checkpoint")
    async def load_state_async(
        self, path: str, weights_access_token: str | None = None, **options: Unpack[CallOptions]
    ) -> Future[LoadWeightsResponse]:
        """Like `load_state`; awaiting it gives the future."""
        return self._load(path, False, weights_access_token, options)

    @deprecated(
        "ServiceClient.create_training_client_from_state_with_optimizer() makes a new run of a "
        "checkpoint"
    )
    async def load_state_with_optimizer_async(
        self, path: str, weights_access_token: str | None = None, **options: Unpack[CallOptions]
    ) -> Future[LoadWeightsResponse]:
        """Like `load_state_with_optimizer`; awaiting it gives the future."""
        return self._load(path, True, weights_access_token, options)

    def _load(
        self, path: str, optimizer: bool, token: str | None, options: CallOptions
    ) -> Future[LoadWeightsResponse]:
        request = LoadWeightsRequest(
            model_id=self.model_id, path=path, optimizer=optimizer, weights_access_token=token
        )
        return self._put(protocol.LOAD_WEIGHTS, request, options)

    def drop_gradients(self) -> DropGradientsResponse:
        """Drop the gradient gathered since the last step, on servers that offer it; a run that
        cannot step goes on.

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
        """Let the server forget this run's live state, on servers that offer it; its checkpoints
        stay.

        Example:
            >>> client.unload_model()
            UnloadModelResponse(model_id='...:train:0', ...)
        """
        return self._outbox.put(self._unloading, Poison.ALWAYS).result()

    @unlisted
    async def unload_model_async(self) -> UnloadModelResponse:
        """Like `unload_model`."""
        return await self._outbox.put(self._unloading, Poison.ALWAYS)

    async def _unloading(self) -> Fetch[UnloadModelResponse]:
        receipt = await self._session.submit(
            protocol.UNLOAD_MODEL, UnloadModelRequest(model_id=self.model_id)
        )

        async def fetch() -> UnloadModelResponse:
            unloaded: UnloadModelResponse = await self._session.result(receipt)
            return unloaded

        return fetch

    # ── about the run ─────────────────────────────────────────────────────────────────────────────

    async def _info(self) -> GetInfoResponse:
        """What this run trains: learnt when it was made, or asked for once of a server that did not
        know then.
        """
        async with self._asking:
            if self._known_info is None:
                self._known_info = await info_of(self._session, self.model_id)
            return self._known_info

    @property
    def _base_model(self) -> str | None:
        """The name of the base model, where it is known."""
        return self._known_info.model_data.model_name if self._known_info is not None else None

    def get_info(self) -> GetInfoResponse:
        """What this run trains; no request is needed.

        Example:
            >>> client.get_info().model_data.model_name
            'tinkex/tiny'
        """
        return (
            self._session.call(self._info).result()
            if self._known_info is None
            else self._known_info
        )

    @deprecated("call TrainingClient.get_info(), which makes no request")
    async def get_info_async(self) -> GetInfoResponse:
        """Deprecated: use `get_info`, which makes no request."""
        return (
            await self._session.call(self._info) if self._known_info is None else self._known_info
        )

    def get_tokenizer(
        self,
        *,
        backend: str | None = None,
        info_fun: Callable[[TrainingClient], Any] | None = None,
        load_fun: LoadFunction | None = None,
    ) -> Any:
        """The tokenizer of the base model; see `tinkex.tokenizers.get_or_load_tokenizer`.

        Args:
            backend: "transformers" or "tokenizers"; the first that is installed by default.
            info_fun: Says what this run trains, in place of `get_info`.
            load_fun: Loads the tokenizer, in place of the libraries.

        Returns:
            transformers' tokenizer where that is installed, else a `tinkex.tokenizers.Tokenizer`
            with the same methods.

        Raises:
            ConfigurationError: It is neither on this machine nor can it be downloaded.

        Example:
            >>> tokenizer = client.get_tokenizer()
            >>> tokenizer.decode(tokenizer.encode("12+34=", add_special_tokens=False))
            '12+34='
        """
        info = self.get_info() if info_fun is None else info_fun(self)
        return get_or_load_tokenizer(tokenizer_id_of(info), backend=backend, load_fun=load_fun)

    def encode(self, text: str, **options: Any) -> list[int]:
        """The tokens of a text, by this run's tokenizer; `options` are its own, e.g.
        `add_special_tokens`.

        Args:
            text: The text.
            options: The tokenizer's own, e.g. `add_special_tokens`.

        Returns:
            The token ids.

        Example:
            >>> client.encode("12+34=")
            [0, 23, 24, 17, 25, 26, 35]
        """
        tokens: list[int] = self._tokenizer().encode(text, **options)
        return tokens

    def decode(self, tokens: Sequence[int], **options: Any) -> str:
        """The text of tokens, by this run's tokenizer.

        Args:
            tokens: The token ids.
            options: The tokenizer's own, e.g. `skip_special_tokens`.

        Returns:
            The text.

        Example:
            >>> client.decode(client.encode("12+34="), skip_special_tokens=True)
            '12+34='
        """
        text: str = self._tokenizer().decode(tokens, **options)
        return text

    def _tokenizer(self) -> Any:
        if self._loaded_tokenizer is None:
            self._loaded_tokenizer = self.get_tokenizer()
        return self._loaded_tokenizer

    def get_console_url(self) -> str:
        """This run's page in the hosted service's console.

        Example:
            >>> client.get_console_url()
            'https://.../training_runs/...'
        """
        return f"{CONSOLE}/training_runs/{quote(self.model_id, safe='')}"

    @unlisted
    async def get_tokenizer_async(
        self, *, backend: str | None = None, load_fun: LoadFunction | None = None
    ) -> Any:
        """Like `get_tokenizer`."""
        info = await self._session.call(self._info)
        return await asyncio.to_thread(
            get_or_load_tokenizer, tokenizer_id_of(info), backend=backend, load_fun=load_fun
        )

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a TrainingClient cannot be pickled: save its state, and resume that in the other "
            "process"
        )

    def __repr__(self) -> str:
        return f"TrainingClient({self.model_id!r})"


async def info_of(session: Session, model_id: str) -> GetInfoResponse:
    """Ask the server what a run trains."""
    info: GetInfoResponse = await session.transport.call(
        protocol.GET_INFO, GetInfoRequest(model_id=model_id)
    )
    return info
