"""How many threads operations use: a block of its own number, for the thread that is in it and no
other."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from engine.conftest import Sample
from tinkex.engine.api import SampleJob
from tinkex.engine.model import matmul_check
from tinkex.engine.model.matmul_check import onednn
from tinkex.engine.sample import row_adapters, slab_decoding
from tinkex.engine.sample.sampler import Limits, Sampler
from tinkex.engine.torch.engine import TorchEngine
from tinkex.engine.torch.openmp import Threads, _runtime
from tinkex.types.inputs import ModelInput
from tinkex.types.sampling import SampleRequest, SamplingParams


@pytest.fixture
def engine(engine: TorchEngine) -> TorchEngine:
    """One that decodes by PyTorch alone."""
    engine._sampler = Sampler(Limits(way="slabs"))
    return engine


pytestmark = pytest.mark.skipif(
    _runtime() is None, reason="PyTorch's OpenMP cannot be reached here"
)


def test_block_has_its_own_number_of_threads() -> None:
    torch.set_num_threads(2)
    one, two = Threads(1), Threads(2)
    with one:
        assert torch.get_num_threads() == 1
        with two:
            assert torch.get_num_threads() == 2
            with two:
                assert torch.get_num_threads() == 2
            assert torch.get_num_threads() == 2
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 2


def test_block_that_fails_leaves_the_number_as_it_was() -> None:
    torch.set_num_threads(2)
    with pytest.raises(ValueError, match="broken"), Threads(1):
        raise ValueError("broken")
    assert torch.get_num_threads() == 2


def test_other_threads_keep_their_settings() -> None:
    torch.set_num_threads(2)
    inside, seen = threading.Event(), threading.Event()

    def elsewhere() -> int:
        inside.wait(30)
        count = torch.get_num_threads()  # the first that this thread asks
        seen.set()
        return count

    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(elsewhere)
        with Threads(1):
            inside.set()
            assert seen.wait(30)
        assert answer.result(30) == 2


def test_decoding_gives_all_threads_to_products_only(
    engine: TorchEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: dict[str, set[int]] = {"products": set(), "adapters": set()}
    multiply, add_share = onednn(), row_adapters._add_share
    if multiply is None:
        pytest.skip("PyTorch has no oneDNN here")

    def seen(what: str, function: Any) -> Any:
        def run(*args: Any) -> Any:
            counts[what].add(torch.get_num_threads())
            return function(*args)

        return run

    engine.snapshot("a", "s")
    torch.set_num_threads(2)
    monkeypatch.setattr(matmul_check, "onednn", lambda: seen("products", multiply))
    monkeypatch.setattr(matmul_check, "choice", lambda *_, **__: "onednn")
    monkeypatch.setattr(row_adapters, "_add_share", seen("adapters", add_share))
    params = SamplingParams(max_tokens=4, stop=[])
    request = SampleRequest(prompt=ModelInput.from_ints([1, 2, 3]), sampling_params=params)
    engine.sample_start(SampleJob("job", "s", request, 0))
    engine.sample_step()  # the prompt
    assert counts == {"products": {2}, "adapters": {2}}
    counts["adapters"].clear()
    engine.sample_step()
    assert counts == {"products": {2}, "adapters": {1}}
    assert torch.get_num_threads() == 2


def test_room_of_rows_that_have_ended_is_kept_and_empty(
    engine: TorchEngine, sample: Sample
) -> None:
    engine.snapshot("a", "s")
    first = sample(engine, [5, 6, 7], max_tokens=9, stop=[])
    (runner,) = engine._sampler._runners.values()
    slabs = runner._decoding._slabs  # type: ignore[attr-defined]
    (slab,) = slabs.values()
    assert not slab.rows
    assert not slab.kv.any()
    kept = slab.kv.data_ptr()
    again = sample(engine, [5, 6, 7], max_tokens=9, stop=[])
    assert slabs[slab_decoding.SMALLEST_SLAB].kv.data_ptr() == kept
    assert again.sequences[0].logprobs == first.sequences[0].logprobs


def test_large_slabs_are_released(
    engine: TorchEngine, sample: Sample, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slab_decoding, "KEPT_SLAB", 0)
    engine.snapshot("a", "s")
    sample(engine, [5, 6, 7], max_tokens=9, stop=[])
    (runner,) = engine._sampler._runners.values()
    assert not runner._decoding._slabs  # type: ignore[attr-defined]
