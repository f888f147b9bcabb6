"""The futures of clients, samples and REST calls: one kind to await or to ask for its result."""

from __future__ import annotations

import asyncio
import concurrent.futures
import copy
import inspect
import logging
import pickle
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import tinkex
from faulty import Answer, FaultyServer, faulty_server
from support import is_coroutine_function
from tinkex import (
    AdminClient,
    APIFuture,
    BackcompatSamplingClientFuture,
    BackcompatTrainingClientFuture,
    RestClient,
    SamplingClient,
    ServiceClient,
    TrainingClient,
    types,
)
from tinkex.client.futures.api_future import AwaitableConcurrentFuture, Future, start
from tinkex.client.futures.backcompat import BackcompatClientFuture, SampleFuture

DATA = [types.Datum(types.ModelInput.from_ints([1, 2]), {"target_tokens": [2, 3]})]
PROMPT = types.ModelInput.from_ints([1, 2, 3])
PARAMS = types.SamplingParams(max_tokens=2)
STEP = types.AdamParams(learning_rate=0.1)


@pytest.fixture
def service(fake_service: Callable[..., ServiceClient]) -> ServiceClient:
    return fake_service()


@pytest.fixture
def client(service: ServiceClient) -> TrainingClient:
    return service.create_lora_training_client("fake", rank=4).result(20)


@pytest.fixture
def sampler(service: ServiceClient) -> SamplingClient:
    return service.create_sampling_client(base_model="fake").result(20)


class Held:
    """A server whose answer to a path waits until it is let go."""

    def __init__(self, faulty: FaultyServer) -> None:
        self.faulty, self.open = faulty, threading.Event()
        self.service = ServiceClient(base_url=faulty.base_url)
        created = {"model_id": "s:train:0", "type": "create_model"}
        faulty.script("create_model", Answer(body=created, until=self.open.is_set))
        bound = {"sampling_session_id": "s:sample:0"}
        faulty.script("create_sampling_session", Answer(body=bound, until=self.open.is_set))

    def training(self) -> BackcompatTrainingClientFuture:
        return self.service.create_lora_training_client("m")

    def sampling(self) -> BackcompatSamplingClientFuture:
        return self.service.create_sampling_client(base_model="m")


@pytest.fixture
def held() -> Iterator[Held]:
    with faulty_server() as faulty:
        held = Held(faulty)
        yield held
        held.open.set()
        held.service.close("interrupted").result(20)


