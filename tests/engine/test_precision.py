"""What half precision may not cost: states are summed up without loss, and logits are not rounded."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tinkex.engine.elementwise import add_norm
from tinkex.engine.lora import Factors, Linear
from tinkex.engine.row_adapters import BankShare
from tinkex.engine.span_adapters import Share, base_product, forward

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no accelerator")),
]
EPS = 1e-6
LAYERS = 60


def halves(*size: int, seed: int, device: str) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed)).bfloat16().to(device)


@pytest.mark.parametrize("device", DEVICES)
def test_a_state_is_summed_up_without_loss(device: str) -> None:
    x, weight = halves(7, 96, seed=0, device=device), 1 + halves(96, seed=1, device=device)
    exact, rounded, rest = x.double(), x, None
    for layer in range(LAYERS):
        share = halves(7, 96, seed=2 + layer, device=device)
        x, rest, normed = add_norm(x, rest, share, weight, EPS)
        exact, rounded = exact + share, rounded + share
    assert rest is not None
    assert x.dtype == rest.dtype == normed.dtype == torch.bfloat16
    lost, ours = ((rounded - exact).norm(), (x.double() + rest.double() - exact).norm())
    assert float(ours) < 0.02 * float(lost)
    assert float(lost) > 0.002 * float(exact.norm())
    normed_exact = F.rms_norm(exact, weight.shape, weight.double(), EPS)
    assert float((normed - normed_exact).norm()) < 0.003 * float(normed_exact.norm())  # it is rounded, once


@pytest.mark.parametrize(("dtype", "near"), [(torch.float32, 1e-4), (torch.bfloat16, 0.03)])
@pytest.mark.parametrize("device", DEVICES)
def test_gradients_pass_through_sums_and_their_norms(device: str, dtype: torch.dtype, near: float) -> None:
    weight, into = 1 + halves(96, seed=1, device=device), halves(3, 7, 96, seed=9, device=device)

    def gradient(of: torch.dtype, *, ours: bool) -> torch.Tensor:
        start = halves(7, 96, seed=0, device=device).to(of).requires_grad_()
        x, rest, loss = start, None, torch.zeros((), device=device, dtype=torch.float64)
        for layer in range(3):
            share = torch.tanh(x)
            if ours:
                x, rest, normed = add_norm(x, rest, share, weight.to(of), EPS)
            else:
                x = x + share
                normed = F.rms_norm(x, weight.shape, weight.to(of), EPS)
            loss = loss + (normed * into[layer].to(of)).double().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        assert start.grad is not None
        return start.grad.double()

    exact = gradient(torch.float64, ours=False)
    assert float((gradient(dtype, ours=True) - exact).norm()) < near * float(exact.norm())


@pytest.mark.parametrize("device", DEVICES)
def test_single_precision_has_no_second_part(device: str) -> None:
    x, share, weight = (halves(7, 96, seed=seed, device=device).float() for seed in range(3))
    summed, rest, _ = add_norm(x, None, share, weight[0], EPS)
    assert rest is None
    assert torch.equal(summed, x + share)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no accelerator")
@pytest.mark.parametrize("rank", [8, 200])
def test_logits_are_not_rounded(rank: int) -> None:
    x, weight = halves(12, 64, seed=0, device="cuda"), halves(500, 64, seed=1, device="cuda")
    head = Linear("lm_head", "unembed", weight, None, ["lm_head"], [500], is_head=True)
    factors = Factors(halves(rank, 64, seed=2, device="cuda"), [halves(500, rank, seed=3, device="cuda")], 0.25)
    exact = x.double() @ weight.double().t()
    logits = base_product(x, head)
    assert logits.dtype == torch.float32
    assert float((logits - exact).abs().max()) < 1e-4
    low = (x @ factors.a_RD.t()).double()
    exact += 0.25 * low @ factors.b_NR[0].double().t()
    by_span, _ = forward(x, head, [Share(0, 12, factors, None)])
    banked = BankShare({"lm_head": factors.a_RD}, {"lm_head": 0.25 * factors.b_NR[0]}, None)
    by_row = banked.linear(x, head)
    for ours in (by_span, by_row):
        assert ours.dtype == torch.float32
        assert float((ours - exact).abs().max()) < 1e-3 * float(exact.abs().max())
