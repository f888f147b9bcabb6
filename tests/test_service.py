"""The service client: what it makes, of what, under which numbers; and that what fails leaves
nothing behind."""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import tinkex
from faulty import Answer, FaultyServer, Seen, faulty_server
from support import MODEL, is_coroutine_function, make_data, wait_until
from tinkex import AdamParams, Datum, ModelInput, ServiceClient, TrainingClient, types
from tinkex.wire import codec, protobuf_schema

KEY = "tml-very-secret"
STATE = "tinker://other:train:0/weights/a"
STEP = AdamParams(learning_rate=0.1)
PASSED = types.ForwardBackwardOutput(
    "ArrayRecord",
    [{"logprobs": types.TensorData.from_numpy(np.array([-1.0] * 3, np.float32))}],
    {"loss:sum": 1.0},
)
DATA = [
    Datum(ModelInput.from_ints([1, 2, 3]), {"target_tokens": [2, 3, 4], "weights": [1.0, 1.0, 0.0]})
]


@pytest.fixture
def faulty() -> Iterator[FaultyServer]:
    """A server on which everything works, until it is told otherwise."""
    with faulty_server() as server:

        def create(seen: Seen) -> Answer:
            return Answer(body={"request_id": f"model-{seen.json['model_seq_id']}"})

        def load(seen: Seen) -> Answer:
            return Answer(body={"request_id": f"load-{seen.json.get('model_seq_id', '')}"})

        def result(seen: Seen) -> Answer:
            kind, _, number = seen.json["request_id"].partition("-")
            if kind == "broken":
                return Answer(body={"error": "no such state", "category": "user"})
            if kind == "pass":
                return Answer(body=codec.encode(PASSED).data, content_type=codec.PROTOBUF)
            named = {"model_id": f"s:train:{number}"} if number else {}
            loaded = {"path": STATE, **named}
            return Answer(
                body={"model": named, "load": loaded, "loss": {"loss_id": "loss-1"}, "step": {}}[
                    kind
                ]
            )

        def bind(seen: Seen) -> Answer:
            return Answer(
                body={"sampling_session_id": f"s:sample:{seen.json['sampling_session_seq_id']}"}
            )

        server.script("create_model", create)
        server.script("load_weights", load)
        server.script("unload_model", Answer(body={"request_id": "unload"}))
        server.script("optim_step", Answer(body={"request_id": "step"}))
        server.script("forward_backward", Answer(body={"request_id": "pass"}))
        server.script("create_sampling_session", bind)
        server.script("create_custom_loss", Answer(body={"request_id": "loss"}))
        server.script("retrieve_future", result)
        server.script(
            "weights_info", Answer(body={"base_model": "m", "is_lora": True, "lora_rank": 8})
        )
        yield server


@pytest.fixture
def service(faulty: FaultyServer) -> Iterator[ServiceClient]:
    with ServiceClient(base_url=faulty.base_url, api_key=KEY) as client:
        yield client


def made(service: ServiceClient, method: str, twin: str, *args: Any, **named: Any) -> Any:
    """Call a method or its async twin."""
    if twin == "sync":
        return getattr(service, method)(*args, **named).result()

    async def call() -> Any:
        with pytest.warns(FutureWarning, match=f"{method}_async"):
            call = getattr(service, f"{method}_async")(*args, **named)
        return await call

    return asyncio.run(call())


both = pytest.mark.parametrize("twin", ["sync", "async"])

# ── runs and samplers ─────────────────────────────────────────────────────────────────────────────


@both
@pytest.mark.covers("C34", "C37", "C40", "24.service.1")
def test_runs_and_samplers_are_numbered_from_zero(
    faulty: FaultyServer, service: ServiceClient, twin: str
) -> None:
    runs = [made(service, "create_lora_training_client", twin, "m") for _ in range(2)]
    samplers = [made(service, "create_sampling_client", twin, base_model="m") for _ in range(2)]
    assert [run.model_id for run in runs] == ["s:train:0", "s:train:1"]
    assert [run.model_seq_id for run in runs] == [0, 1]
    assert [sampler.sampling_session_id for sampler in samplers] == ["s:sample:0", "s:sample:1"]
    assert [seen.json["model_seq_id"] for seen in faulty.requests("create_model")] == [0, 1]
    bound = [seen.json for seen in faulty.requests("create_sampling_session")]
    assert [body["sampling_session_seq_id"] for body in bound] == [0, 1]
    assert bound[0] == {
        "session_id": "s",
        "sampling_session_seq_id": 0,
        "base_model": "m",
        "type": "create_sampling_session",
    }


