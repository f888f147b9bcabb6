"""A platform in memory, for tests of training loops.

A small model in numpy that learns, with the same results every time.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import numpy as np

from tinkex.adapters.computing import Batch, ComputedSession, ComputingPlatform, Next, log_softmax
from tinkex.adapters.platforms import SessionConfig
from tinkex.types.optimizers import AdamParams
from tinkex.types.tensors import Array

SPREAD = 0.5
"""The spread of the logits of an untrained model."""
END = 1
"""The token that ends a text."""


@dataclass(slots=True, kw_only=True)
class MemorySession(ComputedSession):
    """The logits of the next token by the present one, and their moments in AdamW."""

    weights: Array
    number: int
    grad: Array | None = None
    moments: tuple[Array, Array] | None = None
    steps: int = 0


class MemoryPlatform(ComputingPlatform[MemorySession]):
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
            base_model = config.base_model
            weights = SPREAD * random.standard_normal((self._vocab, self._vocab))
        elif config.checkpoint not in self._checkpoints:
            raise ValueError(f"there is no checkpoint {config.checkpoint!r}")
        else:
            base_model, weights = self._checkpoints[config.checkpoint]
        if base_model != config.base_model:
            raise ValueError(
                f"checkpoint {config.checkpoint!r} is of {base_model!r}, not of "
                f"{config.base_model!r}"
            )
        return MemorySession(
            base_model=base_model,
            vocab=self._vocab,
            context=self._context,
            eos=[END],
            weights=weights.copy(),
            number=self._sessions,
        )

    def _pass(self, session: MemorySession, batch: Batch) -> tuple[list[Array], list[Array]]:
        grad = np.zeros_like(session.weights)
        logprobs, values = [], []
        for example in batch.examples:
            rows = log_softmax(session.weights[example.tokens])
            targets = example.targets.reshape(len(rows), -1)
            found = np.take_along_axis(rows, targets, 1).reshape(example.targets.shape)
            value, slopes = batch.evaluate(example, found)
            by_row = slopes.reshape(targets.shape)
            np.add.at(grad, (example.tokens[:, None], targets), by_row)
            np.add.at(grad, example.tokens, -by_row.sum(1, keepdims=True) * np.exp(rows))
            logprobs.append(found)
            values.append(value)
        session.grad = grad if session.grad is None else session.grad + grad
        return logprobs, values

    def _step(self, session: MemorySession, params: AdamParams) -> float:
        if session.grad is None:
            return 0.0
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
        return norm

    def save_checkpoint(self, session: MemorySession, name: str) -> str:
        """Keep the weights for the life of the platform."""
        path = f"memory://{session.number}/{name}"
        if path in self._checkpoints:
            raise ValueError(f"there is a checkpoint {path!r} already")
        self._checkpoints[path] = (session.base_model, session.weights.copy())
        return path

    def _begin(self, session: MemorySession, tokens: list[int]) -> tuple[Array, Next]:
        weights = session.weights
        return weights[tokens[-1]], lambda token: weights[token]
