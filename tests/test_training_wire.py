"""A training client on the wire: what it sends, in which order, what it makes of the answers, and
what it refuses."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import itertools
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

import tinkex
from faulty import Answer, FaultyServer, Seen, faulty_server
from support import settled, wait_until
from tinkex import ServiceClient, TrainingClient, types
from tinkex.client.training_parts import call_arguments
from tinkex.wire import codec

RUN = "s:train:0"
STEP = types.AdamParams(learning_rate=0.1)


def datum(*tokens: int, **inputs: Any) -> types.Datum:
    return types.Datum(
        types.ModelInput.from_ints(list(tokens)), {"target_tokens": list(tokens), **inputs}
    )


DATA = [datum(1, 2)]


def examples(count: int) -> list[types.Datum]:
    return [datum(index, index + 1) for index in range(count)]


def output(*values: list[float], **metrics: float) -> types.ForwardBackwardOutput:
    records = [
        {"logprobs": types.TensorData.from_numpy(np.array(value, np.float32))} for value in values
    ]
    return types.ForwardBackwardOutput("ArrayRecord", records, {"loss:sum": 1.0, **metrics})


def bulk(value: Any) -> Answer:
    return Answer(body=codec.encode(value).data, content_type=codec.PROTOBUF)


def passed(seen: Seen) -> types.ForwardBackwardRequest:
    """A pass as the server reads it."""
    read: types.ForwardBackwardRequest = codec.decode(
        types.ForwardBackwardRequest, seen.body, seen.headers["content-type"]
    )
    return read


def passes(faulty: FaultyServer) -> list[types.ForwardBackwardRequest]:
    """The passes over something, in the order of arrival."""
    found = [passed(seen) for seen in faulty.requests("forward_backward")]
    return [request for request in found if request.forward_backward_input.data]


def spent(faulty: FaultyServer) -> list[int | None]:
    """The numbers that were used up with a pass over nothing."""
    found = [passed(seen) for seen in faulty.requests("forward_backward")]
    return [request.seq_id for request in found if not request.forward_backward_input.data]


class Server:
    """A scripted server on which everything works, until it is told otherwise."""

    def __init__(self, faulty: FaultyServer) -> None:
        self.faulty = faulty
        self.results: dict[str, Answer] = {
            "created": Answer(body={"model_id": RUN}),
            "optim_step": Answer(body={"metrics": {}}),
            "save_weights": Answer(body={"path": f"tinker://{RUN}/weights/a"}),
            "save_weights_for_sampler": Answer(body={"path": f"tinker://{RUN}/sampler_weights/a"}),
            "save_weights_external": Answer(body={"path": f"tinker://{RUN}/external/a"}),
            "load_weights": Answer(body={"path": "tinker://x/weights/a"}),
            "unload_model": Answer(body={"model_id": RUN}),
        }
        faulty.script("retrieve_future", self.result)
        for path in self.results:
            faulty.script(path, Answer(body={"request_id": path}))
        faulty.script("forward_backward", self.take)
        faulty.script("create_sampling_session", Answer(body={"sampling_session_id": "s:sample:7"}))
        faulty.script("get_info", Answer(body={"model_id": RUN, "model_data": {"model_name": "m"}}))

    def take(self, seen: Seen) -> Answer:
        """A receipt for a pass; its result has one output for each datum, which names it."""
        request = passed(seen)
        name = f"pass{request.seq_id}"
        rows = [
            [-float(d.model_input.to_ints()[0])] if d.model_input.is_text else [0.0]
            for d in _data(request)
        ]
        self.results.setdefault(name, bulk(output(*rows)))
        return Answer(body={"request_id": name})

    def result(self, seen: Seen) -> Answer:
        return self.results[seen.json["request_id"]]

    def configure(self, **config: Any) -> None:
        self.faulty.script("client/config", Answer(body=config))

    def polls(self, name: str) -> int:
        return len(
            [
                seen
                for seen in self.faulty.requests("retrieve_future")
                if seen.json["request_id"] == name
            ]
        )


def _data(request: types.ForwardBackwardRequest) -> list[types.Datum]:
    return request.forward_backward_input.data


@pytest.fixture
def faulty() -> Iterator[FaultyServer]:
    with faulty_server() as server:
        yield server


@pytest.fixture
def server(faulty: FaultyServer) -> Server:
    return Server(faulty)


@pytest.fixture
def service(faulty: FaultyServer, server: Server) -> Iterator[ServiceClient]:
    with ServiceClient(base_url=faulty.base_url) as client:
        yield client


@pytest.fixture
def client(service: ServiceClient) -> TrainingClient:
    return service.create_lora_training_client("m", rank=4).result()


def test_error_names_the_operation_that_was_called(
    faulty: FaultyServer, client: TrainingClient
) -> None:
    faulty.script("forward_backward", Answer(404, {"detail": "there is no model"}))
    for call, name in ((client.forward, "forward"), (client.forward_backward, "forward_backward")):
        with pytest.raises(tinkex.NotFoundError, match=f"^{name} at "):
            call(DATA, "cross_entropy").result(10)
    assert len(passes(faulty)) == 2
    lost = Answer(body={"error": "the run is lost", "category": "user"})
    faulty.script("forward_backward", lost)
    with pytest.raises(tinkex.RequestFailedError, match=r"^forward failed "):
        client.forward(DATA, "cross_entropy").result(10)


def test_saved_sampler_has_no_type_as_in_the_official_client(
    server: Server, client: TrainingClient
) -> None:
    """The server's word is for its own kind of answer, of which the path is passed on."""
    answer = {"path": f"tinker://{RUN}/sampler_weights/a", "type": "save_weights_for_sampler"}
    server.results["save_weights_for_sampler"] = Answer(body=answer)
    saved = client.save_weights_for_sampler("a").result(10)
    assert saved == types.SaveWeightsForSamplerResponse(path=answer["path"], type=None)


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits before a retry are short."""
    monkeypatch.setattr("tinkex.client.settings.delays.Delays.after", lambda *_, **__: 0.01)


# ── numbers ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.covers("C42", "24.training.12")
def test_numbers_of_a_whole_run(
    faulty: FaultyServer, server: Server, service: ServiceClient
) -> None:
    server.configure(fwdbwd_max_chunk_len=1)
    client = service.create_lora_training_client("m").result()
    futures: list[Any] = [
        client.forward_backward(examples(2), "cross_entropy"),
        client.optim_step(STEP),
        client.save_state("a"),
    ]
    for future in futures:
        future.result(5)
    assert sorted(request.seq_id or 0 for request in passes(faulty)) == [1, 2]
    assert [faulty.requests(path)[0].json["seq_id"] for path in ("optim_step", "save_weights")] == [
        3,
        4,
    ]


@pytest.mark.covers("C43", "C64", "24.training.1", "1.19/7")
def test_1025_examples_are_sent_in_two_requests_and_results_joined(
    faulty: FaultyServer, client: TrainingClient
) -> None:
    joined = client.forward_backward(examples(1025), "cross_entropy").result(10)
    assert {request.seq_id: len(_data(request)) for request in passes(faulty)} == {1: 1024, 2: 1}
    assert [record["logprobs"].data[0] for record in joined.loss_fn_outputs] == [
        -float(i) for i in range(1025)
    ]
    assert joined.metrics == {"loss:sum": 2.0}
    client.forward_backward(examples(1024), "cross_entropy").result(10)
    assert len(passes(faulty)) == 3


def image(size: int, **fields: Any) -> types.Datum:
    chunk = types.ImageChunk(data=b"\x89" * size, format="png", **fields)
    return types.Datum(types.ModelInput(chunks=[chunk]), {"target_tokens": [1]})


@pytest.mark.covers("C43", "C78", "24.training.11", "D01", "1.19/7")
@pytest.mark.parametrize(
    ("sizes", "counts"),
    [
        ([4_000_000, 3_500_000], [1, 1]),
        ([600_000] * 9, [8, 1]),
        ([6_000_000, 1000, 1000], [1, 2]),
        ([1000, 6_000_000, 1000], [1, 1, 1]),
        ([2_000_000, 2_000_000], [2]),
    ],
    ids=str,
)
def test_large_examples_are_cut_by_bytes_and_no_piece_is_empty(
    faulty: FaultyServer, client: TrainingClient, sizes: list[int], counts: list[int]
) -> None:
    client.forward_backward([image(size) for size in sizes], "cross_entropy").result(10)
    sent = {request.seq_id or 0: len(_data(request)) for request in passes(faulty)}
    assert [sent[number] for number in sorted(sent)] == counts
    assert spent(faulty) == []


@pytest.mark.covers("D13")
def test_only_requests_refused_by_the_server_use_a_number(
    faulty: FaultyServer, client: TrainingClient
) -> None:
    with pytest.raises(ValueError, match="no loss"):
        client.forward_backward(DATA, "nonsense")
    with pytest.raises(ValueError, match="ttl_seconds"):
        client.save_state("a", ttl_seconds=0)
    faulty.script(
        "optim_step", Answer(422, {"detail": "no"}), Answer(body={"request_id": "optim_step"})
    )
    with pytest.raises(tinkex.UnprocessableEntityError):
        client.optim_step(STEP).result(5)
    client.optim_step(STEP).result(5)
    assert [seen.json["seq_id"] for seen in faulty.requests("optim_step")] == [1, 2]
    assert spent(faulty) == [1]


@pytest.mark.covers("C41", "D18")
@pytest.mark.parametrize(
    "answer", [{"request_id": "created"}, {"model_id": RUN}], ids=["future", "at-once"]
)
def test_run_is_bound_to_its_model_before_it_is_handed_out(
    faulty: FaultyServer, service: ServiceClient, answer: dict[str, str]
) -> None:
    faulty.script("create_model", Answer(body=answer))
    assert service.create_lora_training_client("m").result().model_id == RUN
    assert len(faulty.requests("retrieve_future")) == ("request_id" in answer)


# ── what is refused here ──────────────────────────────────────────────────────────────────────────


def receipts_of_forward(client: TrainingClient, *args: Any) -> Any:
    return client.receipts.forward(*args)


def receipts_of_forward_backward(client: TrainingClient, *args: Any) -> Any:
    return client.receipts.forward_backward(*args)


PASSES: list[Callable[..., Any]] = [
    TrainingClient.forward,
    TrainingClient.forward_backward,
    receipts_of_forward,
    receipts_of_forward_backward,
]


@pytest.mark.covers("C47", "24.training.2")
@pytest.mark.parametrize("method", PASSES, ids=lambda method: str(method.__name__))
@pytest.mark.parametrize(
    ("loss_fn", "config", "error", "words"),
    [
        (
            "crossentropy",
            None,
            ValueError,
            "no loss 'crossentropy'.*cross_entropy, importance_sampling, ppo",
        ),
        ("", None, ValueError, "no loss ''"),
        (7, None, TypeError, "name of a loss"),
        (None, None, TypeError, "name of a loss"),
        ("ppo", [("clip", 1)], TypeError, "loss_fn_config must be a mapping"),
        ("ppo", {"clip": None}, ValueError, r"loss_fn_config\['clip'\]"),
        ("ppo", {"clip": True}, ValueError, r"loss_fn_config\['clip'\]"),
        ("ppo", {"clip": [0.2]}, ValueError, r"loss_fn_config\['clip'\]"),
        ("ppo", {"clip": float("nan")}, ValueError, r"loss_fn_config\['clip'\] must be a finite"),
    ],
    ids=str,
)
def test_loss_or_setting_that_makes_no_sense_makes_no_request(
    faulty: FaultyServer,
    client: TrainingClient,
    method: Callable[..., Any],
    loss_fn: Any,
    config: Any,
    error: type[Exception],
    words: str,
) -> None:
    before = len(faulty.seen)
    with pytest.raises(error, match=words):
        method(client, DATA, loss_fn, config)
    assert len(faulty.seen) == before


@pytest.mark.covers("24.training.3", "C47")
def test_loss_settings_are_brought_to_one_form(
    faulty: FaultyServer, client: TrainingClient
) -> None:
    config: dict[Any, Any] = {
        "clip": "0.2",
        "beta": 1,
        "low": np.float32(0.5),
        "mode": "hard",
        "odd": " 3 ",
    }
    client.forward_backward(DATA, "ppo", config).result(5)
    [sent] = passes(faulty)
    assert sent.forward_backward_input.loss_fn_config == {
        "clip": 0.2, "beta": 1.0, "low": 0.5, "mode": "hard", "odd": 3.0,
    }  # fmt: skip
    assert call_arguments.checked_config("custom", {"loss_id": "12"}) == {"loss_id": "12"}
    assert call_arguments.checked_config("ppo", {"name": "nan"}) == {"name": "nan"}


@pytest.mark.covers("C47", "24.training.6", "C83", "1.15/5")
@pytest.mark.parametrize("seconds", [0, -1, 1.5, "60", True], ids=repr)
def test_invalid_time_to_live_makes_no_request(
    faulty: FaultyServer, client: TrainingClient, seconds: Any
) -> None:
    before = len(faulty.seen)
    for call in (client.save_state, client.save_weights_for_sampler, client.save_weights_external):
        with pytest.raises(ValueError, match="ttl_seconds must be a positive whole number or None"):
            call("a", ttl_seconds=seconds)
    assert len(faulty.seen) == before


CALLS: dict[str, Callable[..., Any]] = {
    "forward": lambda client, **more: client.forward(DATA, "cross_entropy", **more),
    "forward_backward": lambda client, **more: client.forward_backward(
        DATA, "cross_entropy", **more
    ),
    "custom": lambda client, **more: client.forward_backward_custom(DATA, summed, **more),
    "optim_step": lambda client, **more: client.optim_step(STEP, **more),
    "save_state": lambda client, **more: client.save_state("a", **more),
    "save_weights_for_sampler": lambda client, **more: client.save_weights_for_sampler("a", **more),
    "save_weights_external": lambda client, **more: client.save_weights_external("a", **more),
    "load_state": lambda client, **more: quietly(client.load_state, "tinker://x/weights/a", **more),
    "load_state_with_optimizer": lambda client, **more: quietly(
        client.load_state_with_optimizer, "tinker://x/weights/a", **more
    ),
}


def quietly(call: Callable[..., Any], *args: Any, **more: Any) -> Any:
    """A call that is deprecated."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return call(*args, **more)