@pytest.mark.covers("C34", "24.service.1")
def test_clients_made_at_once_have_numbers_of_their_own(
    faulty: FaultyServer, service: ServiceClient
) -> None:
    async def many() -> list[TrainingClient]:
        return await asyncio.gather(*(service.create_lora_training_client("m") for _ in range(12)))

    assert sorted(client.model_seq_id for client in asyncio.run(many())) == list(range(12))
    assert len(faulty.requests("create_session")) == 1


@both
@pytest.mark.covers("C34", "C35", "24.service.2")
def test_run_options_are_folded_into_one_lora_config(
    faulty: FaultyServer, service: ServiceClient, twin: str
) -> None:
    made(service, "create_lora_training_client", twin, "m")
    made(
        service,
        "create_lora_training_client",
        twin,
        "m",
        rank=4,
        seed=0,
        train_mlp=False,
        train_unembed=False,
        user_metadata={"a": "b"},
        optimizer=types.DimuonOptimizerConfig(),
    )
    plain, chosen = (seen.json for seen in faulty.requests("create_model"))
    assert plain == {
        "session_id": "s",
        "model_seq_id": 0,
        "base_model": "m",
        "lora_config": {"rank": 32, "train_unembed": True, "train_mlp": True, "train_attn": True},
        "optimizer_config": {"type": "adamw"},
        "type": "create_model",
    }
    lora = {"rank": 4, "seed": 0, "train_unembed": False, "train_mlp": False, "train_attn": True}
    assert chosen["lora_config"] == lora
    assert chosen["user_metadata"] == {"a": "b"}
    assert chosen["optimizer_config"] == {"type": "dimuon", "version": 1}


@both
@pytest.mark.covers("C35", "24.service.3")
def test_run_without_trainable_parts_is_refused_before_sending(
    faulty: FaultyServer, service: ServiceClient, twin: str
) -> None:
    nothing = {"train_mlp": False, "train_attn": False, "train_unembed": False}
    with pytest.raises(AssertionError, match="train_mlp, train_attn and train_unembed"):
        made(service, "create_lora_training_client", twin, "m", **nothing)
    assert faulty.seen == []
    assert made(service, "create_lora_training_client", twin, "m").model_seq_id == 0


@both
@pytest.mark.covers("C37", "24.service.4")
def test_sampler_without_a_model_is_refused_before_sending(
    faulty: FaultyServer, service: ServiceClient, twin: str
) -> None:
    with pytest.raises(ValueError, match="model_path or base_model"):
        made(service, "create_sampling_client", twin)
    assert faulty.seen == []
    with pytest.raises(ValueError, match="tinker://"):
        made(service, "create_sampling_client", twin, model_path="/tmp/weights")
    assert faulty.requests("create_sampling_session") == []


@pytest.mark.covers("24.service.7")
def test_two_services_share_no_state(faulty: FaultyServer) -> None:
    opened = iter(["a", "b"])
    faulty.script("create_session", lambda _: Answer(body={"session_id": next(opened)}))
    for name in "ab":
        faulty.script(f"sessions/{name}/finish", Answer())
    configured = iter([{"fwdbwd_max_chunk_len": 1}, {}])
    faulty.script("client/config", lambda _: Answer(body=next(configured)))
    with (
        ServiceClient(base_url=faulty.base_url, api_key=KEY, user_metadata={"who": "a"}) as a,
        ServiceClient(base_url=faulty.base_url, api_key="tml-other", project_id="p") as b,
    ):
        clients = [service.create_lora_training_client("m").result() for service in (a, b)]
        assert [client.model_seq_id for client in clients] == [0, 0]
        assert [client.holder.session_id for client in clients] == ["a", "b"]
        assert [client.holder.client_config.fwdbwd_max_chunk_len for client in clients] == [1, 1024]
        assert clients[0].holder.gate is not clients[1].holder.gate
        a.close().result(5)
        assert clients[1].optim_step(STEP).result(5).metrics is None  # b is as it was
        with pytest.raises(RuntimeError, match="closed"):
            clients[0].optim_step(STEP)
    keys = [seen.headers["x-api-key"] for seen in faulty.requests("create_session")]
    assert keys == [KEY, "tml-other"]
    first, second = (seen.json for seen in faulty.requests("create_session"))
    assert (first["user_metadata"], "project_id" in first) == ({"who": "a"}, False)
    assert (second["user_metadata"], second["project_id"]) == ({}, "p")


