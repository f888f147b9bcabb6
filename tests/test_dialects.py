"""Servers of other ages: one that knows JSON alone and few fields, and those of today, which never
see that form."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tinkex
from faulty import Answer, FaultyServer, Seen, faulty_server
from support import serving, wait_until
from tinkex import (
    AdamParams,
    Datum,
    ModelInput,
    SamplingParams,
    ServiceClient,
    TrainingClient,
    types,
)
from tinkex.client.http.exchange import HttpRequest, Reply
from tinkex.client.http.http_exchange import HttpExchange
from tinkex.engine.fake import FakeEngine
from tinkex.wire import codec

DATA = [Datum(ModelInput.from_ints([1, 2, 3]), {"target_tokens": [2, 3, 4]}) for _ in range(3)]
PROMPT = ModelInput.from_ints([5, 6, 7])
PARAMS = SamplingParams(max_tokens=2, seed=1)
STEP = AdamParams(learning_rate=0.1)

FIELDS = {
    "create_session": "tags user_metadata sdk_version project_id type",
    "create_model": "session_id model_seq_id base_model user_metadata lora_config type",
    "forward": "model_id seq_id forward_input",
    "forward_backward": "model_id seq_id forward_backward_input",
    "optim_step": "model_id seq_id adam_params",
    "save_weights": "model_id path seq_id ttl_seconds type",
    "load_weights": "model_id path seq_id optimizer type",
    "save_weights_for_sampler": "model_id path sampling_session_seq_id seq_id ttl_seconds type",
    "create_sampling_session": "session_id sampling_session_seq_id base_model model_path type",
    "asample": "sampling_session_id seq_id prompt sampling_params num_samples topk_prompt_logprobs "
    "prompt_logprobs "
    "type",
    "retrieve_future": "request_id allow_metadata_only",
    "weights_info": "tinker_path",
}
"""What such a server knows of each request; anything else it refuses."""
INNER = {
    "lora_config": "rank seed train_mlp train_attn train_unembed",
    "forward_input": "data loss_fn loss_fn_config",
    "forward_backward_input": "data loss_fn loss_fn_config",
    "adam_params": "learning_rate beta1 beta2 eps weight_decay grad_clip_norm",
    "sampling_params": "max_tokens temperature top_k top_p seed stop",
}


class OlderServer:
    """Strict, JSON alone. `at_once` are the operations whose results it gives without a future."""

    def __init__(
        self, faulty: FaultyServer, at_once: frozenset[str] = frozenset(), refusal: int = 422
    ) -> None:
        self.faulty, self.at_once, self.refusal = faulty, at_once, refusal
        self.failing: set[str] = set()
        """Operations whose futures fail."""
        self._results: dict[str, Any] = {}
        self._polls: dict[str, int] = {}
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        faulty.script("client/config", Answer(404, {"detail": "Not Found"}))
        for path in FIELDS:
            faulty.script(path, self.answer)

    def answer(self, seen: Seen) -> Answer:
        with self._lock:
            if "json" not in seen.headers.get("content-type", ""):
                return Answer(self.refusal, {"detail": "the body is not JSON"})
            body = seen.json
            unknown = [*(body.keys() - set(FIELDS[seen.path].split())), *self._unknown_inside(body)]
            unknown += [name for name, value in body.items() if value is None]
            if unknown:
                return Answer(422, {"detail": f"{seen.path}: unknown fields {sorted(unknown)}"})
            if seen.path == "retrieve_future":
                return self._poll(body["request_id"])
            result = getattr(self, seen.path)(body)
            if seen.path in self.at_once or seen.path in (
                "create_session",
                "create_sampling_session",
                "weights_info",
            ):
                return Answer(body=result)
            name = f"{seen.path}-{next(self._numbers)}"
            self._results[name] = result
            return Answer(body={"request_id": name})

    @staticmethod
    def _unknown_inside(body: dict[str, Any]) -> list[str]:
        return [
            name
            for part in INNER.keys() & body.keys()
            for name in body[part].keys() - set(INNER[part].split())
        ]

    def _poll(self, name: str) -> Answer:
        self._polls[name] = self._polls.get(name, 0) + 1
        if self._polls[name] == 1:
            return Answer(body={"status": "pending"})
        if name.rpartition("-")[0] in self.failing:
            return Answer(
                body={"status": "failed", "error": {"message": "no room", "category": "server"}}
            )
        return Answer(body={"status": "completed", "result": self._results[name]})

    def create_session(self, _: Any) -> Any:
        return {"session_id": "s", "type": "create_session"}

    def create_model(self, body: Any) -> Any:
        return {"model_id": f"s:train:{body['model_seq_id']}", "type": "create_model"}

    def forward(self, body: Any) -> Any:
        return self._passed(body["forward_input"])

    def forward_backward(self, body: Any) -> Any:
        return self._passed(body["forward_backward_input"])

    def _passed(self, given: Any) -> Any:
        outputs = [
            {"logprobs": {"data": [-1.0] * 3, "dtype": "float32", "shape": [3]}}
            for _ in given["data"]
        ]
        total = float(len(given["data"]))
        return {
            "loss_fn_output_type": "ArrayRecord",
            "loss_fn_outputs": outputs,
            "metrics": {"loss:sum": total},
        }

    def optim_step(self, _: Any) -> Any:
        return {"metrics": {"grad_norm:mean": 2.0}}

    def save_weights(self, body: Any) -> Any:
        return {
            "path": f"tinker://{body['model_id']}/weights/{body['path']}",
            "type": "save_weights",
        }

    def load_weights(self, body: Any) -> Any:
        return {"path": body["path"], "type": "load_weights"}

    def weights_info(self, _: Any) -> Any:
        return {"base_model": "m", "is_lora": True, "lora_rank": 8}

    def save_weights_for_sampler(self, body: Any) -> Any:
        name = body.get("path", f"nameless-{body.get('sampling_session_seq_id')}")
        return {
            "path": f"tinker://{body['model_id']}/sampler_weights/{name}",
            "type": "save_weights_for_sampler",
        }

    def create_sampling_session(self, body: Any) -> Any:
        return {
            "sampling_session_id": f"s:sample:{body['sampling_session_seq_id']}",
            "type": "create_sampling_session",
        }

    def asample(self, body: Any) -> Any:
        drawn = {"tokens": [7, 8], "logprobs": [-1.0, -2.0], "stop_reason": "length"}
        answer: dict[str, Any] = {"sequences": [drawn] * body["num_samples"], "type": "sample"}
        if body.get("prompt_logprobs"):
            answer["prompt_logprobs"] = [None, -1.5, -2.5]
        return answer


EVERYTHING = frozenset(FIELDS) - {"retrieve_future"}


@pytest.fixture
def faulty() -> Iterator[FaultyServer]:
    with faulty_server() as server:
        yield server


def everything(service: ServiceClient) -> None:
    """Each call of a training program, with the results that the older server gives."""
    client = service.create_lora_training_client("m", rank=8).result()
    assert client.model_id == "s:train:0"
    passed = client.forward(DATA, "cross_entropy").result(10)
    assert passed.metrics == {"loss:sum": 3.0}
    assert passed.loss_fn_outputs[0]["logprobs"].tolist() == [-1.0] * 3
    passes = [client.forward_backward(DATA, "ppo", {"clip_low_threshold": 0.8}) for _ in range(2)]
    step = client.optim_step(STEP)
    assert [each.result(10).metrics["loss:sum"] for each in passes] == [3.0, 3.0]
    assert step.result(10).metrics == {"grad_norm:mean": 2.0}
    path = client.save_state("a").result(10).path
    assert path == "tinker://s:train:0/weights/a"
    assert (
        client.save_weights_for_sampler("b").result(10).path
        == "tinker://s:train:0/sampler_weights/b"
    )
    sampler = client.save_weights_and_get_sampling_client().result()
    drawn = sampler.sample(PROMPT, 2, PARAMS).result(10)
    assert [sequence.tokens for sequence in drawn.sequences] == [[7, 8]] * 2
    assert len({sequence.sequence_id for sequence in drawn.sequences}) == 2
    assert sampler.compute_logprobs(PROMPT).result(10) == [None, -1.5, -2.5]
    again = service.create_training_client_from_state_with_optimizer(path).result()
    assert again.model_id == "s:train:1"
    assert again.optim_step(STEP).result(10).metrics == {"grad_norm:mean": 2.0}


def numbers(faulty: FaultyServer, model_id: str) -> list[int]:
    """The numbers of a run's requests, in the order of arrival."""
    bodies = [
        seen.json for seen in faulty.seen if seen.method == "POST" and seen.path != "client/config"
    ]
    return [
        body["seq_id"] for body in bodies if body.get("model_id") == model_id and "seq_id" in body
    ]


