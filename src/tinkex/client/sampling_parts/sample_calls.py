"""SampleCalls: the base of SamplingClient, with its model and the way to its samples."""

from __future__ import annotations

import asyncio
import functools
import itertools
import time
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import replace
from typing import Any

from tinkex.client.futures.api_future import unlisted
from tinkex.client.futures.batch_polling import BatchPoller
from tinkex.client.futures.loop_thread import runtime
from tinkex.client.futures.queue_states import Observer, QueueStateLogger, QueueStateTracker
from tinkex.client.futures.result_polling import QueueNotice, Receipt, read_result, retrieve
from tinkex.client.futures.twins import deprecated
from tinkex.client.http.exchange import Reply
from tinkex.client.http.retry import RetryConfig, RetryHandler, persist
from tinkex.client.http.transport import OFF_LOOP_BYTES
from tinkex.client.session import Session
from tinkex.client.session_client import SessionClient
from tinkex.errors import APITimeoutError, GoneError, RateLimitError, TinkerError
from tinkex.tokenizers import LoadFunction, get_or_load_tokenizer, get_tokenizer_id
from tinkex.types.inputs import ModelInput
from tinkex.types.sampled import SampleResponse
from tinkex.types.sampling import SampleRequest, SamplingParams
from tinkex.types.sessions import (
    GetSamplerResponse,
    JoinSamplingSessionRequest,
    JoinSamplingSessionResponse,
)
from tinkex.types.tensors import TensorData
from tinkex.wire import protocol

SEQ_BLOCK = 1_000_000_000
BACKPRESSURE = {"X-Tinker-Sampling-Backpressure": "1"}
"""Header: the sender can handle status 429."""
BACK_PRESSURE_STATUS = frozenset({429})
"""The status of back-pressure, which the gate deals with."""


