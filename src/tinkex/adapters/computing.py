"""The platforms that compute in this process: their losses, and sampling from logits.

The losses are those of the engine, written again in numpy from their definitions, so that each
checks the other.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

import numpy as np

from tinkex.adapters.platforms import Sampling
from tinkex.types.chunks import EncodedTextChunk
from tinkex.types.inputs import Datum, ModelInput
from tinkex.types.optimizers import AdamParams
from tinkex.types.sampled import SampledSequence, SampleResponse, StopReason
from tinkex.types.sampling import SamplingParams
from tinkex.types.tensors import Array, TensorData
from tinkex.types.training import ForwardBackwardOutput, OptimStepResponse

TARGETS = "target_tokens"

Slopes: TypeAlias = tuple[Array, Array]
"""The values of a loss and their derivatives by the log-probabilities."""


def _cross_entropy(
    logprobs: Array, inputs: Mapping[str, Array], config: Mapping[str, float]
) -> Slopes:
    return -inputs["weights"] * logprobs, -inputs["weights"]


def _importance_sampling(
    logprobs: Array, inputs: Mapping[str, Array], config: Mapping[str, float]
) -> Slopes:
    values = -np.exp(logprobs - inputs["logprobs"]) * inputs["advantages"]
    return values, values


def _ppo(logprobs: Array, inputs: Mapping[str, Array], config: Mapping[str, float]) -> Slopes:
    ratio, advantages = np.exp(logprobs - inputs["logprobs"]), inputs["advantages"]
    clipped = np.clip(ratio, config["clip_low_threshold"], config["clip_high_threshold"])
    # where it is not, the clipped ratio counts, which is flat
    free = ratio * advantages <= clipped * advantages
    return -np.minimum(ratio * advantages, clipped * advantages), np.where(
        free, -ratio * advantages, 0.0
    )


@dataclass(frozen=True, slots=True)
class Objective:
    """A loss, its inputs with their defaults, and its settings.

    An input without a default must be given.
    """

    evaluate: Callable[[Array, Mapping[str, Array], Mapping[str, float]], Slopes]
    inputs: Mapping[str, float | None]
    config: Mapping[str, float]


_POLICY = {"logprobs": None, "advantages": None}
OBJECTIVES = {
    "cross_entropy": Objective(_cross_entropy, {"weights": 1.0}, {}),
    "importance_sampling": Objective(_importance_sampling, _POLICY, {}),
    "ppo": Objective(_ppo, _POLICY, {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}),
}


@dataclass(frozen=True, slots=True)
class Example:
    """A datum that passed every check: tokens, targets, and inputs of their shape."""

    tokens: Array
    targets: Array
    inputs: dict[str, Array]


@dataclass(frozen=True, slots=True)
class Batch:
    """Data that passed every check, with the loss they are for."""

    objective: Objective
    config: dict[str, float]
    examples: list[Example]

    def evaluate(self, example: Example, logprobs: Array) -> Slopes:
        """The loss of one example."""
        return self.objective.evaluate(logprobs.astype(np.float64), example.inputs, self.config)


def _read(
    data: Sequence[Datum],
    loss_fn: str,
    config: Mapping[str, float | str] | None,
    vocab: int,
    context: int,
) -> Batch:
    """Check a call before anything is computed.

    Raises:
        ValueError: There is no such loss or setting, or a datum does not fit it; it is named.
    """
    objective = OBJECTIVES.get(loss_fn)
    if objective is None:
        raise ValueError(f"there is no loss {loss_fn!r} here; there are {', '.join(OBJECTIVES)}")
    settings = dict(objective.config)
    for name, value in (config or {}).items():
        if name not in settings:
            known = ", ".join(settings) or "none"
            raise ValueError(f"loss {loss_fn!r} has no setting {name!r}; known are {known}")
        settings[name] = float(value)
    if not data:
        raise ValueError("data is empty: there is nothing to compute")
    return Batch(
        objective,
        settings,
        [_example(i, datum, objective, vocab, context) for i, datum in enumerate(data)],
    )


def _example(index: int, datum: Datum, objective: Objective, vocab: int, context: int) -> Example:
    if not all(isinstance(chunk, EncodedTextChunk) for chunk in datum.model_input.chunks):
        raise ValueError(f"datum {index}: only text can be trained on here")
    tokens = datum.model_input.to_numpy().astype(np.int64)
    if not 1 <= tokens.size <= context:
        raise ValueError(
            f"datum {index}: {tokens.size} tokens, there must be between 1 and {context}"
        )
    if TARGETS not in datum.loss_fn_inputs:
        raise ValueError(f"datum {index}: input {TARGETS!r} is missing")
    targets = datum.loss_fn_inputs[TARGETS].to_numpy().astype(np.int64)
    if targets.shape[:1] != tokens.shape or targets.ndim > (
        2 if "weights" in objective.inputs else 1
    ):
        raise ValueError(
            f"datum {index}: {TARGETS!r} has shape {list(targets.shape)} for {tokens.size} tokens"
        )
    for name, found in (("model_input", tokens), (TARGETS, targets)):
        if found.size and not (found.min() >= 0 and found.max() < vocab):
            raise ValueError(
                f"datum {index}: {name!r} holds a token outside the vocabulary of {vocab}"
            )
    inputs = {
        key: _input(index, datum, key, targets, default)
        for key, default in objective.inputs.items()
    }
    return Example(tokens, targets, inputs)


def _input(index: int, datum: Datum, key: str, targets: Array, default: float | None) -> Array:
    tensor = datum.loss_fn_inputs.get(key)
    if tensor is None and default is None:
        raise ValueError(f"datum {index}: input {key!r} is missing")
    values = (
        np.full(targets.shape, default) if tensor is None else tensor.to_numpy().astype(np.float64)
    )
    if values.shape != targets.shape:
        raise ValueError(
            f"datum {index}: {key!r} has shape {list(values.shape)}, targets {list(targets.shape)}"
        )
    if not np.isfinite(values).all():
        raise ValueError(f"datum {index}: {key!r} holds NaN or infinity")
    return values


# ── sampling ──────────────────────────────────────────────────────────────────────────────────────

Next: TypeAlias = Callable[[int], Array]
"""A function from a token to the logits of the next one."""


def log_softmax(logits: Array) -> Array:
    """Return logits as logarithms of probabilities, along the last axis."""
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    normalised: Array = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return normalised


def _checked(
    session: ComputedSession, prompt: ModelInput, num_samples: int, params: SamplingParams
) -> tuple[list[int], int]:
    """Return the tokens of a prompt and the most tokens to sample, or raise."""
    tokens, vocab, context = prompt.to_ints(), session.vocab, session.context
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
    return tokens, limit


def _stops_of(session: ComputedSession, params: SamplingParams) -> Collection[int | str]:
    if params.stop is None:
        return set(session.eos)
    stops = {params.stop} if isinstance(params.stop, str) else set(params.stop)
    if any(isinstance(stop, str) for stop in stops):
        raise ValueError("stop strings are not supported here: give token ids")
    return stops


def _sample(
    index: int,
    limit: int,
    params: SamplingParams,
    begin: Callable[[], tuple[Array, Next]],
    stops: Collection[int | str],
) -> SampledSequence:
    random = np.random.default_rng(None if params.seed is None else [params.seed % 2**64, index])
    drawn: list[int] = []
    scores: list[float] = []
    reason: StopReason = "length"
    logits, following = begin()
    while len(drawn) < limit:
        token, score = _choose(logits, params, random)
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


def _choose(
    logits: Array, params: SamplingParams, random: np.random.Generator
) -> tuple[int, float]:
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


# ── the platform ──────────────────────────────────────────────────────────────────────────────────


@dataclass(slots=True, kw_only=True)
class ComputedSession:
    """A model that is trained in this process."""

    base_model: str
    vocab: int
    context: int
    """The most tokens of a text."""
    eos: Collection[int]
    """Tokens that end a text."""


C = TypeVar("C", bound=ComputedSession)


class ComputingPlatform(Sampling[C]):
    """The calls of a platform that computes in this process.

    Samples are drawn one after the other; with a seed, sample i is always the same. Stops are token
    ids, by default the end-of-text tokens.
    """

    def forward_backward(
        self,
        session: C,
        data: Sequence[Datum],
        loss_fn: str,
        loss_fn_config: Mapping[str, float | str] | None = None,
    ) -> ForwardBackwardOutput:
        """Compute the loss of data and add its gradient."""
        batch = _read(data, loss_fn, loss_fn_config, session.vocab, session.context)
        logprobs, values = self._pass(session, batch)
        records = [
            {"logprobs": TensorData.from_numpy(found.astype(np.float32))} for found in logprobs
        ]
        tokens = sum(example.tokens.size for example in batch.examples)
        loss = float(sum(found.sum() for found in values))
        metrics = {"loss:sum": loss, "tokens:sum": float(tokens)}
        return ForwardBackwardOutput("ArrayRecord", records, metrics)

    def _pass(self, session: C, batch: Batch) -> tuple[list[Array], list[Array]]:
        """Add the gradient; return the log-probabilities and the losses of each example."""
        raise NotImplementedError

    def optim_step(self, session: C, params: AdamParams) -> OptimStepResponse:
        """Apply the gradient with AdamW and the params of this step, and clear it."""
        params.validate()
        norm = self._step(session, params)
        return OptimStepResponse(
            metrics={"grad_norm:mean": norm, "learning_rate:mean": params.learning_rate}
        )

    def _step(self, session: C, params: AdamParams) -> float:
        """Apply the gradient, if there is one; return its norm."""
        raise NotImplementedError

    def _sample(
        self, session: C, prompt: ModelInput, count: int, params: SamplingParams
    ) -> SampleResponse:
        tokens, limit = _checked(session, prompt, count, params)
        stops = _stops_of(session, params)
        return SampleResponse(
            [
                _sample(i, limit, params, lambda: self._begin(session, tokens), stops)
                for i in range(count)
            ]
        )

    def _begin(self, session: C, tokens: list[int]) -> tuple[Array, Next]:
        """Return the logits after a prompt, and a function that goes on from there."""
        raise NotImplementedError
