"""The client's one poll for many samples: few requests, the same values, nothing lost and nothing
left behind."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import json
import threading
import time
import tracemalloc
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tinkex
from faulty import Answer, FaultyServer, Seen, faulty_server
from support import serving, settled, wait_until
from tinkex import LocalBackend, ModelInput, SamplingClient, SamplingParams, ServiceClient, events
from tinkex.client.futures import batch_polling
from tinkex.client.futures.api_future import Future, start
from tinkex.client.http.exchange import HttpRequest, Reply, StreamReply
from tinkex.engine.fake import FakeEngine
from tinkex.server.server_limits import Limits
from tinkex.types.future_requests import FutureCompletion, FutureFinished, FuturesRetrieveResponse
from tinkex.types.sampled import SampledSequence, SampleResponse
from tinkex.wire import codec

PROMPT = ModelInput.from_ints([1, 2, 3])
PARAMS = SamplingParams(max_tokens=3, seed=1)


@pytest.fixture
def paths() -> Iterator[Counter[str]]:
    """Count the requests for each endpoint."""
    count: Counter[str] = Counter()

    def note(name: str, measurements: Any, metadata: Mapping[str, Any]) -> None:
        count[metadata["path"].removeprefix("/api/v1/")] += 1

    events.attach("counting", [events.HTTP_START], note)
    yield count
    events.detach("counting")


@pytest.fixture(params=["socket", "embedded"])
def fake_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[..., str]]:
    """Starts servers over a fake engine, both ways."""
    with contextlib.ExitStack() as stack:

        def make(engine: FakeEngine, **limits: Any) -> str:
            if request.param == "socket":
                return stack.enter_context(serving(engine, tmp_path, limits=Limits(**limits)))
            backend = LocalBackend(engine=engine, data_dir=tmp_path, limits=Limits(**limits))
            return stack.enter_context(backend).base_url

        yield make


def choose(service: ServiceClient, mode: str) -> None:
    """Have the client use one of the three ways to wait for samples."""
    service.create_sampling_client(base_model="fake").result()  # the session is open now
    flags = {"batched_results": mode == "inline", "sample_use_retrieve_futures": mode == "official"}
    service._session.client_config = service._session.client_config.model_copy(update=flags)


def values(futures: list[Future[SampleResponse]]) -> list[Any]:
    return [
        [(s.tokens, s.logprobs, s.stop_reason) for s in future.result(20).sequences]
        for future in futures
    ]


def left_behind(sampler: SamplingClient) -> dict[str, int]:
    """Return the objects that a client's poller still holds."""
    poller = sampler._poller
    assert poller is not None
    held = {
        name: len(getattr(poller, name)) for name in ("_waiting", "_open", "_early", "_in_doubt")
    }
    return {name: count for name, count in held.items() if count}


# ── against our own server ────────────────────────────────────────────────────────────────────────


@pytest.mark.covers("W20", "C68")
def test_many_samples_take_far_fewer_requests_than_two_each(
    fake_url: Callable[..., str], paths: Counter[str]
) -> None:
    opened = threading.Event()

    def hold(method: str, subject: str) -> None:
        assert method != "sample_step" or opened.wait(10)

    with ServiceClient(base_url=fake_url(FakeEngine(fail=hold))) as service:
        sampler = service.create_sampling_client(base_model="fake").result()
        futures = [
            sampler.sample(PROMPT, 1, SamplingParams(max_tokens=10, seed=seed))
            for seed in range(100)
        ]
        wait_until(lambda: sampler._poller is not None and len(sampler._poller._waiting) == 100)
        opened.set()
        assert len({tuple(future.result(20).sequences[0].tokens) for future in futures}) > 90
        assert paths["asample"] == 100
        assert paths["retrieve_futures"] <= 50
        assert paths["retrieve_future"] == 0
        wait_until(lambda: left_behind(sampler) == {})


