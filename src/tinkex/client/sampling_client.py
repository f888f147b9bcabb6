"""SamplingClient: samples and log-probabilities from a base model or from saved weights."""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import itertools
import json
import logging
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, get_args

from tinkex.client.futures.api_future import AwaitableConcurrentFuture, Future, unlisted
from tinkex.client.futures.batch_polling import BatchPoller
from tinkex.client.futures.loop_thread import runtime
from tinkex.client.futures.queue_states import Observer, QueueStateLogger, QueueStateTracker
from tinkex.client.futures.result_polling import QueueNotice, failure_of, read_result
from tinkex.client.futures.sample_future import SampleFuture
from tinkex.client.futures.stream_text import StreamTexts
from tinkex.client.futures.streams import SampleStream, chunks_of
from tinkex.client.futures.twins import deprecated, value_twin
from tinkex.client.http.exchange import Reply
from tinkex.client.http.legacy_servers import Receipt, sequence_ids
from tinkex.client.http.request_names import name_requests
from tinkex.client.http.retry import RetryConfig, RetryHandler, persist
from tinkex.client.http.transport import OFF_LOOP_BYTES
from tinkex.client.session import Session, shadow_of
from tinkex.client.settings.config import Config
from tinkex.errors import (
    APIConnectionError,
    APIResponseValidationError,
    APIStatusError,
    APITimeoutError,
    GoneError,
    NotFoundError,
    RateLimitError,
    TinkerError,
)
from tinkex.tokenizers import LoadFunction, get_or_load_tokenizer, get_tokenizer_id
from tinkex.types.checkpoints import SCHEME, SamplingClientKind
from tinkex.types.inputs import ModelInput
from tinkex.types.record import to_json
from tinkex.types.sampling import (
    CreateSamplingSessionRequest,
    CreateSamplingSessionResponse,
    GetSamplerResponse,
    SampleRequest,
    SampleResponse,
    SampleStreamChunk,
    SamplingParams,
)
from tinkex.types.sessions import JoinSamplingSessionRequest, JoinSamplingSessionResponse
from tinkex.types.tensors import TensorData
from tinkex.wire import protocol, sse

if TYPE_CHECKING:
    from tinkex.telemetry import Reporter

logger = logging.getLogger("tinkex")

SEQ_BLOCK = 1_000_000_000
BACKPRESSURE = {"X-Tinker-Sampling-Backpressure": "1"}
"""Says that the sender knows what to do with a 429."""
NO_STREAMS = frozenset({404, 405, 501})
"""How a server answers that knows no streams."""


