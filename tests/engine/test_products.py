"""Products on a CPU: in C, and which library is taken because its rows are steady."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F

from tinkex.engine.model import matmul, matmul_check
from tinkex.engine.native import c_matmul, library

has_c = pytest.mark.skipif(not list(library.compilers()), reason="there is no C compiler")


@pytest.fixture(autouse=True)
def _asked_anew() -> Iterator[None]:
    matmul_check._choice.cache_clear()
    matmul_check._warn.cache_clear()
    yield
    matmul_check._choice.cache_clear()
    matmul_check._warn.cache_clear()


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def unsteady(
    x_TD: torch.Tensor, weight_ND: torch.Tensor, bias_N: torch.Tensor | None = None
) -> torch.Tensor:
    """A product that adds up in another order for few rows, as some libraries do."""
    if x_TD.shape[0] >= 64:
        return _linear(x_TD, weight_ND, bias_N)
    return _linear(x_TD.flip(1).contiguous(), weight_ND.flip(1).contiguous(), bias_N)


_linear = F.linear


@has_c
@pytest.mark.parametrize("outputs", [1, 16, 40, 300])
@pytest.mark.parametrize("inputs", [1, 7, 512, 1100])
@pytest.mark.parametrize("threads", [1, 3])
def test_products_in_c_are_right_and_their_rows_steady(
    outputs: int, inputs: int, threads: int
) -> None:
    torch.set_num_threads(threads)
    x, w, bias = random(900, inputs), random(inputs, outputs, seed=1), random(outputs, seed=2)
    start = random(900, outputs, seed=3)
    wide = F.pad(x, (2, 3))[:, 2 : 2 + inputs]
    for weight in (w, w.t().contiguous().t()):
        y = c_matmul.multiply(x, weight, bias, 0.5)
        torch.testing.assert_close(
            y.double(), x.double() @ (0.5 * w.double()) + bias, rtol=1e-5, atol=1e-4
        )
        assert torch.equal(c_matmul.multiply(wide, weight, bias, 0.5), y)
        assert torch.equal(c_matmul.multiply(x.t().contiguous().t(), weight, bias, 0.5), y)
        onto = start.clone()
        c_matmul.add_product(onto, x, weight, 0.5)
        torch.testing.assert_close(
            onto.double(), start + x.double() @ (0.5 * w.double()), rtol=1e-5, atol=1e-4
        )
        for rows in (slice(0, 1), slice(3, 9), slice(100, 113), slice(7, 800)):
            assert torch.equal(c_matmul.multiply(x[rows], weight, bias, 0.5), y[rows])
            part = F.pad(start[rows], (1, 1))[:, 1:-1]
            c_matmul.add_product(part, x[rows], weight, 0.5)
            assert torch.equal(part, onto[rows])


@has_c
def test_c_products_refuse_unsupported_layouts() -> None:
    for x, w in ((random(3, 4), random(5, 2)), (random(3, 4).double(), random(4, 2).double())):
        with pytest.raises(ValueError, match="no such product"):
            c_matmul.multiply(x, w)
    assert c_matmul.multiply(random(0, 4), random(4, 2)).shape == (0, 2)


@has_c
@pytest.mark.parametrize("shape", [(48, 40), (300, 1500)])
def test_library_with_unsteady_rows_is_replaced_by_c(
    shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    weight, x = random(*shape), random(128, shape[1], seed=1)
    monkeypatch.setattr(matmul_check, "onednn", lambda: None)
    monkeypatch.setattr(F, "linear", unsteady)
    assert not torch.equal(F.linear(x[:4], weight), F.linear(x, weight)[:4])
    assert not matmul_check.is_steady("pytorch", *shape)
    assert matmul_check.choice(weight) == matmul_check.choice(weight, is_small=True) == "c"
    for multiply in (matmul.weighed, matmul.lowered):
        y = multiply(x, weight)
        torch.testing.assert_close(y, _linear(x, weight), rtol=1e-4, atol=1e-4)
        assert torch.equal(multiply(x[:4], weight), y[:4])
    y = matmul.weighed(x, weight, random(shape[0], seed=2))
    torch.testing.assert_close(
        y, _linear(x, weight, random(shape[0], seed=2)), rtol=1e-4, atol=1e-4
    )


@pytest.mark.skipif(matmul_check.onednn() is None, reason="PyTorch has no oneDNN here")
def test_onednn_is_not_used_if_its_rows_are_unsteady(monkeypatch: pytest.MonkeyPatch) -> None:
    def operator(x_TD: torch.Tensor, weight: torch.Tensor, *_: object) -> torch.Tensor:
        return unsteady(x_TD, weight.to_dense())

    monkeypatch.setattr(matmul_check, "onednn", lambda: operator)
    assert not matmul_check.is_steady("onednn", 300, 1500)
    assert matmul_check.choice(random(300, 1500)) != "onednn"


def test_large_weights_are_checked_with_fewer_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def linear(x_TD: torch.Tensor, weight_ND: torch.Tensor) -> torch.Tensor:
        seen.append(x_TD.shape[0])
        return x_TD.new_zeros(x_TD.shape[0], 1)

    monkeypatch.setattr(F, "linear", linear)
    monkeypatch.setattr(matmul_check, "_added", linear)
    for outputs, most in ((64, 516), (4096, 64)):
        seen.clear()
        matmul_check.is_steady("pytorch", outputs, 4096)
        assert max(seen) == most


def test_unsteady_library_without_c_is_reported_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(library, "load", lambda: None)
    monkeypatch.setattr(matmul_check, "is_steady", lambda *_, **__: False)
    with caplog.at_level(logging.WARNING, "tinkex.engine"):
        for shape in ((48, 40), (300, 1500)):
            assert matmul_check.choice(random(*shape)) == "pytorch"
    (record,) = caplog.records
    assert "tinkex doctor" in record.getMessage()


def test_shape_is_checked_once_for_each_number_of_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checked: list[tuple[object, ...]] = []
    monkeypatch.setattr(matmul_check, "is_steady", lambda *shape, **_: not checked.append(shape))  # type: ignore[func-returns-value]
    for threads in (1, 2, 1, 2):
        torch.set_num_threads(threads)
        for weight in (random(48, 40), random(48, 40, seed=1), random(40, 48).t()):
            matmul_check.choice(weight, is_small=True)
    assert checked == [("pytorch", 48, 40)] * 4  # as it lies and turned, by one thread and by two


def test_batch_with_split_matrices_uses_one_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.set_num_threads(3)
    for is_steady, count, expected in ((True, 5, 3), (True, 1, 1), (False, 5, 1)):
        monkeypatch.setattr(matmul_check, "are_batches_steady", lambda _, found=is_steady: found)
        with matmul_check.steady_batch(count):
            assert torch.get_num_threads() == expected
        assert torch.get_num_threads() == 3


def test_batches_that_are_split_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    real = torch.bmm
    monkeypatch.setattr(torch, "bmm", lambda a, b: real(a, b) * (1 + 1e-6 * (a.shape[0] == 2)))
    assert not matmul_check.are_batches_steady.__wrapped__(4)
