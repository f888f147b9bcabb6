"""Where the tests run the engine's kernels: on a GPU, or, where there is none, on the CPU by
Triton's interpreter.

There the engine is made to take a CPU's tensors for those of a GPU. Every kernel of ours then runs,
launched as on a GPU, with the adapters, tables and strides that go with it; what is PyTorch's own
on a GPU and has no twin on a CPU is done by plain means. What is left to a real one are CUDA
graphs, streams, and what the compiler makes of a kernel.
"""

from __future__ import annotations

import importlib.util
import os
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from tinkex.engine.families.model_config import AttentionRule
from tinkex.engine.model import attention, elementwise, matmul
from tinkex.engine.model.attention import PackedAttention, attend, visible
from tinkex.engine.sample import passes, prefill, sampler, static_decoding
from tinkex.engine.train import span_adapters, target_logprobs

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tinkex.engine.model.decoder import Decoder
    from tinkex.engine.sample.passes import Pool

HALVES = (torch.bfloat16, torch.float16)


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The device whose tensors the engine's kernels take."""
    is_interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if torch.cuda.is_available() and not is_interpreted:
        yield "cuda"
        return
    if importlib.util.find_spec("triton") is None or not is_interpreted:
        pytest.skip("there is no accelerator; `make kernels` does without")
    _pretend(monkeypatch)
    attention._packed_kernels.cache_clear()
    with np.errstate(over="ignore"):  # a GPU says nothing when an exponential is infinite
        yield "cpu"
    attention._packed_kernels.cache_clear()


def _pretend(monkeypatch: pytest.MonkeyPatch) -> None:
    from tinkex.engine.kernels import fused, gates, paged

    _mend_interpreter(monkeypatch)
    for module in (elementwise, matmul, span_adapters, target_logprobs, passes):
        monkeypatch.setattr(
            module, "kernels_for", lambda x: None if x.dtype == torch.float64 else fused
        )
    monkeypatch.setattr(gates, "_stages", lambda rank, device: 2)
    monkeypatch.setattr(span_adapters, "_go_first", _go_first)
    monkeypatch.setattr(matmul, "_can_widen", lambda x: x.dtype in HALVES)
    monkeypatch.setattr(torch, "mm", _mm)
    # attention of training
    made = PackedAttention.__init__

    def make(self: PackedAttention, runs: Any, rules: Any, device: Any = "cpu") -> None:
        made(self, runs, rules, device)
        self._bounds = torch.tensor([0, *self._lengths()]).cumsum(0)

    monkeypatch.setattr(PackedAttention, "__init__", make)
    # there is no kernel of PyTorch's to compare with
    monkeypatch.setattr(attention, "_kernel_error", lambda *_: 0.0)
    for holder in (attention, prefill):
        monkeypatch.setattr(holder, "flash", _flash)
        monkeypatch.setattr(
            holder, "takes_packed", lambda q, rule: rule.softcap is None and q.dtype in HALVES
        )

    # attention of samples
    def find_kernel(model: Decoder, pool: Pool) -> Any:
        size = model.config.head_dim
        return paged.paged_attention if size >= 16 and size & (size - 1) == 0 else None

    monkeypatch.setattr(static_decoding, "find_kernel", find_kernel)
    monkeypatch.setattr(sampler, "find_native", lambda *_: None)


def _mend_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """It cuts bfloat16 off where GPUs round, and multiplies such numbers as if they were whole
    ones."""
    from triton import language as tl
    from triton.runtime import interpreter

    convert, dot = interpreter._convert_float, interpreter.InterpreterBuilder.create_dot

    def convert_float(given: Any, source: Any, target: Any, rounding: Any) -> Any:
        if (source, target) == (tl.float32, tl.bfloat16):
            values = torch.from_numpy(np.array(given, np.float32))
            return values.bfloat16().view(torch.int16).numpy().view(np.uint16)
        if (source, target) == (tl.bfloat16, tl.float32):
            return given.view(np.uint16).astype(np.uint32) << 16
        return convert(given, source, target, rounding)

    def widened(handle: Any) -> Any:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        wide = convert_float(handle.data, tl.bfloat16, tl.float32, None).view(np.float32)
        return interpreter.TensorHandle(wide, tl.float32)

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return dot(self, widened(a), widened(b), *rest)

    monkeypatch.setattr(interpreter, "_convert_float", convert_float)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


def _go_first(shares: Sequence[span_adapters.Share], x_TD: torch.Tensor) -> bool:
    covered = sum(share.stop - share.start for share in shares)
    return not torch.is_grad_enabled() and 0 < x_TD.shape[0] == covered


_mm_of_torch = torch.mm


def _mm(
    left: torch.Tensor, right: torch.Tensor, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    return (
        _mm_of_torch(left, right)
        if out_dtype is None
        else _mm_of_torch(left.to(out_dtype), right.to(out_dtype))
    )


def _flash(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bounds: torch.Tensor,
    longest: int,
    scale: float,
    window: int | None,
    keys: tuple[torch.Tensor, int] | None = None,
) -> list[torch.Tensor]:
    """Each sequence's queries are the last of its positions."""
    rule, mixed = AttentionRule(scale, window), []
    spans = (pairwise(edges) for edges in (bounds.tolist(), (keys or (bounds,))[0].tolist()))
    for (start, stop), (first, last) in zip(*spans, strict=True):
        assert 0 < stop - start <= min(longest, last - first)
        at = torch.arange(last - first)
        seen = visible(at[last - first - (stop - start) :], at, rule)
        mixed.append(
            attend(q[None, start:stop], k[None, first:last], v[None, first:last], seen, rule)[0]
        )
    return [torch.cat(mixed).view(q.shape)]