@pytest.mark.covers("D18")
@pytest.mark.parametrize("at_once", [frozenset(), EVERYTHING], ids=["futures", "at-once"])
def test_older_server_can_be_trained_on(faulty: FaultyServer, at_once: frozenset[str]) -> None:
    OlderServer(faulty, at_once)
    with ServiceClient(base_url=faulty.base_url) as service:
        everything(service)
    assert not any("protobuf" in seen.headers.get("content-type", "") for seen in faulty.seen)
    assert numbers(faulty, "s:train:0") == list(range(1, 8))
    assert numbers(faulty, "s:train:1") == [1, 2]
    (opened,) = faulty.requests("create_sampling_session")
    assert opened.json["model_path"] == "tinker://s:train:0/sampler_weights/nameless-0"
    assert len(faulty.requests("retrieve_future")) == (0 if at_once else 2 * 13)


@pytest.mark.parametrize("operation", sorted(EVERYTHING))
def test_single_result_may_be_ready_at_once(faulty: FaultyServer, operation: str) -> None:
    OlderServer(faulty, frozenset({operation}))
    with ServiceClient(base_url=faulty.base_url) as service:
        everything(service)


def test_requested_newer_fields_are_sent_to_old_servers(faulty: FaultyServer) -> None:
    """A server that does not know it says so; it is not left out in silence."""
    OlderServer(faulty)
    with ServiceClient(base_url=faulty.base_url) as service:
        client = service.create_lora_training_client("m").result()
        with pytest.raises(tinkex.UnprocessableEntityError, match="overwrite"):
            client.save_state("a", overwrite=True).result(10)
        sampler = service.create_sampling_client(base_model="m").result()
        with pytest.raises(tinkex.UnprocessableEntityError, match="topk_sample_logprobs"):
            sampler.sample(PROMPT, 1, PARAMS, topk_sample_logprobs=3).result(10)
        with pytest.raises(tinkex.UnprocessableEntityError, match="optimizer_config"):
            service.create_lora_training_client(
                "m", optimizer=types.DimuonOptimizerConfig()
            ).result()