def warned(call: Callable[[], Any]) -> list[warnings.WarningMessage]:
    """The warnings that a call gives."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return list(caught)


# ── clients that are being made ───────────────────────────────────────────────────────────────────


@pytest.mark.covers("U2")
def test_client_future_is_returned_before_the_client_is_made(held: Held) -> None:
    future = held.training()
    assert isinstance(future, TrainingClient)
    assert isinstance(future, APIFuture)
    assert isinstance(future, BackcompatClientFuture)
    assert not isinstance(future, AwaitableConcurrentFuture)
    assert not future.future().done()
    held.open.set()
    made = future.result(20)
    assert type(made) is TrainingClient
    assert not isinstance(made, APIFuture)
    assert isinstance(held.sampling(), SamplingClient)


@pytest.mark.covers("U2", "U3")
def test_all_paths_to_a_client_class_give_the_same_object(service: ServiceClient) -> None:
    for future in (
        service.create_lora_training_client("fake", rank=4),
        service.create_sampling_client(base_model="fake"),
    ):

        async def ways(future: Any = future) -> list[Any]:
            return [
                await future,
                await future.result_async(20),
                await future.coroutine(),
                await future,
            ]

        first = future.result(20)
        given: list[Any] = [*asyncio.run(ways()), future.future().result(), future.result()]
        assert all(one is first for one in given)


@pytest.mark.covers("U2")
def test_clients_are_numbered_in_the_order_of_the_calls(held: Held) -> None:
    futures = [held.training() for _ in range(3)]
    held.open.set()
    assert [future.result(20).model_seq_id for future in reversed(futures)] == [2, 1, 0]


@pytest.mark.covers("U4")
def test_timeout_of_result_leaves_the_client_to_be_made(held: Held) -> None:
    future = held.training()
    with pytest.raises(TimeoutError):
        future.result(timeout=0.05)
    held.open.set()
    assert future.result(20).model_id == "s:train:0"


@pytest.mark.covers("U4")
def test_timeout_of_result_async_gives_the_client_up(held: Held) -> None:
    future = held.sampling()

    async def late() -> None:
        with pytest.raises(TimeoutError):
            await future.result_async(timeout=0.05)

    asyncio.run(late())
    assert future.future().cancelled()
    assert repr(future) == "<BackcompatSamplingClientFuture: cancelled>"
    with pytest.raises(concurrent.futures.CancelledError):
        future.result()


@pytest.mark.covers("U5")
def test_repr_shows_the_state_of_the_client(held: Held) -> None:
    future = held.training()
    assert repr(future) == "<BackcompatTrainingClientFuture: pending>"
    held.open.set()
    assert repr(future.result(20)) == repr(future) == "TrainingClient('s:train:0')"
    failed = held.service.create_sampling_client(model_path="nowhere")
    concurrent.futures.wait([failed.future()], timeout=20)
    assert repr(failed).startswith("<BackcompatSamplingClientFuture: failed: ValueError(")


@pytest.mark.covers("U6")
def test_attribute_of_a_client_future_warns_and_comes_from_the_client(held: Held) -> None:
    future = held.training()
    for private in ("_x", "_session", "_base_model"):
        with pytest.raises(AttributeError, match=private):
            getattr(future, private)
    with pytest.raises(AttributeError, match="_sampling_session_id"):
        held.sampling()._sampling_session_id  # noqa: B018
    held.open.set()
    with pytest.warns(
        FutureWarning, match=r"Future\.model_id will be removed: get the client first"
    ) as caught:
        assert future.model_id == "s:train:0"
    assert caught[0].filename == __file__
    with pytest.warns(FutureWarning, match="holder"):
        assert future.holder is held.service.holder
    with pytest.warns(FutureWarning):
        assert not hasattr(future, "done")
    future.note = "mine"  # type: ignore[attr-defined]
    assert not hasattr(future.result(), "note")
    assert future
    assert future in {future: 1}


CALLS: dict[str, tuple[Any, ...]] = {
    "forward": (DATA, "cross_entropy"),
    "forward_backward": (DATA, "cross_entropy"),
    "forward_backward_custom": (DATA, lambda data, logprobs: (-logprobs[0].sum(), {})),
    "optim_step": (STEP,),
    "save_state": ("a",),
    "save_weights_for_sampler": ("a",),
    "save_weights_external": ("a",),
    "load_state": ("tinker://nowhere/weights/a",),
    "load_state_with_optimizer": ("tinker://nowhere/weights/a",),
    "create_sampling_client": ("tinker://nowhere/sampler_weights/a",),
    "on_queue_state_change": ("active",),
    "encode": ("1",),
    "decode": ([1],),
    "sample": (PROMPT, 1, PARAMS),
    "sample_stream": (PROMPT, PARAMS),
    "compute_logprobs": (PROMPT,),
}
"""What methods are called with."""


def finished(given: Any) -> Any:
    """Return a method's value, or that of its awaited twin."""
    return asyncio.run(given) if inspect.iscoroutine(given) else given


def public_methods(kind: type[Any]) -> list[str]:
    return [
        name
        for name, member in inspect.getmembers_static(kind)
        if inspect.isfunction(member) and name[0] != "_"
    ]