def test_all_ways_to_wait_give_the_same_values(
    fake_url: Callable[..., str], paths: Counter[str]
) -> None:
    url, drawn = fake_url(FakeEngine(step_delay=0.001)), {}
    for mode in ("inline", "official", "one by one"):
        with ServiceClient(base_url=url) as service:
            choose(service, mode)
            sampler = service.create_sampling_client(base_model="fake").result()
            paths.clear()
            many = [SamplingParams(max_tokens=3 + seed % 4, seed=seed) for seed in range(20)]
            drawn[mode] = values([sampler.sample(PROMPT, 2, params, True) for params in many])
            expected = {"inline": (True, 0), "official": (True, 20), "one by one": (False, 20)}[
                mode
            ]
            assert (paths["retrieve_futures"] > 0, paths["retrieve_future"]) == expected
    assert drawn["inline"] == drawn["official"] == drawn["one by one"]


def test_results_too_large_to_come_along_are_fetched_by_themselves(
    fake_url: Callable[..., str], paths: Counter[str]
) -> None:
    with ServiceClient(base_url=fake_url(FakeEngine(), inline_bytes=10)) as service:
        sampler = service.create_sampling_client(base_model="fake").result()
        short = sampler.sample(PROMPT, 1, SamplingParams(max_tokens=2, seed=1)).result(10)
        assert (len(short.sequences[0].tokens), paths["retrieve_future"]) == (2, 0)
        futures = [
            sampler.sample(PROMPT, 1, SamplingParams(max_tokens=60, seed=seed)) for seed in range(5)
        ]
        assert [len(future.result(10).sequences[0].tokens) for future in futures] == [60] * 5
        assert paths["retrieve_future"] == 5
        assert len(set(map(str, values(futures)))) == 5


def test_failures_are_part_of_the_batch(fake_url: Callable[..., str], paths: Counter[str]) -> None:
    with ServiceClient(base_url=fake_url(FakeEngine())) as service:
        sampler = service.create_sampling_client(base_model="fake").result()
        with pytest.raises(tinkex.RequestFailedError, match=r"65 tokens do not fit") as caught:
            sampler.sample(ModelInput.from_ints([1] * 65), 1, PARAMS).result(10)
        assert caught.value.request_id == f"{sampler.sampling_session_id}:0"
        assert paths["retrieve_future"] == 0


@pytest.mark.covers("W21")
def test_polling_stops_with_the_last_waiter(
    fake_url: Callable[..., str], paths: Counter[str]
) -> None:
    with ServiceClient(base_url=fake_url(FakeEngine(step_delay=0.01))) as service:
        sampler = service.create_sampling_client(base_model="fake").result()
        endless = [sampler.sample(PROMPT, 1, SamplingParams(max_tokens=100_000)) for _ in range(3)]
        wait_until(lambda: paths["retrieve_futures"] == 1)
        poller = sampler._poller
        assert poller is not None
        wait_until(lambda: len(poller._waiting) == 3)
        endless[0].future().cancel()
        time.sleep(0.05)
        task = poller._task
        assert task is not None
        endless[1].future().cancel()
        endless[2].future().cancel()
        wait_until(lambda: poller._task is None and task.done())
        assert left_behind(sampler) == {}
        settled(lambda: paths["retrieve_futures"])
        assert sampler.sample(PROMPT, 1, PARAMS).result(10).sequences  # and it begins again
        wait_until(lambda: left_behind(sampler) == {})


def test_cancelled_samples_are_cleaned_up_while_others_run(
    fake_url: Callable[..., str],
) -> None:
    """Those that were cancelled end on the server as well, and are told of, with nobody to take
    them."""
    with ServiceClient(base_url=fake_url(FakeEngine(step_delay=0.002))) as service:
        sampler = service.create_sampling_client(base_model="fake").result()
        kept = []
        for _ in range(10):
            doomed = [sampler.sample(PROMPT, 1, SamplingParams(max_tokens=1000)) for _ in range(5)]
            kept += [
                sampler.sample(PROMPT, 1, SamplingParams(max_tokens=4, seed=3)) for _ in range(5)
            ]
            time.sleep(0.01)
            for future in doomed:
                future.future().cancel()
        assert len({str(value) for value in values(kept)}) == 1
        wait_until(lambda: left_behind(sampler) == {})


