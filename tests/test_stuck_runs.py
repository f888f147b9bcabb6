"""A gradient that no step can apply: the error says where it is from, and three ways lead on."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

import tinkex
from support import MODEL, serving
from tinkex import ServiceClient, TrainingClient, types
from tinkex.engine.torch.engine import TorchEngine

if TYPE_CHECKING:
    from pathlib import Path

STEP = types.AdamParams(learning_rate=1e-3)


def datum(advantage: float) -> types.Datum:
    inputs = {
        "target_tokens": [5, 6],
        "logprobs": [-5.0, -5.0],
        "advantages": [advantage, advantage],
    }
    return types.Datum(types.ModelInput.from_ints([4, 5]), inputs)


@pytest.fixture(scope="module")
def engine(model_dir: Path) -> TorchEngine:
    return TorchEngine({MODEL: model_dir})


@pytest.fixture(scope="module")
def url(engine: TorchEngine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(engine, tmp_path_factory.mktemp("server")) as served:
        yield served


@pytest.fixture
def client(url: str) -> Iterator[TrainingClient]:
    with ServiceClient(base_url=url) as service:
        yield service.create_lora_training_client(MODEL, rank=4, seed=1).result()


def stick(client: TrainingClient) -> str:
    """Gather a gradient that is too large; the error of the step after it."""
    client.forward_backward([datum(1.0)], "importance_sampling").result(60)
    client.forward_backward([datum(1e30)], "importance_sampling").result(60)
    client.forward_backward([datum(2.0)], "importance_sampling").result(60)
    for _ in range(2):
        with pytest.raises(tinkex.RequestFailedError, match="the step overflows") as stuck:
            client.optim_step(STEP).result(60)
    return str(stuck.value)


def norm_of(stepped: types.OptimStepResponse) -> float:
    assert stepped.metrics is not None
    return stepped.metrics["grad_norm:mean"]


def steps(client: TrainingClient) -> None:
    """The run goes on as if nothing had been."""
    client.forward_backward([datum(1.0)], "importance_sampling").result(60)
    assert 0 < norm_of(client.optim_step(STEP).result(60)) < 1e6


def test_error_names_the_pass_and_the_ways_out(client: TrainingClient) -> None:
    message = stick(client)
    assert f"is from request {client.model_id}:2." in message
    for way in ("grad_clip_norm=1.0", "drop_gradients", "load_state"):
        assert way in message


def test_clipped_step_leads_on(client: TrainingClient) -> None:
    stick(client)
    clipped = types.AdamParams(learning_rate=1e-3, grad_clip_norm=1.0)
    assert norm_of(client.optim_step(clipped).result(60)) > 1e20
    steps(client)


def test_dropping_the_gradient_leads_on(client: TrainingClient) -> None:
    stick(client)
    dropped = client.drop_gradients()
    assert dropped == types.DropGradientsResponse(model_id=client.model_id, type="drop_gradients")
    assert norm_of(client.optim_step(STEP).result(60)) == 0
    steps(client)


async def test_gradient_is_dropped_in_its_turn(client: TrainingClient) -> None:
    passed = client.forward_backward([datum(1e30)], "importance_sampling")
    assert (await client.drop_gradients_async()).model_id == client.model_id
    await asyncio.wait_for(passed, 10)
    await client.forward_backward([datum(1.0)], "importance_sampling")
    assert 0 < norm_of(await client.optim_step(STEP)) < 1e6


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_loading_a_state_leads_on(client: TrainingClient) -> None:
    path = client.save_state("before").result(60).path
    stick(client)
    client.load_state(path).result(60)
    steps(client)


def test_gradients_whose_sum_is_not_finite_cannot_be_clipped(
    engine: TorchEngine, client: TrainingClient
) -> None:
    stick(client)
    gathered = engine._adapters[client.model_id].grad
    assert gathered is not None
    gathered.fill_(float("inf"))  # as two of the largest finite ones add up to
    clipped = types.AdamParams(learning_rate=1e-3, grad_clip_norm=1.0)
    with pytest.raises(tinkex.RequestFailedError, match="drop_gradients") as stuck:
        client.optim_step(clipped).result(60)
    assert "grad_clip_norm" not in str(stuck.value)
    client.drop_gradients()
    steps(client)


def test_resilient_client_drops_gradients_of_the_run_of_the_moment(
    client: TrainingClient,
) -> None:
    with tinkex.resilient(client, every=5) as trainer:
        stick(trainer)
        trainer.drop_gradients()
        steps(trainer)
