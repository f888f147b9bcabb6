"""Custom losses that the server computes: the gradient of the client's own way, and mistakes that
name their datum."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

import tinkex
from support import MODEL, Wire, pass_json, serving, step_json
from tinkex import ServiceClient, TensorData, types
from tinkex.client.losses.loss_graphs import create_request, trace
from tinkex.engine.api import PassDone
from tinkex.engine.fake import FakeEngine
from tinkex.engine.torch.engine import TorchEngine
from tinkex.types.inputs import Datum, ModelInput
from traced_losses import EXAMPLES, Example

if TYPE_CHECKING:
    from pathlib import Path

    from tinkex.client.losses.loss_graphs import LossHandle


class Recording(TorchEngine):
    """An engine that remembers the gradient of each adapter after its last pass."""

    grads: dict[str, torch.Tensor | None]

    def pass_step(self) -> Sequence[PassDone]:
        ended = super().pass_step()
        for done in ended:
            name = done.job.rpartition(":")[0]
            grad = self._adapters[name].grad
            self.grads[name] = None if grad is None else grad.clone()
        return ended


@pytest.fixture(scope="module")
def engine(model_dir: Path) -> Recording:
    engine = Recording({MODEL: model_dir})
    engine.grads = {}
    return engine


@pytest.fixture(scope="module")
def url(engine: Recording, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(engine, tmp_path_factory.mktemp("server")) as url:
        yield url


@pytest.fixture
def service(url: str) -> Iterator[ServiceClient]:
    with ServiceClient(base_url=url) as client:
        yield client


def data_for(
    example: Example, lengths: tuple[int, ...] = (8, 4, 12, 6), seed: int = 0
) -> list[Datum]:
    """Data with the inputs that a loss takes, each with its own rank and dtype."""
    random = np.random.default_rng(seed)
    data = []
    for length in lengths:
        shapes: list[tuple[int, ...]] = [(), (length,), (length, 3)]
        inputs: dict[str, Any] = {
            "target_tokens": random.integers(2, 300, shapes[example.ranks["logprobs"]])
        }
        for name, rank in example.ranks.items():
            if name == "logprobs":
                continue
            kind = example.kinds.get(name)
            values: Any = random.uniform(0.05, 1.0, shapes[rank])
            if kind is not None:
                values = random.integers(0, 2 if kind == "binary" else 3, shapes[rank])
            inputs[name] = TensorData.from_numpy(np.asarray(values))
        data.append(Datum(ModelInput.from_ints(random.integers(2, 300, length)), inputs))
    return data


def assert_same_gradient(
    ours: torch.Tensor | None, theirs: torch.Tensor | None, relative: float = 1e-6
) -> None:
    assert ours is not None
    assert theirs is not None
    scale = float(theirs.abs().max())
    assert scale > 0
    assert float((ours - theirs).abs().max()) <= relative * scale


@pytest.mark.covers("S18")
@pytest.mark.parametrize(
    "name", ["neg_ll", "ppo", "dpo_pairs", "top_k", "indexed", "filled", "discounted", "focal"]
)
def test_server_loss_equals_the_clients(
    name: str, service: ServiceClient, engine: Recording
) -> None:
    example = EXAMPLES[name]
    handle = service.create_custom_loss(example.fn, example.ranks).result(60)
    assert handle.loss_id is not None
    data = data_for(example)
    results = {}
    for way, chosen in {"server": handle, "client": replace(handle, loss_id=None)}.items():
        client = service.create_lora_training_client(MODEL, rank=4, seed=1).result()
        client.forward_backward(data_for(EXAMPLES["neg_ll"], (5,)), "cross_entropy").result(60)
        client.optim_step(types.AdamParams(learning_rate=1e-2)).result(60)  # B away from zero
        result = client.forward_backward_custom(data, chosen).result(60)
        results[way] = (result, engine.grads[client.model_id])
    (ours, our_grad), (theirs, their_grad) = results["server"], results["client"]
    assert_same_gradient(our_grad, their_grad)
    names = {key for key in theirs.metrics if key.startswith("custom/")} | {"loss:sum"}
    assert names <= ours.metrics.keys()
    for key in names:
        assert ours.metrics[key] == pytest.approx(theirs.metrics[key], rel=1e-5, abs=1e-6)
    for one, two in zip(ours.loss_fn_outputs, theirs.loss_fn_outputs, strict=True):
        np.testing.assert_array_equal(one["logprobs"].to_numpy(), two["logprobs"].to_numpy())


OFFICIAL = """
import json, numpy as np, tinker, torch