# ── faults ────────────────────────────────────────────────────────────────────────────────────────


def result_of(number: int) -> SampleResponse:
    return SampleResponse([SampledSequence("length", tokens_np=np.array([number], np.int32))])


class Samples:
    """A server whose samples end at once; each one's only token is its number."""

    def __init__(self, faulty: FaultyServer, **config: bool) -> None:
        self.faulty = faulty
        self.log: list[str] = []
        self.numbers = itertools.count()
        self.lock = threading.Lock()
        faulty.script("client/config", Answer(body=config or {"batched_results": True}))
        faulty.script("create_sampling_session", Answer(body={"sampling_session_id": "x"}))
        faulty.script("asample", self.submit)
        faulty.script("retrieve_futures", self.poll)
        faulty.script("retrieve_future", self.fetch)

    def submit(self, seen: Seen) -> Answer:
        with self.lock:
            name = f"q{next(self.numbers)}"
            self.log.append(name)
        return Answer(body={"request_id": name})

    def fetch(self, seen: Seen) -> Answer:
        number = int(seen.json["request_id"][1:])
        return Answer(body=codec.encode(result_of(number)).data, content_type=codec.PROTOBUF)

    def poll(self, seen: Seen) -> Answer:
        cursor = seen.json["prev_cursor"]
        if not self.log[cursor:]:
            return Answer(body={"completions": [], "cursor": cursor}, delay=0.05)
        return self.told(self.log[cursor:], len(self.log))

    @staticmethod
    def told(names: list[str], cursor: int) -> Answer:
        payloads = [codec.encode(result_of(int(name[1:]))).data for name in names]
        completions: list[FutureCompletion] = [
            FutureFinished(request_id=name, content_type=codec.PROTOBUF, inline_size=len(data))
            for name, data in zip(names, payloads, strict=True)
        ]
        body = codec.encode_batch(
            FuturesRetrieveResponse(completions=completions, cursor=cursor), payloads
        )
        return Answer(body=body.data, content_type=codec.BATCH)

    def fetched(self) -> int:
        return len(self.faulty.requests("retrieve_future"))

    def polls(self) -> list[Any]:
        return [seen.json for seen in self.faulty.requests("retrieve_futures")]


@pytest.fixture
def faulty() -> Iterator[FaultyServer]:
    with faulty_server() as server:
        yield server


@pytest.fixture
def sampler(faulty: FaultyServer) -> Iterator[SamplingClient]:
    Samples(faulty)
    with ServiceClient(base_url=faulty.base_url, api_key="tml-x") as service:
        yield service.create_sampling_client(base_model="m").result()


def tokens(futures: list[Future[SampleResponse]]) -> list[int]:
    return sorted(future.result(10).sequences[0].tokens[0] for future in futures)


FAULTS = {
    "404": Answer(404, {"detail": "Not Found"}),
    "405": Answer(405, {"detail": "Method Not Allowed"}),
    "500": Answer(500, {"detail": "broken"}),
    "429": Answer(429, {"detail": "slow down"}),
    "a dropped connection": Answer(drop=True),
    "410": Answer(410, {"detail": "the cursor is of an earlier life"}),
    "no JSON": Answer(body=b"<html>"),
    "no answer to the question": Answer(body={"else": 1}),
    "a batch cut short": Answer(body=b"\x05\x00", content_type=codec.BATCH),
    "a batch of nonsense": Answer(body=b"\xff\xff\xff\x7f{}", content_type=codec.BATCH),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=list(FAULTS))