@pytest.mark.covers("U7")
@pytest.mark.parametrize(
    ("future_class", "client_class"),
    [
        (BackcompatTrainingClientFuture, TrainingClient),
        (BackcompatSamplingClientFuture, SamplingClient),
    ],
)
def test_every_public_method_of_a_client_is_forwarded(
    future_class: type[Any], client_class: type[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Recorder:
        def __getattr__(self, name: str) -> Any:
            def called(*args: Any, **kwargs: Any) -> Any:
                async def giving() -> Any:
                    return name, args, kwargs

                return giving() if name.endswith("_async") else (name, args, kwargs)

            return called

    made: Future[Any] = Future()
    made.set_result(Recorder())
    future = future_class(made)
    names = public_methods(client_class)
    assert len(names) > 9
    for name in names:
        forwarder = vars(future_class)[name]
        assert forwarder.__qualname__ == f"{future_class.__name__}.{name}"
        assert [*inspect.signature(forwarder).parameters] == ["self", "args", "kwargs"]
        with pytest.warns(
            FutureWarning, match=rf"{future_class.__name__}\.{name}\(\) will be removed"
        ) as caught:
            given = finished(getattr(future, name)(1, named=2))
        assert given == (name, (1,), {"named": 2})
        assert caught[0].filename == __file__


@pytest.mark.covers("U7", "U36")
def test_forwarded_methods_equal_the_clients(
    service: ServiceClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = service.create_lora_training_client("fake", rank=4)
    with pytest.warns(FutureWarning):
        passed = training.forward_backward(DATA, "cross_entropy")
    assert passed.result(20).metrics
    with pytest.warns(FutureWarning):
        assert training.get_info().model_data.model_name == "fake"

    async def twice() -> Any:
        with pytest.warns(FutureWarning):
            stepped = await training.optim_step_async(STEP)
        return await stepped

    assert asyncio.run(twice()) is not None
    with pytest.warns(FutureWarning):
        sampling = training.save_weights_and_get_sampling_client()
    with pytest.warns(FutureWarning):
        assert sampling.sample(PROMPT, 1, PARAMS).result(20).sequences
    monkeypatch.setattr(TrainingClient, "get_info", lambda self: "patched")
    with pytest.warns(FutureWarning):
        assert str(training.get_info()) == "patched"


@pytest.mark.covers("U7")
def test_methods_of_a_client_that_was_not_made_raise_its_error(service: ServiceClient) -> None:
    training = service.create_lora_training_client("none")
    sampling = service.create_sampling_client(model_path="x")
    with pytest.raises(tinkex.BadRequestError) as caught:
        training.result(20)
    for future, kind, error in (
        (training, TrainingClient, tinkex.BadRequestError),
        (sampling, SamplingClient, ValueError),
    ):
        for name in public_methods(kind):
            with pytest.warns(FutureWarning), pytest.raises(error) as raised:
                finished(getattr(future, name)(*CALLS.get(name.removesuffix("_async"), ())))
            assert error is not tinkex.BadRequestError or raised.value is caught.value
        with pytest.warns(FutureWarning), pytest.raises(error):
            hasattr(future, "anything")


@pytest.mark.covers("U8")
def test_pickled_sampling_client_future_is_the_client(
    sampler: SamplingClient, client: TrainingClient
) -> None:
    future = client.save_weights_and_get_sampling_client()
    with pytest.warns(FutureWarning, match="pickling"):
        copied = pickle.loads(pickle.dumps(future))
    assert type(copied) is SamplingClient
    assert copied.sampling_session_id == future.result().sampling_session_id
    assert copied.sample(PROMPT, 1, PARAMS).result(20).sequences
    with pytest.raises(TypeError, match="pickle"):
        pickle.dumps(BackcompatTrainingClientFuture(start(given(client))))
    training = BackcompatTrainingClientFuture(start(given(client)))
    assert copy.copy(training).result(20) is client
    with pytest.warns(FutureWarning, match="pickling"):
        assert type(copy.copy(future)) is SamplingClient
    handle = sampler.get_sampler_handle()
    assert not warned(lambda: BackcompatSamplingClientFuture.from_sampler_handle(handle))


async def given(value: Any) -> Any:
    return value


@pytest.mark.covers("U9")
def test_arguments_of_creations_are_checked_in_the_call_or_by_the_future(
    service: ServiceClient,
) -> None:
    with pytest.raises(ValueError, match="model_path or base_model"):
        service.create_sampling_client()
    with pytest.raises(AssertionError):
        service.create_lora_training_client(
            "fake", train_mlp=False, train_attn=False, train_unembed=False
        )
    future = service.create_sampling_client(model_path="x")
    with pytest.raises(ValueError, match="tinker://"):
        future.result(20)
    service.close().result(20)
    with pytest.raises(RuntimeError, match="ServiceClient is closed"):
        service.create_sampling_client(base_model="fake")


@pytest.mark.covers("U10")
def test_every_future_goes_into_tasks_and_gather(
    service: ServiceClient, client: TrainingClient
) -> None:
    async def run() -> None:
        def futures() -> list[APIFuture[Any]]:
            return [
                service.create_lora_training_client("fake", rank=4),
                service.create_sampling_client(base_model="fake"),
                client.save_weights_and_get_sampling_client(),
                client.forward(DATA, "cross_entropy"),
                client.optim_step(STEP),
                rest.list_sessions(),
                rest.get_server_capabilities(),
            ]

        sampler = await service.create_sampling_client(base_model="fake")
        with RestClient(service.holder) as rest:
            made = [*futures(), sampler.sample(PROMPT, 1, PARAMS), sampler.compute_logprobs(PROMPT)]
            tasks = [asyncio.create_task(future.coroutine()) for future in made]
            by_task = await asyncio.gather(*tasks)
            assert by_task == await asyncio.gather(*made)
            assert await asyncio.wait_for(futures()[0], 20) is not None
        with pytest.raises(TypeError):
            await asyncio.create_task(made[0])  # type: ignore[arg-type]

    asyncio.run(run())


# ── samples ───────────────────────────────────────────────────────────────────────────────────────

FAMILY: dict[str, Callable[[Any], Any]] = {
    "done": lambda future: future.done(),
    "cancel": lambda future: future.cancel(),
    "cancelled": lambda future: future.cancelled(),
    "running": lambda future: future.running(),
    "exception": lambda future: future.exception(20),
    "add_done_callback": lambda future: future.add_done_callback(lambda done: None),
}


@pytest.mark.covers("U11")
def test_future_of_a_sample_is_of_both_kinds_and_quiet(sampler: SamplingClient) -> None:
    for call in (
        lambda: sampler.sample(PROMPT, 1, PARAMS),
        lambda: sampler.compute_logprobs(PROMPT),
    ):
        future: Any = call()
        assert isinstance(future, concurrent.futures.Future)
        assert isinstance(future, APIFuture)

        async def ways(future: Any = future) -> list[Any]:
            wrapped = await asyncio.gather(future, future.coroutine())
            return [await future, await future.result_async(20), *wrapped]

        def quiet(future: Any = future, ways: Any = ways) -> None:
            first = future.result(20)
            assert all(one == first for one in asyncio.run(ways()))
            assert future.future().result(20) == first
            assert future.future() is not future
            assert type(future.future()) is Future
            assert future._future is future.future()
            assert concurrent.futures.wait([future], 20).done == {future}
            assert list(concurrent.futures.as_completed([future], 20)) == [future]

        assert warned(quiet) == []


@pytest.mark.covers("U11")
@pytest.mark.parametrize("name", FAMILY)
def test_concurrent_method_of_a_sample_warns_once(sampler: SamplingClient, name: str) -> None:
    future: Any = sampler.sample(PROMPT, 1, PARAMS)
    concurrent.futures.wait([future], 20)
    with pytest.warns(FutureWarning, match=rf"DEPRECATED: {name}\(\) will be removed") as caught:
        FAMILY[name](future)
    assert caught[0].filename == __file__
    assert warned(lambda: [method(future) for method in FAMILY.values()]) == []
    assert (future._has_warned, future.result(20)) == (True, future.future().result())


@pytest.mark.covers("U11", "U12")
def test_cancelling_a_sample_or_its_plain_future_gives_it_up(held: Held) -> None:
    held.faulty.script("asample", Answer(until=held.open.is_set))
    held.faulty.script(
        "create_sampling_session", Answer(body={"sampling_session_id": "s:sample:0"})
    )
    sampler = held.sampling().result(20)
    first, second = sampler.sample(PROMPT, 1, PARAMS), sampler.sample(PROMPT, 1, PARAMS)
    assert second.future().cancel()
    with pytest.warns(FutureWarning):
        assert first.cancel()
    for future in (first, second):
        with pytest.raises(concurrent.futures.CancelledError):
            future.result(20)
        assert future.future().cancelled()
    assert concurrent.futures.wait([first, second], 20).not_done == set()


@pytest.mark.covers("U12")
def test_callbacks_of_a_sample_fire_without_a_waiter(sampler: SamplingClient) -> None:
    fired: dict[str, Any] = {}
    both = threading.Barrier(3)

    def note(name: str) -> Callable[[Any], None]:
        def callback(done: Any) -> None:
            fired[name] = done
            threading.Thread(target=both.wait, daemon=True).start()

        return callback

    future = sampler.sample(PROMPT, 1, PARAMS)
    future.future().add_done_callback(note("plain"))
    with pytest.warns(FutureWarning):
        future.add_done_callback(note("own"))
    both.wait(20)
    assert fired["own"] is future
    assert fired["plain"] is future.future()
    assert fired["plain"].result() == future.result()


# ── the abstract future, and those of REST calls ──────────────────────────────────────────────────


@pytest.mark.covers("U13")
def test_future_needs_its_concurrent_future() -> None:
    class Without(APIFuture[int]):
        def result(self, timeout: float | None = None) -> int:
            return 1

        async def result_async(self, timeout: float | None = None) -> int:
            return 2

    with pytest.raises(TypeError, match="future"):
        Without()  # type: ignore[abstract]

    class With(Without):
        def future(self) -> concurrent.futures.Future[int]:
            return Future()

    assert inspect.iscoroutinefunction(APIFuture.coroutine)
    assert asyncio.run(With().coroutine()) == 2
    assert issubclass(Future, APIFuture)
    assert issubclass(SampleFuture, Future)


@pytest.mark.covers("U14")
def test_future_of_a_rest_call_has_a_concurrent_future(service: ServiceClient) -> None:
    with RestClient(service.holder) as rest:
        call = rest.list_sessions()
        assert isinstance(call, AwaitableConcurrentFuture)
        for name in FAMILY:
            with pytest.raises(
                AttributeError, match=rf"no attribute '{name}': `\.future\(\)` has it"
            ):
                getattr(call, name)
        with pytest.raises(AttributeError, match="`await`"):
            call.sessions  # type: ignore[attr-defined]  # noqa: B018
        assert call.future().result(20) == call.result(20) == asyncio.run(call.coroutine())
        assert call.future().done()
    assert isinstance(service.close(), AwaitableConcurrentFuture)
    plain: concurrent.futures.Future[int] = concurrent.futures.Future()
    wrapped = AwaitableConcurrentFuture(plain)
    assert wrapped.future() is wrapped._future is plain
    plain.set_result(3)
    assert wrapped.result(5) == asyncio.run(wrapped.result_async(5)) == 3


@pytest.mark.covers("U14")
def test_rest_client_methods_are_annotated_with_futures() -> None:
    for kind in (RestClient, AdminClient):
        for name in public_methods(kind):
            told = str(inspect.get_annotations(getattr(kind, name)).get("return"))
            if not name.endswith("_async") and name != "get_telemetry":
                assert "Future[" in told, name


# ── blocking ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.covers("U34")
@pytest.mark.filterwarnings("ignore:DEPRECATED:FutureWarning")
def test_blocking_on_tinkexs_own_loop_is_refused(
    held: Held, caplog: pytest.LogCaptureFixture
) -> None:
    future = held.training()

    async def block() -> list[str]:
        refused = []
        for call in (
            future.result,
            lambda: future.model_id,
            AwaitableConcurrentFuture(future._future).result,
            future._future.result,
        ):
            with pytest.raises(RuntimeError, match="tinkex's own event loop") as caught:
                call()
            refused.append(str(caught.value))
        return refused

    assert len(start(block()).result(20)) == 4
    assert caplog.text == ""
    held.open.set()
    client = future.result(20)

    async def read() -> TrainingClient:
        return future.result()

    assert start(read()).result(20) is client


@pytest.mark.covers("U34")
def test_blocking_on_a_client_future_in_a_loop_is_logged_while_it_is_pending(
    held: Held, caplog: pytest.LogCaptureFixture
) -> None:
    async def block() -> None:
        future = held.sampling()
        threading.Timer(0.05, held.open.set).start()
        assert future.result(20) is future.result(20)

    with caplog.at_level(logging.WARNING, "tinkex"):
        asyncio.run(block())
    assert [record.stack_info is not None for record in caplog.records] == [True]
    assert "await the future instead" in caplog.text


@pytest.mark.covers("U37")
def test_service_client_is_left_inside_a_running_loop() -> None:
    with faulty_server() as faulty:

        async def run() -> None:
            with ServiceClient(base_url=faulty.base_url) as service:
                await service.create_lora_training_client("m")

        faulty.script(
            "create_model", Answer(body={"model_id": "s:train:0", "type": "create_model"})
        )
        assert warned(lambda: asyncio.run(run())) == []
        assert len(faulty.requests("sessions/s/finish")) == 1


# ── what programs look for on the classes ─────────────────────────────────────────────────────────

TRACED = {
    TrainingClient: {
        "create_sampling_client",
        "forward",
        "forward_backward",
        "forward_backward_custom",
        "load_state",
        "load_state_with_optimizer",
        "optim_step",
        "save_state",
        "save_weights_and_get_sampling_client",
        "save_weights_external",
        "save_weights_for_sampler",
    },
    SamplingClient: {"compute_logprobs", "sample"},
}


@pytest.mark.covers("U35")
@pytest.mark.parametrize("kind", TRACED)
def test_methods_that_return_futures_are_the_known_methods(kind: type[Any]) -> None:
    found = {
        name
        for name, member in vars(kind).items()
        if inspect.isfunction(member) and name[0] != "_" and not name.endswith("_async")
        if "Future" in str(member.__annotations__.get("return"))
    }
    assert found == TRACED[kind]
    others = {"get_info"} if kind is TrainingClient else {"get_base_model"}
    for name in found | others:
        assert not is_coroutine_function(vars(kind)[name])


@pytest.mark.covers("U36")
def test_methods_can_be_replaced_on_the_class(
    service: ServiceClient,
    client: TrainingClient,
    sampler: SamplingClient,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    finished: list[str] = []
    ended = threading.Semaphore(0)

    def traced(kind: type[Any], name: str) -> None:
        original = getattr(kind, name)

        def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
            returned = original(self, *args, **kwargs)

            def note(_: Any) -> None:
                finished.append(name)
                ended.release()

            returned.future().add_done_callback(note)
            return returned

        monkeypatch.setattr(kind, name, wrapper)

    for kind, names in TRACED.items():
        for name in names:
            traced(kind, name)
    client.forward_backward(DATA, "cross_entropy")
    client.optim_step(STEP)
    client.save_weights_and_get_sampling_client()
    sampler.sample(PROMPT, 1, PARAMS)
    future = service.create_sampling_client(base_model="fake")
    with pytest.warns(FutureWarning):
        future.compute_logprobs(PROMPT)
    for _ in range(5):
        assert ended.acquire(timeout=20)
    expected = [
        "compute_logprobs",
        "forward_backward",
        "optim_step",
        "sample",
        "save_weights_and_get_sampling_client",
    ]
    assert sorted(finished) == expected