def summed(
    _: list[types.Datum], logprobs: list[torch.Tensor]
) -> tuple[torch.Tensor, dict[str, float]]:
    return torch.cat(logprobs).sum(), {"mine": 2.0}


@pytest.mark.parametrize("call", CALLS)
def test_options_that_do_not_exist_are_refused(
    faulty: FaultyServer, client: TrainingClient, call: str
) -> None:
    before = len(faulty.seen)
    with pytest.raises(
        TypeError, match="unknown option 'time_out'; known are timeout, queue_state_observer"
    ):
        CALLS[call](client, time_out=5)
    for nonsense in (0, -1, "5", True, float("nan")):
        with pytest.raises(ValueError, match="timeout must be a positive number"):
            CALLS[call](client, timeout=nonsense)
    assert len(faulty.seen) == before


# ── time limits ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.covers("D22", "C62")
@pytest.mark.parametrize("call", CALLS)
def test_every_call_honours_its_timeout(
    faulty: FaultyServer, server: Server, client: TrainingClient, call: str
) -> None:
    def held(seen: Seen) -> Answer:
        return Answer(408, delay=60)

    faulty.script("retrieve_future", held)
    began = time.monotonic()
    with pytest.raises(tinkex.APITimeoutError, match="had no result"):
        CALLS[call](client, timeout=0.1).result(20)
    assert 0.1 <= time.monotonic() - began < 20
    faulty.script("retrieve_future", server.result)
    if call == "custom":  # without its second pass it has no gradient
        refused(client, tinkex.APITimeoutError)
    else:
        assert client.optim_step(STEP).result(5).metrics == {}