def test_failed_batch_poll_falls_back_to_single_polls(faulty: FaultyServer, fault: Answer) -> None:
    samples = Samples(faulty)
    faulty.script("retrieve_futures", fault)
    with ServiceClient(base_url=faulty.base_url, api_key="tml-x") as service:
        sampler = service.create_sampling_client(base_model="m").result()
        assert tokens([sampler.sample(PROMPT, 1, PARAMS) for _ in range(8)]) == list(range(8))
        assert samples.fetched() == 8
        polled = len(samples.polls())
        assert 1 <= polled <= 8
        assert tokens([sampler.sample(PROMPT, 1, PARAMS) for _ in range(4)]) == [8, 9, 10, 11]
        assert len(samples.polls()) == polled  # not tried again at once
        wait_until(lambda: left_behind(sampler) == {})


@pytest.mark.parametrize(
    ("status", "again"), [(404, False), (405, False), (501, False), (500, True), (410, True)]
)
def test_server_without_the_endpoint_gets_no_second_request(
    faulty: FaultyServer, monkeypatch: pytest.MonkeyPatch, status: int, again: bool
) -> None:
    monkeypatch.setattr(batch_polling, "REST_SECONDS", 0.0)
    samples = Samples(faulty)
    faulty.script("retrieve_futures", Answer(status, {"detail": "no"}), samples.poll)
    with ServiceClient(base_url=faulty.base_url, api_key="tml-x") as service:
        sampler = service.create_sampling_client(base_model="m").result()
        assert tokens([sampler.sample(PROMPT, 1, PARAMS)]) == [0]
        assert tokens([sampler.sample(PROMPT, 1, PARAMS)]) == [1]
    assert (len(samples.polls()) > 1) is again
    assert (samples.fetched() < 2) is again


def test_cursor_of_an_earlier_server_is_dropped(
    faulty: FaultyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_polling, "REST_SECONDS", 0.0)
    samples = Samples(faulty)
    with ServiceClient(base_url=faulty.base_url, api_key="tml-x") as service:
        sampler = service.create_sampling_client(base_model="m").result()
        assert tokens([sampler.sample(PROMPT, 1, PARAMS) for _ in range(3)]) == [0, 1, 2]
        samples.log.clear()  # the server was restarted
        faulty.script("retrieve_futures", Answer(410, {"detail": "an earlier life"}), samples.poll)
        assert tokens([sampler.sample(PROMPT, 1, PARAMS)]) == [3]
        assert samples.fetched() == 1
        assert tokens([sampler.sample(PROMPT, 1, PARAMS)]) == [4]
        assert samples.fetched() == 1
    cursors = [poll["prev_cursor"] for poll in samples.polls()]
    assert 3 in cursors
    assert cursors[cursors.index(3) + 1] == 0


def test_cursor_that_goes_back_falls_back_to_single_polls(
    faulty: FaultyServer,
) -> None:
    samples = Samples(faulty)
    with ServiceClient(base_url=faulty.base_url, api_key="tml-x") as service:
        sampler = service.create_sampling_client(base_model="m").result()
        assert tokens([sampler.sample(PROMPT, 1, PARAMS) for _ in range(3)]) == [0, 1, 2]
        begun_anew = Answer(body={"completions": [], "cursor": 0})
        faulty.script(
            "retrieve_futures", begun_anew, Answer(body={"completions": [], "cursor": 0}, delay=0.2)
        )
        assert tokens([sampler.sample(PROMPT, 1, PARAMS) for _ in range(2)]) == [3, 4]
        assert samples.fetched() >= 1


