"""Decoding by C: how it is compiled and kept, and what it computes. Other files show that it
samples as PyTorch."""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.conftest import Checkpoint, Sample
from engine.references import adapter_of, randomise
from support import wait_until
from tinkex.engine.api import SampleJob
from tinkex.engine.model import matmul_check
from tinkex.engine.model.decoder import Lora
from tinkex.engine.native import bindings, c_passes, library, self_check
from tinkex.engine.native.c_passes import Native, NativeDecoding, NativeSteps, PackedLora, packed
from tinkex.engine.sample.sampler import Limits, Runner, Sampler
from tinkex.engine.sample.token_choice import choose
from tinkex.engine.torch.engine import TorchEngine
from tinkex.engine.torch.lora import Factors, Linear
from tinkex.engine.torch.openmp import usable_cores
from tinkex.types.inputs import ModelInput
from tinkex.types.sampling import SampleRequest, SamplingParams
from tinkex.types.tensors import Array
from tinkex.types.training import LoraConfig

pytestmark = pytest.mark.skipif(not list(library.compilers()), reason="there is no C compiler")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache, and nothing loaded."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("platformdirs.user_cache_path", lambda name: tmp_path / name)
    library.load.cache_clear()
    matmul_check._choice.cache_clear()
    yield tmp_path / "tinkex" / "native"
    library.load.cache_clear()
    matmul_check._choice.cache_clear()


