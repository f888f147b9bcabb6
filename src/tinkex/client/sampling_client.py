"""SamplingClient: samples from a base model or from saved weights."""

from __future__ import annotations

import base64
import binascii
import contextlib
import functools
import json
import logging
import warnings
from collections.abc import Mapping
from typing import Any, TypeVar

from tinkex.client.futures.api_future import AwaitableConcurrentFuture, Future
from tinkex.client.futures.backcompat import (
    ADVICE,
    BackcompatClientFuture,
    SampleFuture,
    forwarding,
)
from tinkex.client.futures.queue_states import Observer
from tinkex.client.futures.result_polling import failure_of
from tinkex.client.futures.streams import SampleStream, StreamTexts, chunks_of
from tinkex.client.futures.twins import twin, value_twin
from tinkex.client.http.request_headers import name_requests
from tinkex.client.http.retry import RetryConfig, persist
from tinkex.client.sampling_parts.sample_calls import Notice, SampleCalls, base_model_of
from tinkex.client.session import Session, shadow_of
from tinkex.client.session_client import SessionClient, made_of
from tinkex.client.settings.config import Config
from tinkex.errors import (
    APIConnectionError,
    APIResponseValidationError,
    APIStatusError,
    NotFoundError,
    TinkerError,
)
from tinkex.types.checkpoints import SCHEME
from tinkex.types.inputs import ModelInput
from tinkex.types.record import to_json
from tinkex.types.sampled import SampleResponse
from tinkex.types.sampling import SampleRequest, SampleStreamChunk, SamplingParams
from tinkex.types.sessions import CreateSamplingSessionRequest, CreateSamplingSessionResponse
from tinkex.types.tensors import TensorData
from tinkex.wire import protocol, sse

logger = logging.getLogger("tinkex")

NO_STREAMS = frozenset({404, 405, 501})
"""Status codes of servers that cannot stream."""

S = TypeVar("S", bound="SamplingClient")


@made_of(SessionClient, SampleCalls)
class SamplingClient(SampleCalls):
    """Samples from fixed weights; later training of the same run does not change them.

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
        """Open a sampler of a checkpoint, a base model or an existing sampling session.

        Args:
            holder: The session to sample in.
            model_path: A `tinker://…/sampler_weights/…` path.
            base_model: The name of a base model.
            sampling_session_id: An existing sampling session.
            retry_config: How samples are retried.
            record_stability_info: Ask the server to keep what `stable_reinforce` needs.

        Returns:
            A future of the sampler.

        Example:
            >>> SamplingClient.create(service.holder, base_model="tinkex/tiny").result()
            SamplingClient('...:sample:0')
        """
        opening = functools.partial(
            open_sampler,
            holder,
            SamplingClient,
            base_model=base_model,
            model_path=model_path,
            sampling_session_id=sampling_session_id,
            retry_config=retry_config,
            record_stability_info=record_stability_info,
        )
        return AwaitableConcurrentFuture(holder.create(opening))

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
            prompt: The text to continue, as tokens.
            num_samples: The number of samples.
            sampling_params: Temperature, stop and the other settings.
            include_prompt_logprobs: Also return the log-probability of each prompt token.
            topk_prompt_logprobs: Also return this many likeliest tokens per prompt position.
            topk_sample_logprobs: Also return this many likeliest tokens per sampled position.
            target_prompt_logprobs: Token ids `[P-1, K]` (int64, -1 = none) to score at each prompt
                position.
            prompt_alt_tokens_k: Draw this many alternatives at each prompt position after the
                first.
            prompt_logprobs_last_n: Return prompt log-probabilities for the last n tokens only.
            timeout: Seconds after which the sample fails with APITimeoutError; they include
                queueing and retries.
            queue_state_observer: Called when the server's queue pauses or goes on, in addition to
                the log.
            headers: Extra headers of the submission.

        Returns:
            A future of the samples.

        Raises:
            ValueError: The options contradict each other.
            TypeError: The prompt is not a ModelInput.

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
            include_prompt_logprobs,
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

    def compute_logprobs(
        self,
        prompt: ModelInput,
        prompt_logprobs_last_n: int | None = None,
        *,
        timeout: float | None = None,
        queue_state_observer: Observer | None = None,
    ) -> Future[list[float | None]]:
        """Return the log-probability of each token of a prompt; None for the first.

        Args:
            prompt: The tokens to score.
            prompt_logprobs_last_n: Score the last n tokens only.
            timeout: Seconds after which the call fails with APITimeoutError.
            queue_state_observer: Called when the server's queue pauses or goes on, in addition to
                the log.

        Returns:
            A future of one number or None per token.

        Example:
            >>> sampler.compute_logprobs(prompt).result()
            [None, -4..., -2..., ...]
        """
        request = self._request(
            prompt,
            1,
            SamplingParams(max_tokens=1),
            True,
            prompt_logprobs_last_n=prompt_logprobs_last_n,
        )

        async def score() -> list[float | None]:
            return (
                await self._sample(request, timeout, queue_state_observer)
            ).prompt_logprobs or []

        return self._session.call(score, kind=SampleFuture)

    compute_logprobs_async = value_twin(compute_logprobs)

    def sample_stream(
        self,
        prompt: ModelInput,
        sampling_params: SamplingParams,
        num_samples: int = 1,
        *,
        timeout: float | None = None,
    ) -> SampleStream:
        """Draw samples, and return each token when it is drawn.

        Args:
            prompt: The text to continue, as tokens.
            sampling_params: Temperature, stop and the other settings.
            num_samples: The number of samples; the `index` of a chunk tells its sample.
            timeout: Seconds of silence after which the stream fails; the configured timeout by
                default.

        Returns:
            A stream to iterate over with `for` or `async for`. Servers that cannot stream return
            all tokens at the end.

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

    sample_stream_async = twin(sample_stream, is_ours=True)

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
                await persist(read, self._repeating(size, Notice(self, None)))
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
                        continue  # the closing event, or an unknown one
                    if event.event == "error" or told.get("error") is not None:
                        raise failure_of(transport, op, told, request.sampling_session_id or "")
                    chunk = SampleStreamChunk.from_map(told)
                    open_samples -= chunk.is_done
                    stream.put(texts.add(chunk))
        except APIConnectionError:
            if open_samples > 0:
                raise  # else only the closing event is missing
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

    def get_sampler_handle(self) -> str:
        """Return a text from which another process can make this client.

        It holds no credential.

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
        """Make a client from a handle, with the credential of this process.

        Args:
            handle: The text that `get_sampler_handle` returned.
            api_key: The key; that of the environment by default.

        Returns:
            A client with request numbers of its own.

        Raises:
            ValueError: The text is not a handle.

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

    def __repr__(self) -> str:
        return f"SamplingClient({self.sampling_session_id!r})"