def test_result_before_its_receipt_is_kept(faulty: FaultyServer) -> None:
    samples = Samples(faulty)
    late, told = threading.Event(), threading.Event()

    def submit(seen: Seen) -> Answer:
        answer = samples.submit(seen)
        return Answer(body=answer.body, until=told.is_set if late.is_set() else None)

    faulty.script("asample", submit)
    with ServiceClient(base_url=faulty.base_url, api_key="tml-x") as service:
        sampler = service.create_sampling_client(base_model="m").result()
        assert tokens([sampler.sample(PROMPT, 1, PARAMS)]) == [0]
        poller = sampler._poller
        assert poller is not None
        nothing = Answer(body={"completions": [], "cursor": 1}, until=lambda: len(samples.log) == 5)
        faulty.script("retrieve_futures", nothing, samples.poll)
        first = sampler.sample(PROMPT, 1, PARAMS)
        wait_until(lambda: len(poller._waiting) == 1)
        late.set()
        others = [sampler.sample(PROMPT, 1, PARAMS) for _ in range(3)]
        wait_until(lambda: len(poller._early) == 3)
        told.set()
        assert tokens([first]) == [1]
        assert tokens(others) == [2, 3, 4]
        assert samples.fetched() == 0
        assert left_behind(sampler) == {}


def test_abandoned_results_are_dropped_during_submissions(
    sampler: SamplingClient,
) -> None:
    """A stream of samples never has a moment without a submission; what cancelled ones left must go
    all the same."""

    async def run() -> list[int]:
        poller = batch_polling.BatchPoller(sampler._session.transport, "x", 0, inline=True)
        sizes, last = [], poller.begin()
        for number in range(50):
            following = poller.begin()
            poller._settle(f"cancelled {number}", None)
            poller.end(last)
            sizes.append(len(poller._early))
            last = following
        poller.end(last)
        return [max(sizes), len(poller._early)]

    assert start(run()).result(5) == [1, 0]


@pytest.mark.parametrize("silent", ["restarted", "repeating"])
def test_server_that_does_not_hold_its_polls_is_not_asked_in_a_hot_loop(
    faulty: FaultyServer, silent: str
) -> None:
    samples = Samples(faulty)
    body: Any = {"completions": [], "cursor": 0}
    if silent == "repeating":
        body["completions"] = [{"state": "finished", "request_id": "unknown"}]
    faulty.script("retrieve_futures", Answer(body=body))
    with ServiceClient(base_url=faulty.base_url, api_key="tml-x") as service:
        sampler = service.create_sampling_client(base_model="m").result()
        began = time.monotonic()
        future = sampler.sample(PROMPT, 1, PARAMS)
        time.sleep(0.6)
        polls = len(samples.polls())
        assert polls <= 8 * (time.monotonic() - began) / 0.6
        future.future().cancel()


@pytest.mark.covers("W21")
def test_last_cancelled_sample_ends_the_poll(faulty: FaultyServer) -> None:
    Samples(faulty)
    faulty.script("retrieve_futures", Answer(body={"completions": [], "cursor": 0}, delay=60))
    with ServiceClient(base_url=faulty.base_url, api_key="tml-x") as service:
        sampler = service.create_sampling_client(base_model="m").result()
        future = sampler.sample(PROMPT, 1, PARAMS)
        wait_until(lambda: len(faulty.requests("retrieve_futures")) == 1)
        assert sampler._poller is not None
        task = sampler._poller._task
        assert task is not None
        future.future().cancel()
        wait_until(task.done)


@pytest.mark.parametrize("answer", ["the result", "gone"])
def test_poll_that_never_speaks_of_a_sample_does_not_lose_it(
    faulty: FaultyServer, monkeypatch: pytest.MonkeyPatch, answer: str
) -> None:
    """A server that was restarted before the first cursor cannot be told from one that has nothing
    to say."""
    monkeypatch.setattr(batch_polling, "DOUBT_SECONDS", 0.2)
    samples = Samples(faulty)
    faulty.script("retrieve_futures", Answer(body={"completions": [], "cursor": 0}, delay=0.05))
    if answer == "gone":
        lost = [Answer(410, {"detail": "lost"})] * 20
        faulty.script("retrieve_future", *lost, samples.fetch)
    with ServiceClient(base_url=faulty.base_url, api_key="tml-x") as service:
        sampler = service.create_sampling_client(
            base_model="m", retry_config=tinkex.RetryConfig(retry_delay_base=0.01)
        ).result()
        futures = [sampler.sample(PROMPT, 1, PARAMS) for _ in range(batch_polling.DOUBTED + 4)]
        assert len(tokens(futures)) == batch_polling.DOUBTED + 4
        assert left_behind(sampler) == {}