@pytest.mark.covers("D30")
def test_no_call_has_a_hidden_limit_of_five_seconds(
    faulty: FaultyServer, server: Server, service: ServiceClient
) -> None:
    """Submissions and results that take longer than that, all at once."""
    slow = 5.2
    faulty.script("get_info", Answer(body={"model_id": RUN, "model_data": {}}, delay=slow))
    making = [service.create_lora_training_client("m") for _ in range(2)]
    client, other = (one.result() for one in making)
    for path in ("save_weights_for_sampler", "optim_step"):
        faulty.script(path, Answer(body={"request_id": path}, delay=slow))
    server.results["save_weights"] = Answer(body={"path": "tinker://x/weights/a"}, delay=slow)
    saved = client.save_state("a")
    stepped = client.optim_step(STEP)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        sampler = pool.submit(other.save_weights_and_get_sampling_client)
        assert saved.result().path == "tinker://x/weights/a"
        assert stepped.result().metrics == {}
        assert client.get_info().model_id == RUN
        assert sampler.result() is not None
    assert len(faulty.requests("get_info")) == 2
    for path in ("optim_step", "save_weights_for_sampler"):
        assert len(faulty.requests(path)) == 1


# ── nobody is held up ─────────────────────────────────────────────────────────────────────────────

PATHS = {
    "forward": "forward_backward",
    "forward_backward": "forward_backward",
    "custom": "forward_backward",
    "optim_step": "optim_step",
    "save_state": "save_weights",
    "save_weights_for_sampler": "save_weights_for_sampler",
    "save_weights_external": "save_weights_external",
    "load_state": "load_weights",
    "load_state_with_optimizer": "load_weights",
}


def refuse_once(server: Server, path: str, refusal: Answer) -> None:
    """Refuse the first request for a path that asks for anything."""
    refused: list[int] = []

    def answer(seen: Seen) -> Answer:
        if path == "forward_backward" and not _data(passed(seen)):
            return Answer(body={"request_id": "nothing"})
        if not refused:
            refused.append(1)
            return refusal
        return (
            server.take(seen) if path == "forward_backward" else Answer(body={"request_id": path})
        )

    server.faulty.script(path, answer)