def test_failure_on_an_older_server_is_the_calls_own(faulty: FaultyServer) -> None:
    server = OlderServer(faulty)
    server.failing = {"optim_step"}
    with ServiceClient(base_url=faulty.base_url) as service:
        client = service.create_lora_training_client("m").result()
        with pytest.raises(tinkex.RequestFailedError, match="no room") as caught:
            client.optim_step(STEP).result(10)
        assert caught.value.category == "server"
        assert client.forward(DATA, "cross_entropy").result(10).metrics == {"loss:sum": 3.0}


def test_number_that_was_refused_is_spent_in_the_older_form(faulty: FaultyServer) -> None:
    """The server would wait for it otherwise, and reads nothing but JSON."""
    server = OlderServer(faulty)

    def refuse(seen: Seen) -> Answer:
        return (
            Answer(422, {"detail": "bad data"}) if seen.json["seq_id"] == 1 else server.answer(seen)
        )

    faulty.script("forward_backward", refuse)
    with ServiceClient(base_url=faulty.base_url) as service:
        client = service.create_lora_training_client("m").result()
        with pytest.raises(tinkex.UnprocessableEntityError, match="bad data"):
            client.forward_backward(DATA, "cross_entropy").result(10)
        assert client.optim_step(STEP).result(10).metrics == {"grad_norm:mean": 2.0}
    (spent,) = faulty.requests("forward")
    assert (spent.json["seq_id"], spent.json["forward_input"]["data"]) == (1, [])
    assert faulty.requests("optim_step")[0].json["seq_id"] == 2