@pytest.mark.covers("C39", "D10")
def test_closing_a_services_rest_client_keeps_the_service(
    faulty: FaultyServer, service: ServiceClient
) -> None:
    faulty.script(
        "training_runs",
        Answer(body={"training_runs": [], "cursor": {"offset": 0, "limit": 1, "total_count": 0}}),
    )
    client = service.create_lora_training_client("m").result()
    with pytest.warns(FutureWarning, match="RestClient"):
        rest = service.create_rest_client()
    with rest:
        assert rest.list_training_runs().result(5).training_runs == []
    assert client.optim_step(STEP).result(5).metrics is None
    assert faulty.requests("sessions/s/finish") == []
    assert len(faulty.requests("create_session")) == 1


# ── runs of saved states ──────────────────────────────────────────────────────────────────────────

LOADING = pytest.mark.parametrize("method", ["", "_with_optimizer"], ids=["weights", "optimizer"])


@both
@LOADING
@pytest.mark.covers("C36", "24.service.5", "24.service.6")
def test_resumed_run_has_the_shape_of_its_checkpoint(
    faulty: FaultyServer, service: ServiceClient, method: str, twin: str
) -> None:
    info = {
        "base_model": "big",
        "is_lora": True,
        "lora_rank": 8,
        "train_mlp": False,
        "train_unembed": None,
    }
    faulty.script("client/config", Answer(404))
    faulty.script(
        "weights_info", Answer(body=info | {"optimizer_config": {"type": "dimuon", "version": 1}})
    )
    client = made(
        service,
        f"create_training_client_from_state{method}",
        twin,
        STATE,
        user_metadata={"a": "b"},
        weights_access_token="tml-foreign",
    )
    asked, created, loaded = (
        faulty.requests(path)[0] for path in ("weights_info", "create_model", "load_weights")
    )
    assert asked.json == {"tinker_path": STATE}
    # a foreign checkpoint is described to its token
    assert asked.headers["x-api-key"] == "tml-foreign"
    assert created.headers["x-api-key"] == loaded.headers["x-api-key"] == KEY
    assert created.json["base_model"] == "big"
    assert created.json["lora_config"] == {
        "rank": 8,
        "train_unembed": True,
        "train_mlp": False,
        "train_attn": True,
    }
    assert created.json["optimizer_config"] == {"type": "dimuon", "version": 1}
    assert created.json["user_metadata"] == {"a": "b"}
    assert loaded.json == {
        "model_id": "s:train:0",
        "seq_id": 1,
        "path": STATE,
        "optimizer": bool(method),
        "weights_access_token": "tml-foreign",
        "type": "load_weights",
    }
    client.optim_step(STEP).result(5)
    # the first number was the loading's
    assert faulty.requests("optim_step")[0].json["seq_id"] == 2


@both
@LOADING
@pytest.mark.covers("C36", "24.service.6")
def test_resumed_run_is_made_in_one_request_if_supported(
    faulty: FaultyServer, service: ServiceClient, method: str, twin: str
) -> None:
    service.create_lora_training_client("m").result()
    options = {} if method else {"optimizer": types.DimuonOptimizerConfig()}
    client = made(
        service,
        f"create_training_client_from_state{method}",
        twin,
        STATE,
        base_model="m",
        user_metadata={"a": "b"},
        weights_access_token="tml-foreign",
        **options,
    )
    assert (client.model_id, client.model_seq_id) == ("s:train:1", 1)
    (loaded,) = faulty.requests("load_weights")
    expected = {
        "session_id": "s",
        "model_seq_id": 1,
        "path": STATE,
        "optimizer": bool(method),
        "base_model": "m",
        "user_metadata": {"a": "b"},
        "weights_access_token": "tml-foreign",
        "type": "load_weights",
    }
    assert loaded.json == expected | (
        {} if method else {"optimizer_config": {"type": "dimuon", "version": 1}}
    )
    assert faulty.requests("weights_info") == []
    assert len(faulty.requests("create_model")) == 1
    client.optim_step(STEP).result(5)
    assert faulty.requests("optim_step")[0].json["seq_id"] == 1


def test_optimizer_that_is_given_wins_over_the_checkpoints(
    faulty: FaultyServer, service: ServiceClient
) -> None:
    faulty.script("client/config", Answer(404))
    service.create_training_client_from_state(
        STATE, "mine", optimizer=types.DimuonOptimizerConfig()
    ).result()
    created = faulty.requests("create_model")[0].json
    assert created["base_model"] == "mine"
    assert created["optimizer_config"] == {"type": "dimuon", "version": 1}