def refused(client: TrainingClient, cause: type[BaseException]) -> None:
    """The next call is refused because of a custom loss."""
    with pytest.raises(RuntimeError, match="an earlier custom loss") as caught:
        client.optim_step(STEP).result(5)
    assert isinstance(caught.value.__cause__, cause)


def next_step(client: TrainingClient, faulty: FaultyServer, before: int) -> None:
    """The next call goes out soon, with the next number, and every number before it was sent."""
    assert client.optim_step(STEP).result(5).metrics == {}
    number = faulty.requests("optim_step")[-1].json["seq_id"]
    assert number == before + 1
    seen = {request.seq_id for request in passes(faulty)} | set(spent(faulty))
    for path in set(PATHS.values()) - {"forward_backward"}:
        seen |= {request.json["seq_id"] for request in faulty.requests(path)}
    assert seen == set(range(1, number + 1))


@pytest.mark.covers("W01", "C56")
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("status", [403, 422])
def test_refused_call_does_not_block_later_calls(
    faulty: FaultyServer, server: Server, client: TrainingClient, call: str, status: int
) -> None:
    client.forward(DATA, "cross_entropy").result(5)  # the server has shown that it reads protobuf
    refuse_once(server, PATHS[call], Answer(status, {"detail": "not this"}))
    bad, good = CALLS[call](client), client.optim_step(STEP)
    if call == "optim_step":
        assert good.result(5).metrics == {}
    with pytest.raises(tinkex.APIStatusError, match="not this"):
        bad.result(5)
    good.result(5)
    next_step(client, faulty, 3)
    assert 2 in spent(faulty)


@pytest.mark.covers("W01", "C56")
@pytest.mark.parametrize("call", CALLS)
def test_failed_call_does_not_block_later_calls(
    faulty: FaultyServer, server: Server, client: TrainingClient, call: str
) -> None:
    name = "pass1" if PATHS[call] == "forward_backward" else PATHS[call]
    good = server.results.get(name)
    server.results[name] = Answer(body={"error": "not this", "category": "user"})
    with pytest.raises(tinkex.RequestFailedError, match="not this"):
        CALLS[call](client).result(5)
    if good is not None:
        server.results[name] = good
    next_step(client, faulty, 1)


@pytest.mark.covers("W02")
@pytest.mark.parametrize("call", CALLS)
def test_call_cancelled_while_waiting_leaves_no_gap(
    faulty: FaultyServer, client: TrainingClient, call: str
) -> None:
    gate = threading.Event()
    faulty.script("save_weights", Answer(body={"request_id": "save_weights"}, until=gate.is_set))
    slow = client.save_state("slow")
    given_up = CALLS[call](client)
    wait_until(lambda: faulty.requests("save_weights"))
    time.sleep(0.02)
    assert given_up.cancel()
    gate.set()
    slow.result(5)
    if call == "custom":
        refused(client, asyncio.CancelledError)
    else:
        next_step(client, faulty, 1)
    assert passes(faulty) == []