def per_datum(logprobs, old, advantages, beta):
    ratio = torch.exp(logprobs - old)
    loss = -torch.minimum(ratio * advantages, torch.clamp(ratio, 0.8, 1.2) * advantages).sum()
    loss = loss + beta * (logprobs - old).pow(2).sum()
    return loss, {"custom/ratio:mean": ratio.mean(), "custom/loss:sum": loss}

rng = np.random.default_rng(0)
data = []
for length in (8, 3, 12):
    data.append(tinker.types.Datum(
        model_input=tinker.types.ModelInput.from_ints(rng.integers(2, 300, length).tolist()),
        loss_fn_inputs={
            "target_tokens": rng.integers(2, 300, length),
            "old": rng.uniform(-7, -5, length).astype(np.float32),
            "advantages": rng.normal(size=length).astype(np.float32),
            "beta": np.array(0.3, dtype=np.float32),
        },
    ))

def whole(data, logprobs):
    losses, ratios = [], []
    for datum, row in zip(data, logprobs):
        inputs = [datum.loss_fn_inputs[name].to_torch() for name in ("old", "advantages", "beta")]
        loss, metrics = per_datum(row, *inputs)
        losses.append(loss)
        ratios.append(float(metrics["custom/ratio:mean"]))
    total = torch.stack(losses).sum()
    return total, {"custom/ratio:mean": sum(ratios) / len(ratios), "custom/loss:sum": float(total)}

with tinker.ServiceClient() as service:
    ranks = {"logprobs": 1, "old": 1, "advantages": 1, "beta": 0}
    handle = service.create_custom_loss(per_datum, input_ranks=ranks).result(60)
    told = {}
    for way, loss in (("server", handle), ("client", whole)):
        client = service.create_lora_training_client("MODEL", rank=4, seed=1).result()
        result = client.forward_backward_custom(data, loss).result(60)
        told[way] = {"model": client.model_id, "metrics": result.metrics}
        client.optim_step(tinker.types.AdamParams(learning_rate=1e-3)).result(60)
    print(json.dumps(told))
