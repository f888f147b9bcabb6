"""Owners share rows, blocks and prompt tokens: a newcomer gets its part within a few steps."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import BPE

from engine.test_sampling_batches import WAYS, alone, ask, crowd, directory, limits, same, tokens_of
from tinkex.engine.api import SampleDone, SampleJob
from tinkex.engine.sample.passes import block_bytes
from tinkex.engine.sample.sampler import Runner
from tinkex.engine.torch.engine import TorchEngine

__all__ = ["crowd", "directory", "limits"]  # fixtures

MOST_STEPS = 6
"""So many steps may a short prompt and two tokens take, one more for reading ahead included."""


def runner_of(engine: TorchEngine) -> Runner:
    return next(iter(engine._sampler._runners.values()))


def steps_until(engine: TorchEngine, name: str, results: dict[str, Any] | None = None) -> int:
    """Return the number of steps that a job takes from now on."""
    for step in range(1, 5000):
        for done in engine.sample_step():
            if results is not None:
                results[done.job] = done.result
            if done.job == name:
                assert not isinstance(done.result, Exception), done.result
                return step
    raise AssertionError("it never ended")


@WAYS
@pytest.mark.parametrize("after", [1, 3, 40])
def test_short_sample_waits_for_no_crowd_of_rows(way: str, after: int, limits: Any) -> None:
    engine = limits(way=way, max_rows=8)
    many, few = ask(tokens_of(1, 70), 64, 60), ask(tokens_of(2, 10), 1, 2)
    expected = alone(engine, "one", many, 1), alone(engine, "two", few, 2)
    results: dict[str, Any] = {}
    engine.sample_start(SampleJob("many", "one", many, 1, owner="a"))
    for _ in range(after):
        engine.sample_step()
    engine.sample_start(SampleJob("few", "two", few, 2, owner="b"))
    assert steps_until(engine, "few", results) <= MOST_STEPS
    assert len(runner_of(engine).scheduler.room._rows()) == 1
    assert (
        runner_of(engine).scheduler.room.seated >= 7
    )  # what nobody else wants is still the crowd's
    steps_until(engine, "many", results)
    for result, before in zip((results["many"], results["few"]), expected, strict=True):
        assert [one.tokens for one in result.sequences] == [one.tokens for one in before.sequences]
        if way != "static":
            same(result, before)


def test_waiting_jobs_take_no_room_for_samples_and_tables(limits: Any) -> None:
    engine = limits(way="slabs", max_rows=8)
    engine._bases["m"].tokenizer = Tokenizer(BPE())  # stop strings need one
    wide, stopping = ask(tokens_of(1, 70), 1024, 60), ask(tokens_of(1, 70), 1024, 60, stop=["x"])
    scored = ask(tokens_of(2, 70), 1, 1, prompt_logprobs=True, topk_prompt_logprobs=90)
    engine.sample_start(SampleJob("first", "one", wide, 1, owner="a"))  # makes the cache
    for request in (wide, stopping, scored):
        tracemalloc.start()
        for number in range(50):
            engine.sample_start(SampleJob(f"{id(request)} {number}", "one", request, 1, owner="a"))
        size = tracemalloc.get_traced_memory()[0] / 50
        tracemalloc.stop()
        assert size < 8_000


@WAYS
def test_owners_have_equal_parts_of_the_rows(way: str, limits: Any) -> None:
    engine = limits(way=way, max_rows=9)
    for index, owner in enumerate("aabc"):
        engine.sample_start(
            SampleJob(f"{owner}{index}", "one", ask(tokens_of(index, 20), 30, 50), 1, owner=owner)
        )
        engine.sample_step()
    for _ in range(2):
        engine.sample_step()
    assert runner_of(engine).scheduler.room._rows() == {"a": 3, "b": 3, "c": 3}
    engine.sample_cancel("b2")
    for _ in range(2):
        engine.sample_step()
    rows = runner_of(engine).scheduler.room._rows()
    assert rows["a"] + rows["c"] == 9
    assert min(rows["a"], rows["c"]) >= 4


@WAYS
def test_crowd_that_fills_the_cache_makes_room(way: str, limits: Any) -> None:
    roomy = limits(way=way)
    size = block_bytes(roomy._bases["m"].model)
    many, few = ask(tokens_of(1, 100), 30, 140), ask(tokens_of(2, 70), 1, 40)
    expected = alone(roomy, "one", many, 1), alone(roomy, "two", few, 2)
    engine = limits(way=way, cache_bytes=24 * size)
    results: dict[str, Any] = {}
    engine.sample_start(SampleJob("many", "one", many, 1, owner="a"))
    for _ in range(90):
        engine.sample_step()
    assert runner_of(engine)._pool.blocks.free < 3
    engine.sample_start(SampleJob("few", "two", few, 2, owner="b"))
    assert steps_until(engine, "few", results) <= 40 + MOST_STEPS
    steps_until(engine, "many", results)
    for result, before in zip((results["many"], results["few"]), expected, strict=True):
        assert [one.tokens for one in result.sequences] == [one.tokens for one in before.sequences]
    assert runner_of(engine)._pool.blocks.free == 24


@WAYS
def test_short_prompt_does_not_wait_for_many_long_prompts(way: str, limits: Any) -> None:
    engine = limits(way=way, prefill_tokens=128)
    for index in range(40):
        engine.sample_start(
            SampleJob(f"long{index}", "one", ask(tokens_of(index, 600), 1, 5), 1, owner="a")
        )
    for _ in range(3):
        engine.sample_step()
    engine.sample_start(SampleJob("short", "two", ask(tokens_of(99, 10), 1, 2), 1, owner="b"))
    assert steps_until(engine, "short") <= MOST_STEPS
    engine.sample_start(SampleJob("middle", "two", ask(tokens_of(98, 256), 1, 2), 1, owner="b"))
    assert steps_until(engine, "middle") <= 256 / 64 + MOST_STEPS  # half of a chunk each


def test_started_prompt_shares_with_prompts_that_had_less(limits: Any) -> None:
    engine = limits(prefill_tokens=128)
    heard: list[Any] = []
    engine.sample_start(
        SampleJob("begun", "one", ask(tokens_of(1, 200), 4, 300), 1, heard.append, owner="a")
    )
    engine.sample_step()
    engine.sample_start(SampleJob("later", "two", ask(tokens_of(2, 600), 1, 2), 1, owner="b"))
    for _ in range(2):
        engine.sample_step()
    assert heard


@pytest.mark.parametrize("way", ["native", "slabs"])
def test_job_that_needs_most_of_the_cache_is_done_among_a_stream_of_short_ones(
    way: str, limits: Any
) -> None:
    """An owner's only job is never moved for others, and a job that waited long comes first."""
    engine = limits(way=way, cache_bytes=11 * block_bytes(limits()._bases["m"].model))
    big = ask(tokens_of(1, 500), 1, 60)
    expected = alone(engine, "one", big, 1)
    count, done = 0, list[SampleDone]()
    for _ in range(3):
        engine.sample_start(
            SampleJob(f"short{count}", "two", ask(tokens_of(count, 100), 2, 12), 1, owner="b")
        )
        count += 1
    engine.sample_step()
    engine.sample_start(SampleJob("big", "one", big, 1, owner="a"))
    for _ in range(1500):
        ended = engine.sample_step()
        done += ended
        for one in ended:
            if one.job == "big":
                break
            engine.sample_start(
                SampleJob(f"short{count}", "two", ask(tokens_of(count, 100), 2, 12), 1, owner="b")
            )
            count += 1
        if any(one.job == "big" for one in done):
            break
    (found,) = [one.result for one in done if one.job == "big"]
    assert not isinstance(found, Exception)
    same(found, expected)
    assert len(done) > 20