def test_few_samples_are_fetched_singly_while_the_poll_agrees(
    faulty: FaultyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Samples that take long cost a few requests more, not two each."""
    monkeypatch.setattr(batch_polling, "DOUBT_SECONDS", 0.3)
    monkeypatch.setattr(batch_polling, "DOUBTED", 2)
    samples = Samples(faulty)
    faulty.script("retrieve_futures", Answer(body={"completions": [], "cursor": 0}, delay=0.1))
    faulty.script("retrieve_future", Answer(408, {"queue_state": "active"}, delay=60))
    began = time.monotonic()
    with ServiceClient(base_url=faulty.base_url, api_key="tml-x") as service:
        sampler = service.create_sampling_client(base_model="m").result()
        futures = [sampler.sample(PROMPT, 1, PARAMS) for _ in range(40)]
        wait_until(lambda: samples.fetched() >= 2)
        time.sleep(0.5)
        fetched = samples.fetched()
        assert fetched <= 2 * (time.monotonic() - began) / 0.3
        for future in futures:
            future.future().cancel()
        wait_until(lambda: left_behind(sampler) == {})


def test_official_form_lists_fetched_files(faulty: FaultyServer) -> None:
    samples = Samples(faulty, sample_use_retrieve_futures=True)

    def poll(seen: Seen) -> Answer:
        cursor = seen.json["prev_cursor"]
        named = [{"state": "finished", "request_id": name} for name in samples.log[cursor:]]
        return Answer(body={"completions": named, "cursor": len(samples.log)}, delay=0.02)

    faulty.script("retrieve_futures", poll)
    with ServiceClient(base_url=faulty.base_url, api_key="tml-x") as service:
        sampler = service.create_sampling_client(base_model="m").result()
        assert tokens([sampler.sample(PROMPT, 1, PARAMS) for _ in range(10)]) == list(range(10))
        assert tokens([sampler.sample(PROMPT, 1, PARAMS)]) == [10]
    assert samples.fetched() == 11
    polls = samples.polls()
    assert all("inline_bytes" not in poll or poll["inline_bytes"] is None for poll in polls)
    assert polls[0]["target"] == {
        "type": "sampling_session",
        "sampling_session_id": "x",
        "cloned_sampler_id": 0,
    }
    assert {name for poll in polls for name in poll["retrieved_request_ids"]} >= {
        f"q{number}" for number in range(10)
    }


# ── acknowledgements ─────────────────────────────────────────────────────────────────────────────


def official(faulty: FaultyServer) -> Samples:
    """A server that names what has ended, as the hosted service does."""
    samples = Samples(faulty, sample_use_retrieve_futures=True)

    def poll(seen: Seen) -> Answer:
        cursor = seen.json["prev_cursor"]
        named = [{"state": "finished", "request_id": name} for name in samples.log[cursor:]]
        delay = 0.0 if seen.json.get("timeout") == 0 else 0.02
        return Answer(body={"completions": named, "cursor": len(samples.log)}, delay=delay)

    faulty.script("retrieve_futures", poll)
    return samples


def acks(samples: Samples) -> list[tuple[int, list[str]]]:
    """The polls that were not to be held: cursor and reported requests."""
    return [
        (poll["prev_cursor"], poll["retrieved_request_ids"])
        for poll in samples.polls()
        if poll.get("timeout") == 0
    ]


@pytest.mark.covers("U24")
@pytest.mark.parametrize(
    ("form", "reported"), [(official, ["q0"]), (Samples, [])], ids=["official", "inline"]
)
def test_results_are_acknowledged_once_without_a_waiter(
    faulty: FaultyServer, form: Callable[[FaultyServer], Samples], reported: list[str]
) -> None:
    samples = form(faulty)
    with ServiceClient(base_url=faulty.base_url, api_key="tml-x") as service:
        sampler = service.create_sampling_client(base_model="m").result()
        assert tokens([sampler.sample(PROMPT, 1, PARAMS)]) == [0]
        assert acks(samples) == []
        wait_until(lambda: acks(samples) == [(1, reported)])
        assert all("timeout" not in poll for poll in samples.polls()[:-1])
        count = settled(lambda: len(samples.polls()), 60)
        assert count == len(samples.polls())
        assert len(acks(samples)) == 1
        assert tokens([sampler.sample(PROMPT, 1, PARAMS) for _ in range(3)]) == [1, 2, 3]
        wait_until(
            lambda: (
                len(acks(samples)) == 2
                and sampler._poller is not None
                and not sampler._poller._owes
            )
        )
    assert len(acks(samples)) == 2  # nothing was left for the end


@pytest.mark.covers("U24")
def test_acknowledgement_that_failed_is_sent_again_when_the_client_is_collected(
    faulty: FaultyServer,
) -> None:
    samples = official(faulty)
    answer = faulty._scripts["retrieve_futures"][0]
    refuses = True

    def poll(seen: Seen) -> Answer:
        if refuses and seen.json.get("timeout") == 0:
            return Answer(500, {"detail": "broken"})
        assert callable(answer)
        return answer(seen)

    faulty.script("retrieve_futures", poll)
    with ServiceClient(base_url=faulty.base_url, api_key="tml-x") as service:
        sampler = service.create_sampling_client(base_model="m").result()
        assert tokens([sampler.sample(PROMPT, 1, PARAMS)]) == [0]
        wait_until(lambda: acks(samples) == [(1, ["q0"])])
        settled(lambda: len(samples.polls()), 50)
        assert len(acks(samples)) == 1  # it is not repeated in the meantime
        refuses = False
        del sampler
        gc.collect()
        wait_until(lambda: acks(samples) == [(1, ["q0"])] * 2)


@pytest.mark.covers("U24")
@pytest.mark.parametrize("how", ["close", "collect"])
def test_session_end_acknowledges_results(faulty: FaultyServer, how: str) -> None:
    samples = official(faulty)
    service = ServiceClient(base_url=faulty.base_url, api_key="tml-x")
    sampler = service.create_sampling_client(base_model="m").result()
    assert tokens([sampler.sample(PROMPT, 1, PARAMS)]) == [0]
    assert acks(samples) == []
    if how == "close":
        service.close().result(10)
        assert acks(samples) == [(1, ["q0"])]
        assert faulty.seen[-1].path == "sessions/s/finish"
    else:
        del sampler, service
        gc.collect()
        wait_until(lambda: acks(samples) == [(1, ["q0"])])


def test_closing_does_not_wait_long_for_an_acknowledgement(
    faulty: FaultyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_polling, "LAST_ACK_SECONDS", 0.2)
    samples = official(faulty)
    with ServiceClient(base_url=faulty.base_url, api_key="tml-x") as service:
        sampler = service.create_sampling_client(base_model="m").result()
        assert tokens([sampler.sample(PROMPT, 1, PARAMS)]) == [0]
        faulty.script("retrieve_futures", Answer(body={"completions": [], "cursor": 1}, delay=60))
        began = time.monotonic()
    assert time.monotonic() - began < 5
    assert len(acks(samples)) == 1


# ── many ──────────────────────────────────────────────────────────────────────────────────────────


class Memory:
    """An exchange without a server: samples end in order of arrival, a few per poll."""

    def __init__(self, per_poll: int) -> None:
        self.per_poll = per_poll
        self.submitted = self.polls = 0
        self.goes = asyncio.Event()

    async def send(self, request: HttpRequest) -> Reply:
        name = request.path.removeprefix("/api/v1/")
        if name == "asample":
            self.submitted += 1
            return self.json({"request_id": f"q{self.submitted - 1}"})
        if name == "retrieve_futures":
            await self.goes.wait()
            asked = json.loads(request.data or b"")
            cursor, is_last = asked["prev_cursor"], asked.get("timeout") == 0
            while cursor >= self.submitted and not is_last:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            self.polls += 1
            upto = min(cursor + self.per_poll, self.submitted)
            answer = Samples.told([f"q{number}" for number in range(cursor, upto)], upto)
            return Reply(200, {"content-type": answer.content_type}, answer.data)
        answers = {
            "client/config": {"batched_results": True, "sample_max_concurrent_requests": 10_000},
            "create_session": {"session_id": "s"},
            "create_sampling_session": {"sampling_session_id": "x"},
        }
        return self.json(answers.get(name, {}))

    def json(self, body: Any) -> Reply:
        return Reply(200, {"content-type": "application/json"}, json.dumps(body).encode())

    @contextlib.asynccontextmanager
    async def stream(self, *_: Any) -> AsyncIterator[StreamReply]:
        raise NotImplementedError
        yield

    async def close(self) -> None:
        pass


@pytest.fixture
def memory() -> Iterator[Callable[[int], tuple[Memory, SamplingClient]]]:
    with contextlib.ExitStack() as stack:
        stack.callback(tinkex.configure)

        def make(per_poll: int) -> tuple[Memory, SamplingClient]:
            exchange = Memory(per_poll)
            tinkex.configure(http_client=lambda config: exchange)
            service = stack.enter_context(ServiceClient(base_url="http://nowhere", api_key="tml-x"))
            return exchange, service.create_sampling_client(base_model="m").result()

        yield make


class Walked(dict[str, Any]):
    """A dict that counts how many of its entries were looked at in passing."""

    steps = 0

    def __iter__(self) -> Iterator[str]:
        for key in super().__iter__():
            self.steps += 1
            yield key

    def values(self) -> Iterator[Any]:  # type: ignore[override]
        for key in self:
            yield self[key]

    def items(self) -> Iterator[tuple[str, Any]]:  # type: ignore[override]
        for key in self:
            yield key, self[key]


def test_poll_cost_depends_on_finished_samples_only(
    memory: Callable[[int], tuple[Memory, SamplingClient]],
) -> None:
    exchange, sampler = memory(1)
    futures = [sampler.sample(PROMPT, 1, PARAMS) for _ in range(200)]
    wait_until(lambda: sampler._poller is not None and len(sampler._poller._waiting) == 200)
    poller = sampler._poller
    assert poller is not None
    walked = Walked(poller._waiting)
    poller._waiting = walked
    start(_set(exchange.goes)).result(5)
    assert tokens(futures) == list(range(200))
    assert exchange.polls == 200
    assert walked.steps <= 2 * 200


async def _set(event: asyncio.Event) -> None:
    event.set()


@pytest.mark.parametrize("count", [2000, pytest.param(5000, marks=pytest.mark.slow)])
def test_thousands_of_samples_leave_no_state(
    memory: Callable[[int], tuple[Memory, SamplingClient]], count: int
) -> None:
    exchange, sampler = memory(500)
    start(_set(exchange.goes)).result(5)

    def draw(count: int) -> None:
        for _ in range(count // 500):
            tokens([sampler.sample(PROMPT, 1, PARAMS) for _ in range(500)])

    def held() -> int:
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    draw(count - 2000)
    tracemalloc.start(1)
    try:
        draw(1000)
        before = held()  # with what is under way at any time, here and in other threads
        draw(1000)
        # The last answers are there before all that brought them is gone.
        wait_until(lambda: held() < before + 100_000)
    finally:
        tracemalloc.stop()
    assert exchange.submitted == count
    assert left_behind(sampler) == {}
    assert sampler._poller is not None
    assert not sampler._poller._fetched
