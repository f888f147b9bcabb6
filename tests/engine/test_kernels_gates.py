"""A gate that adds the shares of adapters on its way, against the formula in float32."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tinkex.engine.torch.lora import Factors, Linear
from tinkex.engine.train.span_adapters import Span, SpanAdapters

INPUTS, WIDTH, SCALE = 96, 200, 0.5


@pytest.mark.parametrize("activation", ["silu", "gelu"])
@pytest.mark.parametrize("tokens", [132, 1700])  # a program has up to 512 of an adapter's
@pytest.mark.parametrize("ranks", [(8,), (1, 32), (33, 64, 128)])
def test_gate_adds_shares_on_its_way(
    accelerator: str, ranks: tuple[int, ...], tokens: int, activation: str
) -> None:
    generator = torch.Generator().manual_seed(0)

    def random(*size: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(*size, generator=generator) * scale).to(accelerator, torch.bfloat16)

    weight = random(2 * WIDTH, INPUTS, scale=0.1)
    bounds = [0, *(tokens * (n + 1) // len(ranks) // 4 * 4 for n in range(len(ranks)))]
    factors = [
        Factors(random(2 * r, INPUTS, scale=0.1), [random(WIDTH, r), random(WIDTH, r)], SCALE)
        for r in ranks
    ]
    x, grad = random(tokens, INPUTS).requires_grad_(), random(tokens, WIDTH)

    into = [Factors(f.a_RD.float() * 0, [b.float() * 0 for b in f.b_NR], SCALE) for f in factors]
    spans = [
        Span(start, stop, {"mlp": f}, {"mlp": i})
        for start, stop, f, i in zip(bounds, bounds[1:], factors, into, strict=False)
    ]
    linear = Linear("mlp", "mlp", weight, None, ["gate", "up"], [WIDTH, WIDTH])
    out = SpanAdapters(spans, x.device).gated(x, linear, activation)
    assert out is not None
    out.backward(grad)  # type: ignore[no-untyped-call]
    assert x.grad is not None
    ours = [out.detach(), x.grad, *(t for i in into for t in (i.a_RD, *i.b_NR))]

    exact_x = x.detach().float().requires_grad_()
    leaves = [exact_x]
    parts = []
    for start, stop, f in zip(bounds, bounds[1:], factors, strict=False):
        a, gate_b, up_b = (t.float().requires_grad_() for t in (f.a_RD, *f.b_NR))
        leaves += [a, gate_b, up_b]
        gate, up = (exact_x[start:stop] @ weight.float().t()).chunk(2, dim=1)
        gate_low, up_low = (exact_x[start:stop] @ a.t()).chunk(2, dim=1)
        gate, up = gate + SCALE * gate_low @ gate_b.t(), up + SCALE * up_low @ up_b.t()
        parts.append(
            (F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")) * up
        )
    exact_out = torch.cat(parts)
    exact_out.backward(grad.float())  # type: ignore[no-untyped-call]
    for one, other in zip(ours, [exact_out.detach(), *(leaf.grad for leaf in leaves)], strict=True):
        assert other is not None
        assert float((one.float() - other).norm()) < 0.03 * float(other.norm())
        assert float((one.float() - other).abs().max()) < 0.05 * float(other.abs().max())