class SampleCalls(SessionClient):
    """One sampling session: its model, and the way from a request to its samples."""

    def __init__(
        self,
        holder: Session,
        *,
        sampling_session_id: str,
        base_model: str | None = None,
        shadow: bool = False,
        retry_config: RetryConfig | None = None,
        record_stability_info: bool = False,
    ) -> None:
        self._session = holder
        self.sampling_session_id = sampling_session_id
        self._record_stability_info = record_stability_info
        self._retry_config = retry_config
        self._joining = asyncio.Lock()
        # A copy in another process has its own block of request numbers, and may ask for it.
        self._block: int | None = None if shadow or holder.is_shadow else 0
        self._seq_ids = itertools.count()
        self._handler: RetryHandler | None = None
        self._poller: BatchPoller | None = None
        self._queue_states = QueueStateLogger("Sampling")
        self._streams = True
        self._asking = asyncio.Lock()
        self._base_model = base_model

    @property
    def _sampling_session_id(self) -> str:
        """The id of the sampling session, by its name in the official client."""
        return self.sampling_session_id

    @property
    def feature_gates(self) -> set[str]:
        """The feature gates of the configuration; they have no effect."""
        return set(self._session.config.feature_gates)

    @property
    def retry_handler(self) -> RetryHandler:
        """The runner of the samples: it limits how many run at once, and retries them."""
        if self._handler is None:
            server = self._session.client_config
            config = self._retry_config or RetryConfig()
            limit = server.sample_max_concurrent_requests
            if self._retry_config is not None:
                limit = min(limit, config.max_connections)
            if server.sample_no_retries:
                config = replace(config, enable_retry_logic=False)
            if not server.sample_enable_stuck_detection:
                config = replace(config, enable_stuck_detection=False)
            name = f"sampling from {self.sampling_session_id}"
            self._handler = RetryHandler(config, name, limit=limit, metadata=self._facts())
        return self._handler

    def on_queue_state_change(
        self, queue_state: Any, queue_state_reason: str | None = None
    ) -> None:
        """Log a pause of the server's queue for this sampler, once a minute at most.

        Args:
            queue_state: "active", "paused_capacity" or "paused_rate_limit".
            queue_state_reason: The server's reason, if it gives one.

        Example:
            >>> sampler.on_queue_state_change("paused_rate_limit", "too many samples at once")
        """
        name = self.sampling_session_id
        self._queue_states.on_queue_state_change(queue_state, queue_state_reason, name=name)

    def _request(
        self,
        prompt: ModelInput,
        num_samples: int,
        params: SamplingParams,
        prompt_logprobs: bool = False,
        *,
        target_prompt_logprobs: TensorData | None = None,
        prompt_alt_tokens_k: int = 0,
        prompt_logprobs_last_n: int | None = None,
        **options: Any,
    ) -> SampleRequest:
        """Return a request without its number; raise if its parts contradict each other."""
        if not isinstance(prompt, ModelInput):
            raise TypeError(
                f"prompt must be a ModelInput, got {type(prompt).__name__}: "
                "ModelInput.from_ints(tokenizer.encode(text)) makes one of text"
            )
        if isinstance(num_samples, SamplingParams) or not hasattr(num_samples, "__index__"):
            raise TypeError(
                f"num_samples must be a whole number, got {type(num_samples).__name__}: "
                "the order is prompt, number of samples, sampling_params"
            )
        if num_samples < 1:
            raise ValueError("num_samples must be at least 1")
        if prompt_alt_tokens_k < 0:
            raise ValueError("prompt_alt_tokens_k must be >= 0")
        if target_prompt_logprobs is not None and (
            target_prompt_logprobs.dtype != "int64" or len(target_prompt_logprobs.shape or ()) != 2
        ):
            raise ValueError("target_prompt_logprobs must be a two-dimensional int64 tensor")
        if prompt_logprobs_last_n is not None and not prompt_logprobs:
            raise ValueError("prompt_logprobs_last_n needs include_prompt_logprobs")
        if prompt_logprobs_last_n is not None and prompt_logprobs_last_n < 1:
            raise ValueError("prompt_logprobs_last_n must be at least 1")
        return SampleRequest(
            prompt=prompt,
            num_samples=num_samples,
            sampling_params=params,
            sampling_session_id=self.sampling_session_id,
            prompt_logprobs=prompt_logprobs,
            target_prompt_logprobs=target_prompt_logprobs,
            prompt_alt_tokens_k=prompt_alt_tokens_k,
            prompt_logprobs_last_n=prompt_logprobs_last_n,
            record_stability_info=self._record_stability_info,
            **options,
        )

    async def _number(self) -> int:
        """Return the next request number; a copy first asks for a block of numbers."""
        if self._block is None:
            async with self._joining:
                if self._block is None:
                    self._block = await self._clone()
        return self._block * SEQ_BLOCK + next(self._seq_ids)

    async def _clone(self) -> int:
        """Return a copy's number among its session's clients, from the server or random."""
        if self._session.client_config.sample_join_sampling_session:
            request = JoinSamplingSessionRequest(sampling_session_id=self.sampling_session_id)
            joined: JoinSamplingSessionResponse = await self._session.transport.call(
                protocol.JOIN_SAMPLING_SESSION, request
            )
            return joined.client_counter
        return uuid.uuid4().int % SEQ_BLOCK + 1

    def _sample(
        self,
        request: SampleRequest,
        timeout: float | None = None,
        observer: Observer | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Coroutine[Any, Any, SampleResponse]:
        """Submit and fetch with retries; each attempt has its own number."""
        notice = Notice(self, observer)
        attempts = self.retry_handler.execute(self._attempt, request, notice, headers)
        return attempts if timeout is None else self._within(timeout, attempts)

    async def _within(self, timeout: float, attempts: Awaitable[SampleResponse]) -> SampleResponse:
        try:
            async with asyncio.timeout(timeout):
                return await attempts
        except TimeoutError as error:
            if isinstance(error, TinkerError):
                raise
            raise APITimeoutError(
                f"sampling at {self._session.transport.place}: no samples within {timeout:g} s"
            ) from None

    def _facts(self) -> dict[str, Any]:
        """Return the ids for events about this sampler."""
        return {
            "session_id": self._session.session_id,
            "sampling_session_id": self.sampling_session_id,
        }

    async def _attempt(
        self, request: SampleRequest, notice: QueueNotice, headers: Mapping[str, str] | None
    ) -> SampleResponse:
        request = request.model_copy(update={"seq_id": await self._number()})
        poller, outcome = self._batches(), None
        if poller is None:
            receipt = await self._submit(request, notice, headers)
        else:
            submission = poller.begin()
            try:
                receipt = await self._submit(request, notice, headers)
                if receipt.request_id is not None:
                    outcome = poller.outcome(receipt.request_id)
            finally:
                poller.end(submission)
        try:
            if poller is None or outcome is None or receipt.request_id is None:
                response: SampleResponse = await retrieve(
                    self._session.transport, receipt, notice=notice
                )
            else:
                response = await self._collect(poller, outcome, receipt, receipt.request_id, notice)
        except asyncio.CancelledError:
            self._cancel(receipt)
            raise
        return response.named(sequence_ids(receipt, request))

    async def _collect(
        self,
        poller: BatchPoller,
        outcome: asyncio.Future[Reply | None],
        receipt: Receipt,
        request_id: str,
        notice: QueueNotice,
    ) -> SampleResponse:
        """Return a result that the batched poll has, or poll for it alone."""
        transport = self._session.transport
        response: SampleResponse
        try:
            reply = await outcome
            if reply is None:
                asked = time.monotonic()
                try:
                    response = await retrieve(transport, receipt, notice=notice)
                except TinkerError:
                    poller.fetched(request_id, time.monotonic() - asked)
                    raise
                poller.fetched(request_id, time.monotonic() - asked)
            elif len(reply.body) > OFF_LOOP_BYTES:
                response = await asyncio.to_thread(
                    read_result, transport, protocol.ASAMPLE, reply, request_id
                )
            else:
                response = read_result(transport, protocol.ASAMPLE, reply, request_id)
        except asyncio.CancelledError:
            poller.forget(request_id)
            raise
        return response

    def _batches(self) -> BatchPoller | None:
        """Return the poller of all samples of this client, if the server supports it."""
        server = self._session.client_config
        if not (server.batched_results or server.sample_use_retrieve_futures):
            return None
        if self._poller is None:
            transport, inline = self._session.transport, server.batched_results
            self._poller = BatchPoller(
                transport, self.sampling_session_id, self._block or 0, inline=inline, owner=self
            )
            self._session.pollers.add(self._poller)
        return self._poller if self._poller.is_usable else None

    def _submit(
        self, request: SampleRequest, notice: QueueNotice, headers: Mapping[str, str] | None
    ) -> Awaitable[Receipt]:
        """Pass the gate and submit; the same request is sent again after back-pressure."""
        size = request.prompt.estimated_bytes
        return persist(
            functools.partial(self._submit_once, request, headers, size),
            self._repeating(size, notice),
        )

    async def _submit_once(
        self, request: SampleRequest, headers: Mapping[str, str] | None, size: int
    ) -> Receipt:
        patience = None if self.retry_handler.config.enable_retry_logic else 0.0
        sent = BACKPRESSURE if headers is None else {**BACKPRESSURE, **headers}
        async with self._session.gate.passed(size):
            try:
                return await self._session.submit(
                    protocol.ASAMPLE,
                    request,
                    headers=sent,
                    patience=patience,
                    final=BACK_PRESSURE_STATUS,
                )
            except GoneError as error:
                # the sampler is gone: another number does not help
                error.should_retry = False
                raise

    def _repeating(self, size: int, notice: QueueNotice) -> Callable[[object], float | None]:
        """Return a policy that repeats after back-pressure; the gate keeps the pause."""
        return functools.partial(self._delay_after, size, notice)

    def _delay_after(self, size: int, notice: QueueNotice, outcome: object) -> float | None:
        if not isinstance(outcome, RateLimitError):
            return None
        tell_state(outcome.body, notice)
        self._session.gate.refused(size, outcome.retry_after)
        return 0.0 if self.retry_handler.config.enable_retry_logic else None

    def _cancel(self, receipt: Receipt) -> None:
        """Tell the server that a sample is no longer needed, if it wants to know."""
        if receipt.request_id is None or not self._session.dynamic_config.sample_cancel_enabled:
            return
        if not self._session.closed:
            runtime().task(self._session.cancel_future(receipt.request_id))

    # ── the model ─────────────────────────────────────────────────────────────────────────────────

    async def _model(self) -> str:
        """Return the name of the base model; ask the server once if it is not known."""
        async with self._asking:
            if self._base_model is None:
                self._base_model = await base_model_of(self._session, self.sampling_session_id)
            return self._base_model

    def get_base_model(self) -> str:
        """Return the name of the base model of this sampler; this sends no request.

        Example:
            >>> sampler.get_base_model()
            'tinkex/tiny'
        """
        if self._base_model is None:
            return self._session.call(self._model).result()
        return self._base_model

    @deprecated("call SamplingClient.get_base_model(), which makes no request")
    async def get_base_model_async(self) -> str:
        """Deprecated: use `get_base_model`, which makes no request."""
        if self._base_model is None:
            return await self._session.call(self._model)
        return self._base_model

    def get_tokenizer(
        self,
        *,
        backend: str | None = None,
        sampler_fun: Callable[[Any], Any] | None = None,
        load_fun: LoadFunction | None = None,
    ) -> Any:
        """Return the tokenizer of the base model.

        See `tinkex.tokenizers.get_or_load_tokenizer`.

        Args:
            backend: "transformers" or "tokenizers"; the first that is installed by default.
            sampler_fun: Returns an object with `base_model`, in place of the server.
            load_fun: Loads the tokenizer, in place of the libraries.

        Returns:
            transformers' tokenizer where that is installed, else a `tinkex.tokenizers.Tokenizer`.

        Example:
            >>> tokenizer = sampler.get_tokenizer()
            >>> tokenizer.decode(tokenizer.encode("12+34=", add_special_tokens=False))
            '12+34='
        """
        base_model = self.get_base_model() if sampler_fun is None else sampler_fun(self).base_model
        return get_or_load_tokenizer(
            get_tokenizer_id(base_model), backend=backend, load_fun=load_fun
        )

    @unlisted
    async def get_tokenizer_async(
        self, *, backend: str | None = None, load_fun: LoadFunction | None = None
    ) -> Any:
        """Like `get_tokenizer`."""
        return await asyncio.to_thread(self.get_tokenizer, backend=backend, load_fun=load_fun)


async def base_model_of(session: Session, sampling_session_id: str) -> str:
    """Ask the server for the base model of a sampling session."""
    path = {"sampler_id": sampling_session_id}
    sampler: GetSamplerResponse = await session.transport.call(protocol.GET_SAMPLER, path=path)
    return sampler.base_model


def sequence_ids(receipt: Receipt, request: SampleRequest) -> list[str]:
    """Return the ids of samples; made from the request's if the server sends none."""
    name = receipt.request_id or f"{request.sampling_session_id}:{request.seq_id}"
    return receipt.sample_sequence_ids or [
        f"{name}:{index}" for index in range(request.num_samples)
    ]


class Notice:
    """The listener for the queue of one sample.

    It makes its tracker at the first word, because most samples hear nothing.
    """

    __slots__ = ("_client", "_observer", "_tracker")

    def __init__(self, client: SampleCalls, observer: Observer | None) -> None:
        self._client, self._observer = client, observer
        self._tracker: QueueStateTracker | None = None

    def __call__(
        self, queue_state: str, queue_state_reason: str | None = None, /, *, request_id: str = ""
    ) -> object:
        """Take note of the queue's state."""
        if self._tracker is None:
            listener, facts = self._client.on_queue_state_change, self._client._facts()
            self._tracker = QueueStateTracker([self._observer], facts, listener=listener)
        return self._tracker.heard(queue_state, queue_state_reason, request_id=request_id)


def tell_state(body: object, notice: QueueNotice) -> None:
    """Report the queue state that a refusal names."""
    if isinstance(body, dict) and isinstance(state := body.get("queue_state"), str):
        reason = body.get("queue_state_reason")
        notice(state, reason if isinstance(reason, str) else None)
