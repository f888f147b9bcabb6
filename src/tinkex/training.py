"""TrainingClient: passes, optimizer steps and checkpoints of one training run, in the order they were called."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar
from urllib.parse import quote

from tinkex import losses, protocol
from tinkex.errors import APIConnectionError, TinkerError
from tinkex.futures import Future, combine, retrieve, start
from tinkex.limits import ByteBudget
from tinkex.protocol import Operation
from tinkex.runtime import in_own_thread, runtime
from tinkex.sampling import SamplingClient, open_sampling_client
from tinkex.tokenizers import load_tokenizer
from tinkex.types.checkpoints import (
    CONSOLE,
    LoadWeightsRequest,
    LoadWeightsResponse,
    SaveWeightsExternalRequest,
    SaveWeightsExternalResponse,
    SaveWeightsForSamplerRequest,
    SaveWeightsForSamplerResponse,
    SaveWeightsForSamplerResponseInternal,
    SaveWeightsRequest,
    SaveWeightsResponse,
)
from tinkex.types.inputs import Datum
from tinkex.types.training import (
    AdamParams,
    DimuonParams,
    ForwardBackwardInput,
    ForwardBackwardOutput,
    ForwardBackwardRequest,
    GetInfoRequest,
    GetInfoResponse,
    LossFnConfig,
    OptimParams,
    OptimStepRequest,
    OptimStepResponse,
)

if TYPE_CHECKING:
    from tinkex.session import Session

T = TypeVar("T")

Fetch: TypeAlias = Callable[[], Awaitable[T]]
Turn: TypeAlias = Callable[[], Awaitable[Fetch[T]]]
"""Submits a call when its turn comes, and returns what fetches its result."""


class Outbox:
    """Lets calls out one at a time, in the order they were made; each result is then fetched on its own.

    A request takes its number when it is sent, so a call cancelled while it waits leaves no gap. A submission that
    has begun is always carried through, so the server never waits for a number that was taken and not sent; and a
    call that fails gives its turn up like any other.
    """

    def __init__(self, session: Session, first_seq_id: int = 1) -> None:
        self._session = session
        self._next = first_seq_id
        self._turn = asyncio.Lock()  # hands over in the order of asking
        # Chunks being encoded and sent are all in memory a second time: two or so at once keep the line busy.
        config = session.client_config
        self.budget = ByteBudget(min(config.fwdbwd_dispatch_bytes_semaphore_size, config.fwdbwd_max_chunk_bytes_count))

    def take(self) -> int:
        """The next request number; only a call whose turn it is may ask."""
        self._next += 1
        return self._next - 1

    def put(self, turn: Turn[T]) -> Future[T]:
        """Queue a call made now."""
        if self._session.closed:
            raise RuntimeError("ServiceClient is closed")
        future = start(self._go(turn))
        self._session.track(future)
        return future

    async def _go(self, turn: Turn[T]) -> T:
        begun = False

        async def submit() -> Fetch[T]:
            nonlocal begun
            async with self._turn:
                begun = True
                return await turn()

        submission = runtime().task(submit())
        try:
            fetch = await asyncio.shield(submission)
        except asyncio.CancelledError:
            if not begun:
                submission.cancel()
            raise
        return await fetch()


def _checked(data: Sequence[Datum]) -> list[Datum]:
    """The data of a call, if it is any."""
    if isinstance(data, Datum):
        raise TypeError("data must be a list of Datum, not a single one")
    items = list(data)
    if not items:
        raise ValueError("data is empty: there is nothing to compute")
    for index, item in enumerate(items):
        if not isinstance(item, Datum):
            raise TypeError(f"data must be a list of Datum; item {index} is a {type(item).__name__}")
    return items


class TrainingClient:
    """One training run. Calls return at once; the server executes them in the order they were made.

    Example:
        >>> client = service.create_lora_training_client("tinkex/tiny", rank=16)  # doctest: +SKIP
        >>> passed = client.forward_backward(data, "cross_entropy")  # doctest: +SKIP
        >>> stepped = client.optim_step(AdamParams(learning_rate=1e-3))  # doctest: +SKIP
        >>> passed.result().metrics["loss:sum"], stepped.result()  # doctest: +SKIP
    """

    def __init__(self, session: Session, model_seq_id: int, model_id: str, *, first_seq_id: int = 1) -> None:
        self._session = session
        self.model_seq_id = model_seq_id
        self.model_id = model_id
        self._outbox = Outbox(session, first_seq_id)

    # ── passes ───────────────────────────────────────────────────────────────────────────────────────────────────

    def forward(
        self, data: Sequence[Datum], loss_fn: str, loss_fn_config: LossFnConfig | None = None
    ) -> Future[ForwardBackwardOutput]:
        """Compute the loss and log-probabilities of data, without a gradient.

        Args:
            data: The examples.
            loss_fn: The name of a loss, e.g. "cross_entropy".
            loss_fn_config: Settings of that loss.

        Returns:
            A future of one record of tensors per datum, and metrics.
        """
        return self._pass(data, loss_fn, loss_fn_config, forward_only=True)

    def forward_backward(
        self, data: Sequence[Datum], loss_fn: str, loss_fn_config: LossFnConfig | None = None
    ) -> Future[ForwardBackwardOutput]:
        """Compute the loss of data and add its gradient to what the next `optim_step` applies.

        Args:
            data: The examples. Their losses are summed, never averaged.
            loss_fn: The name of a loss, e.g. "cross_entropy", "importance_sampling" or "ppo".
            loss_fn_config: Settings of that loss.

        Returns:
            A future of one record of tensors per datum, and metrics.

        Raises:
            ValueError: There is no data.
        """
        return self._pass(data, loss_fn, loss_fn_config, forward_only=False)

    async def forward_async(
        self, data: Sequence[Datum], loss_fn: str, loss_fn_config: LossFnConfig | None = None
    ) -> Future[ForwardBackwardOutput]:
        """Like `forward`; awaiting it gives the future."""
        return self.forward(data, loss_fn, loss_fn_config)

    async def forward_backward_async(
        self, data: Sequence[Datum], loss_fn: str, loss_fn_config: LossFnConfig | None = None
    ) -> Future[ForwardBackwardOutput]:
        """Like `forward_backward`; awaiting it gives the future."""
        return self.forward_backward(data, loss_fn, loss_fn_config)

    def _pass(
        self, data: Sequence[Datum], loss_fn: str, config: LossFnConfig | None, *, forward_only: bool
    ) -> Future[ForwardBackwardOutput]:
        items = _checked(data)
        return self._outbox.put(lambda: self._submit_pass(items, loss_fn, config, forward_only))

    async def _submit_pass(
        self, data: list[Datum], loss_fn: str, config: LossFnConfig | None, forward_only: bool
    ) -> Fetch[ForwardBackwardOutput]:
        requests = [
            ForwardBackwardRequest(
                model_id=self.model_id,
                seq_id=self._outbox.take(),
                forward_only=forward_only,
                forward_backward_input=ForwardBackwardInput(
                    data=chunk, loss_fn=loss_fn, loss_fn_config=dict(config) if config else None
                ),
            )
            for chunk in self._chunks(data)
        ]
        submitted = time.monotonic()
        receipts = await self._submit_chunks(requests)

        async def fetch() -> ForwardBackwardOutput:
            transport, op = self._session.transport, protocol.FORWARD_BACKWARD
            polls = [retrieve(transport, op, receipt, submitted) for receipt in receipts]
            return combine(await asyncio.gather(*polls))

        return fetch

    def _chunks(self, data: list[Datum]) -> list[list[Datum]]:
        """Cut data so that no chunk holds too many datums or bytes; a datum that is too big goes alone."""
        config = self._session.client_config
        chunks: list[list[Datum]] = [[]]
        size = 0
        for datum in data:
            full = len(chunks[-1]) >= config.fwdbwd_max_chunk_len
            if chunks[-1] and (full or size + datum.nbytes > config.fwdbwd_max_chunk_bytes_count):
                chunks.append([])
                size = 0
            chunks[-1].append(datum)
            size += datum.nbytes
        return chunks

    async def _submit_chunks(self, requests: list[ForwardBackwardRequest]) -> list[str]:
        """Send the chunks of one call, the first one last: the server can then take them in together.

        Every chunk is sent even when another is refused, so that no number is left out.
        """
        first, *others = [self._submit(protocol.FORWARD_BACKWARD, request) for request in requests]
        later: list[str | BaseException] = await asyncio.gather(*others, return_exceptions=True)
        receipts = [await first]
        for outcome in later:
            if isinstance(outcome, BaseException):
                raise outcome
            receipts.append(outcome)
        return receipts

    async def _submit(self, op: Operation, request: Any) -> str:
        """Send a numbered request. One that cannot be sent, or is refused, has its number spent all the same."""
        compress = op is protocol.FORWARD_BACKWARD and self._session.client_config.proto_compress_fwdbwd
        try:
            async with self._outbox.budget.taken(self._size(request)):
                return (await self._session.submit(op, request, compress=compress)).request_id
        except APIConnectionError:
            raise
        except Exception:
            await self._spend(request.seq_id)
            raise

    @staticmethod
    def _size(request: Any) -> int:
        return sum(d.nbytes for d in request.forward_backward_input.data) if hasattr(request, "forward_only") else 0

    async def _spend(self, seq_id: int) -> None:
        """Use a number up with a pass over nothing, which fails: what comes after it would wait for it otherwise."""
        nothing = ForwardBackwardInput(data=[], loss_fn="cross_entropy")
        request = ForwardBackwardRequest(
            model_id=self.model_id, seq_id=seq_id, forward_only=True, forward_backward_input=nothing
        )
        with contextlib.suppress(TinkerError):
            await self._session.transport.call(protocol.FORWARD_BACKWARD, request, patience=5)

    def forward_backward_custom(
        self, data: Sequence[Datum], loss_fn: losses.CustomLoss
    ) -> Future[ForwardBackwardOutput]:
        """Train on any loss written in torch, at the price of a second pass.

        Args:
            data: The examples; each needs `target_tokens`.
            loss_fn: Takes the data and the list of their log-probability tensors; returns the loss and metrics.

        Returns:
            A future of the outputs; `metrics["loss:sum"]` is the custom loss.

        Raises:
            ValueError: There is no data, or a datum has no target tokens.
        """
        originals = _checked(data)
        prepared = losses.forward_data(originals)

        async def turn() -> Fetch[ForwardBackwardOutput]:
            fetch_first = await self._submit_pass(prepared, "cross_entropy", None, True)
            first = await fetch_first()
            # The user's code may take its time: it runs in a thread, so that the network loop goes on.
            weighted, loss, metrics = await in_own_thread(losses.evaluate, loss_fn, originals, first)
            fetch_second = await self._submit_pass(weighted, "cross_entropy", None, False)

            async def fetch() -> ForwardBackwardOutput:
                return losses.report(await fetch_second(), loss, metrics)

            return fetch

        return self._outbox.put(turn)

    async def forward_backward_custom_async(
        self, data: Sequence[Datum], loss_fn: losses.CustomLoss
    ) -> Future[ForwardBackwardOutput]:
        """Like `forward_backward_custom`; awaiting it gives the future."""
        return self.forward_backward_custom(data, loss_fn)

    # ── steps and checkpoints ────────────────────────────────────────────────────────────────────────────────────

    def optim_step(
        self, optim_params: OptimParams | None = None, *, adam_params: AdamParams | None = None
    ) -> Future[OptimStepResponse]:
        """Apply the accumulated gradient and clear it.

        Args:
            optim_params: The hyper-parameters of this step.
            adam_params: The same, under its older name.

        Raises:
            ValueError: Both were given.
            TypeError: Neither was given, or something else.
        """
        if optim_params is not None and adam_params is not None:
            raise ValueError("give optim_params or adam_params, not both")
        params = optim_params if optim_params is not None else adam_params
        if not isinstance(params, AdamParams | DimuonParams):
            raise TypeError(f"optim_step needs AdamParams or DimuonParams, got {type(params).__name__}")
        if isinstance(params, AdamParams):
            request = OptimStepRequest(model_id=self.model_id, adam_params=params)
        else:
            request = OptimStepRequest(model_id=self.model_id, optimizer_params=params.model_dump())
        return self._put(protocol.OPTIM_STEP, request)

    async def optim_step_async(
        self, optim_params: OptimParams | None = None, *, adam_params: AdamParams | None = None
    ) -> Future[OptimStepResponse]:
        """Like `optim_step`; awaiting it gives the future."""
        return self.optim_step(optim_params, adam_params=adam_params)

    def _put(self, op: Operation, request: Any, convert: Callable[[Any], Any] | None = None) -> Future[Any]:
        """Queue an operation of one request; it gets its number when its turn comes."""

        async def turn() -> Fetch[Any]:
            submitted = time.monotonic()
            request_id = await self._submit(op, request.model_copy(update={"seq_id": self._outbox.take()}))

            async def fetch() -> Any:
                result = await retrieve(self._session.transport, op, request_id, submitted)
                return convert(result) if convert else result

            return fetch

        return self._outbox.put(turn)

    def save_state(
        self,
        name: str,
        ttl_seconds: int | None = None,
        overwrite: bool = False,
        user_metadata: dict[str, str] | None = None,
    ) -> Future[SaveWeightsResponse]:
        """Save weights and optimizer state under a name, to resume from.

        Args:
            name: Unique among this run's training checkpoints.
            ttl_seconds: Seconds after which the checkpoint expires; None keeps it.
            overwrite: Replace a checkpoint of that name.
            user_metadata: Kept beside the checkpoint.
        """
        request = SaveWeightsRequest(
            model_id=self.model_id,
            path=name,
            ttl_seconds=ttl_seconds,
            overwrite=overwrite,
            user_metadata=user_metadata,
        )
        return self._put(protocol.SAVE_WEIGHTS, request)

    async def save_state_async(
        self,
        name: str,
        ttl_seconds: int | None = None,
        overwrite: bool = False,
        user_metadata: dict[str, str] | None = None,
    ) -> Future[SaveWeightsResponse]:
        """Like `save_state`; awaiting it gives the future."""
        return self.save_state(name, ttl_seconds, overwrite, user_metadata)

    def save_weights_for_sampler(
        self, name: str, ttl_seconds: int | None = None, user_metadata: dict[str, str] | None = None
    ) -> Future[SaveWeightsForSamplerResponse]:
        """Save weights under a name, to sample from.

        Args:
            name: Unique among this run's sampler checkpoints.
            ttl_seconds: Seconds after which the checkpoint expires; None keeps it.
            user_metadata: Kept beside the checkpoint.
        """
        request = SaveWeightsForSamplerRequest(
            model_id=self.model_id, path=name, ttl_seconds=ttl_seconds, user_metadata=user_metadata
        )
        return self._put(
            protocol.SAVE_WEIGHTS_FOR_SAMPLER,
            request,
            lambda saved: SaveWeightsForSamplerResponse(path=saved.path or ""),
        )

    async def save_weights_for_sampler_async(
        self, name: str, ttl_seconds: int | None = None, user_metadata: dict[str, str] | None = None
    ) -> Future[SaveWeightsForSamplerResponse]:
        """Like `save_weights_for_sampler`; awaiting it gives the future."""
        return self.save_weights_for_sampler(name, ttl_seconds, user_metadata)

    def save_weights_external(
        self, name: str, ttl_seconds: int | None = None, age_encryption_recipients: list[str] | None = None
    ) -> Future[SaveWeightsExternalResponse]:
        """Export weights as files that can be downloaded, on servers that offer it.

        Args:
            name: Unique among this run's exports.
            ttl_seconds: Seconds after which the export expires; None keeps it.
            age_encryption_recipients: Public keys to encrypt the files for.
        """
        request = SaveWeightsExternalRequest(
            model_id=self.model_id,
            path=name,
            ttl_seconds=ttl_seconds,
            age_encryption_recipients=age_encryption_recipients,
        )
        return self._put(
            protocol.SAVE_WEIGHTS_EXTERNAL,
            request,
            lambda saved: SaveWeightsExternalResponse(path=saved.path or "", type=saved.type),
        )

    async def save_weights_external_async(
        self, name: str, ttl_seconds: int | None = None, age_encryption_recipients: list[str] | None = None
    ) -> Future[SaveWeightsExternalResponse]:
        """Like `save_weights_external`; awaiting it gives the future."""
        return self.save_weights_external(name, ttl_seconds, age_encryption_recipients)

    def _save_and_sample(self, record_stability_info: bool) -> Future[SamplingClient]:
        request = SaveWeightsForSamplerRequest(
            model_id=self.model_id, sampling_session_seq_id=next(self._session.sampling_session_seq_ids)
        )

        def client(saved: SaveWeightsForSamplerResponseInternal) -> SamplingClient:
            return SamplingClient(
                self._session,
                sampling_session_id=saved.sampling_session_id or "",
                record_stability_info=record_stability_info,
            )

        return self._put(protocol.SAVE_WEIGHTS_FOR_SAMPLER, request, client)

    def save_weights_and_get_sampling_client(
        self, name: str | None = None, retry_config: Any = None, record_stability_info: bool = False
    ) -> SamplingClient:
        """A sampler of the weights as they are after the calls made so far; it lives as long as the session."""
        return self._save_and_sample(record_stability_info).result()

    async def save_weights_and_get_sampling_client_async(
        self, name: str | None = None, retry_config: Any = None, record_stability_info: bool = False
    ) -> SamplingClient:
        """A sampler of the weights as they are after the calls made so far; it lives as long as the session."""
        return await self._save_and_sample(record_stability_info)

    def create_sampling_client(
        self, model_path: str, retry_config: Any = None, record_stability_info: bool = False
    ) -> SamplingClient:
        """A sampler of a saved checkpoint."""
        return self._session.start(
            open_sampling_client(self._session, model_path=model_path, record_stability_info=record_stability_info)
        ).result()

    async def create_sampling_client_async(
        self, model_path: str, retry_config: Any = None, record_stability_info: bool = False
    ) -> SamplingClient:
        """A sampler of a saved checkpoint."""
        return await self._session.start(
            open_sampling_client(self._session, model_path=model_path, record_stability_info=record_stability_info)
        )

    def load_state(self, path: str, weights_access_token: str | None = None) -> Future[LoadWeightsResponse]:
        """Replace this run's weights by a checkpoint's; the optimizer starts afresh."""
        return self._load(path, False, weights_access_token)

    def load_state_with_optimizer(
        self, path: str, weights_access_token: str | None = None
    ) -> Future[LoadWeightsResponse]:
        """Replace this run's weights and optimizer state by a checkpoint's."""
        return self._load(path, True, weights_access_token)

    async def load_state_async(self, path: str, weights_access_token: str | None = None) -> Future[LoadWeightsResponse]:
        """Like `load_state`; awaiting it gives the future."""
        return self.load_state(path, weights_access_token)

    async def load_state_with_optimizer_async(
        self, path: str, weights_access_token: str | None = None
    ) -> Future[LoadWeightsResponse]:
        """Like `load_state_with_optimizer`; awaiting it gives the future."""
        return self.load_state_with_optimizer(path, weights_access_token)

    def _load(self, path: str, optimizer: bool, token: str | None) -> Future[LoadWeightsResponse]:
        request = LoadWeightsRequest(model_id=self.model_id, path=path, optimizer=optimizer, weights_access_token=token)
        return self._put(protocol.LOAD_WEIGHTS, request)

    # ── about the run ────────────────────────────────────────────────────────────────────────────────────────────

    async def _info(self) -> GetInfoResponse:
        request = GetInfoRequest(model_id=self.model_id)
        info: GetInfoResponse = await self._session.transport.call(protocol.GET_INFO, request)
        return info

    def get_info(self) -> GetInfoResponse:
        """What this run trains."""
        return self._session.start(self._info()).result()

    async def get_info_async(self) -> GetInfoResponse:
        """What this run trains."""
        return await self._session.start(self._info())

    def get_tokenizer(self, *, backend: str | None = None) -> Any:
        """The tokenizer of the base model; see `tinkex.tokenizers.load_tokenizer`."""
        data = self.get_info().model_data
        return load_tokenizer(data.tokenizer_id or data.model_name or "", backend=backend)

    def get_console_url(self) -> str:
        """This run's page in the hosted service's console."""
        return f"{CONSOLE}/training_runs/{quote(self.model_id, safe='')}"

    async def get_tokenizer_async(self, *, backend: str | None = None) -> Any:
        """The tokenizer of the base model; see `tinkex.tokenizers.load_tokenizer`."""
        data = (await self.get_info_async()).model_data
        return await asyncio.to_thread(load_tokenizer, data.tokenizer_id or data.model_name or "", backend=backend)

    def __repr__(self) -> str:
        return f"TrainingClient({self.model_id!r})"
