"""Custom losses and regularizers through a training client: what is sent, in which order, and what
comes of it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from support import MODEL, make_data
from tinkex import ServiceClient, TrainingClient, types
from tinkex.client.losses import custom_passes
from tinkex.engine.api import PassJob
from tinkex.engine.fake import FakeEngine
from tinkex.regularizers import (
    L1,
    L2,
    Consistency,
    CustomLossOutput,
    RegularizerError,
    RegularizerSpec,
    regularized,
)

if TYPE_CHECKING:
    pass

STEP = types.AdamParams(learning_rate=0.1)


class Recording(FakeEngine):
    """Remembers the passes it was asked for."""

    passes: list[tuple[str, bool, list[types.Datum]]]

    def pass_start(self, work: PassJob) -> None:
        self.passes.append((work.loss_fn, work.backward, list(work.data)))
        super().pass_start(work)


@pytest.fixture
def engine() -> Recording:
    engine = Recording()
    engine.passes = []
    return engine


@pytest.fixture
def client(fake_service: Callable[..., ServiceClient], engine: Recording) -> TrainingClient:
    return fake_service(engine).create_lora_training_client("fake", rank=4).result()


def datum(*tokens: int, **inputs: Any) -> types.Datum:
    targets = {"target_tokens": [token + 1 for token in tokens]}
    return types.Datum(types.ModelInput.from_ints(list(tokens)), {**targets, **inputs})


DATA = [datum(1, 2, 3), datum(7, 8)]


def squares(_: Any, logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[Any, Any]]:
    return sum((x.square().sum() for x in logprobs), torch.zeros(())), {
        "parts": torch.tensor(2.0),
        3: len(logprobs),
    }


# ── custom losses ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.covers("1.13/2", "1.13/3", "1.13/5", "1.13/6")
def test_custom_loss_is_a_forward_pass_and_one_with_minus_its_gradient_as_weights(
    client: TrainingClient, engine: Recording
) -> None:
    seen: list[Any] = []

    def loss(data: Any, logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[Any, Any]]:
        seen.append((data, [x.detach().clone() for x in logprobs]))
        return squares(data, logprobs)

    output = client.forward_backward_custom(DATA, loss).result(20)
    [(first, forward, sent), (second, backward, weighted)] = engine.passes
    assert (first, forward, second, backward) == ("cross_entropy", False, "cross_entropy", True)
    [(data, logprobs)] = seen
    assert data == DATA
    assert [len(x) for x in logprobs] == [3, 2]  # separate tensors, in the order of the data
    for original, passed, again, x in zip(DATA, sent, weighted, logprobs, strict=True):
        assert passed.model_input == again.model_input == original.model_input
        for made in (passed, again):
            assert made.loss_fn_inputs["target_tokens"] == original.loss_fn_inputs["target_tokens"]
        assert again.loss_fn_inputs["weights"].dtype == "float32"
        np.testing.assert_allclose(again.loss_fn_inputs["weights"].to_numpy(), -2 * x.numpy())
    value = float(sum(x.square().sum() for x in logprobs))
    assert output.metrics["loss:sum"] == pytest.approx(value)
    assert (output.metrics["parts"], output.metrics["3"]) == (2.0, 2.0)
    assert len(output.loss_fn_outputs) == 2
    assert client.optim_step(STEP).result(20).metrics is not None


@pytest.mark.covers("1.13/3")
@pytest.mark.parametrize(
    "written",
    [
        [-1.0, -2.0],
        {"data": [-1.0, -2.0], "dtype": "float32", "shape": [2]},
        {"data": [-1.0, -2.0], "dtype": "float32"},
    ],
    ids=["list", "tensor", "shapeless"],
)
def test_log_probabilities_are_read_as_tensors_and_as_bare_lists(written: Any) -> None:
    answer = {"loss_fn_output_type": "x", "loss_fn_outputs": [{"logprobs": written}], "metrics": {}}
    output = types.ForwardBackwardOutput.from_wire(answer)
    weighted, loss, _ = custom_passes.evaluate(squares, [datum(1, 2)], output)
    assert loss == 5
    assert weighted[0].loss_fn_inputs["weights"].tolist() == [2.0, 4.0]


@pytest.mark.covers("1.13/3")
@pytest.mark.parametrize("written", ["abc", 3, None, [["a"]], [[1.0], [1.0, 2.0]]])
def test_invalid_log_probabilities_are_refused(written: Any) -> None:
    with pytest.raises(ValueError, match="tensor"):
        types.ForwardBackwardOutput.from_wire({"loss_fn_outputs": [{"logprobs": written}]})


@pytest.mark.covers("1.13/1")
def test_datum_without_targets_is_refused_before_anything_is_sent(
    client: TrainingClient, engine: Recording
) -> None:
    bare = types.Datum(types.ModelInput.from_ints([1, 2]), {"weights": [1.0, 1.0]})
    with pytest.raises(ValueError, match="datum 1 has none"):
        client.forward_backward_custom(
            [DATA[0], bare], squares, regularizers=[RegularizerSpec(L1(), 1.0)]
        )
    assert engine.passes == []


@pytest.mark.covers("1.13/1", "1.13/2")
def test_numbers_of_both_passes_follow_each_other_also_in_chunks(
    client: TrainingClient, engine: Recording
) -> None:
    session = client._session
    session.client_config = session.client_config.model_copy(update={"fwdbwd_max_chunk_len": 1})
    before, after = (client.forward_backward(DATA[:1], "cross_entropy") for _ in range(2))
    custom = client.forward_backward_custom(DATA, squares)
    end = client.forward_backward(DATA[:1], "cross_entropy")
    for future in (before, after, custom, end):
        future.result(20)
    assert [backward for _, backward, _ in engine.passes] == [
        True,
        True,
        False,
        False,
        True,
        True,
        True,
    ]
    assert [data[0].model_input.length for _, _, data in engine.passes[2:6]] == [3, 2, 3, 2]


# ── regularizers ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.covers("1.13/4", "1.13/5", "1.13/6")
@pytest.mark.parametrize("keyword", [True, False])
def test_regularizers_are_folded_into_the_loss(
    client: TrainingClient, engine: Recording, keyword: bool
) -> None:
    terms = [RegularizerSpec(L1(), 0.5), RegularizerSpec(L2(), 2.0)]
    if keyword:
        output = client.forward_backward_custom(DATA, squares, regularizers=terms).result(20)
    else:
        output = client.forward_backward_custom(DATA, regularized(squares, terms)).result(20)
    logprobs = [record["logprobs"].to_numpy() for record in output.loss_fn_outputs]
    flat = np.concatenate(logprobs)
    base, size, square = (flat**2).sum(), np.abs(flat).sum(), (flat**2).sum()
    assert output.metrics["loss:sum"] == pytest.approx(base + 0.5 * size + 2 * square, rel=1e-5)
    assert output.metrics["base_loss"] == pytest.approx(base, rel=1e-5)
    assert output.metrics["regularizer_total"] == pytest.approx(0.5 * size + 2 * square, rel=1e-5)
    assert output.metrics["l1_sparsity/value"] == pytest.approx(size, rel=1e-5)
    assert output.metrics["l1_sparsity/l1_mean"] == pytest.approx(size / 5, rel=1e-5)
    assert output.metrics["parts"] == 2.0
    for made, x in zip(engine.passes[1][2], logprobs, strict=True):
        expected = -(2 * x + 0.5 * np.sign(x) + 4 * x)
        np.testing.assert_allclose(made.loss_fn_inputs["weights"].to_numpy(), expected, rtol=1e-5)


@pytest.mark.covers("1.13/5")
def test_fields_are_read_from_each_datum_and_stay_at_home(
    client: TrainingClient, engine: Recording
) -> None:
    data = [
        datum(1, 2, 3, original_logprobs=[-1.0, -2.0, -3.0]),
        datum(7, 8, original_logprobs=[-4.0, -5.0]),
    ]
    terms = [RegularizerSpec(Consistency(reduction="sum"), 1.0)]
    output = client.forward_backward_custom(data, squares, regularizers=terms).result(20)
    flat = np.concatenate([record["logprobs"].to_numpy() for record in output.loss_fn_outputs])
    expected = ((flat - np.array([-1, -2, -3, -4, -5])) ** 2).sum()
    assert output.metrics["consistency/value"] == pytest.approx(expected, rel=1e-5)
    assert all(
        set(made.loss_fn_inputs) == {"target_tokens", "weights"}
        for _, _, sent in engine.passes
        for made in sent
    )


@pytest.mark.covers("1.13/5", "1.13/6")
def test_observed_loss_reports_all_terms_and_trains_alike(
    client: TrainingClient, engine: Recording
) -> None:
    told: list[CustomLossOutput] = []
    loss = regularized(
        squares, [RegularizerSpec(L1(), 0.5)], track_grad_norms=True, on_output=told.append
    )
    output = client.forward_backward_custom(DATA, loss).result(20)
    assert told[0].loss == output.metrics["loss:sum"]
    assert told[0].total_grad_norm == output.metrics["total_grad_norm"]
    assert told[0].regularizers["l1_sparsity"].grad_norm == pytest.approx(5**0.5)
    flat = np.concatenate([record["logprobs"].to_numpy() for record in output.loss_fn_outputs])
    gradient = 2 * flat + 0.5 * np.sign(flat)
    assert told[0].total_grad_norm == pytest.approx(np.linalg.norm(gradient), rel=1e-5)
    weights = np.concatenate(
        [made.loss_fn_inputs["weights"].to_numpy() for made in engine.passes[1][2]]
    )
    np.testing.assert_allclose(weights, -gradient, rtol=1e-5)


@pytest.mark.covers("1.13/7")
def test_failing_regularizer_does_not_train(client: TrainingClient, engine: Recording) -> None:
    def broken(data: Any, logprobs: Any) -> Any:
        raise KeyError("mine")

    bad = client.forward_backward_custom(
        DATA, squares, regularizers=[RegularizerSpec(broken, 1.0, "bad")]
    )
    with pytest.raises(RegularizerError, match="'bad'") as caught:
        bad.result(20)
    assert isinstance(caught.value.__cause__, KeyError)
    with pytest.raises(RuntimeError) as refused:
        client.forward_backward_custom(DATA, squares).result(20)
    assert refused.value.__cause__ is caught.value
    assert [backward for _, backward, _ in engine.passes] == [False]


def test_specs_at_fault_are_refused_at_once(client: TrainingClient, engine: Recording) -> None:
    twice = [RegularizerSpec(L1(), 1.0), RegularizerSpec(L1(), 2.0)]
    with pytest.raises(ValueError, match="repeated: l1_sparsity"):
        client.forward_backward_custom(DATA, squares, regularizers=twice)
    with pytest.raises(ValueError, match="item 0 is a function"):
        client.forward_backward_custom(DATA, squares, regularizers=[squares])  # type: ignore[list-item]
    assert engine.passes == []


async def test_asynchronous_call_takes_regularizers_and_their_code_runs_elsewhere(
    client: TrainingClient,
) -> None:
    threads: list[str] = []

    def noting(data: Any, logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, Any]]:
        threads.append(threading.current_thread().name)
        return logprobs[0].sum(), {}

    terms = [RegularizerSpec(noting, 1.0, "noting")]
    output = await client.forward_backward_custom(DATA, squares, regularizers=terms)
    assert "noting/value" in output.metrics
    assert threads == ["tinkex-regularizer-noting"]


def test_regularizers_of_a_loss_that_the_server_could_run(service: ServiceClient) -> None:
    client = service.create_lora_training_client(MODEL, rank=4, seed=1).result()

    def negated(logprobs: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return -logprobs.sum(), {}

    handle = service.create_custom_loss(negated, {"logprobs": 1}).result(60)
    data = make_data(types)
    plain = client.forward_backward_custom(data, handle).result(60).metrics["loss:sum"]
    output = client.forward_backward_custom(
        data, handle, regularizers=[RegularizerSpec(L1(), 0.5)]
    ).result(60)
    assert output.metrics["base_loss"] == pytest.approx(plain, rel=1e-5)
    assert output.metrics["loss:sum"] == pytest.approx(1.5 * plain, rel=1e-5)  # |x| = -x


def test_regularizer_trains(service: ServiceClient) -> None:
    """Cross-entropy made of a base loss without effect and an L1 norm takes cross-entropy's own
    steps."""
    data = make_data(types)

    def nothing(_: Any, logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, Any]]:
        return 0 * logprobs[0].sum(), {}

    ours, theirs = (
        service.create_lora_training_client(MODEL, rank=4, seed=1).result() for _ in range(2)
    )
    for _ in range(3):
        custom = ours.forward_backward_custom(
            data, nothing, regularizers=[RegularizerSpec(L1(), 1.0)]
        )
        plain = theirs.forward_backward(data, "cross_entropy")
        for client in (ours, theirs):
            client.optim_step(types.AdamParams(learning_rate=0.01))
        assert custom.result(60).metrics["loss:sum"] == pytest.approx(
            plain.result(60).metrics["loss:sum"], rel=1e-4
        )
