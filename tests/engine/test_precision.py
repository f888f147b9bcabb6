"""What half precision may not cost: states are summed up without loss, logits are not rounded, and
routes stay."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F

from engine.references import adapter_of, gradients, randomise
from tinkex.engine.api import run_pass
from tinkex.engine.model.decoder import BARE
from tinkex.engine.model.elementwise import States, add_norm, cut_off
from tinkex.engine.model.matmul import base_product
from tinkex.engine.model.mlp import Experts
from tinkex.engine.sample.row_adapters import BankShare
from tinkex.engine.torch.engine import TorchEngine
from tinkex.engine.torch.lora import Factors, Linear
from tinkex.engine.train.span_adapters import Share, forward
from tinkex.types.training import LoraConfig

if TYPE_CHECKING:
    from engine.conftest import Checkpoint, Data

DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no accelerator"),
    ),
]
EPS = 1e-6
LAYERS = 60


def halves(*size: int, seed: int, device: str) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed)).bfloat16().to(device)


@pytest.mark.parametrize("device", DEVICES)
def test_state_is_summed_up_without_loss(device: str) -> None:
    x, weight = halves(7, 96, seed=0, device=device), 1 + halves(96, seed=1, device=device)
    exact, rounded, rest = x.double(), x, None
    for layer in range(LAYERS):
        share = halves(7, 96, seed=2 + layer, device=device)
        (x, rest), normed = add_norm(States(x, rest), share, weight, EPS)
        exact, rounded = exact + share, rounded + share
    assert rest is not None
    assert x.dtype == rest.dtype == normed.dtype == torch.bfloat16
    lost, ours = ((rounded - exact).norm(), (x.double() + rest.double() - exact).norm())
    assert float(ours) < 0.02 * float(lost)
    assert float(lost) > 0.002 * float(exact.norm())
    normed_exact = F.rms_norm(exact, weight.shape, weight.double(), EPS)
    # it is rounded, once
    assert float((normed - normed_exact).norm()) < 0.003 * float(normed_exact.norm())
    cut = cut_off(States(x, rest), normed, weight, EPS)
    assert cut is not None
    assert float((normed + cut - normed_exact).norm()) < 5e-5 * float(normed_exact.norm())


@pytest.mark.parametrize(("dtype", "near"), [(torch.float32, 1e-4), (torch.bfloat16, 0.03)])
@pytest.mark.parametrize("device", DEVICES)
def test_gradients_pass_through_sums_and_their_norms(
    device: str, dtype: torch.dtype, near: float
) -> None:
    weight, into = 1 + halves(96, seed=1, device=device), halves(3, 7, 96, seed=9, device=device)

    def gradient(of: torch.dtype, *, ours: bool) -> torch.Tensor:
        start = halves(7, 96, seed=0, device=device).to(of).requires_grad_()
        x, rest, loss = start, None, torch.zeros((), device=device, dtype=torch.float64)
        for layer in range(3):
            share = torch.tanh(x)
            if ours:
                (x, rest), normed = add_norm(States(x, rest), share, weight.to(of), EPS)
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
    states, normed = add_norm(States(x), share, weight[0], EPS)
    assert states.rest is None
    assert torch.equal(states.rounded, x + share)
    assert cut_off(states, normed, weight[0], EPS) is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no accelerator")
@pytest.mark.parametrize("rank", [8, 200])
def test_logits_are_not_rounded(rank: int) -> None:
    x, weight = halves(12, 64, seed=0, device="cuda"), halves(500, 64, seed=1, device="cuda")
    head = Linear("lm_head", "unembed", weight, None, ["lm_head"], [500], wide=True)
    factors = Factors(
        halves(rank, 64, seed=2, device="cuda"), [halves(500, rank, seed=3, device="cuda")], 0.25
    )
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


@pytest.mark.parametrize("device", DEVICES)
def test_experts_route_by_unrounded_states(device: str) -> None:
    wide, router = (
        torch.randn(*size, generator=torch.Generator().manual_seed(3))
        for size in ((900, 64), (32, 64))
    )
    experts = Experts(router.to(device), [], chosen=4, normed=True)
    wide = wide.to(device)
    rounded = wide.bfloat16()
    weights, chosen = experts.route(wide)
    again_weights, again = experts.route(rounded, wide - rounded)
    assert torch.equal(again, chosen)
    torch.testing.assert_close(again_weights, weights, atol=1e-5, rtol=0)
    assert not torch.equal(experts.route(rounded)[1], chosen)


def test_router_gets_the_unrounded_states(
    checkpoint: Checkpoint, data: Data, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, route = [], Experts.route

    def noted(self: Experts, x_TD: torch.Tensor, cut_TD: torch.Tensor | None = None) -> Any:
        seen.append((x_TD, cut_TD))
        return route(self, x_TD, cut_TD)

    monkeypatch.setattr(Experts, "route", noted)
    for dtype in (torch.float32, torch.bfloat16):
        engine = TorchEngine({"m": checkpoint("qwen3-moe")}, dtype=dtype, threads=1)
        engine.create("a", "m", LoraConfig(rank=8))
        run_pass(engine, "a", data(5, 17), "cross_entropy", {}, backward=False)
        assert seen
        for x, cut in seen:
            if dtype == torch.float32:
                assert cut is None
            else:
                assert cut is not None
                assert 0 < float(cut.abs().max()) <= float(x.abs().max()) / 256
        seen.clear()


@pytest.mark.parametrize("device", DEVICES)
def test_mixtures_sum_in_single_precision(device: str, checkpoint: Checkpoint, data: Data) -> None:
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        engine = TorchEngine({"m": checkpoint("qwen3-moe")}, device=device, dtype=dtype)
        engine.create("a", "m", LoraConfig(rank=8))
        adapter = adapter_of(engine)
        randomise(adapter)
        run_pass(engine, "a", data(5, 17, 30), "cross_entropy", {})
        found.append({name: grad.double().cpu() for name, grad in gradients(adapter).items()})
        for layer in adapter.model.layers:
            assert layer.o.wide
            if isinstance(layer.mlp, Experts):
                assert (
                    layer.mlp(torch.ones(3, 32, device=device, dtype=dtype), BARE).dtype
                    == torch.float32
                )
    exact, ours = found
    error = sum(float((ours[name] - exact[name]).square().sum()) for name in exact)
    assert error < 0.01 * sum(float(grad.square().sum()) for grad in exact.values())


def test_residual_sums_of_dense_models_are_rounded(checkpoint: Checkpoint) -> None:
    """It costs them little, and time is dear."""
    engine = TorchEngine({"m": checkpoint("qwen3")}, threads=1)
    engine.create("a", "m", LoraConfig(rank=8))
    assert not any(linear.wide for linear in adapter_of(engine).model.linears()[:-1])