def _unpickled(
    handle: str, api_key: str | None, retry_config: RetryConfig | None
) -> SamplingClient:
    client = SamplingClient.from_sampler_handle(handle, api_key=api_key)
    client._retry_config = retry_config
    return client


async def open_sampler(
    session: Session,
    kind: type[S],
    *,
    base_model: str | None = None,
    model_path: str | None = None,
    sampling_session_id: str | None = None,
    known_model: str | None = None,
    **options: Any,
) -> S:
    """Open a sampler of a base model, a checkpoint or an existing sampling session.

    Args:
        session: The session to sample in.
        kind: The class of the client.
        base_model: The name of a base model.
        model_path: A `tinker://…/sampler_weights/…` path.
        sampling_session_id: An existing sampling session.
        known_model: The base model of the weights. It is not sent; without it the server is asked.
        options: Further arguments of the client.

    Returns:
        The sampler.

    Raises:
        ValueError: There is nothing to sample from, or the path is not a `tinker://` path.
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
    return kind(session, sampling_session_id=sampling_session_id, base_model=model, **options)


@name_requests
@forwarding(SamplingClient)
class BackcompatSamplingClientFuture(BackcompatClientFuture[SamplingClient], SamplingClient):
    """The future of a SamplingClient: `await` it, or call `.result()`.

    It can still be used as if it were the client, with a warning. A pickle of it is one of the
    client.

    Example:
        >>> service.create_sampling_client(base_model="tinkex/tiny").result()
        SamplingClient('...:sample:0')
    """

    def __reduce__(self) -> Any:
        message = f"DEPRECATED: pickling a {type(self).__name__} will be removed: {ADVICE}"
        warnings.warn(message, FutureWarning, stacklevel=2)
        return self.result().__reduce__()


def open_later(session: Session, **options: Any) -> BackcompatSamplingClientFuture:
    """Begin to open a sampler; `options` are those of `open_sampler`."""
    return BackcompatSamplingClientFuture(
        session.create(functools.partial(open_sampler, session, SamplingClient, **options))
    )
