"""A platform in memory, for tests of training loops.

A small model in numpy that learns, with the same results every time.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tinkex.adapters import drawing, numpy_losses
from tinkex.adapters.platforms import SessionConfig
from tinkex.types.inputs import Datum, ModelInput
from tinkex.types.optimizers import AdamParams
from tinkex.types.sampled import SampleResponse
from tinkex.types.sampling import SamplingParams
from tinkex.types.tensors import Array
from tinkex.types.training import ForwardBackwardOutput, OptimStepResponse

SPREAD = 0.5
"""The spread of the logits of an untrained model."""
END = 1
"""The token that ends a text."""


@dataclass(slots=True)
class MemorySession:
    """The logits of the next token by the present one, and their moments in AdamW."""

    base_model: str
    weights: Array
    number: int
    grad: Array | None = None
    moments: tuple[Array, Array] | None = None
    steps: int = 0


class MemoryPlatform:
    """A platform with a model that sees one token back, with exact gradients.

    Nothing is random.

    Its losses are cross_entropy, importance_sampling and ppo. The adapter's shape and seed have no
    effect.

    Args:
        vocab_size: The size of the vocabulary; token 1 ends a text.
        context_length: The most tokens of a text.

    Example:
        >>> platform = MemoryPlatform()
        >>> session = platform.create_session(SessionConfig(base_model="any"))
        >>> datum = Datum(ModelInput.from_ints([5, 6]), {"target_tokens": [6, 7]})
        >>> for _ in range(50):
        ...     loss = platform.forward_backward(session, [datum], "cross_entropy").metrics[
        ...         "loss:sum"
        ...     ]
        ...     stepped = platform.optim_step(session, AdamParams(learning_rate=0.5))
        >>> loss < 0.01
        True
        >>> platform.sample(
        ...     session, ModelInput.from_ints([5]), 1, SamplingParams(max_tokens=2)
        ... ).sequences[0].tokens
        [6, 7]
    """

    def __init__(self, vocab_size: int = 256, context_length: int = 128) -> None:
        self._vocab, self._context = vocab_size, context_length
        self._checkpoints: dict[str, tuple[str, Array]] = {}
        self._sessions = 0

    def create_session(self, config: SessionConfig) -> MemorySession:
        """Start from the base model of a name, or from a checkpoint."""
        self._sessions += 1
        if config.checkpoint is None:
            random = np.random.default_rng(zlib.crc32(config.base_model.encode()))
            weights = SPREAD * random.standard_normal((self._vocab, self._vocab))
            return MemorySession(config.base_model, weights, self._sessions)
        if config.checkpoint not in self._checkpoints:
            raise ValueError(f"there is no checkpoint {config.checkpoint!r}")
        base_model, weights = self._checkpoints[config.checkpoint]
        if base_model != config.base_model:
            raise ValueError(
                f"checkpoint {config.checkpoint!r} is of {base_model!r}, not of "
                f"{config.base_model!r}"
            )
        return MemorySession(base_model, weights.copy(), self._sessions)

    def forward_backward(
        self,
        session: MemorySession,
        data: Sequence[Datum],
        loss_fn: str,
        loss_fn_config: Mapping[str, float | str] | None = None,
    ) -> ForwardBackwardOutput:
        """Compute the loss of data and add its gradient."""
        batch = numpy_losses.read(data, loss_fn, loss_fn_config, self._vocab, self._context)
        grad = np.zeros_like(session.weights)
        logprobs, values = [], []
        for example in batch.examples:
            rows = drawing.log_softmax(session.weights[example.tokens])
            targets = example.targets.reshape(len(rows), -1)
            found = np.take_along_axis(rows, targets, 1).reshape(example.targets.shape)
            value, slopes = batch.evaluate(example, found)
            by_row = slopes.reshape(targets.shape)
            np.add.at(grad, (example.tokens[:, None], targets), by_row)
            np.add.at(grad, example.tokens, -by_row.sum(1, keepdims=True) * np.exp(rows))
            logprobs.append(found)
            values.append(value)
        session.grad = grad if session.grad is None else session.grad + grad
        return numpy_losses.output(batch, logprobs, values)

    def optim_step(self, session: MemorySession, params: AdamParams) -> OptimStepResponse:
        """Apply the gradient with AdamW and clear it."""
        params.validate()
        norm = 0.0
        if session.grad is not None:
            grad = session.grad
            norm = float(np.linalg.norm(grad))
            if params.grad_clip_norm > 0 and norm > params.grad_clip_norm:
                grad = grad * (params.grad_clip_norm / norm)
            session.steps += 1
            first, second = session.moments or (np.zeros_like(grad), np.zeros_like(grad))
            first = params.beta1 * first + (1 - params.beta1) * grad
            second = params.beta2 * second + (1 - params.beta2) * grad**2
            mean, square = (
                first / (1 - params.beta1**session.steps),
                second / (1 - params.beta2**session.steps),
            )
            decayed = session.weights * (1 - params.learning_rate * params.weight_decay)
            session.weights = decayed - params.learning_rate * mean / (np.sqrt(square) + params.eps)
            session.moments, session.grad = (first, second), None
        return OptimStepResponse(
            metrics={"grad_norm:mean": norm, "learning_rate:mean": params.learning_rate}
        )

    def save_checkpoint(self, session: MemorySession, name: str) -> str:
        """Keep the weights for the life of the platform."""
        path = f"memory://{session.number}/{name}"
        if path in self._checkpoints:
            raise ValueError(f"there is a checkpoint {path!r} already")
        self._checkpoints[path] = (session.base_model, session.weights.copy())
        return path

    def sample(
        self,
        session: MemorySession,
        prompt: ModelInput,
        num_samples: int = 1,
        sampling_params: SamplingParams | None = None,
    ) -> SampleResponse:
        """Sample from the present weights."""
        weights = session.weights
        return drawing.draw(
            prompt,
            num_samples,
            sampling_params or SamplingParams(),
            lambda tokens: (weights[tokens[-1]], lambda token: weights[token]),
            vocab=self._vocab,
            context=self._context,
            eos=[END],
        )
