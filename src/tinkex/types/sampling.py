"""Requests to sample."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Self

from tinkex.types.inputs import ModelInput, read_input
from tinkex.types.record import Int64, Record, from_builtins, settle, settle_each, whole
from tinkex.types.sampling_params import SamplingParams as SamplingParams
from tinkex.types.tensors import TensorData

COUNTS = ("num_samples", "topk_prompt_logprobs", "topk_sample_logprobs", "prompt_alt_tokens_k")


class SampleRequest(Record, frozen=True, kw_only=True):
    """Ask for samples and, optionally, for log-probabilities of the prompt.

    Example:
        >>> params = SamplingParams(max_tokens=16)
        >>> SampleRequest(
        ...     prompt=ModelInput.from_ints([1, 2]), sampling_params=params, num_samples=4
        ... ).num_samples
        4
    """

    prompt: ModelInput
    sampling_params: SamplingParams
    num_samples: Int64 = 1
    base_model: str | None = None
    model_path: str | None = None
    sampling_session_id: str | None = None
    seq_id: Int64 | None = None
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: Int64 = 0
    topk_sample_logprobs: Int64 = 0
    target_prompt_logprobs: TensorData | None = None
    prompt_alt_tokens_k: Int64 = 0
    prompt_logprobs_last_n: Int64 | None = None
    record_stability_info: bool | None = None
    type: Literal["sample"] = "sample"

    def __post_init__(self) -> None:
        if not isinstance(self.prompt, ModelInput):
            settle(self, "prompt", read_input(self.prompt, "prompt"))
        if not isinstance(self.sampling_params, SamplingParams):
            settle(self, "sampling_params", from_builtins(SamplingParams, self.sampling_params))
        settle_each(self, whole, COUNTS, optional=("prompt_logprobs_last_n",))


class SampleStreamChunk(Record, frozen=True, kw_only=True, dict=True):
    """One event of a stream of samples: a token, the end, or an error (whose text is in `token`).

    Example:
        >>> stream = [
        ...     SampleStreamChunk(token="Hel"),
        ...     SampleStreamChunk(token="lo"),
        ...     SampleStreamChunk.done("stop", 2),
        ... ]
        >>> "".join(chunk.token for chunk in stream if not chunk.is_done)
        'Hello'
    """

    token: str | None = None
    token_id: int | None = None
    index: int | None = None
    finish_reason: str | None = None
    total_tokens: int | None = None
    logprob: float | None = None
    weights_version: int | None = None
    prompt_cache_hit_tokens: int | None = None
    event_type: Literal["token", "done", "error"] = "token"

    @classmethod
    def from_map(cls, value: Mapping[str, Any]) -> Self:
        """Read an event: one with a reason to finish is the end, one with an error is that.

        Args:
            value: The event's data.

        Returns:
            The chunk.

        Example:
            >>> SampleStreamChunk.from_map({"finish_reason": "length", "total_tokens": 16}).is_done
            True
        """
        if value.get("error") is not None:
            return cls.error(str(value["error"]))
        fields = {
            name: value[name] for name in cls.__struct_fields__ if value.get(name) is not None
        }
        if fields.get("finish_reason") is not None:
            fields["event_type"] = "done"
        return from_builtins(cls, fields)

    @classmethod
    def done(cls, finish_reason: str | None = None, total_tokens: int | None = None) -> Self:
        """The end of a stream.

        Args:
            finish_reason: Why.
            total_tokens: How many tokens there were.

        Returns:
            The chunk.

        Example:
            >>> SampleStreamChunk.done("stop", total_tokens=12).event_type
            'done'
        """
        return cls(finish_reason=finish_reason, total_tokens=total_tokens, event_type="done")

    @classmethod
    def error(cls, message: str) -> Self:
        """An error that ends a stream.

        Args:
            message: What went wrong.

        Returns:
            The chunk.

        Example:
            >>> chunk = SampleStreamChunk.error("out of memory")
            >>> chunk.is_done, chunk.token
            (True, 'out of memory')
        """
        return cls(token=message, event_type="error")

    @property
    def text(self) -> str:
        """The text that the chunk adds to its sample: whole characters only.

        The text of a character of several tokens is in the chunk of the last one; what is left at
        the end is in the last chunk. The tokenizer is loaded when this is first looked at.

        Example:
            >>> stream = sampler.sample_stream(prompt, SamplingParams(max_tokens=2, temperature=0))
            >>> "".join(chunk.text for chunk in stream)
            '46'
        """
        told = self.__dict__.get("_text")
        return (self.token or "") if told is None else str(told())

    @property
    def is_done(self) -> bool:
        """True if the stream ends here, with or without an error."""
        return self.event_type != "token"