@pytest.mark.covers("W02")
@pytest.mark.parametrize("call", CALLS)
def test_call_cancelled_during_sending_still_arrives(
    faulty: FaultyServer,
    server: Server,
    client: TrainingClient,
    call: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is given up between a failed attempt and the next: that one is still made, and only then
    the next call's."""
    monkeypatch.setattr("tinkex.client.settings.delays.Delays.after", lambda *_, **__: 0.1)
    path, gate = PATHS[call], threading.Event()

    def good(seen: Seen) -> Answer:
        taken = (
            server.take(seen) if path == "forward_backward" else Answer(body={"request_id": path})
        )
        return dataclasses.replace(taken, until=gate.is_set)

    faulty.script(path, Answer(503), good)
    given_up = CALLS[call](client)
    wait_until(lambda: len(faulty.requests(path)) > 0)
    time.sleep(0.02)
    assert given_up.cancel()
    gate.set()
    if call == "custom":
        refused(client, asyncio.CancelledError)
    else:
        next_step(client, faulty, 1)
    failed, accepted = faulty.requests(path)[:2]
    assert accepted.body == failed.body
    assert call == "custom" or accepted.when < faulty.requests("optim_step")[-1].when
    assert len(passes(faulty)) == 2 * (path == "forward_backward")  # a custom loss goes no further
    assert spent(faulty) == []


@pytest.mark.covers("W02", "C55")
@pytest.mark.parametrize("where", ["first pass", "user's code"])
def test_cancelled_custom_loss_frees_its_turn(
    faulty: FaultyServer, server: Server, client: TrainingClient, where: str
) -> None:
    began, release, ended = threading.Event(), threading.Event(), threading.Event()

    def slow(data: list[types.Datum], logprobs: list[torch.Tensor]) -> Any:
        began.set()
        assert release.wait(20)
        ended.set()
        return summed(data, logprobs)

    if where == "first pass":
        server.results["pass1"] = Answer(408, until=release.is_set)
    custom = client.forward_backward_custom(DATA, slow)
    wait_until(lambda: began.is_set() or (where == "first pass" and server.polls("pass1") > 0))
    assert custom.cancel()
    refused(client, asyncio.CancelledError)  # while that still goes on
    assert not ended.is_set()
    release.set()
    assert where == "first pass" or ended.wait(20)
    time.sleep(0.1)
    assert len(passes(faulty)) == 1


@pytest.mark.covers("W02", "C56")
@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize("call", CALLS)
def test_number_that_may_not_have_arrived_is_spent(
    faulty: FaultyServer, server: Server, call: str
) -> None:
    """The server is not heard of for as long as anybody has patience; then it is back."""
    tinkex.configure(patience=0.1)
    try:
        service = ServiceClient(base_url=faulty.base_url)
    finally:
        tinkex.configure()
    with service:
        client = service.create_lora_training_client("m").result()
        path = PATHS[call]

        def drop(seen: Seen) -> Answer:
            if path == "forward_backward" and not _data(passed(seen)):
                return Answer(body={"request_id": "nothing"})
            return Answer(drop=True)

        faulty.script(path, drop)
        with pytest.raises(tinkex.APIConnectionError):
            CALLS[call](client).result(5)
        wait_until(lambda: spent(faulty) == [1])
        faulty.script(path, Answer(body={"request_id": path}))
        next_step(client, faulty, 1)


# ── chunks ────────────────────────────────────────────────────────────────────────────────────────


def cut(server: Server, service: ServiceClient, **config: Any) -> TrainingClient:
    """A client that sends one example in a request."""
    server.configure(fwdbwd_max_chunk_len=1, **config)
    client = service.create_lora_training_client("m").result()
    # number 1: the server has shown that it reads protobuf
    client.forward(DATA, "cross_entropy").result(5)
    server.faulty.seen.clear()
    return client


@pytest.mark.covers("C43")
@pytest.mark.parametrize("parallel", [True, False])
def test_chunks_go_out_together_or_one_after_the_other(
    faulty: FaultyServer, server: Server, service: ServiceClient, parallel: bool
) -> None:
    client = cut(server, service, parallel_fwdbwd_chunks=parallel)

    def all_there() -> bool:
        return not parallel or len(faulty.requests("forward_backward")) >= 3

    faulty.script(
        "forward_backward",
        lambda seen: Answer(body=server.take(seen).body, until=all_there, delay=0.1),
    )
    joined = client.forward(examples(4), "cross_entropy").result(5)
    assert [record["logprobs"].data[0] for record in joined.loss_fn_outputs] == [
        0.0,
        -1.0,
        -2.0,
        -3.0,
    ]
    numbers = [request.seq_id or 0 for request in passes(faulty)]
    times = [seen.when for seen in faulty.requests("forward_backward")]
    if parallel:
        assert sorted(numbers[:3]) == [3, 4, 5]
        assert numbers[3] == 2
        assert times[3] - times[2] >= 0.09
    else:
        assert numbers == [2, 3, 4, 5]
        assert all(later - earlier >= 0.09 for earlier, later in itertools.pairwise(times))


@pytest.mark.covers("W27", "W01")
@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("forward_only", [True, False])
def test_partly_accepted_call_is_a_clear_error(
    server: Server, service: ServiceClient, parallel: bool, forward_only: bool
) -> None:
    client = cut(server, service, parallel_fwdbwd_chunks=parallel)
    refuse_once(server, "forward_backward", Answer(422, {"detail": "not this"}))
    call = client.forward if forward_only else client.forward_backward
    with pytest.raises(tinkex.UnprocessableEntityError, match="not this") as caught:
        call(examples(3), "cross_entropy").result(5)
    hint = (
        "2 of the call's 3 chunks were accepted; the gradient of those counts in the next "
        "optim_step"
    )
    assert (hint in str(caught.value)) is not forward_only
    assert client.optim_step(STEP).result(5).metrics == {}


@pytest.mark.covers("W27")
def test_partly_failed_call_is_a_clear_error(server: Server, service: ServiceClient) -> None:
    client = cut(server, service)
    server.results["pass3"] = Answer(body={"error": "not this", "category": "user"})
    with pytest.raises(
        tinkex.RequestFailedError,
        match=r"not this(.|\n)*3 chunks; the gradient of those that succeed",
    ):
        client.forward_backward(examples(3), "cross_entropy").result(5)
    server.results["pass5"] = Answer(body={"error": "not this", "category": "user"})
    with pytest.raises(tinkex.RequestFailedError) as caught:
        client.forward_backward(DATA, "cross_entropy").result(5)  # one chunk: there are no others
    assert caught.value.hint is None


@pytest.mark.covers("24.code.15", "C56", "4.1/14")
def test_failed_chunk_ends_the_wait_for_later_chunks(
    faulty: FaultyServer, server: Server, service: ServiceClient
) -> None:
    client = cut(server, service)
    again = Answer(body={"type": "try_again", "retry_after_ms": 20})
    server.results |= {"pass2": again, "pass3": again, "pass4": again}
    server.results["pass5"] = Answer(body={"error": "the last", "category": "user"})
    future = client.forward_backward(examples(4), "cross_entropy")
    wait_until(lambda: server.polls("pass2") > 3 and server.polls("pass5") == 1)
    # an earlier one may still fail, and its error is the one that is raised
    assert not future.done()
    server.results["pass3"] = Answer(body={"error": "the second", "category": "user"})
    server.results["pass2"] = bulk(output([0.0]))
    with pytest.raises(tinkex.RequestFailedError, match="the second"):
        future.result(5)
    assert settled(lambda: server.polls("pass4")) > 0


# ── receipts ──────────────────────────────────────────────────────────────────────────────────────


def test_pass_can_be_submitted_now_and_waited_for_elsewhere(
    server: Server, service: ServiceClient, faulty: FaultyServer
) -> None:
    client = cut(server, service)
    receipts = client.receipts.forward_backward(examples(2), "cross_entropy").result(5)
    assert [receipt.request_id for receipt in receipts] == ["pass2", "pass3"]
    assert [request.forward_only for request in passes(faulty)] == [False, False]
    assert server.polls("pass2") == server.polls("pass3") == 0
    [receipt] = client.receipts.forward(DATA, "cross_entropy").result(5)
    assert passes(faulty)[-1].forward_only
    step = client.receipts.optim_step(STEP).result(5)
    assert step.request_id == "optim_step"
    other = service.create_lora_training_client("m").result()
    assert other.receipts.retrieve(receipts[1]).result(5).loss_fn_outputs[0]["logprobs"].data == [
        -1.0
    ]
    assert other.receipts.retrieve(receipt.request_id).result(5).metrics == {"loss:sum": 1.0}
    assert asyncio.run(
        other.receipts.retrieve(step, "optim_step").coroutine()
    ) == types.OptimStepResponse(metrics={})
    assert faulty.requests("retrieve_future")[-1].headers["x-tinker-request-type"] == "OptimStep"


@pytest.mark.parametrize(
    ("request_id", "operation", "words"),
    [
        ("", "forward_backward", "expected a request id"),
        (None, "forward_backward", "expected a request id"),
        (7, "forward_backward", "expected a request id"),
        ("r", "nonsense", "'nonsense' is not an operation with a future; those are: .*optim_step"),
        ("r", "get_info", "'get_info' is not an operation with a future"),
    ],
    ids=str,
)
def test_unawaitable_object_is_refused(
    client: TrainingClient, request_id: Any, operation: str, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        client.receipts.retrieve(request_id, operation)
    with pytest.raises(TypeError, match="unknown option"):
        client.receipts.retrieve("r", "optim_step", patience=3)


def test_server_that_answers_at_once_gives_no_receipts(
    faulty: FaultyServer, client: TrainingClient
) -> None:
    faulty.script("optim_step", Answer(body={"metrics": {"a": 1.0}}))
    assert client.optim_step(STEP).result(5).metrics == {"a": 1.0}
    with pytest.raises(tinkex.TinkerError, match="the result itself") as caught:
        client.receipts.optim_step(STEP).result(5)
    assert caught.value.hint is not None


def test_closing_waits_for_a_retrieval(faulty: FaultyServer, server: Server) -> None:
    with ServiceClient(base_url=faulty.base_url) as service:
        client = service.create_lora_training_client("m").result()
        server.results["r"] = Answer(body={"metrics": {}}, delay=0.2)
        future = client.receipts.retrieve("r", "optim_step")
        wait_until(lambda: server.polls("r") == 1)
    assert future.result(0).metrics == {}


# ── checkpoints ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.covers("C48", "24.training.8")
def test_saved_path_comes_from_its_name(faulty: FaultyServer, client: TrainingClient) -> None:
    faulty.script(
        "save_weights",
        lambda seen: Answer(body={"path": f"tinker://{RUN}/weights/{seen.json['path']}"}),
    )
    saved = client.save_state(
        "step-7", ttl_seconds=60, overwrite=True, user_metadata={"why": "test"}
    ).result(5)
    assert saved.path == f"tinker://{RUN}/weights/step-7"
    [seen] = faulty.requests("save_weights")
    assert seen.json == {
        "model_id": RUN,
        "path": "step-7",
        "seq_id": 1,
        "ttl_seconds": 60,
        "overwrite": True,
        "user_metadata": {"why": "test"},
        "type": "save_weights",
    }


@pytest.mark.covers("C49", "24.training.7")
def test_loading_states_if_the_optimizer_is_wanted(
    faulty: FaultyServer, client: TrainingClient
) -> None:
    for call in (client.load_state, client.load_state_with_optimizer):
        quietly(call, "tinker://x/weights/a").result(5)
    quietly(client.load_state, "tinker://x/weights/a", "token").result(5)
    sent = [seen.json for seen in faulty.requests("load_weights")]
    assert [(body["optimizer"], body["path"], body["seq_id"]) for body in sent] == [
        (False, "tinker://x/weights/a", 1),
        (True, "tinker://x/weights/a", 2),
        (False, "tinker://x/weights/a", 3),
    ]
    assert [body.get("weights_access_token") for body in sent] == [None, None, "token"]


@pytest.mark.covers("C50", "D03")
@pytest.mark.parametrize("at_once", [True, False])
def test_saving_for_sampling_always_gives_the_typed_answer(
    faulty: FaultyServer, client: TrainingClient, at_once: bool
) -> None:
    path = f"tinker://{RUN}/sampler_weights/a"
    if at_once:
        faulty.script("save_weights_for_sampler", Answer(body={"path": path}))
        faulty.script("save_weights_external", Answer(body={"path": path}))
    saved = client.save_weights_for_sampler("a", ttl_seconds=5).result(5)
    assert type(saved) is types.SaveWeightsForSamplerResponse
    assert saved.path == path
    assert type(client.save_weights_external("a").result(5)) is types.SaveWeightsExternalResponse
    [seen] = faulty.requests("save_weights_for_sampler")
    assert (
        seen.json["path"],
        seen.json["ttl_seconds"],
        "sampling_session_seq_id" in seen.json,
    ) == ("a", 5, False)


@pytest.mark.covers("D03")
def test_named_save_without_a_path_is_an_error(server: Server, client: TrainingClient) -> None:
    server.results["save_weights_for_sampler"] = Answer(body={"sampling_session_id": "s:sample:1"})
    server.results["save_weights_external"] = Answer(body={"size_bytes": 1})
    for call in (client.save_weights_for_sampler, client.save_weights_external):
        with pytest.raises(
            tinkex.APIResponseValidationError, match=r"save_weights_\w+ at .*no path"
        ):
            call("a").result(5)


Sampled = Callable[[TrainingClient], tinkex.SamplingClient]
TWINS: dict[str, Sampled] = {
    "sync": lambda client: client.save_weights_and_get_sampling_client().result(),
    "async": lambda client: asyncio.run(client.save_weights_and_get_sampling_client().coroutine()),
}


@pytest.mark.covers("C51", "24.training.9")
@pytest.mark.parametrize("twin", TWINS)
def test_sampler_uses_the_weights_that_the_server_names(
    faulty: FaultyServer, server: Server, client: TrainingClient, twin: str
) -> None:
    path = f"tinker://{RUN}/sampler_weights/x"
    server.results["save_weights_for_sampler"] = Answer(body={"path": path})
    assert TWINS[twin](client).sampling_session_id == "s:sample:7"
    [opened] = faulty.requests("create_sampling_session")
    assert opened.json["model_path"] == path

    server.results["save_weights_for_sampler"] = Answer(body={"sampling_session_id": "s:sample:1"})
    assert TWINS[twin](client).sampling_session_id == "s:sample:1"
    assert len(faulty.requests("create_sampling_session")) == 1

    server.results["save_weights_for_sampler"] = Answer(body={})
    with pytest.raises(
        tinkex.APIResponseValidationError, match="neither a sampling session nor a path"
    ):
        TWINS[twin](client)
    numbers = [
        (seen.json["seq_id"], seen.json.get("path"))
        for seen in faulty.requests("save_weights_for_sampler")
    ]
    assert numbers == [(1, None), (2, None), (3, None)]
    assert client.optim_step(STEP).result(5).metrics == {}


@pytest.mark.covers("W05")
@pytest.mark.usefixtures("hurried")
def test_nameless_save_keeps_its_number_over_retries(
    faulty: FaultyServer, server: Server, client: TrainingClient
) -> None:
    server.results["save_weights_for_sampler"] = Answer(body={"sampling_session_id": "s:sample:1"})
    good = Answer(body={"request_id": "save_weights_for_sampler"})
    faulty.script("save_weights_for_sampler", Answer(503), Answer(drop=True), good)
    client.save_weights_and_get_sampling_client().result()
    client.save_weights_and_get_sampling_client().result()
    sent = [
        seen.json["sampling_session_seq_id"] for seen in faulty.requests("save_weights_for_sampler")
    ]
    assert sent == [0, 0, 0, 1]


# ── deprecations ──────────────────────────────────────────────────────────────────────────────────

OLD: dict[str, Callable[[TrainingClient], Any]] = {
    "load_state": lambda client: client.load_state("tinker://x/weights/a"),
    "load_state_with_optimizer": lambda client: client.load_state_with_optimizer(
        "tinker://x/weights/a"
    ),
    "load_state_async": lambda client: asyncio.run(client.load_state_async("tinker://x/weights/a")),
    "load_state_with_optimizer_async": lambda client: asyncio.run(
        client.load_state_with_optimizer_async("tinker://x/weights/a")
    ),
    "name": lambda client: client.save_weights_and_get_sampling_client("a").result(),
    "loss_type_input": lambda client: client.forward_backward_custom(
        DATA, summed, loss_type_input="logprobs"
    ),
}


@pytest.mark.parametrize("call", [name for name in OLD if not name.endswith("_async")])
def test_deprecation_warns_at_the_callers_line(client: TrainingClient, call: str) -> None:
    # as in the official package
    kind = FutureWarning if call.startswith("load_state") else DeprecationWarning
    with pytest.warns(kind, match=call.removesuffix("_async")) as caught:
        OLD[call](client)
    assert caught[0].filename == __file__


@pytest.mark.parametrize("call", ["load_state_async", "load_state_with_optimizer_async"])
def test_async_twins_warn_at_the_callers_line(client: TrainingClient, call: str) -> None:
    async def run() -> None:
        await getattr(client, call)("tinker://x/weights/a")

    with pytest.warns(FutureWarning) as caught:
        asyncio.run(run())
    assert caught[0].filename == __file__


def test_input_of_losses_that_does_not_exist_is_refused(client: TrainingClient) -> None:
    with pytest.raises(ValueError, match="loss_type_input must be 'logprobs'"):
        client.forward_backward_custom(DATA, summed, loss_type_input="logits")  # type: ignore[arg-type]


# ── what a run is ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.covers("C53")
def test_run_describes_itself_and_unloads(faulty: FaultyServer, client: TrainingClient) -> None:
    assert client.get_info().model_data.model_name == "m"
    assert client.get_info().model_id == RUN
    assert faulty.requests("get_info")[0].json["model_id"] == RUN
    assert client.unload_model().model_id == RUN
    assert asyncio.run(client.unload_model_async()).model_id == RUN
    assert [seen.json for seen in faulty.requests("unload_model")] == [
        {"model_id": RUN, "type": "unload_model"}
    ] * 2


@pytest.mark.covers("C53", "D27")
def test_letting_go_has_its_place_among_the_calls(
    faulty: FaultyServer, client: TrainingClient
) -> None:
    faulty.script("optim_step", Answer(body={"request_id": "optim_step"}, delay=0.1))
    before = [client.optim_step(STEP) for _ in range(3)]
    client.unload_model()
    client.save_state("a").result(5)
    for future in before:
        future.result(5)
    order = [
        seen.path
        for seen in faulty.seen
        if seen.path in ("optim_step", "unload_model", "save_weights")
    ]
    assert order == ["optim_step"] * 3 + ["unload_model", "save_weights"]
    assert faulty.requests("save_weights")[0].json["seq_id"] == 4  # letting go takes no number


@pytest.mark.covers("C54")
def test_text_becomes_tokens_and_text_again(server_url: str) -> None:
    from support import MODEL

    with ServiceClient(base_url=server_url) as service:
        client = service.create_lora_training_client(MODEL, rank=4).result()
        tokens = client.encode("the cat sat", add_special_tokens=False)
        assert tokens == client.get_tokenizer().encode("the cat sat", add_special_tokens=False)
        assert len(tokens) > 1
        assert client.decode(tokens) == "the cat sat"
        loaded = client._tokenizer()
        assert client._tokenizer() is loaded


def test_optimizers_of_kinds_unknown_here_pass_through(
    faulty: FaultyServer, client: TrainingClient
) -> None:
    client.optim_step(types.OptimParamsBase(type="lion", learning_rate=0.1, depth=3)).result(5)
    client.optim_step(types.DimuonParams(learning_rate=0.2)).result(5)
    client.optim_step(STEP).result(5)
    lion, dimuon, adam = (seen.json for seen in faulty.requests("optim_step"))
    assert lion["optimizer_params"] == {"type": "lion", "learning_rate": 0.1, "depth": 3}
    assert (dimuon["optimizer_params"]["type"], dimuon["optimizer_params"]["learning_rate"]) == (
        "dimuon",
        0.2,
    )
    assert adam["adam_params"]["learning_rate"] == 0.1
    assert "optimizer_params" not in adam
    assert not lion.keys() & {"adam_params", "optim_params"}


# ── custom losses ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.covers(
    "1.13/1", "1.13/4", "1.13/5", "C55", "24.custom.1", "24.custom.2", "24.custom.3"
)
def test_sum_of_two_log_probabilities_trains_with_weights_of_minus_one(
    faulty: FaultyServer, server: Server, client: TrainingClient
) -> None:
    server.results["pass1"] = bulk(output([-1.0, -2.0]))
    server.results["pass2"] = bulk(output([-1.0, -2.0], mine=1.0, theirs=3.0))
    trained = client.forward_backward_custom(DATA, summed).result(5)
    first, second = passes(faulty)
    assert [(request.seq_id, request.forward_only) for request in (first, second)] == [
        (1, True),
        (2, False),
    ]
    assert (
        first.forward_backward_input.loss_fn
        == second.forward_backward_input.loss_fn
        == "cross_entropy"
    )
    assert _data(first)[0].loss_fn_inputs["weights"].data == [0.0, 0.0]
    weights = _data(second)[0].loss_fn_inputs["weights"]
    assert (weights.data, weights.dtype) == ([-1.0, -1.0], "float32")
    assert _data(second)[0].loss_fn_inputs["target_tokens"].data == [1, 2]
    assert trained.metrics == {
        "loss:sum": -3.0,
        "surrogate_loss:sum": 1.0,
        "mine": 2.0,
        "theirs": 3.0,
    }


@pytest.mark.covers("24.custom.3")
def test_users_own_metrics_win_even_over_the_loss(server: Server, client: TrainingClient) -> None:
    def named(data: list[types.Datum], logprobs: list[torch.Tensor]) -> Any:
        return logprobs[0].sum(), {"loss:sum": torch.tensor(7.0), 5: 1}

    metrics = client.forward_backward_custom(DATA, named).result(5).metrics
    assert (metrics["loss:sum"], metrics["5"]) == (7.0, 1.0)


@pytest.mark.covers("1.13/7", "24.code.16", "C56")
@pytest.mark.parametrize(
    ("first", "words"),
    [
        (output([0.0]), "over 2 data gave 1 outputs"),
        (output([0.0], [0.0], [0.0]), "over 2 data gave 3 outputs"),
        (
            types.ForwardBackwardOutput("x", [{"other": types.TensorData.from_any([0.0])}] * 2),
            "no logprobs for datum 0",
        ),
    ],
    ids=["fewer", "more", "none"],
)
def test_outputs_that_do_not_fit_the_data_are_not_trained_on(
    faulty: FaultyServer,
    server: Server,
    client: TrainingClient,
    first: types.ForwardBackwardOutput,
    words: str,
) -> None:
    server.results["pass1"] = bulk(first)
    called: list[int] = []

    def loss(data: list[types.Datum], logprobs: list[torch.Tensor]) -> Any:
        called.append(1)
        return summed(data, logprobs)

    with pytest.raises(ValueError, match=words):
        client.forward_backward_custom(examples(2), loss).result(5)
    assert called == []
    refused(client, ValueError)
    assert len(passes(faulty)) == 1


@pytest.mark.covers("1.13/7", "24.code.16", "C56")
@pytest.mark.parametrize(
    ("loss", "error", "words"),
    [
        (lambda data, logprobs: (torch.cat(logprobs), {}), ValueError, "single number"),
        (lambda data, logprobs: (3.0, {}), ValueError, "no gradient"),
        (lambda data, logprobs: (logprobs[0].sum(), None), ValueError, "must return"),
        (lambda data, logprobs: 1 / 0, ZeroDivisionError, "division"),
    ],
    ids=["vector", "number", "no-metrics", "raises"],
)
def test_invalid_custom_loss_is_an_error_and_fails_the_next_step(
    faulty: FaultyServer,
    server: Server,
    client: TrainingClient,
    loss: Any,
    error: type[Exception],
    words: str,
) -> None:
    server.results["pass1"] = bulk(output([-1.0, -2.0]))
    bad, behind = client.forward_backward_custom(DATA, loss), client.optim_step(STEP)
    with pytest.raises(error, match=words):
        bad.result(5)
    with pytest.raises(RuntimeError, match="an earlier custom loss"):
        behind.result(5)
    refused(client, error)
    assert len(passes(faulty)) == 1
    assert faulty.requests("optim_step") == []


def test_token_provenance_survives_a_custom_loss(
    faulty: FaultyServer, client: TrainingClient
) -> None:
    span = types.SampledProvenanceSpan(sequence_id="q:0", length=2)
    traced = types.Datum(
        types.ModelInput.from_ints([1, 2]),
        {"target_tokens": [2, 3], "weights": [1.0, 1.0]},
        model_input_spans=[span],
        loss_fn_input_spans=[span],
    )
    client.forward_backward_custom([traced], summed).result(5)
    for request in passes(faulty):
        [sent] = _data(request)
        assert sent.model_input_spans == [span]
        assert sent.loss_fn_input_spans == [span]


# ── images and sounds ─────────────────────────────────────────────────────────────────────────────


@pytest.mark.covers("24.training.10", "W24")
def test_images_and_sounds_go_out_in_training(faulty: FaultyServer, client: TrainingClient) -> None:
    chunks: list[types.ModelInputChunk] = [
        types.ImageChunk(data=b"\x89PNG", format="png"),
        types.EncodedTextChunk(tokens=[1, 2]),
        types.ImageChunk(data=b"\xff\xd8", format="jpeg", expected_tokens=5),
        types.DmelChunk(dmel=b"\xfe\x01\x01\x03abc"),
    ]
    client.forward_backward(
        [types.Datum(types.ModelInput(chunks=chunks), {"target_tokens": [1]})], "ppo"
    ).result(5)
    [sent] = passes(faulty)
    assert _data(sent)[0].model_input.chunks == chunks


@pytest.mark.covers("W24")
def test_pointers_to_images_go_out_as_json(faulty: FaultyServer, client: TrainingClient) -> None:
    pointer = types.ImageAssetPointerChunk(format="jpeg", location="there")
    client.forward(
        [types.Datum(types.ModelInput(chunks=[pointer]), {"target_tokens": [1]})], "ppo"
    ).result(5)
    [seen] = faulty.requests("forward_backward")
    assert seen.headers["content-type"] == codec.JSON
    assert _data(passed(seen))[0].model_input.chunks == [pointer]


@pytest.mark.covers("W06")
def test_networks_loop_is_free_while_a_custom_loss_computes(client: TrainingClient) -> None:
    began, told = threading.Event(), threading.Event()

    def slow(data: list[types.Datum], logprobs: list[torch.Tensor]) -> Any:
        began.set()
        assert told.wait(20)
        return summed(data, logprobs)

    custom = client.forward_backward_custom(DATA, slow)
    assert began.wait(20)
    client.get_info()
    told.set()
    with contextlib.suppress(tinkex.TinkerError):
        custom.result(20)
