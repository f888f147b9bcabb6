"""The eight regularizers: their values, the numbers that must come out, and every gradient against
differences."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from tinkex import types
from tinkex.regularizers import (
    L1,
    L2,
    Consistency,
    ElasticNet,
    Entropy,
    GradientPenalty,
    KLDivergence,
    Orthogonality,
    RegularizerSpec,
    compute,
    compute_grad_norm,
)

Given = torch.Tensor | list[torch.Tensor]


@dataclass(frozen=True)
class Bare:
    """A datum whose inputs are tensors of any precision."""

    loss_fn_inputs: dict[str, Any]


def data(**inputs: Any) -> list[Any]:
    return [Bare(inputs)]


def doubles(*values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def value(regularizer: Any, x: Given, given: Sequence[Any] = (), **opts: Any) -> float:
    return float(regularizer.compute(given, x, opts)[0])


def gradient(regularizer: Any, x: torch.Tensor, given: Sequence[Any] = ()) -> torch.Tensor:
    leaf = x.clone().requires_grad_(True)
    torch.manual_seed(3)  # for the one that draws a number
    loss = regularizer.compute(given, leaf)[0].sum()
    if not loss.requires_grad:
        return torch.zeros_like(x)
    found = torch.autograd.grad(loss, leaf, allow_unused=True)[0]
    return torch.zeros_like(x) if found is None else found


def differences(
    regularizer: Any, x: torch.Tensor, given: Sequence[Any] = (), step: float = 1e-6
) -> torch.Tensor:
    """The gradient by central differences."""
    found = torch.zeros_like(x)
    for index in range(x.numel()):
        sides = []
        for sign in (1, -1):
            moved = x.clone()
            moved.view(-1)[index] += sign * step
            torch.manual_seed(3)
            sides.append(float(regularizer.compute(given, moved)[0].sum()))
        found.view(-1)[index] = (sides[0] - sides[1]) / (2 * step)
    return found


# ── the numbers that must come out ────────────────────────────────────────────────────────────────

LOGPROBS = doubles(-0.5, -1.2, -0.8, -2.1, -0.3, -1.5, -0.9, -1.8, -0.6, -1.1)
REFERENCE = doubles(0.22, 0.18, 0.12, 0.10, 0.08, 0.07, 0.06, 0.06, 0.06, 0.05).log()
PAIR = doubles(-0.45, -1.05, -0.75, -2.05, -0.25, -1.35, -0.85, -1.65, -0.55, -1.05)

TRUTH = [
    (L1(), 0.01, "l1_sparsity", 10.8, 0.1080, 3.1623),
    (Entropy(mode="maximize"), 0.001, "entropy", -3.1972, -0.0032, 0.6867),
    (Entropy(mode="maximize", temperature=0.5), 0.001, "entropy_at_half", -1.9354, -0.0019, 0.4833),
    (L2(center="mean"), 0.005, "l2_weight_decay", 3.036, 0.0152, 3.4848),
    (ElasticNet(l1_ratio=0.6), 0.002, "elastic_net", 12.36, 0.0247, 4.8349),
    (KLDivergence(REFERENCE), 0.01, "kl_forward", 6.0870, 0.0609, 3.7822),
    (KLDivergence(REFERENCE, direction="reverse"), 0.01, "kl_reverse", -1.1569, -0.0116, 0.3603),
    (KLDivergence(REFERENCE, symmetric=True), 0.01, "kl_symmetric", 2.4650, 0.0247, 1.7687),
    (Consistency(pair_field="pair"), 0.02, "consistency", 0.0085, 0.0002, 0.0583),
    (Orthogonality(), 0.003, "orthogonality", 0.0, 0.0, 0.0),
    (GradientPenalty(torch.sum), 0.001, "gradient_penalty", 4.6754, 0.0047, 0.0),
]


def base_loss(_: Any, logprobs: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
    loss = -logprobs.mean()
    return loss, {"perplexity": loss.exp()}


@pytest.mark.covers(
    "1.12.1/1",
    "1.12.9/1",
    "1.12.9/2",
    "1.12.9/3",
    "1.12.9/4",
    "1.12.9/5",
    "1.12.9/6",
    "1.12.9/7",
    "1.12.9/8",
    "1.12.9/9",
    "1.12.9/10",
    "1.12.9/11",
    "1.12.9/12",
    "1.12.9/13",
    "1.12.9/14",
    "Q-12",
)
@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_numbers_are_those_of_the_reference_with_true_gradients(
    parallel: bool, dtype: torch.dtype
) -> None:
    specs = [RegularizerSpec(fn, weight, name) for fn, weight, name, *_ in TRUTH]
    given = data(pair=PAIR)
    output = compute(
        given, LOGPROBS.to(dtype), base_loss, specs, track_grad_norms=True, parallel=parallel
    )
    for _, weight, name, expected, contribution, norm in TRUTH:
        found = output.regularizers[name]
        assert found.value == pytest.approx(expected, abs=6e-5), name
        assert found.contribution == pytest.approx(contribution, abs=6e-5), name
        assert found.contribution == weight * found.value
        assert found.grad_norm == pytest.approx(norm, abs=6e-5), name
    assert output.base_loss is not None
    assert output.base_loss.value == pytest.approx(1.08, abs=1e-6)
    assert output.base_loss.grad_norm == pytest.approx(0.3162, abs=6e-5)
    assert output.base_loss.custom["perplexity"] == pytest.approx(2.9447, abs=6e-5)
    assert output.loss_total == pytest.approx(1.3016, abs=6e-5)
    assert output.regularizer_total == pytest.approx(0.2216, abs=6e-5)
    assert output.total_grad_norm == pytest.approx(0.3195, abs=6e-5)
    assert compute_grad_norm(lambda x: x.square().sum(), LOGPROBS) == pytest.approx(
        7.6681, abs=6e-5
    )


# ── gradients ─────────────────────────────────────────────────────────────────────────────────────

X1 = LOGPROBS
X2 = torch.log_softmax(doubles([0.3, -1.0, 2.0], [1.1, 0.2, -0.4]), -1)
X3 = torch.log_softmax(torch.arange(12, dtype=torch.float64).reshape(2, 3, 2).sin(), -1)
OTHER = {1: REFERENCE, 2: torch.log_softmax(X2.cos(), -1), 3: torch.log_softmax(X3.cos() * 2, -1)}


def cube(x: torch.Tensor) -> torch.Tensor:
    return (x**3).sum() / 3


EVERY = [
    *(kind(target, reduction) for kind in (L1, L2, ElasticNet) for target in ("logprobs", "probs")
      for reduction in ("sum", "mean")),
    L1(("field", "other")),
    L1(lambda_=0.3),
    *(L2(center=center, clip=clip) for center in (None, "mean", -1.0) for clip in (None, 0.65)),
    *(ElasticNet(l1_ratio=ratio, lambda_=2.0) for ratio in (0.0, 0.3, 1.0)),
    *(Entropy(mode, reduction)
      for mode in ("minimize", "maximize") for reduction in ("mean", "sum", "none")),
    *(Entropy(normalize=normalize, temperature=warmth)
      for normalize in (False, True) for warmth in (0.5, 3.0)),
    *(KLDivergence(reference_field="other", reduction=reduction, direction=direction,
                   symmetric=symmetric)
      for reduction in ("mean", "sum", "none")
      for direction in ("forward", "reverse") for symmetric in (False, True)),
    *(Consistency("other", metric, reduction) for metric in ("mse", "l1", "cosine", "kl")
      for reduction in ("mean", "sum", "none")),
    *(Orthogonality(mode, normalize, axis)
      for mode in ("soft", "hard", "spectral") for normalize in (True, False)
      for axis in ("rows", "sequence", "vocabulary")),
    *(GradientPenalty(cube, mode, target, "other")
      for mode in ("output", "interpolated") for target in (0.0, 1.5)),
    GradientPenalty(torch.sum),
]  # fmt: skip


@pytest.mark.covers(
    "1.12.8/1",
    "1.12.8/2",
    "1.12.8/3",
    "1.12.8/4",
    "1.12.8/5",
    "1.12.8/6",
    "1.12.8/7",
    "1.12.8/8",
    "Q-12",
)
@pytest.mark.parametrize("x", [X1, X2, X3], ids=["1-D", "2-D", "3-D"])
@pytest.mark.parametrize(
    "regularizer", EVERY, ids=[f"{one.NAME}-{number}" for number, one in enumerate(EVERY)]
)
def test_every_gradient_is_that_of_the_value(regularizer: Any, x: torch.Tensor) -> None:
    given = data(other=OTHER[x.dim()])
    found, expected = gradient(regularizer, x, given), differences(regularizer, x, given)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)


def test_gradients_that_are_checked_are_not_all_zero() -> None:
    moving = {
        type(one) for one in EVERY if gradient(one, X2, data(other=OTHER[2])).abs().max() > 1e-3
    }
    assert moving == {
        L1,
        L2,
        ElasticNet,
        Entropy,
        KLDivergence,
        Consistency,
        Orthogonality,
        GradientPenalty,
    }


P, Q = X1.exp(), REFERENCE.exp()


@pytest.mark.covers("1.12.8/12")
@pytest.mark.parametrize(
    ("regularizer", "expected"),
    [
        (L1(lambda_=0.5), 0.5 * X1.sign()),
        (L1("probs"), P),
        (L1(("field", "other")), torch.zeros(10)),
        (L1(reduction="mean"), X1.sign() / 10),
        (L2(), 2 * X1),
        (L2(center="mean"), 2 * (X1 - X1.mean())),
        (L2(clip=1.0), torch.where(X1.abs() < 1, 2 * X1, 0)),
        (ElasticNet(l1_ratio=0.6), 0.6 * X1.sign() + 0.8 * X1),
        (Entropy(), -P * (X1 + 1)),
        (Entropy("maximize"), P * (X1 + 1)),
        (KLDivergence(REFERENCE), P * (X1 - REFERENCE + 1)),
        (KLDivergence(REFERENCE, direction="reverse"), -Q),
        (Consistency("pair"), 2 * (X1 - PAIR) / 10),
        (GradientPenalty(torch.sum), torch.zeros(10)),
    ],
)
def test_gradients_have_their_closed_forms(regularizer: Any, expected: torch.Tensor) -> None:
    found = gradient(regularizer, X1, data(other=REFERENCE, pair=PAIR))
    torch.testing.assert_close(found, expected.double(), rtol=1e-12, atol=1e-12)


@pytest.mark.covers("1.12.8/12")
def test_gradient_of_an_l1_norm_at_zero_is_zero() -> None:
    assert gradient(L1(), doubles(0.0, 2.0, -3.0)).tolist() == [0.0, 1.0, -1.0]


@pytest.mark.covers("1.12.8/12")
@pytest.mark.parametrize("regularizer", [Entropy(), KLDivergence(reference_field="other")])
def test_rows_share_the_gradient_of_a_mean(regularizer: Any) -> None:
    given = data(other=OTHER[2])
    total = type(regularizer)(**{**vars(regularizer), "reduction": "sum"})
    torch.testing.assert_close(gradient(regularizer, X2, given) * 2, gradient(total, X2, given))


@pytest.mark.parametrize(
    "regularizer",
    [
        Entropy(),
        Entropy(temperature=2.0),
        KLDivergence(doubles(0.5, 0.5, 1e-30).log()),
        L1("probs"),
    ],
)
def test_impossible_tokens_leave_no_trace(regularizer: Any) -> None:
    x = doubles(0.5, 0.5, 0.0).log()
    assert math.isfinite(value(regularizer, x))
    assert gradient(regularizer, x).isfinite().all()
    assert gradient(regularizer, x)[2] == 0


# ── values ────────────────────────────────────────────────────────────────────────────────────────

T = doubles(1.0, -2.0, 3.0)


@pytest.mark.covers("1.12.8/1", "1.12.8/2", "1.12.8/3", "1.12.8/9")
@pytest.mark.parametrize(
    ("regularizer", "name", "expected", "metrics"),
    [
        (L1(), "l1_sparsity", 6, {"l1_raw": 6, "l1_mean": 2}),
        (L1(reduction="mean", lambda_=0.5), "l1_sparsity", 1, {"l1_raw": 1, "l1_mean": 2}),
        (L1("probs"), "l1_sparsity", float(T.exp().sum()), None),
        (L1(("field", "other")), "l1_sparsity", 15, {"l1_raw": 15, "l1_mean": 5}),
        (L2(), "l2_weight_decay", 14, {"l2_raw": 14, "l2_mean": 14 / 3, "center": "none"}),
        (L2(center=1), "l2_weight_decay", 13, {"l2_raw": 13, "l2_mean": 14 / 3, "center": 1}),
        (L2(center="mean", reduction="mean"), "l2_weight_decay", 38 / 9, None),
        (L2(clip=2.5, lambda_=2), "l2_weight_decay", 2 * (1 + 4 + 6.25), None),
        # the centre first: clipped first it were 9 + 2.25
        (L2(center=1, clip=2.5), "l2_weight_decay", 6.25 + 4, None),
        (ElasticNet(), "elastic_net", 10, {"elastic_net": 10, "l1_ratio": 0.5}),
        (ElasticNet(l1_ratio=0.25, lambda_=2), "elastic_net", 2 * (1.5 + 10.5), None),
        (ElasticNet(reduction="mean"), "elastic_net", 10 / 3, None),
    ],
)
def test_sizes(
    regularizer: Any, name: str, expected: float, metrics: dict[str, Any] | None
) -> None:
    loss, found = regularizer.compute(data(other=doubles(4, 5, -6)), T)
    assert regularizer.name() == name
    assert float(loss) == pytest.approx(expected)
    if metrics is not None:
        assert found == pytest.approx(metrics)


HALF = doubles([0.5, 0.5], [0.25, 0.75]).log()
ROWS = [math.log(2), -(0.25 * math.log(0.25) + 0.75 * math.log(0.75))]


@pytest.mark.covers("1.12.8/4")
def test_entropies() -> None:
    assert value(Entropy(), HALF) == pytest.approx(sum(ROWS) / 2)
    assert value(Entropy(reduction="sum"), HALF) == pytest.approx(sum(ROWS))
    assert Entropy(reduction="none").compute([], HALF)[0].tolist() == pytest.approx(ROWS)
    assert value(Entropy(normalize=True, reduction="sum"), HALF) == pytest.approx(
        sum(ROWS) / math.log(2)
    )
    assert value(Entropy("maximize", "sum"), HALF) == pytest.approx(-sum(ROWS))
    warm = torch.softmax(HALF[1] / 2, -1)
    assert value(Entropy(temperature=2), HALF[1]) == pytest.approx(
        float(-(warm * warm.log()).sum())
    )
    loss, metrics = Entropy("maximize", temperature=2).compute([], HALF)
    assert metrics == {"entropy": float(loss), "mode": "maximize", "temperature": 2}
    assert value(Entropy(), doubles(-50.0, -60.0)) == 0
    assert value(Entropy(), doubles(-49.0)) == pytest.approx(49 * math.exp(-49), abs=0)
    with pytest.raises(ValueError, match="two classes"):
        Entropy(normalize=True).compute([], doubles(-1.0))


def kl(p: torch.Tensor, q: torch.Tensor) -> list[float]:
    found: list[float] = (p.exp() * (p - q)).sum(-1).tolist()
    return found


@pytest.mark.covers("1.12.8/5")
def test_divergences() -> None:
    other = doubles([0.9, 0.1], [0.6, 0.4]).log()
    forward, reverse = kl(HALF, other), kl(other, HALF)
    loss, metrics = KLDivergence(other).compute([], HALF)
    assert float(loss) == pytest.approx(sum(forward) / 2)
    expected = {"kl_divergence": float(loss), "kl_max": max(forward), "kl_min": min(forward)}
    assert metrics == pytest.approx({**expected, "kl_direction": "forward", "kl_symmetric": False})
    assert value(KLDivergence(other, reduction="sum", direction="reverse"), HALF) == pytest.approx(
        sum(reverse)
    )
    for direction in ("forward", "reverse"):
        both = KLDivergence(other, direction=direction, symmetric=True)
        assert value(both, HALF) == pytest.approx(sum(forward + reverse) / 4)
    assert KLDivergence(other, reduction="none").compute([], HALF)[0].tolist() == pytest.approx(
        forward
    )


@pytest.mark.covers("1.12.8/5")
def test_divergence_is_clipped_and_skips_unlikely_tokens() -> None:
    assert value(KLDivergence(doubles(-500.0)), doubles(0.0)) == 100
    assert value(KLDivergence(doubles(500.0)), doubles(0.0)) == -100
    assert value(KLDivergence(doubles(0.0)), doubles(math.log(1e-10) - 1e-6)) == 0
    assert value(KLDivergence(doubles(0.0)), doubles(math.log(1e-9))) != 0


@pytest.mark.covers("1.12.8/5", "1.12.8/11")
def test_reference_comes_from_the_first_source_that_is_given() -> None:
    given, zeros = data(ref=HALF), torch.zeros(2, 2)
    field: dict[str, Any] = {"reference_field": "ref"}
    assert value(KLDivergence(**field), HALF, given) == pytest.approx(0)
    computed = KLDivergence(compute_reference=lambda found: found[0].loss_fn_inputs["ref"])
    assert value(computed, HALF, given) == pytest.approx(0)
    assert value(
        KLDivergence(compute_reference=lambda _: zeros, **field), HALF, given
    ) == pytest.approx(0)
    assert value(KLDivergence(zeros, **field), HALF, given) != pytest.approx(0)
    with pytest.raises(ValueError, match="needs a reference"):
        KLDivergence().compute(given, HALF)
    with pytest.raises(ValueError, match=r"shape \[3\].*\[2, 2\]"):
        KLDivergence(doubles(1, 2, 3)).compute(given, HALF)


@pytest.mark.covers("1.12.8/6")
def test_consistencies() -> None:
    x, r = doubles([1, 2], [3, 4]).log(), doubles([2, 2], [1, 5]).log()
    given = data(original_logprobs=r)
    square, size = (x - r).square(), (x - r).abs()
    assert Consistency().compute(given, x)[1] == {"consistency_metric": "mse"}
    assert value(Consistency(), x, given) == pytest.approx(float(square.mean()))
    assert value(Consistency(reduction="sum"), x, given) == pytest.approx(float(square.sum()))
    assert value(Consistency(metric="l1"), x, given) == pytest.approx(float(size.mean()))
    torch.testing.assert_close(
        Consistency(metric="l1", reduction="none").compute(given, x)[0], size
    )
    for reduction in ("mean", "sum"):
        distance = 1 - torch.nn.functional.cosine_similarity(x.flatten(), r.flatten(), dim=0)
        assert value(Consistency(metric="cosine", reduction=reduction), x, given) == pytest.approx(
            float(distance)
        )
    both = (np.array(kl(x, r)) + np.array(kl(r, x))) / 2
    assert value(Consistency(metric="kl"), x, given) == pytest.approx(both.mean())
    assert Consistency(metric="kl", reduction="none").compute(given, x)[
        0
    ].tolist() == pytest.approx(both.tolist())
    # not clipped
    assert (
        value(Consistency(metric="kl"), doubles(-300.0), data(original_logprobs=doubles(0.0)))
        == 150
    )
    zero = data(original_logprobs=torch.zeros(2))
    assert value(Consistency(metric="cosine"), torch.zeros(2), zero) == 1  # the floor of the norms
    with pytest.raises(ValueError, match=r"shape \[2\].*\[2, 2\]"):
        Consistency().compute(zero, x)


@pytest.mark.covers("1.12.8/7")
def test_orthogonality() -> None:
    # G = [[25, 24], [24, 25]]; with unit rows [[1, .96], [.96, 1]]
    m = doubles([3.0, 4.0], [4.0, 3.0])
    assert value(Orthogonality(), m) == pytest.approx(2 * 0.96**2)
    assert value(Orthogonality("hard"), m) == pytest.approx(2 * 0.96**2)
    assert value(Orthogonality("soft", normalize=False), m) == pytest.approx(2 * 24**2)
    assert value(Orthogonality("hard", normalize=False), m) == pytest.approx(2 * 24**2 + 2 * 24**2)
    assert value(Orthogonality("spectral", normalize=False), m) == pytest.approx(48**2 + 2 * 24**2)
    loss, metrics = Orthogonality().compute([], m)
    assert metrics == {"orthogonality": float(loss)}
    assert value(Orthogonality(), T) == 0  # one row
    assert value(Orthogonality("hard", normalize=False), doubles(2.0).squeeze()) == 9
    assert value(Orthogonality(), torch.zeros(2, 2)) == 0


@pytest.mark.covers("1.12.8/10")
@pytest.mark.parametrize(
    ("axis", "shape", "rows"),
    [
        ("rows", (2, 3, 4), lambda x: x.reshape(6, 4)),
        ("sequence", (2, 3, 4), lambda x: x.permute(1, 0, 2).reshape(3, 8)),
        ("vocabulary", (2, 3, 4), lambda x: x.permute(2, 0, 1).reshape(4, 6)),
        ("sequence", (3, 4), lambda x: x),
        ("vocabulary", (3, 4), lambda x: x.T),
        ("sequence", (5,), lambda x: x[None]),
        ("vocabulary", (2, 2, 2, 2), lambda x: x.reshape(8, 2)),
    ],
)
def test_rows_of_orthogonality(axis: str, shape: tuple[int, ...], rows: Any) -> None:
    x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    matrix = rows(x)
    gram = matrix @ matrix.T
    expected = float((gram - torch.diag(gram.diagonal())).square().sum())
    assert value(Orthogonality(normalize=False, axis=axis), x) == pytest.approx(expected)


@pytest.mark.covers("1.12.8/8")
def test_gradient_penalties(monkeypatch: pytest.MonkeyPatch) -> None:
    assert value(GradientPenalty(cube), doubles(1.0, 2.0)) == pytest.approx(
        (math.sqrt(17) - 1) ** 2
    )
    assert value(GradientPenalty(cube, target_norm=4.0), doubles(1.0, 2.0)) == pytest.approx(
        (math.sqrt(17) - 4) ** 2
    )
    assert value(GradientPenalty(lambda x: torch.tensor(3.0)), T) == 1  # a constant has no gradient
    assert GradientPenalty(cube).compute([], T)[1] == {}
    monkeypatch.setattr(torch, "rand", lambda size: torch.tensor(0.25))
    between = GradientPenalty(cube, "interpolated", 0.0)
    given = data(reference_logprobs=doubles(1.0, 0.0))
    points = [0.25 * 2 + 0.75 * 1, 0.25 * 4]
    assert value(between, doubles(2.0, 4.0), given) == pytest.approx(
        sum(point**4 for point in points)
    )


@pytest.mark.covers("1.12.8/8")
def test_point_between_is_random() -> None:
    between, given = GradientPenalty(cube, "interpolated"), data(reference_logprobs=torch.zeros(3))
    assert len({value(between, T, given) for _ in range(5)}) == 5


@pytest.mark.covers("1.12.8/9", "1.12.8/11")
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: L1("weights"), "unknown target 'weights'"),
        (lambda: L1(("input", "x")), "unknown target"),
        (lambda: L1(reduction="none"), "unknown reduction 'none'"),
        (lambda: L2(reduction="none"), "unknown reduction .*; it must be one of sum, mean"),
        (lambda: ElasticNet(reduction="none"), "of sum, mean$"),
        (lambda: L2(center="median"), "center must be a number"),  # type: ignore[arg-type]
        (lambda: L2(clip=0), "clip must be greater than 0"),
        (lambda: ElasticNet(l1_ratio=1.5), "at most 1"),
        (lambda: Entropy("both"), "unknown mode 'both'"),
        (lambda: Entropy(reduction="max"), "unknown reduction 'max'"),
        (lambda: Entropy(temperature=0), "temperature must be greater than 0"),
        (lambda: KLDivergence(direction="up"), "unknown direction"),
        (lambda: KLDivergence(reduction="min"), "unknown reduction 'min'"),
        (lambda: Consistency(metric="l3"), "unknown metric 'l3'"),
        (lambda: Consistency(reduction="avg"), "unknown reduction 'avg'"),
        (lambda: Orthogonality("firm"), "unknown mode 'firm'"),
        (lambda: Orthogonality(axis="columns"), "unknown axis"),
        (lambda: GradientPenalty(torch.sum, "input"), "unknown mode 'input'"),
        (
            lambda: L1().compute([], T, {"scale": 2}),
            "no option 'scale'; known are target, reduction, lambda_",
        ),
        (lambda: L1(("field", "x")).compute([], T), "no data to read 'x' from"),
        (lambda: L1(("field", "x")).compute(data(y=T), T), "datum 0 has no input 'x'; it has y"),
        (lambda: L1().compute([], []), "no log-probabilities"),
    ],
)
def test_unknown_option_is_refused(make: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()


@pytest.mark.covers("1.12.8/11")
def test_gradient_penalty_needs_its_function() -> None:
    with pytest.raises(KeyError, match="loss_fn"):
        GradientPenalty().compute([], T)


def test_options_may_be_given_for_one_call() -> None:
    assert float(L1().compute([], T, {"reduction": "mean", "lambda": 3})[0]) == 6
    assert value(Entropy(), HALF, mode="maximize") == -value(Entropy(), HALF)


# ── data ──────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.covers("1.12.8/9")
def test_fields_of_a_single_tensor_are_the_first_datums_as_tensors_or_tensor_data() -> None:
    first = types.Datum(types.ModelInput.from_ints([1, 2]), {"original_logprobs": [-1.0, -2.0]})
    other = types.Datum(types.ModelInput.from_ints([1, 2]), {"original_logprobs": [9.0, 9.0]})
    x = torch.tensor([-1.0, -4.0])
    assert isinstance(first.loss_fn_inputs["original_logprobs"], types.TensorData)
    assert value(Consistency(), x, [first, other]) == 2
    assert value(Consistency(), x, data(original_logprobs=torch.tensor([-1.0, -2.0]))) == 2


def test_list_has_one_tensor_per_datum() -> None:
    lists: Given = [doubles(-1.0, -2.0), doubles(-3.0)]
    pairs = [*data(original_logprobs=doubles(-1.0, -1.0)), *data(original_logprobs=doubles(-1.0))]
    assert value(L1(), lists) == 6
    assert value(L2(reduction="mean"), lists) == pytest.approx(14 / 3)
    assert value(Consistency(), lists, pairs) == pytest.approx((0 + 1 + 4) / 3)
    rows = [value(Entropy(), part) for part in lists]
    assert value(Entropy(), lists) == pytest.approx(sum(rows) / 2)  # each datum is a row
    assert value(KLDivergence(lists), lists) == 0
    assert (
        value(GradientPenalty(lambda xs: sum(x.square().sum() for x in xs), target_norm=0), lists)
        == 4 * 14
    )
    with pytest.raises(ValueError, match="there are 1 data but log-probabilities of 2"):
        Consistency().compute(pairs[:1], lists)
    with pytest.raises(ValueError, match="1 tensors for log-probabilities of 2 data"):
        KLDivergence(lists[0]).compute(pairs, lists)
    with pytest.raises(ValueError, match="data of one shape"):
        Orthogonality().compute([], lists)
    assert value(Orthogonality(), [lists[0], lists[0]]) == pytest.approx(2)
