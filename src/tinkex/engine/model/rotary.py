"""The frequencies of rotary embeddings."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tinkex.engine.families.model_config import DecoderConfig, Fields
from tinkex.engine.families.rope import TRAINED


def inverse_frequencies(config: DecoderConfig) -> Tensor:
    """Return the angle per position of each pair of channels.

    The shape is `[kinds of rotary embedding, C/2]`; scaling is applied.
    """
    return torch.stack([_frequencies(rope, config.head_dim) for rope in config.ropes])


def _frequencies(rope: Fields, channels: int) -> Tensor:
    exponents = torch.arange(0, channels, 2, dtype=torch.float32) / channels
    frequencies = 1.0 / (float(rope["rope_theta"]) ** exponents)
    if rope["rope_type"] == "linear":
        return frequencies / float(rope["factor"])
    return _llama3(frequencies, rope) if rope["rope_type"] == "llama3" else frequencies


def _llama3(frequencies: Tensor, rope: Fields) -> Tensor:
    """Divide slow rotations by `factor`, keep quick ones, and interpolate between."""
    trained, low, high = (
        float(rope[name]) for name in (TRAINED, "low_freq_factor", "high_freq_factor")
    )
    turns = trained * frequencies / (2 * math.pi)
    keep = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - keep) * frequencies / float(rope["factor"]) + keep * frequencies