""".replace("MODEL", MODEL)


@pytest.mark.covers("S18")
def test_official_client_gets_the_same_gradient_both_ways(url: str, engine: Recording) -> None:
    environment = {
        **os.environ,
        "TINKER_BASE_URL": url,
        "TINKER_API_KEY": "tml-any",
        "TINKER_TELEMETRY": "0",
    }
    run = subprocess.run(
        [sys.executable, "-c", OFFICIAL],
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    told = json.loads(run.stdout.splitlines()[-1])
    ours, theirs = told["server"], told["client"]
    assert "surrogate_loss:sum" in theirs["metrics"]
    assert "surrogate_loss:sum" not in ours["metrics"], "one pass is enough"
    for name in ("loss:sum", "custom/ratio:mean", "custom/loss:sum"):
        assert ours["metrics"][name] == pytest.approx(theirs["metrics"][name], rel=1e-5)
    assert_same_gradient(engine.grads[ours["model"]], engine.grads[theirs["model"]])


def loss_json(session: str, number: int = 0, name: str = "neg_ll") -> Any:
    example = EXAMPLES[name]
    return create_request(trace(example.fn, example.ranks, session), number).model_dump(mode="json")


def custom_json(model: str, seq_id: int, loss_id: Any, **inputs: Any) -> dict[str, Any]:
    body = pass_json(model, seq_id, weights={"data": [1.0, 2.0, 3.0], "dtype": "float32"}, **inputs)
    body["forward_backward_input"] |= {"loss_fn": "custom", "loss_fn_config": {"loss_id": loss_id}}
    return body


def test_loss_is_made_once_by_its_number(url: str, engine: Recording) -> None:
    wire = Wire(url)
    session = wire.session()
    first, again = (wire.post("create_custom_loss", loss_json(session)) for _ in range(2))
    assert first == again
    loss_id = wire.result(first["request_id"])["loss_id"]
    assert wire.result(first["request_id"])["type"] == "create_custom_loss"
    other = wire.run("create_custom_loss", loss_json(session, 0, "focal"))
    assert other == {
        "error": "request number 0 was used before, for another request",
        "category": "user",
    }
    assert wire.run("create_custom_loss", loss_json(session, 1, "focal"))["loss_id"] != loss_id
    mine = [known for known in engine._losses if known.startswith(session)]
    assert len(mine) == 2


def test_losses_go_with_their_session(url: str, engine: Recording) -> None:
    wire = Wire(url)
    session, other = wire.session(), wire.session()
    for each in (session, other):
        assert "loss_id" in wire.run("create_custom_loss", loss_json(each))
    wire.post(f"sessions/{session}/finish", {"reason": {"type": "success"}, "detail": None})
    # behind the dropping, on the worker
    wire.run("create_custom_loss", loss_json(other, 1, "focal"))
    assert not [known for known in engine._losses if known.startswith(session)]
    assert len([known for known in engine._losses if known.startswith(other)]) == 2
    assert wire.send("create_custom_loss", loss_json(session, 2)).status == 410
    assert wire.send("create_custom_loss", loss_json("nobody", 0)).status == 404


def test_loss_of_another_session_and_missing_loss_are_refused(url: str) -> None:
    wire = Wire(url)
    session, other = wire.session(), wire.session()
    loss_id = wire.run("create_custom_loss", loss_json(session))["loss_id"]
    model, stranger = (wire.model(each, base_model=MODEL) for each in (session, other))
    assert "loss:sum" in wire.run("forward_backward", custom_json(model, 1, loss_id))["metrics"]
    for number, (given, words) in enumerate(
        {
            loss_id: "belongs to another session",
            f"{other}:loss:7": "there is no custom loss",
            "nonsense": "there is no custom loss 'nonsense'",
            3.0: "'loss_id': the text that create_custom_loss gave",
        }.items(),
        1,
    ):
        outcome = wire.run("forward_backward", custom_json(stranger, number, given))
        assert outcome["category"] == "user"
        assert words in outcome["error"]
    bare = custom_json(stranger, 5, loss_id)
    bare["forward_backward_input"]["loss_fn_config"] = None
    assert "takes one setting, 'loss_id'" in wire.run("forward_backward", bare)["error"]


def test_graph_that_cannot_be_rebuilt_fails_in_band(url: str) -> None:
    wire = Wire(url)
    body = loss_json(wire.session())
    body["graph"]["nodes"][2] |= {"op": "call_function", "target": "os.system"}
    outcome = wire.run("create_custom_loss", body)
    assert outcome["category"] == "user"
    assert "custom loss 'neg_ll': node" in outcome["error"]
    assert "is not among the operations" in outcome["error"]


def unstable(logprobs: Any, weights: Any) -> Any:
    return (torch.sqrt(weights) * logprobs).sum() + (1 / weights).sum(), {}


@pytest.mark.covers("S14", "S19")
@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        (
            {"weights": np.array([1, 1, -1, 1], np.float32)},
            "datum 1: .*not finite; nothing was added",
        ),
        (
            {"weights": np.ones(3, np.float32)},
            "datum 1: 'weights' has length 3 but the model input has length 4",
        ),
        (
            {"target_tokens": np.array([5, 6, 7, 400])},
            "datum 1: 'target_tokens' holds token 400, outside",
        ),
    ],
)
def test_failure_names_its_datum_and_leaves_no_gradient(
    inputs: dict[str, Any], words: str, url: str, engine: Recording
) -> None:
    with ServiceClient(base_url=url) as service:
        handle = service.create_custom_loss(unstable, {"logprobs": 1, "weights": 1}).result(60)
        client = service.create_lora_training_client(MODEL, rank=4, seed=1).result()
        good, bad = data_for(EXAMPLES["neg_ll"], (6, 4))
        damaged = Datum(bad.model_input, {**bad.loss_fn_inputs, **inputs})
        with pytest.raises(tinkex.RequestFailedError, match=words) as caught:
            client.forward_backward_custom([good, damaged], handle).result(60)
        assert caught.value.category == "user"
        assert engine.grads.get(client.model_id) is None
        client.forward_backward_custom([good], handle).result(60)
        assert engine.grads[client.model_id] is not None


def test_step_of_the_graph_that_fails_names_datum_and_node(
    service: ServiceClient, engine: Recording
) -> None:
    example = EXAMPLES["dpo_pairs"]
    handle = service.create_custom_loss(example.fn, example.ranks).result(60)
    client = service.create_lora_training_client(MODEL, rank=4).result()
    with pytest.raises(
        tinkex.RequestFailedError, match="datum 2: custom loss 'dpo_pairs': node 'view'"
    ):
        # five make no pairs
        client.forward_backward_custom(data_for(example, (4, 8, 5)), handle).result(60)
    assert engine.grads[client.model_id] is None


def test_rank_of_an_input_is_checked_by_the_server_too(url: str) -> None:
    wire = Wire(url)
    session = wire.session()
    loss_id = wire.run("create_custom_loss", loss_json(session))["loss_id"]
    model = wire.model(session, base_model=MODEL)
    for number, (inputs, words) in enumerate(
        [
            ({"weights": {"data": [1.0] * 6, "dtype": "float32", "shape": [3, 2]}},
             "'weights' has shape [3, 2]"),
            ({"weights": {"data": [1.0], "dtype": "float32", "shape": []}}, "'weights' has shape "
                                                                            "[], custom loss"),
            ({"target_tokens": {"data": [1] * 6, "dtype": "int64", "shape": [3, 2]}},
             "takes rank 1"),
        ],
        1,
    ):  # fmt: skip
        body = custom_json(model, number, loss_id)
        body["forward_backward_input"]["data"][0]["loss_fn_inputs"] |= inputs
        outcome = wire.run("forward_backward", body)
        assert outcome["category"] == "user"
        assert words in outcome["error"]
        assert outcome["error"].startswith("datum 0: ")


def test_forward_pass_computes_the_loss_and_no_gradient(url: str, engine: Recording) -> None:
    wire = Wire(url)
    session = wire.session()
    loss_id = wire.run("create_custom_loss", loss_json(session))["loss_id"]
    model = wire.model(session, base_model=MODEL)
    body = custom_json(model, 1, loss_id)
    alone = wire.run("forward_backward", {**body, "forward_only": True})["metrics"]
    assert engine.grads[model] is None
    both = wire.run("forward_backward", {**body, "seq_id": 2})["metrics"]
    assert alone == both
    assert alone["custom/neg_ll:sum"] == pytest.approx(alone["loss:sum"])


def test_metrics_are_summed_or_averaged_over_the_data(service: ServiceClient) -> None:
    def counted(logprobs: Any, weights: Any) -> Any:
        mean = weights.mean()
        return -(logprobs * weights).sum(), {"custom/a:sum": mean, "custom/a:mean": mean}

    handle: LossHandle = service.create_custom_loss(counted, {"logprobs": 1, "weights": 1}).result(
        60
    )
    client = service.create_lora_training_client(MODEL, rank=4).result()
    data = data_for(EXAMPLES["neg_ll"], (3, 9, 5, 5))
    means = [float(datum.loss_fn_inputs["weights"].to_numpy().mean()) for datum in data]
    metrics = client.forward_backward_custom(data, handle).result(60).metrics
    assert metrics["custom/a:sum"] == pytest.approx(sum(means), rel=1e-6)
    assert metrics["custom/a:mean"] == pytest.approx(sum(means) / 4, rel=1e-6)


# ── the choice of an optimizer ────────────────────────────────────────────────────────────────────


def test_run_keeps_the_optimizer_it_was_created_with(
    service: ServiceClient, engine: Recording
) -> None:
    client = service.create_lora_training_client(
        MODEL, rank=4, optimizer=types.DimuonOptimizerConfig()
    ).result()
    assert client.get_info().optimizer_config == types.DimuonOptimizerConfig()
    data = data_for(EXAMPLES["neg_ll"])
    client.forward_backward(data, "cross_entropy").result(60)
    with pytest.raises(tinkex.RequestFailedError, match="this run's optimizer is dimuon") as caught:
        client.optim_step(types.AdamParams()).result(60)
    assert caught.value.category == "user"
    step = types.DimuonParams(learning_rate=0.01)
    metrics = client.optim_step(step).result(60).metrics
    assert metrics is not None
    assert metrics["grad_norm:mean"] > 0, "the gradient is still there"
    state = client.save_state("muon").result(60).path
    client.forward_backward(data, "cross_entropy").result(60)
    client.optim_step(step).result(60)
    expected = client.forward(data, "cross_entropy").result(60).metrics["loss:sum"]
    resumed = service.create_training_client_from_state_with_optimizer(state).result()
    assert resumed.get_info().optimizer_config == types.DimuonOptimizerConfig()
    resumed.forward_backward(data, "cross_entropy").result(60)
    resumed.optim_step(step).result(60)
    assert resumed.forward(data, "cross_entropy").result(60).metrics["loss:sum"] == expected


def test_run_made_of_a_checkpoint_has_its_optimizer_unless_another_is_named(
    tmp_path: Path,
) -> None:
    with serving(FakeEngine(), tmp_path) as url:
        wire = Wire(url)
        session = wire.session()
        fields = {"session_id": session, "base_model": "fake", "lora_config": {"rank": 4}}
        muon = {"type": "dimuon", "version": 1}
        model = wire.run("create_model", {**fields, "model_seq_id": 0, "optimizer_config": muon})[
            "model_id"
        ]
        path = wire.run("save_weights", {"model_id": model, "path": "a", "seq_id": 1})["path"]
        load = {"session_id": session, "path": path, "optimizer": False}
        for number, (named, expected) in enumerate(
            [({}, muon), ({"optimizer_config": {"type": "adamw"}}, "adamw")], 1
        ):
            made = wire.run("load_weights", {**load, "model_seq_id": number, **named})["model_id"]
            found = wire.post("get_info", {"model_id": made})["optimizer_config"]
            assert found == (expected if isinstance(expected, dict) else {"type": expected})
        outcome = wire.run("optim_step", step_json(model, 2))
        assert outcome["category"] == "user"
        assert "this run's optimizer is dimuon" in outcome["error"]
        dimuon = {"type": "dimuon", "learning_rate": 0.1, "grad_clip_norm": 0.0, "beta1": 0.9}
        assert "metrics" in wire.run(
            "optim_step", {"model_id": model, "seq_id": 3, "optimizer_params": dimuon}
        )


def test_unknown_optimizer_is_refused_in_band(url: str) -> None:
    wire = Wire(url)
    fields = {
        "session_id": wire.session(),
        "model_seq_id": 0,
        "base_model": MODEL,
        "lora_config": {"rank": 4},
    }
    outcome = wire.run("create_model", {**fields, "optimizer_config": {"type": "lion"}})
    assert outcome["category"] == "user"
    assert "'dimuon', 'version': 1" in outcome["error"]


def test_fake_engine_stands_in_for_custom_losses(tmp_path: Path) -> None:
    with serving(FakeEngine(), tmp_path) as url:
        wire = Wire(url)
        session = wire.session()
        model = wire.model(session)
        assert (
            "there is no custom loss"
            in wire.run("forward_backward", custom_json(model, 1, "x"))["error"]
        )
        loss_id = wire.run("create_custom_loss", loss_json(session))["loss_id"]
        ours = wire.run("forward_backward", custom_json(model, 2, loss_id))["metrics"]
        weights = {"data": [1.0, 2.0, 3.0], "dtype": "float32"}
        assert ours == wire.run("forward_backward", pass_json(model, 3, weights=weights))["metrics"]