def test_failure_may_come_at_once(faulty: FaultyServer) -> None:
    OlderServer(faulty)
    with ServiceClient(base_url=faulty.base_url) as service:
        client = service.create_lora_training_client("m").result()
        for told in (
            {"error": "too much", "category": "user"},
            {"status": "failed", "error": {"message": "too much"}},
        ):
            faulty.script("optim_step", Answer(body=told))
            with pytest.raises(tinkex.RequestFailedError, match="too much"):
                client.optim_step(STEP).result(10)
        faulty.script(
            "optim_step", Answer(body={"status": "completed", "result": {"metrics": {"x": 1.0}}})
        )
        assert client.optim_step(STEP).result(10).metrics == {"x": 1.0}


# ── finding out ───────────────────────────────────────────────────────────────────────────────────


PASSED = types.ForwardBackwardOutput(
    "ArrayRecord",
    [{"logprobs": types.TensorData.from_numpy(np.array([-1.0], np.float32))}],
    {"loss:sum": 1.0},
)


def is_protobuf(seen: Seen) -> bool:
    return codec.PROTOBUF in seen.headers["content-type"]


def forms(faulty: FaultyServer, *paths: str) -> list[str]:
    """In which form each pass arrived, those over nothing left out."""
    found = []
    for path in paths or ("forward", "forward_backward"):
        for seen in faulty.requests(path):
            if is_protobuf(seen):
                request = codec.decode(
                    types.ForwardBackwardRequest, seen.body, seen.headers["content-type"]
                )
                empty = not request.forward_backward_input.data
            else:
                body = seen.json
                empty = not (body.get("forward_input") or body["forward_backward_input"])["data"]
            found += [] if empty else ["protobuf" if is_protobuf(seen) else "json"]
    return found


@pytest.fixture
def unknown(faulty: FaultyServer) -> FaultyServer:
    """A server that refuses to tell its configuration, and so its age."""
    results = {
        "created": Answer(body={"model_id": "s:train:0"}),
        "pass": Answer(body=codec.encode(PASSED).data, content_type=codec.PROTOBUF),
        "step": Answer(body={"metrics": {}}),
    }
    faulty.script("forward_backward", Answer(body={"request_id": "pass"}))
    faulty.script("forward", Answer(body={"request_id": "pass"}))
    faulty.script("optim_step", Answer(body={"request_id": "step"}))
    faulty.script("retrieve_future", lambda seen: results[seen.json["request_id"]])
    return faulty


def json_alone(status: int) -> Callable[[Seen], Answer]:
    """Takes a pass in JSON, and refuses any other form."""

    def answer(seen: Seen) -> Answer:
        return (
            Answer(status, {"detail": "no JSON"})
            if is_protobuf(seen)
            else Answer(body={"request_id": "pass"})
        )

    return answer