FAILURES = {
    "refused": Answer(404, {"detail": "no such state"}),
    "failed": Answer(body={"request_id": "broken"}),
    "nonsense": Answer(body={"neither": 1}),
}


@both
@pytest.mark.covers("D04", "24.code.18")
@pytest.mark.parametrize("failure", FAILURES)
def test_state_that_cannot_be_loaded_leaves_no_run_behind(
    faulty: FaultyServer, service: ServiceClient, failure: str, twin: str
) -> None:
    """The run made for it is let go, and its number is not used again."""
    faulty.script("client/config", Answer(404))
    faulty.script("load_weights", FAILURES[failure])
    with pytest.raises(tinkex.TinkerError, match=r"no such state|load_weights"):
        made(service, "create_training_client_from_state", twin, STATE)
    wait_until(lambda: faulty.requests("unload_model"))
    assert [seen.json for seen in faulty.requests("unload_model")] == [
        {"model_id": "s:train:0", "type": "unload_model"}
    ]
    assert service.create_lora_training_client("m").result().model_id == "s:train:1"


@pytest.mark.covers("D04")
def test_cancelled_load_leaves_no_run(faulty: FaultyServer, service: ServiceClient) -> None:
    faulty.script("client/config", Answer(404))
    faulty.script("load_weights", Answer(body={"request_id": "load-"}, delay=5))
    creating = service.create_training_client_from_state(STATE)
    wait_until(lambda: len(faulty.requests("load_weights")) == 1)
    creating.future().cancel()
    wait_until(lambda: faulty.requests("unload_model"))
    assert faulty.requests("unload_model")[0].json["model_id"] == "s:train:0"


@pytest.mark.covers("D04")
def test_error_does_not_wait_for_unloading(faulty: FaultyServer, service: ServiceClient) -> None:
    faulty.script("client/config", Answer(404))
    faulty.script("load_weights", Answer(404, {"detail": "no such state"}))
    gate = threading.Event()
    faulty.script("unload_model", Answer(until=gate.is_set))
    with pytest.raises(tinkex.NotFoundError, match="no such state"):
        service.create_training_client_from_state(STATE).result()
    assert not gate.is_set()
    gate.set()


@both
@pytest.mark.covers("C36", "C35")
@pytest.mark.parametrize(
    ("info", "error", "words"),
    [
        ({"is_lora": False}, ValueError, "not a LoRA checkpoint"),
        ({"is_lora": True}, ValueError, "not a LoRA checkpoint"),
        (
            {
                "is_lora": True,
                "lora_rank": 4,
                "train_mlp": False,
                "train_attn": False,
                "train_unembed": False,
            },
            AssertionError,
            "train_mlp",
        ),
    ],
    ids=["not-lora", "no-rank", "nothing"],
)
def test_checkpoint_that_is_no_adapter_makes_no_run(
    faulty: FaultyServer,
    service: ServiceClient,
    info: dict[str, Any],
    error: type[Exception],
    words: str,
    twin: str,
) -> None:
    faulty.script("client/config", Answer(404))
    faulty.script("weights_info", Answer(body={"base_model": "m", **info}))
    with pytest.raises(error, match=words):
        made(service, "create_training_client_from_state", twin, STATE)
    assert faulty.requests("create_model") == []


@pytest.mark.covers("W07", "C40")
def test_async_creators_do_not_block_the_callers_loop(
    faulty: FaultyServer, service: ServiceClient
) -> None:
    ticks, stood_still = 0, list[str]()

    def after_ticks(body: dict[str, Any]) -> Callable[[Seen], Answer]:
        """An answer that comes when the caller's loop has ticked on since it was asked for."""

        def answer(seen: Seen) -> Answer:
            wanted, latest = ticks + 5, time.monotonic() + 10

            def ticked() -> bool:
                if ticks < wanted and time.monotonic() >= latest:
                    stood_still.append(seen.path)
                    return True
                return ticks >= wanted

            return Answer(body=body, until=ticked)

        return answer

    faulty.script("get_info", after_ticks({"model_id": "m", "model_data": {"model_name": "m"}}))
    faulty.script("load_weights", after_ticks({"request_id": "load-"}))

    async def tick() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0.01)
            ticks += 1

    async def run() -> None:
        ticking = asyncio.create_task(tick())
        await service.create_training_client_from_state(STATE)
        await service.create_training_client_from_state_with_optimizer(STATE)
        await service.create_sampling_client(model_path=STATE)
        await service.get_server_capabilities_async()
        ticking.cancel()

    asyncio.run(run())
    assert ticks >= 20
    assert stood_still == []


