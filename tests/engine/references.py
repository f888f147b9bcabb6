"""The same losses and gradients by other means: transformers, peft and autograd in float64."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from tinkex.engine.train.optim import AdamState, make_state

if TYPE_CHECKING:
    from pathlib import Path

    from tinkex.engine.torch.engine import TorchEngine
    from tinkex.engine.train.optim import Adapter
    from tinkex.types.inputs import Datum

CLIPS = {"ppo": (0.8, 1.2), "cispo": (0.0, 4.0), "gspo": (0.8, 1.2)}


class Case(NamedTuple):
    """A loss with its configuration."""

    loss: str
    config: dict[str, float | str]
    targets: int = 1


CASES = {
    "cross_entropy": Case("cross_entropy", {}),
    "several targets": Case("cross_entropy", {}, targets=3),
    "importance_sampling": Case("importance_sampling", {}),
    "ppo": Case("ppo", {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}),
    "cispo": Case("cispo", {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}),
    "dro": Case("dro", {"beta": 0.05}),
    "gspo": Case("gspo", {}),
    "custom": Case("custom", {"loss_id": "surprise"}),
}
"""Cases of the tests that run every loss; references are below or in a test of their own."""


def adapter_of(engine: TorchEngine, name: str = "a") -> Adapter:
    return engine._adapters[name]


def randomise(adapter: Adapter, seed: int = 3) -> None:
    """B away from zero, else A has no gradient."""
    noise = torch.randn(adapter.layout.size, generator=torch.Generator().manual_seed(seed))
    adapter.state = make_state(
        AdamState, adapter.state.weights + 0.03 * noise.to(adapter.state.weights)
    )


def gradients(adapter: Adapter) -> dict[str, torch.Tensor]:
    assert adapter.grad is not None
    return dict(adapter.layout.tensors(adapter.grad))


def reference_loss(
    name: str, p: torch.Tensor, datum: Datum, settings: dict[str, float]
) -> torch.Tensor:
    """The loss of one datum, position by position, written from its formula."""
    given = {
        key: torch.from_numpy(value.to_numpy()).double()
        for key, value in datum.loss_fn_inputs.items()
    }
    total = torch.zeros((), dtype=torch.float64)
    if name == "cross_entropy":
        return total - (given["weights"] * p).sum()
    q, advantages = given["logprobs"], given["advantages"]
    marks = given.get("sequence_ratio_mask", torch.ones_like(q))
    marked = [i for i in range(len(p)) if float(marks[i]) != 0]
    sequence = sum(float(p[i].detach() - q[i]) for i in marked) / max(len(marked), 1)
    for i in range(len(p)):
        if name == "importance_sampling":
            total = total - torch.exp(p[i] - q[i]) * advantages[i]
        elif name == "dro":
            total = total - (p[i] * advantages[i] - settings["beta"] / 2 * (p[i] - q[i]).square())
        else:
            low, high = (
                float(given[key][i]) if key in given else settings.get(key, default)
                for key, default in zip(
                    ("clip_low_threshold", "clip_high_threshold"), CLIPS[name], strict=True
                )
            )
            ratio = torch.exp(p[i] - q[i])
            if name == "gspo":
                ratio = np.exp(sequence) * torch.exp(p[i]) / torch.exp(p[i].detach())
            if name == "cispo":
                total = total - min(max(float(ratio.detach()), low), high) * p[i] * advantages[i]
            else:
                clipped = torch.clip(ratio, low, high)
                total = total - torch.min(ratio * advantages[i], clipped * advantages[i])
    return total


def reference_run(
    directory: Path, saved: Path, data: list[Datum], loss: str, settings: dict[str, float]
) -> tuple[float, list[np.ndarray[Any, Any]], dict[str, torch.Tensor]]:
    """Loss, log-probabilities and LoRA gradients by transformers, peft and autograd in float64."""
    base = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float64, attn_implementation="eager"
    )
    model = PeftModel.from_pretrained(
        base, str(saved), is_trainable=True, autocast_adapter_dtype=False
    ).double()
    total, logprobs = torch.zeros((), dtype=torch.float64), []
    for datum in data:
        logits = model(torch.from_numpy(datum.model_input.to_numpy()).long()[None]).logits[0]
        targets = torch.from_numpy(datum.loss_fn_inputs["target_tokens"].to_numpy())
        columns = targets if targets.ndim == 2 else targets[:, None]
        p = logits.log_softmax(-1).gather(1, columns).reshape(targets.shape)
        total = total + reference_loss(loss, p, datum, settings)
        logprobs.append(p.detach().numpy())
    total.backward()  # type: ignore[no-untyped-call]
    grads = {
        name.removeprefix("base_model.model.").removesuffix(".default.weight"): parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    return float(total.detach()), logprobs, grads


def assert_near(ours: Any, theirs: Any, relative: float) -> None:
    ours, theirs = np.asarray(ours, dtype=np.float64), np.asarray(theirs, dtype=np.float64)
    assert np.abs(ours - theirs).max() <= relative * np.abs(theirs).max()