@pytest.mark.parametrize("refusal", [400, 415, 422, 501])
def test_server_that_reads_no_protobuf_is_found_out_by_its_first_pass(
    unknown: FaultyServer, refusal: int
) -> None:
    unknown.script("forward_backward", json_alone(refusal))
    with ServiceClient(base_url=unknown.base_url) as service:
        client = service.create_lora_training_client("m").result()
        for _ in range(3):
            assert client.forward_backward(DATA, "cross_entropy").result(10).metrics == {
                "loss:sum": 1.0
            }
        assert client.forward(DATA, "cross_entropy").result(10).metrics == {"loss:sum": 1.0}
        other = service.create_lora_training_client("m").result()
        assert other.forward_backward(DATA, "cross_entropy").result(10).metrics == {"loss:sum": 1.0}
    assert forms(unknown, "forward_backward") == ["protobuf", "json", "json", "json", "json"]
    assert forms(unknown, "forward") == ["json"]
    assert [seen.json["seq_id"] for seen in unknown.requests("forward_backward")[1:]] == [
        1,
        2,
        3,
        1,
    ]


def test_first_forward_pass_reveals_an_older_server(unknown: FaultyServer) -> None:
    unknown.script("forward_backward", json_alone(415))
    with ServiceClient(base_url=unknown.base_url) as service:
        client = service.create_lora_training_client("m").result()
        assert client.forward(DATA, "cross_entropy").result(10).metrics == {"loss:sum": 1.0}
    assert forms(unknown, "forward_backward") == ["protobuf"]
    assert forms(unknown, "forward") == ["json"]


def test_all_chunks_of_a_first_call_reach_a_server_that_reads_no_protobuf(
    unknown: FaultyServer,
) -> None:
    """They go out together: each is refused, and none of them may be lost when another has shown
    the way."""
    unknown.script("client/config", Answer(body={"fwdbwd_max_chunk_len": 1}))
    refused = iter(range(10))

    def answer(seen: Seen) -> Answer:
        if is_protobuf(seen):
            return Answer(415, {"detail": "no JSON"}, delay=0.1 * next(refused))
        return Answer(body={"request_id": "pass"})

    unknown.script("forward_backward", answer)
    with ServiceClient(base_url=unknown.base_url) as service:
        client = service.create_lora_training_client("m").result()
        assert client.forward_backward(DATA, "cross_entropy").result(10).metrics == {
            "loss:sum": 3.0
        }
    taken = [
        seen.json["seq_id"]
        for seen in unknown.requests("forward_backward")
        if not is_protobuf(seen)
    ]
    assert sorted(taken) == [1, 2, 3]


def test_pass_that_is_refused_while_another_finds_out_is_sent_again(
    unknown: FaultyServer,
) -> None:
    """The second run's pass goes out before the first run's has shown how, and is refused after it
    has."""
    clients: list[Any] = []

    def is_found_out() -> bool:
        return bool(clients and clients[0]._session.transport.is_older)

    refused = iter(
        [Answer(415, {"detail": "no JSON"}), Answer(415, {"detail": "no JSON"}, until=is_found_out)]
    )
    taken = Answer(body={"request_id": "pass"}, until=lambda: forms(unknown).count("protobuf") == 2)
    unknown.script("forward_backward", lambda seen: next(refused) if is_protobuf(seen) else taken)
    with ServiceClient(base_url=unknown.base_url) as service:
        one, two = clients[:] = [
            service.create_lora_training_client("m").result() for _ in range(2)
        ]
        first = one.forward_backward(DATA, "cross_entropy")
        wait_until(lambda: forms(unknown) == ["protobuf", "json"])
        second = two.forward_backward(DATA, "cross_entropy")
        assert first.result(10).metrics == second.result(10).metrics == {"loss:sum": 1.0}
    assert forms(unknown) == ["protobuf", "json", "protobuf", "json"]