@pytest.mark.covers("C40", "4.1/11")
def test_every_creator_has_an_async_twin_that_takes_the_same() -> None:
    names = [
        name
        for name in dir(ServiceClient)
        if name.startswith(("create_", "get_server")) and "_async" not in name
    ]
    # one waits for nothing, one gives a future
    waited_for = {"create_rest_client", "create_custom_loss"}
    assert len(names) >= 6
    for name in set(names) - waited_for:
        plain, twin = getattr(ServiceClient, name), getattr(ServiceClient, f"{name}_async")
        assert inspect.signature(plain) == inspect.signature(twin)
        assert is_coroutine_function(twin)


# ── custom losses ─────────────────────────────────────────────────────────────────────────────────


def weighted(logprobs: Any, weights: Any) -> Any:
    loss = -(logprobs * weights).sum()
    return loss, {"custom/nll:sum": loss, "custom/count:mean": weights.sum()}


def other(logprobs: Any) -> Any:
    return logprobs.sum(), {}


RANKS: dict[str, Any] = {"logprobs": 1, "weights": 1}


@pytest.fixture
def uploading(faulty: FaultyServer) -> FaultyServer:
    """A server that runs custom losses itself."""
    faulty.script("client/config", Answer(body={"custom_loss_server_side": True}))
    return faulty


def test_custom_loss_is_uploaded_and_used_by_its_name(
    uploading: FaultyServer, service: ServiceClient
) -> None:
    client = service.create_lora_training_client("m").result()
    handle = service.create_custom_loss(weighted, RANKS).result(10)
    assert (handle.name, handle.loss_id, handle.session_id) == ("weighted", "loss-1", "s")
    (created,) = uploading.requests("create_custom_loss")
    body = created.json
    assert {name: body[name] for name in body if name != "graph"} == {
        "session_id": "s",
        "custom_loss_seq_id": 0,
        "name": "weighted",
        "inputs": [{"name": "logprobs", "rank": 1}, {"name": "weights", "rank": 1}],
        "type": "create_custom_loss",
    }
    assert body["graph"]["format"] == 1
    assert [node["op"] for node in body["graph"]["nodes"][:2]] == ["placeholder"] * 2
    assert body["graph"]["nodes"][-1]["op"] == "output"
    assert client.forward_backward_custom(DATA, handle).result(10).metrics == {"loss:sum": 1.0}
    (passed,) = uploading.requests("forward_backward")
    assert passed.headers["content-type"] == codec.PROTOBUF
    wire = protobuf_schema.parse("ForwardBackwardRequest", passed.body)
    assert (wire.loss_fn, dict(wire.loss_fn_config)) == ("custom", {})
    assert {name: value.text for name, value in wire.loss_fn_config_v2.items()} == {
        "loss_id": "loss-1"
    }
    request = codec.decode(types.ForwardBackwardRequest, passed.body, codec.PROTOBUF)
    assert request.forward_backward_input.loss_fn == "custom"
    assert request.forward_backward_input.loss_fn_config == {"loss_id": "loss-1"}
    assert request.forward_backward_input.data == DATA
    assert (request.seq_id, request.forward_only) == (1, False)


def test_custom_losses_are_numbered_and_each_is_made_once(
    uploading: FaultyServer, service: ServiceClient
) -> None:
    service.create_custom_loss(weighted, RANKS).result(10)
    service.create_custom_loss(other, {"logprobs": 1}).result(10)
    with pytest.raises(ValueError, match="'weighted' was made before in this session"):
        service.create_custom_loss(weighted, RANKS).result(10)
    assert [
        seen.json["custom_loss_seq_id"] for seen in uploading.requests("create_custom_loss")
    ] == [0, 1]


def test_custom_loss_that_could_not_be_uploaded_can_be_made_again(
    uploading: FaultyServer, service: ServiceClient
) -> None:
    uploading.script(
        "create_custom_loss",
        Answer(422, {"detail": "no such function"}),
        Answer(body={"request_id": "loss"}),
    )
    with pytest.raises(tinkex.UnprocessableEntityError, match="no such function"):
        service.create_custom_loss(weighted, RANKS).result(10)
    assert service.create_custom_loss(weighted, RANKS).result(10).loss_id == "loss-1"


