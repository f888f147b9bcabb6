"""Every way in which data can be wrong: what the message says, and that nothing changes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from tinkex.engine.api import EngineError, run_pass
from tinkex.engine.losses.table import LOSSES
from tinkex.engine.train import device_step
from tinkex.types.chunks import DmelChunk, EncodedTextChunk, ImageAssetPointerChunk, ImageChunk
from tinkex.types.inputs import Datum, ModelInput
from tinkex.types.tensors import TensorData

if TYPE_CHECKING:
    from engine.conftest import Data
    from tinkex.engine.torch.engine import TorchEngine

NAN = float("nan")
IMAGE = ImageChunk(data=b"x", format="png", expected_tokens=3)
POINTER = ImageAssetPointerChunk(format="png", location="x", expected_tokens=3)
AUDIO = DmelChunk(dmel=b"\x00\x01\x03")


def refused(
    engine: TorchEngine, batch: list[Datum], loss: str, config: dict[str, Any], message: str
) -> None:
    """The pass is refused, before any compute, with a gradient pending that stays as it is."""
    adapter = engine._adapters["a"]
    state, grad = adapter.state, adapter.grad
    copy = None if grad is None else grad.clone()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_step, "hidden_states", lambda *_, **__: pytest.fail("computed"))
        for backward in (True, False):
            with pytest.raises(EngineError, match=message) as caught:
                run_pass(engine, "a", batch, loss, config, backward=backward)
            assert caught.value.category == "user"
    assert adapter.state is state
    assert adapter.grad is grad
    assert copy is None or (grad is not None and torch.equal(grad, copy))


@pytest.fixture
def pending(engine: TorchEngine, data: Data) -> TorchEngine:
    run_pass(engine, "a", data(4), "cross_entropy", {})
    return engine


@pytest.mark.covers("S19")
@pytest.mark.parametrize(
    ("loss", "inputs", "message"),
    [
        (
            "cross_entropy",
            {"weights": [1.0] * 5},
            "datum 2: 'weights' has length 5 but the model input has length 6",
        ),
        (
            "cross_entropy",
            {"target_tokens": [1] * 7},
            "datum 2: 'target_tokens' has length 7 but .* length 6",
        ),
        (
            "ppo",
            {"logprobs": [1.0] * 7},
            "datum 2: 'logprobs' has length 7 but the model input has length 6",
        ),
        (
            "ppo",
            {"advantages": []},
            "datum 2: 'advantages' has length 0 but the model input has length 6",
        ),
        (
            "cross_entropy",
            {"weights": [1, 2, NAN, 4, 5, 6]},
            "datum 2: 'weights' holds NaN or infinity",
        ),
        (
            "ppo",
            {"advantages": [1, 2, float("inf"), 4, 5, 6]},
            "datum 2: 'advantages' holds NaN or infinity",
        ),
        ("ppo", {"logprobs": [NAN] * 6}, "datum 2: 'logprobs' holds NaN or infinity"),
        (
            "cross_entropy",
            {"target_tokens": [1, 2, 96, 4, 5, 6]},
            "datum 2: 'target_tokens' holds token 96, outside .* 96",
        ),
        (
            "cross_entropy",
            {"target_tokens": [1, 2, -1, 4, 5, 6]},
            "datum 2: 'target_tokens' holds token -1",
        ),
        (
            "cross_entropy",
            {"target_tokens": np.ones((6, 2), int)},
            r"'weights' has shape \[6\] but .* has \[6, 2\]",
        ),
        (
            "cross_entropy",
            {"target_tokens": np.ones(6)},
            "datum 2: 'target_tokens' must be int64, got float32",
        ),
        ("ppo", {"target_tokens": np.ones((6, 2), int)}, "one target per position"),
        ("cross_entropy", {"target_tokens": np.ones((6, 2, 2), int)}, "one target per position"),
        (
            "cross_entropy",
            {"reward": np.ones(6)},
            "datum 2: unknown input 'reward'; allowed are advantages, logprobs, mask",
        ),
    ],
)
def test_bad_inputs(
    pending: TorchEngine, data: Data, loss: str, inputs: dict[str, Any], message: str
) -> None:
    refused(pending, [*data(3, 9), *data(6, **inputs)], loss, {}, message)


@pytest.mark.covers("S19")
@pytest.mark.parametrize(
    ("loss", "missing"),
    [
        ("cross_entropy", "target_tokens"),
        ("ppo", "logprobs"),
        ("importance_sampling", "advantages"),
    ],
)
def test_missing_inputs(pending: TorchEngine, data: Data, loss: str, missing: str) -> None:
    (datum,) = data(6)
    del datum.loss_fn_inputs[missing]
    refused(pending, [*data(3), datum], loss, {}, f"datum 1: input '{missing}' is missing")


@pytest.mark.parametrize(
    ("chunks", "message"),
    [
        (
            [EncodedTextChunk(tokens=[1]), IMAGE],
            "datum 1: image chunks are not supported by this model",
        ),
        ([POINTER], "datum 1: image chunks are not supported by this model"),
        ([AUDIO], "datum 1: audio chunks are not supported by this model"),
        ([], "datum 1: the model input is empty"),
        ([EncodedTextChunk(tokens=[])], "datum 1: the model input is empty"),
        ([EncodedTextChunk(tokens=[1] * 49)], "datum 1: 49 tokens exceed the context window of 48"),
        (
            [EncodedTextChunk(tokens=[1, 96])],
            "datum 1: 'model_input' holds token 96, outside the vocabulary of 96",
        ),
    ],
)
def test_bad_model_inputs(
    pending: TorchEngine, data: Data, chunks: list[Any], message: str
) -> None:
    datum = Datum(ModelInput(chunks=chunks), {"target_tokens": TensorData([1, 2], "int64")})
    refused(pending, [*data(3), datum], "cross_entropy", {}, message)


@pytest.mark.parametrize(
    ("loss", "config", "message"),
    [
        ("sft", {}, "unknown loss 'sft'; known are " + ", ".join(LOSSES)),
        (
            "cross_entropy",
            {"beta": 1.0},
            "loss 'cross_entropy' has no setting 'beta'; known are none",
        ),
        (
            "ppo",
            {"clip_range": 0.2},
            "no setting 'clip_range'; known are clip_low_threshold, clip_high_threshold",
        ),
        (
            "ppo",
            {"clip_low_threshold": "low"},
            "'clip_low_threshold' must be a finite number, got 'low'",
        ),
        (
            "ppo",
            {"clip_low_threshold": NAN},
            "'clip_low_threshold' must be a finite number, got nan",
        ),
    ],
)
def test_bad_losses(
    pending: TorchEngine, data: Data, loss: str, config: dict[str, Any], message: str
) -> None:
    refused(pending, data(3), loss, config, message)


def test_no_data(pending: TorchEngine) -> None:
    refused(pending, [], "cross_entropy", {}, "data is empty")


def test_full_window_is_fine(engine: TorchEngine, data: Data) -> None:
    run_pass(engine, "a", data(48), "cross_entropy", {})
