"""Sampling from logits, for the platforms that compute them here."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TypeAlias

import numpy as np

from tinkex.types.inputs import ModelInput
from tinkex.types.sampled import SampledSequence, SampleResponse, StopReason
from tinkex.types.sampling import SamplingParams
from tinkex.types.tensors import Array

Next: TypeAlias = Callable[[int], Array]
"""A function from a token to the logits of the next one."""


def log_softmax(logits: Array) -> Array:
    """Return logits as logarithms of probabilities, along the last axis."""
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    normalised: Array = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return normalised


def draw(
    prompt: ModelInput,
    num_samples: int,
    params: SamplingParams,
    start: Callable[[list[int]], tuple[Array, Next]],
    *,
    vocab: int,
    context: int,
    eos: Collection[int],
) -> SampleResponse:
    """Draw samples one after the other; with a seed, sample i is always the same.

    Args:
        prompt: The tokens to continue.
        num_samples: The number of samples.
        params: The settings; stops are token ids, by default the end-of-text tokens.
        start: Takes the prompt; returns the logits after it, and a function that goes on from
            there.
        vocab: The number of tokens in the vocabulary.
        context: The most tokens of a prompt and its sample.
        eos: Tokens that end a text.
    """
    tokens = prompt.to_ints()
    if not tokens or min(tokens) < 0 or max(tokens) >= vocab:
        raise ValueError(f"the prompt must be tokens below {vocab}, got {tokens}")
    limit = context - len(tokens) if params.max_tokens is None else params.max_tokens
    if len(tokens) + limit > context:
        raise ValueError(
            f"a prompt of {len(tokens)} tokens and max_tokens {limit} exceed the window of "
            f"{context}"
        )
    if params.changes_logits or params.min_p:
        raise ValueError(
            "min_p, penalties, logit_bias and bad_words are not supported here; leave them out"
        )
    if num_samples < 1:
        raise ValueError(f"num_samples must be at least 1, got {num_samples}")
    stops = (
        set(eos)
        if params.stop is None
        else {params.stop}
        if isinstance(params.stop, str)
        else set(params.stop)
    )
    if any(isinstance(stop, str) for stop in stops):
        raise ValueError("stop strings are not supported here: give token ids")
    return SampleResponse(
        [_sample(i, tokens, limit, params, start, stops) for i in range(num_samples)]
    )


def _sample(
    index: int,
    prompt: list[int],
    limit: int,
    params: SamplingParams,
    start: Callable[[list[int]], tuple[Array, Next]],
    stops: Collection[int | str],
) -> SampledSequence:
    random = np.random.default_rng(None if params.seed is None else [params.seed % 2**64, index])
    drawn: list[int] = []
    scores: list[float] = []
    reason: StopReason = "length"
    logits, following = start(prompt)
    while len(drawn) < limit:
        token, score = choose(logits, params, random)
        drawn.append(token)
        scores.append(score)
        if token in stops:
            reason = "stop"
            break
        if len(drawn) < limit:
            logits = following(token)
    return SampledSequence(
        stop_reason=reason,
        tokens_np=np.array(drawn, np.int32),
        logprobs_np=np.array(scores, np.float32),
    )


def choose(logits: Array, params: SamplingParams, random: np.random.Generator) -> tuple[int, float]:
    """Draw a token; return it and its log-probability before top_k and top_p."""
    if params.temperature == 0:
        token = int(logits.argmax())
        return token, float(log_softmax(logits)[token])
    logprobs = log_softmax(logits / params.temperature)
    order = np.argsort(-logprobs, kind="stable")[: params.top_k if params.top_k > 0 else None]
    weights = np.exp(logprobs[order])
    weights = weights * (weights.cumsum() - weights < params.top_p * weights.sum())
    token = int(random.choice(order, p=weights / weights.sum()))
    return token, float(logprobs[token])