@pytest.mark.parametrize("seed", range(4))
def test_jobs_that_give_way_to_each_other_give_the_same_samples(seed: int, limits: Any) -> None:
    """Owners come and go, with prompts that begin alike and too few rows and blocks."""
    random = np.random.default_rng(seed)
    requests = []
    for number in range(24):
        length = int(random.integers(1, 330))
        prompt = tokens_of(int(random.integers(3)), length)
        requests.append(
            ask(prompt, int(random.integers(1, 6)), int(random.integers(1, 60)), seed=number)
        )
    roomy = limits()
    expected = [alone(roomy, "one", request, number) for number, request in enumerate(requests)]
    engine = limits(
        cache_bytes=14 * block_bytes(roomy._bases["m"].model), max_rows=5, prefill_tokens=96
    )
    results: dict[str, Any] = {}
    for number, request in enumerate(requests):
        owner = "abcd"[int(random.integers(4))]
        engine.sample_start(SampleJob(f"job{number}", "one", request, number, owner=owner))
        for _ in range(int(random.integers(6))):
            results |= {done.job: done.result for done in engine.sample_step()}
    for _ in range(5000):
        results |= {done.job: done.result for done in engine.sample_step()}
        if not engine.sampling():
            break
    for number, before in enumerate(expected):
        same(results[f"job{number}"], before)
    assert runner_of(engine)._pool.blocks.free == 14
