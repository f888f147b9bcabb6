"""Kernels that need an accelerator, against the plain way on the same device."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tinkex.engine.elementwise import gated
from tinkex.engine.lora import Factors, Linear
from tinkex.engine.span_adapters import Span, SpanAdapters

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no accelerator")


@pytest.mark.parametrize("activation", ["silu", "gelu"])
@pytest.mark.parametrize("tokens", [132, 3300])  # a program has up to 512 of an adapter's
@pytest.mark.parametrize("ranks", [(8,), (1, 32), (33, 64, 128)])
def test_a_gate_adds_shares_on_its_way(ranks: tuple[int, ...], tokens: int, activation: str) -> None:
    generator = torch.Generator("cuda").manual_seed(0)

    def random(*size: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(*size, device="cuda", generator=generator) * scale).to(torch.bfloat16)

    inputs, width = 96, 200
    linear = Linear("mlp", "mlp", random(2 * width, inputs, scale=0.1), None, ["gate", "up"], [width, width])
    bounds = [0, *(tokens * (n + 1) // len(ranks) // 4 * 4 for n in range(len(ranks)))]
    factors = [Factors(random(2 * r, inputs, scale=0.1), [random(width, r), random(width, r)], 0.5) for r in ranks]
    x_TD, grad_TF = random(tokens, inputs), random(tokens, width)

    def run(*, fused: bool) -> list[torch.Tensor]:
        into = [Factors(f.a_RD.float() * 0, [b.float() * 0 for b in f.b_NR], f.scale) for f in factors]
        spans = [
            Span(start, stop, {"mlp": f}, {"mlp": i})
            for start, stop, f, i in zip(bounds, bounds[1:], factors, into, strict=False)
        ]
        adapters = SpanAdapters(spans, x_TD.device)
        x = x_TD.clone().requires_grad_()
        out = adapters.gated(x, linear, activation) if fused else gated(adapters.linear(x, linear), activation)
        assert out is not None
        out.backward(grad_TF)  # type: ignore[no-untyped-call]
        assert x.grad is not None
        return [out.detach(), x.grad, *(t for i in into for t in (i.a_RD, *i.b_NR))]

    ours, theirs = run(fused=True), run(fused=False)
    for one, other in zip(ours, theirs, strict=True):
        assert F.cosine_similarity(one.float().flatten(), other.float().flatten(), dim=0) > 0.999
        torch.testing.assert_close(one.float(), other.float(), rtol=0.05, atol=0.05 * float(other.abs().max()))