def test_custom_loss_that_cannot_be_traced_is_refused_at_once(
    faulty: FaultyServer, service: ServiceClient
) -> None:
    def branching(logprobs: Any) -> Any:
        return (logprobs.sum(), {}) if logprobs.sum() > 0 else (-logprobs.sum(), {})

    with pytest.raises(ValueError, match="cannot be traced"):
        service.create_custom_loss(branching, {"logprobs": 1})
    with pytest.raises(ValueError, match="input_ranks"):
        service.create_custom_loss(weighted, {"logprobs": 1})
    assert faulty.seen == []


def test_custom_loss_of_another_session_is_refused(
    faulty: FaultyServer, service: ServiceClient
) -> None:
    handle = service.create_custom_loss(other, {"logprobs": 1}).result(10)
    faulty.script("create_session", Answer(body={"session_id": "t"}))
    faulty.script("sessions/t/finish", Answer())
    with ServiceClient(base_url=faulty.base_url) as stranger:
        client = stranger.create_lora_training_client("m").result()
        with pytest.raises(ValueError, match="belongs to another session"):
            client.forward_backward_custom(DATA, handle)
    assert faulty.requests("forward_backward") == []


def test_custom_loss_is_computed_by_the_client_without_server_support(
    faulty: FaultyServer, service: ServiceClient
) -> None:
    client = service.create_lora_training_client("m").result()
    handle = service.create_custom_loss(weighted, RANKS).result(10)
    assert handle.loss_id is None
    metrics = client.forward_backward_custom(DATA, handle).result(10).metrics
    assert metrics["loss:sum"] == metrics["custom/nll:sum"] == 2.0
    assert metrics["custom/count:mean"] == 2.0
    assert faulty.requests("create_custom_loss") == []
    passes = [
        codec.decode(types.ForwardBackwardRequest, seen.body, codec.PROTOBUF)
        for seen in faulty.requests("forward_backward")
    ]
    assert [(each.seq_id, each.forward_only) for each in passes] == [(1, True), (2, False)]
    assert {each.forward_backward_input.loss_fn for each in passes} == {"cross_entropy"}
    gradient = passes[1].forward_backward_input.data[0].loss_fn_inputs["weights"].tolist()
    assert gradient == [1.0, 1.0, 0.0]  # of the negative log-likelihood by each log-probability


def test_custom_loss_trains_a_model_as_a_plain_function_does(server_url: str) -> None:
    """On our server, with numbers that matter."""
    data = make_data(types)

    def plain(_: list[Any], logprobs: list[Any]) -> Any:
        return -sum(each.sum() for each in logprobs), {}

    def traced(logprobs: Any) -> Any:
        return -logprobs.sum(), {}

    with ServiceClient(base_url=server_url) as service:
        one, two = (
            service.create_lora_training_client(MODEL, rank=4, seed=7).result() for _ in range(2)
        )
        handle = service.create_custom_loss(traced, {"logprobs": 1}).result(10)
        for client, loss in ((one, plain), (two, handle)):
            client.forward_backward_custom(data, loss).result(20)
            client.optim_step(AdamParams(learning_rate=0.01)).result(20)
        losses = [
            client.forward(data, "cross_entropy").result(20).metrics["loss:sum"]
            for client in (one, two)
        ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_clients_take_a_config_in_place_of_single_settings(server_url: str) -> None:
    config = tinkex.Config.resolve(base_url=server_url, timeout=7, user_metadata={"team": "evals"})
    with tinkex.ServiceClient(config=config) as service, tinkex.RestClient(config=config) as rest:
        assert service.get_server_capabilities().supported_models
        assert service.holder.config is config
        assert rest.get_session(service.holder.session_id).result().user_metadata == {
            "team": "evals"
        }
    with tinkex.AdminClient(config=config) as admin:
        assert admin.get_current_checkpoint_storage_usage().result() is not None


@pytest.mark.parametrize(
    "kind", [tinkex.ServiceClient, tinkex.RestClient, tinkex.AdminClient, tinkex.HttpClient]
)
def test_config_beside_single_settings_is_refused(kind: Any) -> None:
    with pytest.raises(ValueError, match="not both"):
        kind(config=tinkex.Config.resolve(base_url="local"), base_url="local")


def test_service_exposes_its_session_id(faulty: FaultyServer) -> None:
    with ServiceClient(base_url=faulty.base_url) as service:
        assert service.session_id == ""
        service.get_server_capabilities()
        assert service.session_id == "s" == ServiceClient.sharing(service.holder).session_id
