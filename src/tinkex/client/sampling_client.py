"""SamplingClient: samples from a base model or from saved weights."""

from __future__ import annotations

import base64
import binascii
import contextlib
import functools
import json
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, get_args

from tinkex.client.futures.api_future import AwaitableConcurrentFuture, Future
from tinkex.client.futures.queue_states import Observer
from tinkex.client.futures.sample_future import SampleFuture
from tinkex.client.futures.twins import value_twin
from tinkex.client.http.retry import RetryConfig
from tinkex.client.sampling_parts.sample_calls import SampleCalls, base_model_of
from tinkex.client.sampling_parts.sample_stream_calls import SampleStreams
from tinkex.client.session import Session, shadow_of
from tinkex.client.session_client import SessionClient, made_of
from tinkex.client.settings.config import Config
from tinkex.errors import NotFoundError
from tinkex.types.checkpoints import SCHEME
from tinkex.types.inputs import ModelInput
from tinkex.types.record import to_json
from tinkex.types.sampled import SampleResponse
from tinkex.types.sampling import (
    CreateSamplingSessionRequest,
    CreateSamplingSessionResponse,
    SamplingParams,
)
from tinkex.types.saves import SamplingClientKind
from tinkex.types.tensors import TensorData
from tinkex.wire import protocol

S = TypeVar("S", bound="SamplingClient")


@made_of(SessionClient, SampleCalls, SampleStreams)
class SamplingClient(SampleStreams):
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


def checked_kind(kind: SamplingClientKind) -> SamplingClientKind:
    """Return the kind of a sampler; raise if there is no such kind."""
    if kind not in get_args(SamplingClientKind):
        raise ValueError(
            f"kind is {kind!r}; expected one of {', '.join(get_args(SamplingClientKind))}"
        )
    return kind


async def open_sampling_client(
    session: Session,
    *,
    retry_config: RetryConfig | None = None,
    record_stability_info: bool = False,
    **source: str | None,
) -> SamplingClient:
    """Open a sampler of a base model, a checkpoint or an existing sampling session.

    Args:
        session: The session to sample in.
        retry_config: How samples are retried.
        record_stability_info: Ask the server to keep what `stable_reinforce` needs.
        source: The weights to sample from; see `open_sampler`.

    Returns:
        The sampler.
    """
    make = functools.partial(
        SamplingClient, retry_config=retry_config, record_stability_info=record_stability_info
    )
    return await open_sampler(session, make, **source)


async def open_sampler(
    session: Session,
    make: Callable[..., S],
    *,
    base_model: str | None = None,
    model_path: str | None = None,
    sampling_session_id: str | None = None,
    known_model: str | None = None,
) -> S:
    """Open a sampler.

    Args:
        session: The session to sample in.
        make: Makes the client.
        base_model: The name of a base model.
        model_path: A `tinker://…/sampler_weights/…` path.
        sampling_session_id: An existing sampling session.
        known_model: The base model of the weights. It is not sent; without it the server is asked.

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
    return make(session, sampling_session_id=sampling_session_id, base_model=model)