def test_refused_first_pass_has_the_error_of_the_newer_form(unknown: FaultyServer) -> None:
    """It was no matter of form: both are refused, and nothing has been learned about the server."""
    unknown.script(
        "forward_backward",
        lambda seen: Answer(
            422, {"detail": "token 9 is too large" if is_protobuf(seen) else "what is this"}
        ),
    )
    with ServiceClient(base_url=unknown.base_url) as service:
        client = service.create_lora_training_client("m").result()
        with pytest.raises(tinkex.UnprocessableEntityError, match="token 9 is too large"):
            client.forward_backward(DATA, "cross_entropy").result(10)
        assert forms(unknown) == ["protobuf", "json"]
        unknown.script("forward_backward", Answer(body={"request_id": "pass"}))
        assert client.forward_backward(DATA, "cross_entropy").result(10).metrics == {
            "loss:sum": 1.0
        }
        assert forms(unknown)[2:] == ["protobuf"]


def test_accepted_protobuf_pass_ends_the_fallback_to_json(unknown: FaultyServer) -> None:
    with ServiceClient(base_url=unknown.base_url) as service:
        client = service.create_lora_training_client("m").result()
        client.forward_backward(DATA, "cross_entropy").result(10)
        unknown.script("forward_backward", Answer(422, {"detail": "token 9 is too large"}))
        for _ in range(2):
            with pytest.raises(tinkex.UnprocessableEntityError, match="token 9 is too large"):
                client.forward_backward(DATA, "cross_entropy").result(10)
    assert set(forms(unknown)) == {"protobuf"}


@pytest.mark.parametrize("status", [401, 403, 404, 413])
def test_refusal_for_another_reason_is_no_matter_of_form(
    unknown: FaultyServer, status: int
) -> None:
    unknown.script("forward_backward", Answer(status, {"detail": "no"}))
    with ServiceClient(base_url=unknown.base_url) as service:
        client = service.create_lora_training_client("m").result()
        with pytest.raises(tinkex.APIStatusError) as caught:
            client.forward_backward(DATA, "cross_entropy").result(10)
        assert caught.value.status_code == status
    assert set(forms(unknown)) == {"protobuf"}


def test_accepted_chunk_proves_that_another_is_invalid(
    unknown: FaultyServer,
) -> None:
    unknown.script("client/config", Answer(body={"fwdbwd_max_chunk_len": 1}))

    def answer(seen: Seen) -> Answer:
        request = codec.decode(
            types.ForwardBackwardRequest, seen.body, seen.headers["content-type"]
        )
        if request.seq_id == 2 and request.forward_backward_input.data:
            return Answer(422, {"detail": "this chunk is bad"})
        return Answer(body={"request_id": "pass"}, delay=0.2)

    unknown.script("forward_backward", answer)
    with ServiceClient(base_url=unknown.base_url) as service:
        client = service.create_lora_training_client("m").result()
        with pytest.raises(tinkex.UnprocessableEntityError, match="this chunk is bad"):
            client.forward_backward(DATA, "cross_entropy").result(10)
    assert forms(unknown) == ["protobuf"] * 3


def test_our_own_server_never_gets_a_pass_in_the_older_form(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[str] = []
    send = HttpExchange.send

    async def watched(self: Any, request: HttpRequest) -> Reply:
        if request.path.endswith(("/forward", "/forward_backward")):
            sent.append(request.headers["Content-Type"])
        return await send(self, request)

    monkeypatch.setattr(HttpExchange, "send", watched)
    with serving(FakeEngine(), tmp_path) as url, ServiceClient(base_url=url) as service:
        client = service.create_lora_training_client("fake", rank=2).result()
        misnumbered = TrainingClient(service.holder, 0, client.model_id, first_seq_id=-1)
        with pytest.raises(tinkex.BadRequestError, match="seq_id must be at least 1"):
            misnumbered.forward_backward(DATA, "cross_entropy").result(10)
        client.forward(DATA, "cross_entropy").result(10)
        client.forward_backward(DATA, "cross_entropy").result(10)
    assert sent
    assert set(sent) == {codec.PROTOBUF}
