"""SamplingClient: samples and log-probabilities from a base model or from saved weights."""

from __future__ import annotations

import asyncio
import base64
import binascii
import itertools
import json
import time
import uuid
from typing import Any

from tinkex import protocol
from tinkex.config import Config
from tinkex.errors import GoneError, RateLimitError
from tinkex.futures import Future, retrieve
from tinkex.session import Session, shadow_of
from tinkex.tokenizers import load_tokenizer
from tinkex.types.inputs import ModelInput
from tinkex.types.record import to_json
from tinkex.types.sampling import (
    CreateSamplingSessionRequest,
    CreateSamplingSessionResponse,
    GetSamplerResponse,
    SampleRequest,
    SampleResponse,
    SamplingParams,
)
from tinkex.types.tensors import TensorData
from tinkex.types.training import UntypedAPIFuture

EXPIRED_ATTEMPTS = 5
SEQ_BLOCK = 1_000_000_000


class SamplingClient:
    """Samples from fixed weights: training that goes on elsewhere does not change what it gives.

    Example:
        >>> with tinkex.ServiceClient(base_url="local") as service:  # doctest: +SKIP
        ...     sampler = service.create_sampling_client(base_model="tinkex/tiny")
        ...     sampler.sample(prompt, num_samples=4, sampling_params=SamplingParams(max_tokens=16)).result()
    """

    def __init__(self, session: Session, *, sampling_session_id: str, record_stability_info: bool = False) -> None:
        self._session = session
        self.sampling_session_id = sampling_session_id
        self._record_stability_info = record_stability_info
        # A copy in another process numbers its requests in a block of its own.
        clone = uuid.uuid4().int % SEQ_BLOCK + 1 if session.is_shadow else 0
        self._seq_ids = itertools.count(clone * SEQ_BLOCK)
        self._in_flight: asyncio.Semaphore | None = None

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
    ) -> Future[SampleResponse]:
        """Draw samples.

        Args:
            prompt: What to continue.
            num_samples: How many samples to draw.
            sampling_params: How to draw them.
            include_prompt_logprobs: Also give the log-probability of each prompt token.
            topk_prompt_logprobs: Also give this many likeliest tokens per prompt position.
            topk_sample_logprobs: Also give this many likeliest tokens per sampled position.
            target_prompt_logprobs: Token ids `[P-1, K]` (int64, -1 = none) to score at each prompt position.
            prompt_alt_tokens_k: Draw this many alternatives at each prompt position after the first.
            prompt_logprobs_last_n: Give prompt log-probabilities for the last n tokens only.

        Returns:
            A future of the samples.

        Raises:
            ValueError: The options contradict each other.
        """
        if not isinstance(prompt, ModelInput):
            raise TypeError(
                f"prompt must be a ModelInput, got {type(prompt).__name__}: "
                "ModelInput.from_ints(tokenizer.encode(text)) makes one of text"
            )
        if num_samples < 1:
            raise ValueError("num_samples must be at least 1")
        if prompt_alt_tokens_k < 0:
            raise ValueError("prompt_alt_tokens_k must be >= 0")
        if target_prompt_logprobs is not None and (
            target_prompt_logprobs.dtype != "int64" or len(target_prompt_logprobs.shape or ()) != 2
        ):
            raise ValueError("target_prompt_logprobs must be a two-dimensional int64 tensor")
        if prompt_logprobs_last_n is not None and not include_prompt_logprobs:
            raise ValueError("prompt_logprobs_last_n needs include_prompt_logprobs")
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
        return self._session.start(self._sample(request))

    def _request(
        self,
        prompt: ModelInput,
        num_samples: int,
        params: SamplingParams,
        *,
        prompt_logprobs_last_n: int | None,
        **options: Any,
    ) -> SampleRequest:
        if prompt_logprobs_last_n is not None and prompt_logprobs_last_n < 1:
            raise ValueError("prompt_logprobs_last_n must be at least 1")
        return SampleRequest(
            prompt=prompt,
            num_samples=num_samples,
            sampling_params=params,
            sampling_session_id=self.sampling_session_id,
            seq_id=next(self._seq_ids),
            prompt_logprobs_last_n=prompt_logprobs_last_n,
            record_stability_info=self._record_stability_info,
            **options,
        )

    async def _sample(self, request: SampleRequest) -> SampleResponse:
        """Submit and fetch. A result that expired before it was fetched is asked for anew, under a new number."""
        if self._in_flight is None:
            self._in_flight = asyncio.Semaphore(self._session.client_config.sample_max_concurrent_requests)
        async with self._in_flight:
            for attempt in range(1, EXPIRED_ATTEMPTS + 1):
                try:
                    return await self._sample_once(request)
                except GoneError:
                    if attempt == EXPIRED_ATTEMPTS:
                        raise
                    request = request.model_copy(update={"seq_id": next(self._seq_ids)})
        raise AssertionError("unreachable")

    async def _sample_once(self, request: SampleRequest) -> SampleResponse:
        submitted = time.monotonic()
        receipt = await self._submit(request)
        transport = self._session.transport
        response: SampleResponse = await retrieve(transport, protocol.ASAMPLE, receipt.request_id, submitted)
        for sequence, sequence_id in zip(response.sequences, receipt.sample_sequence_ids or (), strict=False):
            sequence.sequence_id = sequence_id
        return response

    async def _submit(self, request: SampleRequest) -> UntypedAPIFuture:
        """Pass the gate; back-pressure makes everyone wait, and the same request is then sent again."""
        gate, size = self._session.gate, request.prompt.estimated_bytes
        headers = {"X-Tinker-Sampling-Backpressure": "1"}
        while True:
            async with gate.passed(size):
                try:
                    receipt: UntypedAPIFuture = await self._session.transport.call(
                        protocol.ASAMPLE, request, headers=headers, final={429}
                    )
                    return receipt
                except RateLimitError as error:
                    gate.refused(size, error.retry_after)

    async def sample_async(
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
    ) -> SampleResponse:
        """Draw samples; takes what `sample` takes and gives the samples themselves."""
        return await self.sample(
            prompt,
            num_samples,
            sampling_params,
            include_prompt_logprobs,
            topk_prompt_logprobs,
            topk_sample_logprobs,
            target_prompt_logprobs,
            prompt_alt_tokens_k,
            prompt_logprobs_last_n,
        )

    def compute_logprobs(
        self, prompt: ModelInput, prompt_logprobs_last_n: int | None = None
    ) -> Future[list[float | None]]:
        """The log-probability of each token of a prompt; None for the first."""
        request = self._request(
            prompt, 1, SamplingParams(max_tokens=1), prompt_logprobs=True, prompt_logprobs_last_n=prompt_logprobs_last_n
        )

        async def score() -> list[float | None]:
            return (await self._sample(request)).prompt_logprobs or []

        return self._session.start(score())

    async def compute_logprobs_async(
        self, prompt: ModelInput, prompt_logprobs_last_n: int | None = None
    ) -> list[float | None]:
        """The log-probability of each token of a prompt; None for the first."""
        return await self.compute_logprobs(prompt, prompt_logprobs_last_n)

    def get_sampler_handle(self) -> str:
        """A text from which another process can make this client: where it is, what it samples, no credential."""
        state = {
            "base_url": self._session.config.base_url,
            "session_id": self._session.session_id,
            "sampling_session_id": self.sampling_session_id,
            "record_stability_info": self._record_stability_info,
        }
        return base64.urlsafe_b64encode(to_json(state)).decode()

    @staticmethod
    def from_sampler_handle(handle: str, *, api_key: str | None = None) -> SamplingClient:
        """A client of the sampler behind a handle; the credential is this process's own.

        Raises:
            ValueError: The text is no handle.
        """
        try:
            state = json.loads(base64.urlsafe_b64decode(handle.encode()))
            config = Config.resolve(base_url=state["base_url"], api_key=api_key)
            return SamplingClient(
                shadow_of(config, state["session_id"]),
                sampling_session_id=state["sampling_session_id"],
                record_stability_info=bool(state["record_stability_info"]),
            )
        except (binascii.Error, KeyError, TypeError, UnicodeError, json.JSONDecodeError):
            raise ValueError("this is no sampler handle") from None

    def __reduce__(self) -> Any:
        # As in the official SDK a pickle carries the credential, unlike a handle: it goes to the user's own workers.
        return (_unpickled, (self.get_sampler_handle(), self._session.config.api_key))

    async def _sampler(self) -> GetSamplerResponse:
        path = {"sampler_id": self.sampling_session_id}
        sampler: GetSamplerResponse = await self._session.transport.call(protocol.GET_SAMPLER, path=path)
        return sampler

    def get_base_model(self) -> str:
        """The name of the base model under this sampler."""
        return self._session.start(self._sampler()).result().base_model

    async def get_base_model_async(self) -> str:
        """The name of the base model under this sampler."""
        return (await self._session.start(self._sampler())).base_model

    def get_tokenizer(self, *, backend: str | None = None) -> Any:
        """The tokenizer of the base model; see `tinkex.tokenizers.load_tokenizer`."""
        return load_tokenizer(self.get_base_model(), backend=backend)

    async def get_tokenizer_async(self, *, backend: str | None = None) -> Any:
        """The tokenizer of the base model; see `tinkex.tokenizers.load_tokenizer`."""
        return await asyncio.to_thread(load_tokenizer, await self.get_base_model_async(), backend=backend)

    def __repr__(self) -> str:
        return f"SamplingClient({self.sampling_session_id!r})"


def _unpickled(handle: str, api_key: str | None) -> SamplingClient:
    return SamplingClient.from_sampler_handle(handle, api_key=api_key)


async def open_sampling_client(
    session: Session,
    *,
    base_model: str | None = None,
    model_path: str | None = None,
    record_stability_info: bool = False,
) -> SamplingClient:
    """Bind a new sampler to a base model or a checkpoint."""
    request = CreateSamplingSessionRequest(
        session_id=session.session_id,
        sampling_session_seq_id=next(session.sampling_session_seq_ids),
        base_model=base_model,
        model_path=model_path,
    )
    response: CreateSamplingSessionResponse = await session.transport.call(protocol.CREATE_SAMPLING_SESSION, request)
    return SamplingClient(
        session,
        sampling_session_id=response.sampling_session_id,
        record_stability_info=record_stability_info,
    )