@pytest.fixture(scope="module")
def copier(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A command that copies the library of the real compiler, which takes seconds to build it."""
    directory = tmp_path_factory.mktemp("built")
    with library._cache() as kept:
        built = shutil.copy(library.compiled(next(iter(library.compilers())), kept), directory)
    return compiler_of(directory / "cc", copying(built))


def copying(built: Path | str) -> str:
    """The script of a compiler that gives a library built before."""
    return f'while [ "$1" != -o ]; do shift; done; cp "{built}" "$2"'


def compiler_of(path: Path, script: str) -> list[str]:
    """A command that stands in for a compiler, and leaves a line in `calls` each time."""
    real = " ".join(next(iter(library.compilers())))
    path.write_text(
        f"#!/bin/sh\necho called >> {path.parent}/calls\n{script.replace('REAL', real)}\n"
    )
    path.chmod(0o700)
    return [str(path)]


def test_library_is_compiled_once_and_cached(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = compiler_of(tmp_path / "cc", 'exec REAL "$@"')
    monkeypatch.setattr(library, "compilers", lambda: iter([command]))
    first = library.load()
    assert first is not None
    assert library.load() is first
    library.load.cache_clear()
    assert library.load() is not None
    assert (tmp_path / "calls").read_text().splitlines() == ["called"]
    kept, note = sorted(cache.iterdir(), key=lambda path: path.suffix, reverse=True)
    assert kept.name.startswith("step-")
    assert note == kept.with_suffix(".checked")
    assert not stat.S_IMODE(cache.stat().st_mode) & 0o077


def test_cached_library_depends_on_compiler_and_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = library.compiled(compiler_of(tmp_path / "one", copying(library.SOURCE)), tmp_path)
    two = library.compiled(compiler_of(tmp_path / "two", copying(library.SOURCE)), tmp_path)
    monkeypatch.setattr(library, "_machine", lambda: b"another")
    three = library.compiled([str(tmp_path / "two")], tmp_path)
    assert len({one, two, three}) == 3


@pytest.mark.parametrize("machine", ["aarch64", "arm64"])
def test_library_on_arm_fits_any_processor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, machine: str
) -> None:
    """For the one that is named may be what a virtual machine does not have, and to run it would
    end the process."""
    monkeypatch.setattr("platform.machine", lambda: machine)
    command = compiler_of(tmp_path / "cc", f'echo "$@" > {tmp_path}/given; exit 1')
    with pytest.raises(subprocess.CalledProcessError):
        library.compiled(command, tmp_path)
    given = (tmp_path / "given").read_text().split()
    assert [flag for flag in given if flag.startswith("-m")] == ["-mcpu=generic"]


@pytest.mark.parametrize(
    ("status", "expected"), [(0, ["/usr/bin/cc", "/opt/bin/clang"]), (2, ["/opt/bin/clang"])]
)
def test_stub_compiler_of_a_mac_is_ignored(
    monkeypatch: pytest.MonkeyPatch, status: int, expected: list[str]
) -> None:
    places = {"cc": "/usr/bin/cc", "clang": "/opt/bin/clang"}
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr("shutil.which", places.get)
    monkeypatch.setattr("os.path.realpath", str)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    monkeypatch.delenv("CC", raising=False)
    asked = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[bytes]:
        asked.append(command)
        return subprocess.CompletedProcess(command, status)

    monkeypatch.setattr("subprocess.run", run)
    assert [path for (path,) in library.compilers()] == expected
    assert asked == [["/usr/bin/xcode-select", "-p"]]


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("echo 'step.c: no such header' >&2; exit 1", "cc fails: step.c: no such header"),
        ("exit 3", "cc fails: exit 3"),
        ("exit 0", ""),  # it says it went well, and has made nothing
    ],
)
def test_pytorch_is_used_without_a_working_compiler(
    cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    script: str,
    message: str,
    engine: TorchEngine,
    sample: Sample,
) -> None:
    command = compiler_of(tmp_path / "cc", script)
    monkeypatch.setattr(library, "compilers", lambda: iter([command]))
    with caplog.at_level(logging.INFO, "tinkex.engine"):
        engine.snapshot("a", "s")
        assert len(sample(engine, [5, 6, 7], max_tokens=9, stop=[]).sequences[0].tokens) == 9
    (said,) = [record.getMessage() for record in caplog.records if "slower" in record.getMessage()]
    assert said.startswith("sampling on the CPU uses PyTorch alone and is slower: ")
    assert message in said
    assert not isinstance(runner_of(engine)._decoding, NativeDecoding)
    assert not list(cache.iterdir())


def test_missing_compiler_is_reported(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("shutil.which", lambda _: None)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    monkeypatch.delenv("CC", raising=False)
    with caplog.at_level(logging.INFO, "tinkex.engine"):
        assert library.load() is None
    assert "there is no C compiler (cc, gcc, clang, or the package ziglang)" in caplog.text


def test_library_can_be_switched_off(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(library.SWITCH, "0")
    assert library.load() is None
    assert not cache.exists()


def test_configured_compiler_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "mine --quick")
    assert next(iter(library.compilers())) == ["mine", "--quick"]


@pytest.mark.parametrize("nonsense", ["'", "no-such-compiler-\udcff", "''", "false --quick"])
def test_compiler_that_makes_no_sense_is_passed_over(
    cache: Path, monkeypatch: pytest.MonkeyPatch, nonsense: str
) -> None:
    monkeypatch.setenv("CC", nonsense)
    first, *others = library.compilers()
    assert others
    monkeypatch.setattr(library, "compilers", lambda: iter([first]))
    assert library.load() is None  # and nothing is raised


def test_hanging_compiler_times_out(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    command = compiler_of(tmp_path / "cc", "exec sleep 60")
    monkeypatch.setattr(library, "compilers", lambda: iter([command]))
    monkeypatch.setattr(library, "COMPILE_SECONDS", 0.2)
    with caplog.at_level(logging.INFO, "tinkex.engine"):
        assert library.load() is None
    assert "timed out" in caplog.text
    assert not list(cache.iterdir())


def test_compiler_does_not_read_standard_input(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.write(writer, b"typed")
    kept = os.dup(0)
    try:
        os.dup2(reader, 0)
        command = compiler_of(tmp_path / "cc", f"head -c 5 > {tmp_path}/read; exit 1")
        with pytest.raises(subprocess.CalledProcessError):
            library.compiled(command, tmp_path)
    finally:
        os.dup2(kept, 0)
        for descriptor in (kept, reader, writer):
            os.close(descriptor)
    assert (tmp_path / "read").read_bytes() == b""


def test_unwritable_cache_falls_back_to_pytorch(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cache.parent.write_text("")
    monkeypatch.setattr(tempfile, "tempdir", str(cache.parent / "nowhere"))
    with caplog.at_level(logging.INFO, "tinkex.engine"):
        assert library.load() is None
    assert "sampling on the CPU uses PyTorch alone and is slower: " in caplog.text


def test_missing_home_leaves_no_files_in_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # as it says then
    monkeypatch.setattr("platformdirs.user_cache_path", lambda name: Path("~/.cache") / name)
    monkeypatch.chdir(tmp_path)
    with library._cache() as directory:
        assert directory.is_absolute()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("what", ["others may write", "it is a file"])
def test_cache_of_another_user_is_not_used(
    cache: Path, copier: list[str], monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setattr(library, "compilers", lambda: iter([copier]))
    if what == "others may write":
        cache.mkdir(parents=True)
        cache.chmod(0o777)
    else:
        cache.parent.write_text("")
    assert library.load() is not None
    assert not cache.exists() or not list(cache.iterdir())


def test_damaged_library_is_compiled_again(
    cache: Path, copier: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "compilers", lambda: iter([copier]))
    cache.mkdir(parents=True, mode=0o700)
    kept = library.compiled(copier, cache)
    whole = kept.read_bytes()
    kept.write_bytes(whole[: len(whole) // 2])  # to load this would end the process
    assert library.load() is not None
    (made,) = cache.glob("*.so")
    assert len(made.read_bytes()) == len(whole)  # on a Mac the name it was made under is in it


def test_library_that_computes_nonsense_is_not_used(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    broken = tmp_path / "step.c"
    broken.write_text(
        library.SOURCE.read_text().replace("w[v], kept[row][v])", "w[v], -kept[row][v])")
    )
    monkeypatch.setattr(library, "SOURCE", broken)
    with caplog.at_level(logging.INFO, "tinkex.engine"):
        assert library.load() is None
    assert "its products are wrong on this machine" in caplog.text


@pytest.mark.covers("S36")
def test_library_with_differing_rows_is_not_used(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    broken, right = tmp_path / "step.c", "multiply_add(value, w[v], kept[row][v])"
    source = library.SOURCE.read_text()
    assert right in source
    broken.write_text(source.replace(right, f"rows > 1 ? {right} : kept[row][v] + value * w[v]"))
    monkeypatch.setattr(library, "SOURCE", broken)
    first = next(iter(library.compilers()))
    monkeypatch.setattr(library, "compilers", lambda: iter([first]))
    with caplog.at_level(logging.INFO, "tinkex.engine"):
        assert library.load() is None
    assert "a row gets different bits alone than in a batch" in caplog.text
    (note,) = cache.glob("*.checked")
    assert note.read_text().startswith("rows differ ")
    monkeypatch.setattr(self_check, "rows_agree", lambda _: pytest.fail("it was found before"))
    library.load.cache_clear()
    assert library.load() is None


def test_library_is_checked_once_for_each_processor(
    cache: Path, copier: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "compilers", lambda: iter([copier]))
    checked: list[bindings.Library] = []
    monkeypatch.setattr(self_check, "rows_agree", lambda loaded: not checked.append(loaded))  # type: ignore[func-returns-value]
    for machine, expected in ((b"one", 1), (b"one", 1), (b"two", 2)):
        monkeypatch.setattr(library, "_machine", lambda machine=machine: machine)
        library.load.cache_clear()
        assert library.load() is not None
        assert len(checked) == expected
    for note in cache.glob("*.checked"):
        note.write_bytes(b"\xff nonsense")
    library.load.cache_clear()
    assert library.load() is not None
    assert len(checked) == 3


# --- What it computes
# --------------------------------------------------------------------------------------------


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def native_of(engine: TorchEngine, threads: int, linear: Linear | None = None) -> Native:
    """For a model, or for one whose head is something else."""
    loaded, model = library.load(), engine._bases["small"].model
    assert loaded is not None
    return Native(loaded, model if linear is None else replace(model, head=linear), threads)


@pytest.mark.parametrize("sizes", [[1], [16], [100], [40, 16, 3], [33, 33]])
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
def test_products_are_right_and_rows_are_independent(
    engine: TorchEngine, sizes: list[int], bias: bool
) -> None:
    inputs = 77
    weight, x = random(sum(sizes), inputs), random(45, inputs, seed=1)
    linear = Linear(
        "x", "mlp", weight, random(sum(sizes), seed=2) if bias else None, ["m"] * len(sizes), sizes
    )
    whole = native_of(engine, 2, linear).product(x, linear)
    expected = torch.nn.functional.linear(
        x.double(),
        weight.double(),
        linear.bias_N.double() if bias else None,  # type: ignore[union-attr]
    )
    torch.testing.assert_close(whole.double(), expected, rtol=1e-5, atol=1e-5)
    for threads in (1, 2, 3):
        native = native_of(engine, threads, linear)
        for rows in (*range(1, 27), 45):
            assert torch.equal(native.product(x[:rows], linear), whole[:rows])
        assert torch.equal(native.product(x[13:14], linear), whole[13:14])
        assert torch.equal(native.product(x[:, :].t().contiguous().t(), linear), whole)


def test_factors_are_laid_out_in_panels() -> None:
    a, b = random(6, 20), random(40, 3)
    linear = Linear("x", "mlp", random(40, 20), None, ["one", "two"], [24, 16])
    other = Linear("y", "mlp", random(40, 20), None, ["one"], [40])
    lora = PackedLora(Lora({"x": Factors(a, [b[:24], b[24:]], 0.5)}), [other, linear])
    nothing, factors = lora.factors
    assert not nothing.a
    assert factors.rank == 3

    def read(where: int, panels: int, inputs: int) -> Array:
        values = ctypes.string_at(where, 4 * panels * inputs * bindings.PANEL)
        return np.frombuffer(values, np.float32).reshape(panels, inputs, bindings.PANEL)

    first = read(factors.a, 1, 20)[0]
    np.testing.assert_array_equal(first[:, :6], a.T)
    assert not first[:, 6:].any()
    both = read(factors.b[0], 2, 3)
    np.testing.assert_array_equal(np.concatenate([both[0], both[1][:, :8]], axis=1), 0.5 * b[:24].T)
    np.testing.assert_array_equal(read(factors.b[1], 1, 3)[0], 0.5 * b[24:].T)
    assert lora.bytes == 4 * 16 * (20 + 2 * 3 + 3)
    assert packed(a).shape == (1, 20, 16)


@pytest.mark.parametrize("vocab", [1, 5, 16, 97, 256, 700, 5000])
@pytest.mark.parametrize("scale", [0.1, 3.0, 40.0])
def test_tokens_are_drawn_as_by_pytorch(engine: TorchEngine, vocab: int, scale: float) -> None:
    """By the same numbers; where weights differ in their last bits, a token at the edge may differ,
    and no other."""
    rows = 300
    logits, numbers = (
        scale * random(rows, vocab, seed=vocab),
        np.linspace(0, 1, rows, endpoint=False),
    )
    logits[3, 1:] = -torch.inf
    native = native_of(engine, 2)
    for temperature in (0.0, 1e-4, 0.7, 1.0, 2.5):
        params = SamplingParams(temperature=temperature)
        expected, logprobs = choose(logits, numbers, [params] * rows)
        tokens, chosen = native.draw(logits, numbers, np.full(rows, temperature))
        assert (tokens != expected.numpy()).sum() <= rows // 100
        np.testing.assert_allclose(
            chosen, logprobs.numpy()[np.arange(rows), tokens], rtol=1e-5, atol=1e-5
        )
        for some in (slice(0, 1), slice(5, 40)):  # neighbours change no bit
            again, values = native_of(engine, 1).draw(
                logits[some], numbers[some], np.full(rows, temperature)[some]
            )
            np.testing.assert_array_equal(again, tokens[some])
            np.testing.assert_array_equal(values, chosen[some])


def test_draws_follow_the_probabilities(engine: TorchEngine) -> None:
    logits = random(1, 40) * 2
    numbers = (np.arange(20000) + 0.5) / 20000
    tokens, _ = native_of(engine, 2).draw(logits.expand(20000, -1), numbers, np.ones(20000))
    shares = np.bincount(tokens, minlength=40) / 20000
    np.testing.assert_allclose(shares, logits.softmax(-1)[0].numpy(), atol=1e-4)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_give_no_finite_log_probability(
    engine: TorchEngine, value: float, temperature: float
) -> None:
    logits = random(2, 97)
    logits[0, 40] = value
    tokens, logprobs = native_of(engine, 1).draw(
        logits, np.array([0.3, 0.3]), np.full(2, temperature)
    )
    assert not np.isfinite(logprobs[0])
    assert 0 <= tokens[0] < 97
    assert np.isfinite(logprobs[1])


def runner_of(engine: TorchEngine) -> Runner:
    (runner,) = engine._sampler._runners.values()
    return runner


def test_only_dense_float32_models_use_the_c_step(checkpoint: Checkpoint, sample: Sample) -> None:
    ways = {}
    for family, dtype in (
        ("llama", torch.float32),
        ("llama", torch.bfloat16),
        ("qwen3-moe", torch.float32),
    ):
        engine = TorchEngine({"m": checkpoint(family)}, dtype=dtype, threads=1)
        engine.load_sampler("s", "m", None)
        sample(engine, [5, 6, 7], max_tokens=2, stop=[])
        ways[family, dtype] = type(runner_of(engine)._decoding).__name__
    assert list(ways.values()) == ["NativeDecoding", "SlabDecoding", "SlabDecoding"]


@pytest.mark.parametrize("family", ["long-narrow", "long-wide", "long-window"])
def test_drawn_and_read_positions_weigh_equally(checkpoint: Checkpoint, family: str) -> None:
    """Also where heads fill no panel, a group has more of them than a tile has rows, and windows
    begin anywhere."""
    random = np.random.default_rng(3)
    prompt = random.integers(3, 96, 200)

    def run(limits: Limits, text: Array, tokens: int) -> tuple[Array, Array, Array]:
        engine = TorchEngine({"m": checkpoint(family)}, threads=3)
        engine._sampler = Sampler(limits)
        engine.create("a", "m", LoraConfig(rank=4, seed=1, train_unembed=False))
        randomise(adapter_of(engine))
        engine.snapshot("a", "s")
        request = SampleRequest(
            prompt=ModelInput.from_ints(text),
            sampling_params=SamplingParams(max_tokens=tokens, stop=[], temperature=0),
            prompt_logprobs=True,
        )
        engine.sample_start(SampleJob("job", "s", request, 5))
        while engine.sampling():
            for done in engine.sample_step():
                assert not isinstance(done.result, Exception), done.result
                response = done.result
        assert response.prompt_logprobs is not None
        (sequence,) = response.sequences
        logprobs = np.array(response.prompt_logprobs[1:], np.float32)
        return logprobs, np.array(sequence.tokens), np.array(sequence.logprobs, np.float32)

    _, drawn, likely = run(Limits(), prompt, 100)
    for read in (1, 29, 77):
        text = np.concatenate([prompt, drawn[:read]])
        whole, *first = run(Limits(), text, 1)
        pieces, *second = run(Limits(prefill_tokens=37), text, 1)
        assert first == second == [drawn[read], likely[read]], (
            "not a bit depends on how it came to be"
        )
        assert np.array_equal(whole, pieces)
    plain, *_ = run(Limits(way="slabs"), text, 1)
    np.testing.assert_allclose(plain, whole, atol=2e-5)


def test_rows_see_their_own_sequence_in_any_order(engine: TorchEngine, sample: Sample) -> None:
    engine.load_sampler("bare", "small", None)
    sample(engine, [5, 6, 7], sampler="bare", max_tokens=2, stop=[])
    way = runner_of(engine)._decoding
    assert isinstance(way, NativeDecoding)
    tokens = np.random.default_rng(1).integers(3, 96, (2, 8))

    def run(
        rows: list[tuple[int, int]], blocks: tuple[int, int]
    ) -> dict[tuple[int, int], torch.Tensor]:
        """The hidden states of these positions of two sequences, by both."""
        sequences, positions = np.array(rows).T.copy()
        hidden = torch.empty(len(rows), 32)
        tables = np.array(blocks)[sequences][:, None].copy()
        way._steps.run(tokens[sequences, positions], positions, tables, [], hidden_BD=hidden)
        return dict(zip(rows, hidden, strict=True))

    everything = [(sequence, position) for sequence in range(2) for position in range(8)]
    expected = run(everything, (2, 3))
    shuffled = [everything[at] for at in np.random.default_rng(2).permutation(len(everything))]
    for order in (everything[::-1], shuffled, [(p % 2, p // 2 + (p % 2)) for p in range(14)]):
        run([(0, 0), (1, 0)], (4, 5))
        for row, hidden in run(order, (4, 5)).items():
            assert torch.equal(hidden, expected[row]), f"position {row[1]} of sequence {row[0]}"


def test_prompts_of_one_adapter_read_it_once(
    engine: TorchEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside each other they are one span, whatever their number; the bare model's are none."""
    engine.snapshot("a", "s")
    engine.load_sampler("bare", "small", None)
    spans: list[list[tuple[int, int]]] = []
    original = NativeSteps._spans

    def noted(self: NativeSteps, adapters: Any) -> Any:
        found = original(self, adapters)
        spans.append([(span.start, span.stop) for span in found])
        return found

    monkeypatch.setattr(NativeSteps, "_spans", noted)
    for job, (sampler, size) in enumerate([("s", 5), ("bare", 3), ("s", 4), ("s", 7)]):
        request = SampleRequest(
            prompt=ModelInput.from_ints(range(3, 3 + size)),
            sampling_params=SamplingParams(max_tokens=2, stop=[]),
        )
        engine.sample_start(SampleJob(f"job{job}", sampler, request, job))
    while engine.sampling():
        engine.sample_step()
    # three prompts behind the bare model's, then a row of each
    assert spans == [[(3, 19)], [(1, 4)]]


def test_weights_too_large_to_be_kept_twice_are_not(engine: TorchEngine, sample: Sample) -> None:
    engine._sampler = Sampler(Limits(packed_bytes=1000))
    engine.snapshot("a", "s")
    sample(engine, [5, 6, 7], max_tokens=2, stop=[])
    assert not isinstance(runner_of(engine)._decoding, NativeDecoding)


def test_adapters_stay_packed_while_they_are_used_and_for_a_while(
    engine: TorchEngine, sample: Sample, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in range(4):
        engine.create(f"a{seed}", "small", LoraConfig(rank=4, seed=seed))
        engine.snapshot(f"a{seed}", f"s{seed}")
    made: list[object] = []

    def pack(*given: Any) -> PackedLora:
        made.append(given)
        return PackedLora(*given)

    monkeypatch.setattr(c_passes, "PackedLora", pack)

    def ask(*samplers: int) -> int:
        made.clear()
        for sampler in samplers:
            sample(engine, [5, 6, 7], sampler=f"s{sampler}", max_tokens=4, stop=[])
        return len(made)

    assert ask(0, 1, 2) == 3
    assert ask(0, 1, 2) == 0
    way = runner_of(engine)._decoding
    assert isinstance(way, NativeDecoding)
    each = next(iter(way._steps._packed.values())).bytes
    monkeypatch.setattr(c_passes, "KEPT_ADAPTERS", 2 * each)
    assert ask(3) == 1  # 1 and 2 are kept besides it
    assert ask(1, 2) == 0
    assert ask(0) == 1


@pytest.mark.skipif(sys.platform != "linux", reason="threads are counted in /proc")
def test_unused_threads_end(engine: TorchEngine) -> None:
    def threads() -> int:
        return len(os.listdir("/proc/self/task"))

    gc.collect()
    before = threads()
    native = native_of(engine, 9)
    assert threads() >= before + 8
    del native
    gc.collect()
    # the system forgets them a moment after they have ended
    wait_until(lambda: threads() < before + 4)


def test_little_work_is_done_by_the_thread_that_asks_for_it(engine: TorchEngine) -> None:
    """Waiting for another would take longer. What comes out is the same."""
    linear = Linear("x", "mlp", random(64, 64), None, ["m"], [64])
    native, x = native_of(engine, 3, linear), random(40, 64)
    seen = []
    for share in (1, 64 * 64 * 20, 1 << 40):
        native.library.share.value = share
        seen.append(native.product(x, linear))
    assert torch.equal(seen[0], seen[1])
    assert torch.equal(seen[0], seen[2])


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="threads cannot be placed here")
def test_threads_that_were_called_to_other_cores_may_run_anywhere_afterwards() -> None:
    """After a rest they are woken where the one that calls them is not."""
    found = library.load()
    assert found is not None
    everywhere = os.sched_getaffinity(0)
    for _ in range(20):  # other threads of the tests come and go
        before = set(os.listdir("/proc/self/task"))
        team = found.team_new(3)
        own = set(os.listdir("/proc/self/task")) - before
        if len(own) == 2:
            break
        found.team_free(team)
    weight, x, y = (np.zeros(size, np.float32) for size in (64 * 16 * 64, 12 * 64, 12 * 1024))
    linear = bindings.Linear(weight.ctypes.data, None, 64, 1, (bindings.Int * bindings.PARTS)(1024))
    placed = {len(os.sched_getaffinity(int(thread))) for thread in own}
    for _ in range(20):
        time.sleep(0.005)
        found.product(linear, x.ctypes.data, 12, y.ctypes.data, team)
        placed |= {len(os.sched_getaffinity(int(thread))) for thread in own}
    found.team_free(team)
    assert len(own) == 2
    assert placed == {len(everywhere)}


def test_threads_do_not_race(tmp_path: Path) -> None:
    """A compiler sees what has no order; results show it once in a long while, under load or on
    ARM."""
    program = tmp_path / "racing"
    options = (
        "-std=gnu11",
        "-O1",
        "-g",
        "-pthread",
        "-fsanitize=thread",
        "-include",
        str(library.SOURCE),
    )
    source = str(Path(__file__).with_name("racing.c"))
    for compiler in library.compilers():
        made = subprocess.run(
            [*compiler, *options, "-o", str(program), source, "-lm"], capture_output=True
        )
        if made.returncode == 0:
            break
    else:
        pytest.skip("no compiler here finds races")
    done = subprocess.run([program], capture_output=True, text=True, timeout=60)
    if "FATAL: ThreadSanitizer" in done.stderr:
        pytest.skip("races cannot be found on this system")
    assert done.returncode == 0, done.stderr


@pytest.mark.slow  # a fork of a process with threads is never quite safe
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no forks here")
def test_forked_child_has_its_own_threads(engine: TorchEngine) -> None:
    linear = Linear("x", "mlp", random(40, 20), None, ["m"], [40])
    native, x = native_of(engine, 3, linear), random(5, 20)
    expected = native.product(x, linear).numpy().tobytes()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("warnings.warn", lambda *_, **__: None)  # of threads, which are the point
        child = os.fork()
        if child == 0:
            # waiting for the parent's threads would last for ever
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(20)
            right = native.product(x, linear).numpy().tobytes() == expected
            del native
            gc.collect()
            os._exit(0 if right else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert native.product(x, linear).numpy().tobytes() == expected


@pytest.mark.slow
def test_program_ends_while_a_thread_computes() -> None:
    program = """
import threading, time, torch, types
from tinkex.engine.torch.lora import Linear
from tinkex.engine.native import library
from tinkex.engine.native.c_passes import Native

linear = Linear("x", "mlp", torch.ones(64, 64), None, ["m"], [64])
native = Native(library.load(), types.SimpleNamespace(linears=lambda: [linear]), 4)
x, y = torch.ones(4, 64), torch.empty(4, 64)
given = native.linear(linear), x.data_ptr(), 4, y.data_ptr(), native.team

def compute():  # without PyTorch, which does not bear it
    while True:
        native.library.product(*given)

threading.Thread(target=compute, daemon=True).start()
time.sleep(0.3)
"""
    for _ in range(3):  # it used to hang more often than not
        assert subprocess.run([sys.executable, "-c", program], timeout=40).returncode == 0


@pytest.mark.skipif(sys.platform != "linux", reason="control groups")
@pytest.mark.parametrize(
    ("groups", "limits"),
    [
        ("0::/\n", {"cpu.max": "LIMIT"}),
        ("0::/a.slice/b.scope\n", {"cpu.max": "max 100000", "a.slice/b.scope/cpu.max": "LIMIT"}),
        (
            "0::/a.slice/b.scope\n",
            {"a.slice/cpu.max": "LIMIT", "a.slice/b.scope/cpu.max": "max 100000"},
        ),
        ("0::/seen/from/outside\n", {"cpu.max": "LIMIT"}),
        (
            "4:memory:/m\n3:cpu,cpuacct:/c\n0::/\n",
            {"cpu/c/cpu.cfs_quota_us": "QUOTA", "cpu/c/cpu.cfs_period_us": "PERIOD"},
        ),
        (
            "3:cpu:/seen/from/outside\n",
            {"cpu/cpu.cfs_quota_us": "QUOTA", "cpu/cpu.cfs_period_us": "PERIOD"},
        ),
    ],
    ids=[
        "container",
        "service",
        "service in a slice",
        "container by its outer name",
        "first version",
        "its containers",
    ],
)
def test_containers_share_of_the_cores_is_respected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, groups: str, limits: dict[str, str]
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(groups)
    for quota, expected in (
        ("max", 8),
        ("50000", 1),
        ("100000", 1),
        ("250000", 3),
        ("gibberish", 8),
        ("-1", 8),
    ):
        for name, text in limits.items():
            path = tmp_path / "sys/fs/cgroup" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            limit = (
                text.replace("LIMIT", "QUOTA PERIOD")
                .replace("QUOTA", quota)
                .replace("PERIOD", "100000")
            )
            path.write_text(limit + "\n")
        assert usable_cores(tmp_path) == expected


def test_all_cores_count_without_control_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1, 4, 5}, raising=False)
    assert usable_cores(tmp_path) == 3
    assert usable_cores() >= 1
