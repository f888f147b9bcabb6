"""Deprecated methods: they work, warn at the caller's line, and name what to use instead."""

from __future__ import annotations

import asyncio
import inspect
import warnings
from collections.abc import Callable
from typing import Any

import pytest

from support import is_coroutine_function
from tinkex import (
    AdminClient,
    APIFuture,
    RestClient,
    SamplingClient,
    ServiceClient,
    TrainingClient,
    types,
)
from tinkex.client.futures.api_future import Future
from tinkex.client.futures.twins import deprecated, twin, value_twin

DATA = [types.Datum(types.ModelInput.from_ints([1, 2]), {"target_tokens": [2, 3]})]
PROMPT = types.ModelInput.from_ints([1, 2, 3])
PARAMS = types.SamplingParams(max_tokens=2)
STEP = types.AdamParams(learning_rate=0.1)
OURS = {"drop_gradients_async", "get_tokenizer_async", "sample_stream_async", "unload_model_async"}
"""Methods that the official clients do not have."""


def twins(kind: type[Any]) -> list[str]:
    return sorted(
        name
        for name in vars(kind)
        if name.endswith("_async") and name[0] != "_" and name not in OURS
    )


def called(call: Callable[[], Any]) -> tuple[Any, str]:
    """Return a call's result and the text of its one warning, which names the caller's file."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        given = call()
    assert [(one.category, one.filename) for one in caught] == [(FutureWarning, __file__)]
    return given, str(caught[0].message)


@pytest.fixture
def service(fake_service: Callable[..., ServiceClient]) -> ServiceClient:
    return fake_service()


@pytest.fixture
def client(service: ServiceClient) -> TrainingClient:
    return service.create_lora_training_client("fake", rank=4).result(20)


# ── how they are made ─────────────────────────────────────────────────────────────────────────────


class Thing:
    """Has methods with twins of every kind."""

    def read(self, number: int, *, more: int = 0) -> Future[int]:
        future: Future[int] = Future()
        future.set_result(number + more)
        return future

    read_async = twin(read)
    value_async = value_twin(read)

    @deprecated("call Thing.read()")
    def old(self, number: int) -> int:
        return number

    @deprecated("call Thing.read()")
    async def old_async(self, number: int) -> int:
        return number


def test_twin_gives_the_future_and_value_twin_its_value() -> None:
    thing = Thing()

    async def run() -> list[Any]:
        first, text = called(lambda: thing.read_async(1, more=2))
        second, _ = called(lambda: thing.value_async(1, more=2))
        assert text == "DEPRECATED: Thing.read_async() will be removed: await Thing.read()"
        return [await (await first), await second]

    assert asyncio.run(run()) == [3, 3]
    assert called(lambda: thing.old(4))[0] == 4
    assert asyncio.run(called(lambda: thing.old_async(4))[0]) == 4


def test_twin_looks_like_the_method_it_is_made_of() -> None:
    made: Any = Thing.read_async
    assert inspect.signature(made) == inspect.signature(Thing.read)
    assert (made.__name__, made.__qualname__, made.__module__) == (
        "read_async",
        "Thing.read_async",
        __name__,
    )
    assert made.__deprecated__.startswith("DEPRECATED: Thing.read_async() ")
    assert made.__doc__.startswith("Deprecated: use `read`.")
    for method in (made, Thing.value_async, Thing.old_async):
        assert is_coroutine_function(method)
    assert not is_coroutine_function(Thing.old)


def test_twin_goes_through_the_method_that_a_subclass_has() -> None:
    class Other(Thing):
        def read(self, number: int, *, more: int = 0) -> Future[int]:
            return super().read(100)

    given, _ = called(lambda: Other().value_async(1))
    assert asyncio.run(given) == 100
    future, _ = called(lambda: Other().read_async(1))
    assert asyncio.run(future).result() == 100


# ── those of the clients ──────────────────────────────────────────────────────────────────────────


@pytest.mark.covers("U15")
@pytest.mark.parametrize(
    "kind", [ServiceClient, TrainingClient, SamplingClient, RestClient, AdminClient]
)
def test_every_twin_of_a_client_is_deprecated(kind: type[Any]) -> None:
    assert len(twins(kind)) >= 3
    for name in twins(kind):
        method = getattr(kind, name)
        assert method.__deprecated__.startswith(
            f"DEPRECATED: {kind.__name__}.{name}() will be removed: "
        ), name
        assert is_coroutine_function(method), name
        plain = inspect.signature(getattr(kind, name.removesuffix("_async")))
        assert list(plain.parameters) == list(inspect.signature(method).parameters), name


TRAINING: dict[str, tuple[Any, ...]] = {
    "forward": (DATA, "cross_entropy"),
    "forward_backward": (DATA, "cross_entropy"),
    "forward_backward_custom": (DATA, lambda data, logprobs: (-logprobs[0].sum(), {})),
    "optim_step": (STEP,),
    "save_state": ("a",),
    "save_weights_for_sampler": ("a",),
    "save_weights_external": ("a",),
}


@pytest.mark.covers("U15")
def test_training_twins_give_futures_and_work(client: TrainingClient) -> None:
    async def run() -> None:
        for name, args in TRAINING.items():
            coroutine, text = called(
                lambda name=name, args=args: getattr(client, f"{name}_async")(*args)  # type: ignore[misc]
            )
            assert f"TrainingClient.{name}()" in text
            future = await coroutine
            assert isinstance(future, APIFuture)
            assert await future is not None
        saved = await client.save_state("state")
        for name in ("load_state", "load_state_with_optimizer"):
            coroutine, text = called(lambda name=name: getattr(client, f"{name}_async")(saved.path))  # type: ignore[misc]
            assert "create_training_client_from_state" in text
            assert (await (await coroutine)).path == saved.path

    asyncio.run(run())
    assert {*TRAINING, "load_state", "load_state_with_optimizer"} | {
        "get_info",
        "create_sampling_client",
        "save_weights_and_get_sampling_client",
    } == {name.removesuffix("_async") for name in twins(TrainingClient)}


@pytest.mark.covers("U15", "U18")
def test_other_twins_give_values(service: ServiceClient, client: TrainingClient) -> None:
    state, weights = (
        client.save_state("s").result(20).path,
        client.save_weights_for_sampler("w").result(20).path,
    )

    async def run() -> None:
        made: dict[str, Any] = {}
        calls: dict[str, Callable[[], Any]] = {
            "create_lora_training_client": lambda: service.create_lora_training_client_async(
                "fake", rank=4
            ),
            "from_state": lambda: service.create_training_client_from_state_async(state),
            "with_optimizer": lambda: (
                service.create_training_client_from_state_with_optimizer_async(state)
            ),
            "create_sampling_client": lambda: service.create_sampling_client_async(
                base_model="fake"
            ),
            "of a path": lambda: client.create_sampling_client_async(weights),
            "of now": lambda: client.save_weights_and_get_sampling_client_async(),
            "capabilities": lambda: service.get_server_capabilities_async(),
            "info": lambda: client.get_info_async(),
        }
        for name, call in calls.items():
            made[name] = await called(call)[0]
        for name in ("create_lora_training_client", "from_state", "with_optimizer"):
            assert type(made[name]) is TrainingClient, name
        for name in ("create_sampling_client", "of a path", "of now"):
            assert type(made[name]) is SamplingClient, name
        assert made["capabilities"].model_names() == ["fake"]
        assert made["info"] == client.get_info()
        sampler = made["of now"]
        assert (await called(lambda: sampler.sample_async(PROMPT, 1, PARAMS))[0]).sequences
        assert (await called(lambda: sampler.compute_logprobs_async(PROMPT))[0])[0] is None
        assert await called(lambda: sampler.get_base_model_async())[0] == "fake"

    asyncio.run(run())


@pytest.mark.covers("U16", "U17")
def test_capabilities_come_from_the_rest_client(service: ServiceClient) -> None:
    offered, text = called(lambda: service.get_server_capabilities())
    assert isinstance(offered, types.GetServerCapabilitiesResponse)
    assert "RestClient().get_server_capabilities()" in text
    config = service.holder.config
    with RestClient(config=config) as rest:
        assert isinstance(rest.get_server_capabilities(), APIFuture)
        assert rest.get_server_capabilities().result(20) == offered
        before = len(rest.list_sessions().result(20).sessions)
        assert rest.get_server_capabilities().result(20) == offered
        assert len(rest.list_sessions().result(20).sessions) == before
    assert not hasattr(RestClient, "search_sessions_async")
    assert not hasattr(RestClient, "get_server_capabilities_async")


def test_methods_that_moved_name_their_new_place(
    service: ServiceClient, client: TrainingClient
) -> None:
    rest, text = called(lambda: service.create_rest_client())
    assert isinstance(rest, RestClient)
    assert "tinkex.RestClient()" in text
    future, text = called(lambda: rest.get_audit_log())
    assert "AdminClient.get_audit_log()" in text
    assert future.result(20).entries is not None
    path = client.save_state("a").result(20).path
    for name in ("load_state", "load_state_with_optimizer"):
        future, text = called(lambda name=name: getattr(client, name)(path))  # type: ignore[misc]
        assert "ServiceClient.create_training_client_from_state" in text
        assert future.result(20).path == path
