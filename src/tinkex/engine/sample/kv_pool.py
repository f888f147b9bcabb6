"""The memory of keys and values, in blocks.

Axes: L layers, N blocks, S positions, G key/value heads, C channels of a head, T tokens of a pass.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from tinkex.engine.model.decoder import Decoder
from tinkex.engine.model.elementwise import kernels_for
from tinkex.engine.sample.blocks import BLOCK, RESERVED, Blocks
from tinkex.engine.torch.device_copies import to_device


class Pool:
    """Keys and values in blocks, `[L, 2, N, S, G, C]`."""

    def __init__(self, model: Decoder, count: int) -> None:
        config, like = model.config, model.embed_VD
        self.shape = (config.layers, 2, count + RESERVED, BLOCK, config.kv_heads, config.head_dim)
        self.kv = zeros(self.shape, like)
        self.blocks = Blocks(count)

    def write(self, layer: int, places_T: Tensor, k_TGC: Tensor, v_TGC: Tensor) -> None:
        """Put the keys and values of tokens at their places (block * BLOCK + offset)."""
        if (fused := kernels_for(k_TGC)) is not None:
            fused.store(self.kv[layer], places_T, k_TGC, v_TGC)
            return
        for part, x in zip(self.kv[layer], (k_TGC, v_TGC), strict=True):
            part.view(-1, *part.shape[2:]).index_copy_(0, places_T, x)

    def read(self, layer: int, tables_UN: Tensor) -> tuple[Tensor, Tensor]:
        """Return copies of the keys and values of U sequences, `[U, S, G, C]` each."""
        count = tables_UN.shape[0]
        keys, values = (
            part.index_select(0, tables_UN.view(-1)).view(count, -1, *part.shape[2:])
            for part in self.kv[layer]
        )
        return keys, values

    def gather(self, layer: int, places_K: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and values at these places, `[K, G, C]` each."""
        keys, values = (part.flatten(0, 1).index_select(0, places_K) for part in self.kv[layer])
        return keys, values

    def copy(self, source: int, target: int) -> None:
        """Copy a block."""
        self.kv[:, :, target] = self.kv[:, :, source]

    def clear(self, blocks: Sequence[int]) -> None:
        """Zero blocks: masked values must still be finite."""
        self.kv[:, :, to_device(blocks, self.kv.device)] = 0


def block_bytes(model: Decoder) -> int:
    """Return the bytes of a block."""
    config = model.config
    numbers = config.layers * 2 * BLOCK * config.kv_heads * config.head_dim
    return numbers * model.embed_VD.element_size()


def zeros(shape: Sequence[int], like: Tensor) -> Tensor:
    """Return zeros, which on a CPU take memory only where they are written."""
    if like.device.type == "cpu" and like.dtype in (torch.float32, torch.float64):
        return torch.from_numpy(np.zeros(shape, dtype=str(like.dtype).removeprefix("torch.")))
    return torch.zeros(shape, dtype=like.dtype, device=like.device)