@name_requests
class SamplingClient:
    """Samples from fixed weights: training that goes on elsewhere does not change what it gives.

    In the examples `sampler` is one; `help(tinkex)` shows how the others, such as `prompt`, are
    made.

    Example:
        >>> with ServiceClient(base_url="local") as service:
        ...     sampler = service.create_sampling_client(base_model="tinkex/tiny").result()
        ...     prompt = ModelInput.from_ints(sampler.get_tokenizer().encode("Once upon a time"))
        ...     sampler.sample(
        ...         prompt, num_samples=4, sampling_params=SamplingParams(max_tokens=8)
        ...     ).result()
        SampleResponse([SampledSequence(...), ...])
    """

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
        # A copy in another process numbers its requests in a block of its own, which it may have to
        # ask for.
        self._block: int | None = None if shadow or holder.is_shadow else 0
        self._seq_ids = itertools.count()
        self._handler: RetryHandler | None = None
        self._poller: BatchPoller | None = None
        self._queue_states = QueueStateLogger("Sampling")
        self._streams = True
        self._asking = asyncio.Lock()
        self._base_model = base_model

    @staticmethod
    def create(
        holder: Session,
        *,
        model_path: str | None = None,
        base_model: str | None = None,
        sampling_session_id: str | None = None,
        retry_config: RetryConfig | None = None,
        record_stability_info: bool = False,
    ) -> AwaitableConcurrentFuture[SamplingClient]:
        """A sampler of a checkpoint, of a base model, or of a sampling session that is there
        already.

        Args:
            holder: The session to sample in.
            model_path: A `tinker://…/sampler_weights/…` path.
            base_model: The name of a base model.
            sampling_session_id: A sampling session that is there already.
            retry_config: How samples that fail for a passing reason are treated.
            record_stability_info: Ask the server to keep what `stable_reinforce` needs.

        Returns:
            A future of the sampler.

        Example:
            >>> SamplingClient.create(service.holder, base_model="tinkex/tiny").result()
            SamplingClient('...:sample:0')
        """

        async def opening() -> SamplingClient:
            return await open_sampling_client(
                holder,
                base_model=base_model,
                model_path=model_path,
                sampling_session_id=sampling_session_id,
                retry_config=retry_config,
                record_stability_info=record_stability_info,
            )

        return AwaitableConcurrentFuture(holder.create(opening))

    @property
    def holder(self) -> Session:
        """The session behind this client; what it offers may change in any release."""
        return self._session

    @property
    def _sampling_session_id(self) -> str:
        """The session's id, by the name under which programs look for it in the official client."""
        return self.sampling_session_id

    @property
    def feature_gates(self) -> set[str]:
        """The feature gates that were configured; nothing depends on them."""
        return set(self._session.config.feature_gates)

    def get_telemetry(self) -> Reporter | None:
        """What reports this session's events to the hosted service; None when nothing does.

        Example:
            >>> from tinkex import telemetry
            >>> telemetry.log(
            ...     sampler.get_telemetry(), "evaluated", {"accuracy": 0.9}
            ... )  # False: nobody is told
            False
        """
        return self._session.telemetry

    @property
    def retry_handler(self) -> RetryHandler:
        """What runs the samples: so many at once, tried again, given up when nothing comes through."""
        if self._handler is None:
            server = self._session.client_config
            config, limit = (
                self._retry_config or RetryConfig(),
                server.sample_max_concurrent_requests,
            )
            if self._retry_config is not None:
                limit = min(limit, config.max_connections)
            if server.sample_no_retries:
                config = replace(config, enable_retry_logic=False)
            if not server.sample_enable_stuck_detection:
                config = replace(config, enable_stuck_detection=False)
            facts = {
                "session_id": self._session.session_id,
                "sampling_session_id": self.sampling_session_id,
            }
            name = f"sampling from {self.sampling_session_id}"
            self._handler = RetryHandler(config, name, limit=limit, metadata=facts)
        return self._handler

    def on_queue_state_change(
        self, queue_state: Any, queue_state_reason: str | None = None
    ) -> None:
        """What is done when the server's queue for this sampler changes: a pause is logged, once a
        minute at most.

        Args:
            queue_state: "active", "paused_capacity" or "paused_rate_limit".
            queue_state_reason: The server's reason, if it gives one.

        Example:
            >>> sampler.on_queue_state_change("paused_rate_limit", "too many samples at once")
        """
        self._queue_states.on_queue_state_change(
            queue_state, queue_state_reason, name=self.sampling_session_id
        )

    def sample(
        self,
        prompt: ModelInput,
        num_samples: int,
        sampling_params: SamplingParams,
        include_prompt_logprobs: bool = False,
        topk_prompt_logprobs: int = 0,
        topk_sample_logprobs: int = 0,
        target_prompt_logprobs: TensorData | None = None,
        prompt_alt_tokens_k: int = 0,
        prompt_logprobs_last_n: int | None = None,
        *,
        timeout: float | None = None,
        queue_state_observer: Observer | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Future[SampleResponse]:
        """Draw samples.

        Args:
            prompt: What to continue.
            num_samples: How many samples to draw.
            sampling_params: How to draw them.
            include_prompt_logprobs: Also give the log-probability of each prompt token.
            topk_prompt_logprobs: Also give this many likeliest tokens per prompt position.
            topk_sample_logprobs: Also give this many likeliest tokens per sampled position.
            target_prompt_logprobs: Token ids `[P-1, K]` (int64, -1 = none) to score at each prompt
                position.
            prompt_alt_tokens_k: Draw this many alternatives at each prompt position after the
                first.
            prompt_logprobs_last_n: Give prompt log-probabilities for the last n tokens only.
            timeout: Seconds after which the sample is given up with APITimeoutError, queueing and
                retries included.
            queue_state_observer: Is told when the server's queue pauses or goes on, besides the
                log.
            headers: Extra headers of the submission.

        Returns:
            A future of the samples.

        Raises:
            ValueError: The options contradict each other.
            TypeError: The prompt is no ModelInput.

        Example:
            >>> prompt = ModelInput.from_ints(tokenizer.encode("12+34="))
            >>> drawn = sampler.sample(
            ...     prompt, 1, SamplingParams(max_tokens=2, temperature=0)
            ... ).result()
            >>> [tokenizer.decode(sequence.tokens) for sequence in drawn.sequences]
            ['46']
        """
        request = self._request(
            prompt,
            num_samples,
            sampling_params,
            prompt_logprobs=include_prompt_logprobs,
            topk_prompt_logprobs=topk_prompt_logprobs,
            topk_sample_logprobs=topk_sample_logprobs,
            target_prompt_logprobs=target_prompt_logprobs,
            prompt_alt_tokens_k=prompt_alt_tokens_k,
            prompt_logprobs_last_n=prompt_logprobs_last_n,
        )
        return self._session.call(
            self._sample, request, timeout, queue_state_observer, headers, kind=SampleFuture
        )

    sample_async = value_twin(sample)

    def _request(
        self,
        prompt: ModelInput,
        num_samples: int,
        params: SamplingParams,
        *,
        prompt_logprobs: bool = False,
        target_prompt_logprobs: TensorData | None = None,
        prompt_alt_tokens_k: int = 0,
        prompt_logprobs_last_n: int | None = None,
        **options: Any,
    ) -> SampleRequest:
        """A request without its number, if its parts make sense together."""
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
        """The next request number; the first one of a copy may need a block to be asked for."""
        if self._block is None:
            async with self._joining:
                if self._block is None:
                    self._block = await self._clone()
        return self._block * SEQ_BLOCK + next(self._seq_ids)

    async def _clone(self) -> int:
        """Which of the sampling session's clients a copy is: as the server counts, else by chance."""
        if self._session.client_config.sample_join_sampling_session:
            request = JoinSamplingSessionRequest(sampling_session_id=self.sampling_session_id)
            joined: JoinSamplingSessionResponse = await self._session.transport.call(
                protocol.JOIN_SAMPLING_SESSION, request
            )
            return joined.client_counter
        return uuid.uuid4().int % SEQ_BLOCK + 1

    async def _sample(
        self,
        request: SampleRequest,
        timeout: float | None = None,
        observer: Observer | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> SampleResponse:
        """Submit and fetch, under the retry configuration; every attempt has a number of its own."""
        notice = _Notice(self, observer)
        attempts = self.retry_handler.execute(self._attempt, request, notice, headers)
        if timeout is None:
            return await attempts
        try:
            async with asyncio.timeout(timeout):
                return await attempts
        except TimeoutError as error:
            if isinstance(error, TinkerError):
                raise
            raise APITimeoutError(
                f"sampling at {self._session.transport.place}: no samples within {timeout:g} s"
            ) from None

    def _tracker(self, observer: Observer | None) -> QueueStateTracker:
        facts = {
            "session_id": self._session.session_id,
            "sampling_session_id": self.sampling_session_id,
        }
        return QueueStateTracker([observer], facts, listener=self.on_queue_state_change)

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
                response: SampleResponse = await self._session.result(receipt, notice=notice)
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
        """A result that the batched poll brings along, or one that it leaves to be polled for by
        itself.
        """
        transport = self._session.transport
        response: SampleResponse
        try:
            reply = await outcome
            if reply is None:
                asked = time.monotonic()
                try:
                    response = await self._session.result(receipt, notice=notice)
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
        """The poller for all samples of this client, where the server offers one."""
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

    async def _submit(
        self, request: SampleRequest, notice: QueueNotice, headers: Mapping[str, str] | None
    ) -> Receipt:
        """Pass the gate and submit; the same request is sent again after back-pressure."""
        size = request.prompt.estimated_bytes
        patience = None if self.retry_handler.config.enable_retry_logic else 0.0
        sent = BACKPRESSURE if headers is None else {**BACKPRESSURE, **headers}

        async def submit() -> Receipt:
            async with self._session.gate.passed(size):
                return await self._session.submit(
                    protocol.ASAMPLE, request, headers=sent, patience=patience, final={429}
                )

        try:
            return await persist(submit, self._repeating(size, notice))
        except GoneError as error:
            # the sampler itself is gone: no other number will bring it back
            error.should_retry = False
            raise

    def _repeating(self, size: int, notice: QueueNotice) -> Callable[[object], float | None]:
        """Return a policy that repeats after back-pressure; the gate keeps the pause."""

        def delay_after(outcome: object) -> float | None:
            if not isinstance(outcome, RateLimitError):
                return None
            _tell_state(outcome.body, notice)
            self._session.gate.refused(size, outcome.retry_after)
            return 0.0 if self.retry_handler.config.enable_retry_logic else None

        return delay_after

    def _cancel(self, receipt: Receipt) -> None:
        """Tell the server that nobody waits for a sample any more, where it wants to know."""
        if receipt.request_id is None or not self._session.dynamic_config.sample_cancel_enabled:
            return
        if not self._session.closed:
            runtime().task(self._session.cancel_future(receipt.request_id))

    def sample_stream(
        self,
        prompt: ModelInput,
        sampling_params: SamplingParams,
        num_samples: int = 1,
        *,
        timeout: float | None = None,
    ) -> SampleStream:
        """Draw samples and get each token when it is drawn.

        Args:
            prompt: What to continue.
            sampling_params: How to draw.
            num_samples: How many samples to draw; the chunks' `index` tells them apart.
            timeout: Seconds of silence after which the stream fails; the configured timeout by
                default.

        Returns:
            A stream to iterate over with `for` or `async for`. Servers that cannot stream give all
            tokens at the end.

        Example:
            >>> for chunk in sampler.sample_stream(
            ...     prompt, SamplingParams(max_tokens=2, temperature=0)
            ... ):
            ...     print(chunk.text, end="", flush=True)
            46
        """
        request = self._request(prompt, num_samples, sampling_params)
        stream: SampleStream = SampleStream()
        stream.begin(self._session.call(self._stream, stream, request, timeout))
        return stream

    @unlisted
    async def sample_stream_async(
        self,
        prompt: ModelInput,
        sampling_params: SamplingParams,
        num_samples: int = 1,
        *,
        timeout: float | None = None,
    ) -> SampleStream:
        """Like `sample_stream`."""
        return self.sample_stream(prompt, sampling_params, num_samples, timeout=timeout)

    async def _stream(
        self, stream: SampleStream, request: SampleRequest, timeout: float | None
    ) -> None:
        if self._streams:
            size = request.prompt.estimated_bytes
            numbered = request.model_copy(update={"seq_id": await self._number()})

            async def read() -> None:
                await self._session.gate.backoff.wait()
                await self._read_stream(stream, numbered, timeout)

            try:
                await persist(read, self._repeating(size, _Notice(self, None)))
                return
            except APIStatusError as error:
                if error.status_code not in NO_STREAMS or "sampling session" in str(error.body):
                    raise
            self._streams = False
            logger.info(
                "%s does not stream: the tokens of a sample come all at once",
                self._session.transport.place,
            )
        texts = self._texts()
        for chunk in chunks_of(await self._sample(request, timeout)):
            stream.put(texts.add(chunk))

    def _texts(self) -> StreamTexts:
        return StreamTexts(self.get_tokenizer)

    async def _read_stream(
        self, stream: SampleStream, request: SampleRequest, timeout: float | None
    ) -> None:
        transport, op = self._session.transport, protocol.STREAM_SAMPLE
        open_samples, texts = request.num_samples, self._texts()
        try:
            async with transport.stream(op, request, timeout=timeout) as reply:
                async for event in sse.events(reply.chunks):
                    told = event.json()
                    if not isinstance(told, dict):
                        continue  # a farewell, or something that is no event of ours
                    if event.event == "error" or told.get("error") is not None:
                        raise failure_of(transport, op, told, request.sampling_session_id or "")
                    chunk = SampleStreamChunk.from_map(told)
                    open_samples -= chunk.is_done
                    stream.put(texts.add(chunk))
        except APIConnectionError:
            if open_samples > 0:
                raise  # else all has been said, and only the farewell is missing
        except (OverflowError, ValueError) as error:
            if isinstance(error, TinkerError):
                raise
            raise APIResponseValidationError(
                f"{op.title} at {transport.place}: an event is malformed: {error}"
            ) from error
        if open_samples > 0:
            raise APIConnectionError(
                f"{op.title} at {transport.place}: the stream ended before {open_samples} of its "
                "samples did"
            )

    def compute_logprobs(
        self,
        prompt: ModelInput,
        prompt_logprobs_last_n: int | None = None,
        *,
        timeout: float | None = None,
        queue_state_observer: Observer | None = None,
    ) -> Future[list[float | None]]:
        """The log-probability of each token of a prompt; None for the first.

        Args:
            prompt: What to score.
            prompt_logprobs_last_n: Score the last n tokens only.
            timeout: Seconds after which it is given up with APITimeoutError.
            queue_state_observer: Is told when the server's queue pauses or goes on, besides the
                log.

        Returns:
            A future of one number per token; None where there is none.

        Example:
            >>> sampler.compute_logprobs(prompt).result()
            [None, -4..., -2..., ...]
        """
        request = self._request(
            prompt,
            1,
            SamplingParams(max_tokens=1),
            prompt_logprobs=True,
            prompt_logprobs_last_n=prompt_logprobs_last_n,
        )

        async def score() -> list[float | None]:
            return (
                await self._sample(request, timeout, queue_state_observer)
            ).prompt_logprobs or []

        return self._session.call(score, kind=SampleFuture)

    compute_logprobs_async = value_twin(compute_logprobs)

    def get_sampler_handle(self) -> str:
        """A text from which another process can make this client: where it is, what it samples, no
        credential.

        Example:
            >>> handle = sampler.get_sampler_handle()
            >>> SamplingClient.from_sampler_handle(handle)
            SamplingClient('...:sample:0')
        """
        state = {
            "base_url": self._session.config.base_url,
            "session_id": self._session.session_id,
            "sampling_session_id": self.sampling_session_id,
            "base_model": self._base_model,
            "record_stability_info": self._record_stability_info,
        }
        return base64.urlsafe_b64encode(to_json(state)).decode()

    @staticmethod
    def from_sampler_handle(handle: str, *, api_key: str | None = None) -> SamplingClient:
        """A client of the sampler behind a handle; the credential is this process's own.

        Args:
            handle: What `get_sampler_handle` gave.
            api_key: The key; that of the environment by default.

        Returns:
            A client with request numbers of its own.

        Raises:
            ValueError: The text is no handle.

        Example:
            >>> same = SamplingClient.from_sampler_handle(sampler.get_sampler_handle())
            >>> same.sample(prompt, 1, SamplingParams(max_tokens=8)).result()
            SampleResponse([SampledSequence(...)])
        """
        try:
            state = json.loads(base64.urlsafe_b64decode(handle.encode()))
            config = Config.resolve(base_url=state["base_url"], api_key=api_key)
            return SamplingClient(
                shadow_of(config, state["session_id"]),
                sampling_session_id=state["sampling_session_id"],
                base_model=state.get("base_model"),  # handles of older clients do not name it
                record_stability_info=bool(state["record_stability_info"]),
            )
        except (
            binascii.Error,
            KeyError,
            RecursionError,
            TypeError,
            UnicodeError,
            json.JSONDecodeError,
        ):
            raise ValueError("this is no sampler handle") from None

    def __reduce__(self) -> Any:
        # As in the official SDK a pickle carries the credential, unlike a handle: it goes to the
        # user's own workers.
        return (
            _unpickled,
            (self.get_sampler_handle(), self._session.config.api_key, self._retry_config),
        )

    async def _model(self) -> str:
        """The base model's name: learnt when the sampler was opened, or asked for once."""
        async with self._asking:
            if self._base_model is None:
                self._base_model = await base_model_of(self._session, self.sampling_session_id)
            return self._base_model

    def get_base_model(self) -> str:
        """The name of the base model under this sampler; no request is needed.

        Example:
            >>> sampler.get_base_model()
            'tinkex/tiny'
        """
        return (
            self._session.call(self._model).result()
            if self._base_model is None
            else self._base_model
        )

    @deprecated("call SamplingClient.get_base_model(), which makes no request")
    async def get_base_model_async(self) -> str:
        """Deprecated: use `get_base_model`, which makes no request."""
        return (
            await self._session.call(self._model) if self._base_model is None else self._base_model
        )

    def get_tokenizer(
        self,
        *,
        backend: str | None = None,
        sampler_fun: Callable[[SamplingClient], Any] | None = None,
        load_fun: LoadFunction | None = None,
    ) -> Any:
        """The tokenizer of the base model; see `tinkex.tokenizers.get_or_load_tokenizer`.

        Args:
            backend: "transformers" or "tokenizers"; the first that is installed by default.
            sampler_fun: Says what is sampled from (`base_model`), in place of the server.
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
        tokenizer_id = get_tokenizer_id(await self._session.call(self._model))
        return await asyncio.to_thread(
            get_or_load_tokenizer, tokenizer_id, backend=backend, load_fun=load_fun
        )

    def __repr__(self) -> str:
        return f"SamplingClient({self.sampling_session_id!r})"


def _unpickled(
    handle: str, api_key: str | None, retry_config: RetryConfig | None
) -> SamplingClient:
    client = SamplingClient.from_sampler_handle(handle, api_key=api_key)
    client._retry_config = retry_config
    return client


async def base_model_of(session: Session, sampling_session_id: str) -> str:
    """Ask the server which base model a sampling session samples from."""
    path = {"sampler_id": sampling_session_id}
    sampler: GetSamplerResponse = await session.transport.call(protocol.GET_SAMPLER, path=path)
    return sampler.base_model


def checked_kind(kind: SamplingClientKind) -> SamplingClientKind:
    """The kind of a sampler, if there is one of that name."""
    if kind not in get_args(SamplingClientKind):
        raise ValueError(
            f"kind is {kind!r}; expected one of {', '.join(get_args(SamplingClientKind))}"
        )
    return kind


async def open_sampling_client(
    session: Session,
    *,
    base_model: str | None = None,
    model_path: str | None = None,
    sampling_session_id: str | None = None,
    retry_config: RetryConfig | None = None,
    record_stability_info: bool = False,
    known_model: str | None = None,
) -> SamplingClient:
    """Bind a new sampler to a base model or a checkpoint; a sampling session that is there needs no
    binding.

    Args:
        session: The session to sample in.
        base_model: The name of a base model.
        model_path: A `tinker://…/sampler_weights/…` path.
        sampling_session_id: A sampling session that is there already.
        retry_config: How samples that fail for a passing reason are treated.
        record_stability_info: Ask the server to keep what `stable_reinforce` needs.
        known_model: The base model under the weights, which is not sent; the server is asked for it
            otherwise.

    Returns:
        The sampler.

    Raises:
        ValueError: Nothing to sample from was given, or the path is not a `tinker://` path.
    """
    if sampling_session_id is None:
        if model_path is None and base_model is None:
            raise ValueError("give model_path or base_model")
        if model_path is not None and not model_path.startswith(SCHEME):
            raise ValueError(f"model_path must start with {SCHEME!r}, got {model_path!r}")
        request = CreateSamplingSessionRequest(
            session_id=session.session_id,
            sampling_session_seq_id=next(session.sampling_session_seq_ids),
            base_model=base_model,
            model_path=model_path,
        )
        response: CreateSamplingSessionResponse = await session.transport.call(
            protocol.CREATE_SAMPLING_SESSION, request
        )
        sampling_session_id = response.sampling_session_id
    model = base_model or known_model
    if model is None:
        with contextlib.suppress(NotFoundError):  # older servers have no such endpoint
            model = await base_model_of(session, sampling_session_id)
    return SamplingClient(
        session,
        sampling_session_id=sampling_session_id,
        base_model=model,
        retry_config=retry_config,
        record_stability_info=record_stability_info,
    )


class _Notice:
    """Hears of the queue on behalf of one sample; most hear nothing, so what that takes is made
    with the first word.
    """

    __slots__ = ("_client", "_observer", "_tracker")

    def __init__(self, client: SamplingClient, observer: Observer | None) -> None:
        self._client, self._observer = client, observer
        self._tracker: QueueStateTracker | None = None

    def __call__(
        self, queue_state: str, queue_state_reason: str | None = None, /, *, request_id: str = ""
    ) -> object:
        if self._tracker is None:
            self._tracker = self._client._tracker(self._observer)
        return self._tracker.heard(queue_state, queue_state_reason, request_id=request_id)


def _tell_state(body: object, notice: QueueNotice) -> None:
    """A refusal for want of room may say why."""
    if isinstance(body, dict) and isinstance(state := body.get("queue_state"), str):
        reason = body.get("queue_state_reason")
        notice(state, reason if isinstance(reason, str) else None)
