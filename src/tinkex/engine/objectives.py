"""What a pass minimises: a loss of the table, or one that was sent as a graph.

Both read the data they need, and give the values of the loss together with its gradient by the log-probabilities. What
goes wrong there names its datum, and is known before the model's own gradient is begun.

Axes: M targets of a micro-batch, L values of a loss: one per target, or one per datum where the loss is a graph.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from tinkex.engine import STABLE_REINFORCE, EngineError, Recalled
from tinkex.engine.copies import to_device
from tinkex.engine.custom import CompiledLoss
from tinkex.engine.losses import (
    CUSTOM,
    SEQUENCE,
    TARGETS,
    Evaluated,
    Examples,
    Loss,
    Room,
    check_shape,
    fill_settings,
    find_loss,
    present,
    read_examples,
    read_targets,
)
from tinkex.engine.stability import DEFAULTS, StableReinforce, read_settings
from tinkex.types.inputs import Datum
from tinkex.types.tensors import Array


class Objective(Protocol):
    """What a pass minimises."""

    @property
    def elementwise(self) -> bool:
        """Whether the values are reported beside the log-probabilities."""

    def read(self, data: Sequence[Datum], room: Room) -> Examples:
        """Check data before anything is computed."""

    def sizes(self, examples: Examples) -> Sequence[int]:
        """How many values each datum has."""

    def evaluate(
        self, logprobs_M: torch.Tensor, examples: Examples, indices: Sequence[int], *, backward: bool
    ) -> Evaluated:
        """The loss of the chosen data, and its gradient if there is to be one."""


def find_objective(
    name: str,
    config: Mapping[str, float | str],
    losses: Mapping[str, CompiledLoss],
    recalled: Sequence[Recalled] | None = None,
) -> Objective:
    """What a request names: a loss of the table, one of those that were sent, or the one that needs recordings."""
    if name == STABLE_REINFORCE:
        settings = read_settings(fill_settings(name, DEFAULTS, config))
        if recalled is None:
            raise EngineError(f"loss {name!r} is computed from recordings of its samples, and there are none")
        return StableReinforce(settings, recalled)
    if name != CUSTOM:
        return TableLoss(*find_loss(name, config))
    loss_id = config.get("loss_id")
    if not isinstance(loss_id, str) or len(config) > 1:
        raise EngineError(f"loss {CUSTOM!r} takes one setting, 'loss_id': the text that create_custom_loss gave")
    if loss_id not in losses:
        raise EngineError(f"there is no custom loss {loss_id!r}: create it, and again after a restart of the server")
    return GraphLoss(losses[loss_id])


@dataclass(frozen=True, slots=True)
class TableLoss:
    """A loss of the table with its settings."""

    loss: Loss
    settings: Mapping[str, float]

    @property
    def elementwise(self) -> bool:
        """Whether the values are reported beside the log-probabilities."""
        return self.loss.elementwise

    def read(self, data: Sequence[Datum], room: Room) -> Examples:
        """Check data before anything is computed."""
        return read_examples(data, self.loss, self.settings, room)

    def sizes(self, examples: Examples) -> Sequence[int]:
        """One value for each target."""
        return [targets.size for targets in examples.targets]

    def evaluate(
        self, logprobs_M: torch.Tensor, examples: Examples, indices: Sequence[int], *, backward: bool
    ) -> Evaluated:
        """The loss of the chosen data, and its gradient if there is to be one."""

        def put(arrays: Sequence[Array], dtype: torch.dtype) -> torch.Tensor:
            flat = np.concatenate([array.reshape(-1) for array in arrays])
            return to_device(flat, logprobs_M.device, dtype)

        inputs = {key: put([v[i] for i in indices], logprobs_M.dtype) for key, v in examples.inputs.items()}
        inputs[SEQUENCE] = put([np.full(examples.targets[i].size, n) for n, i in enumerate(indices)], torch.int64)
        leaf_M = logprobs_M.detach().requires_grad_(backward)
        losses_M = self.loss.function(leaf_M, inputs, self.settings)
        return Evaluated(losses_M, torch.autograd.grad(losses_M.sum(), leaf_M)[0] if backward else None)


@dataclass(frozen=True, slots=True)
class GraphLoss:
    """A loss that was sent as a graph: it takes one datum at a time, with inputs of their own shapes and dtypes."""

    compiled: CompiledLoss
    elementwise: bool = False

    def read(self, data: Sequence[Datum], room: Room) -> Examples:
        """Check data before anything is computed; inputs that the loss does not take are ignored."""
        ranks = dict(self.compiled.input_ranks)
        rank = ranks.pop("logprobs")
        tokens, targets = read_targets(data, 2, room)
        for index, array in enumerate(targets):
            self._check_rank(index, TARGETS, list(array.shape), rank)
        inputs = {
            name: [self._input(index, datum, name, axes) for index, datum in enumerate(data)]
            for name, axes in ranks.items()
        }
        return Examples(tokens, targets, inputs)

    def _input(self, index: int, datum: Datum, name: str, rank: int) -> Array:
        tensor = present(index, datum, name)
        shape = [tensor.values.size] if tensor.shape is None else tensor.shape
        if rank == 0 and shape == [1]:  # protobuf has no other way to write a single number
            return tensor.to_numpy().reshape(())
        self._check_rank(index, name, shape, rank)
        if rank > 0:
            check_shape(index, name, tensor, datum.model_input.length)
        return tensor.to_numpy()

    def _check_rank(self, index: int, name: str, shape: Sequence[int], rank: int) -> None:
        if len(shape) != rank:
            raise EngineError(
                f"datum {index}: {name!r} has shape {list(shape)}, custom loss {self.compiled.name!r} takes rank {rank}"
            )

    def sizes(self, examples: Examples) -> Sequence[int]:
        """One value for each datum."""
        return [1] * len(examples.targets)

    def evaluate(
        self, logprobs_M: torch.Tensor, examples: Examples, indices: Sequence[int], *, backward: bool
    ) -> Evaluated:
        """The loss of the chosen data, and its gradient if there is to be one."""
        losses, grads = [], []
        metrics: dict[str, list[float]] = {name: [] for name in self.compiled.metrics}
        parts = torch.split(logprobs_M.detach(), [examples.targets[index].size for index in indices])
        for index, part in zip(indices, parts, strict=True):
            leaf = part.view(examples.targets[index].shape).requires_grad_(backward)
            inputs = {name: torch.tensor(arrays[index]) for name, arrays in examples.inputs.items()}
            try:
                loss, told = self.compiled(leaf, inputs)
            except EngineError as error:
                raise EngineError(f"datum {index}: {error}") from error
            losses.append(loss.detach())
            for name, value in told.items():
                metrics[name].append(float(value))
            if backward:
                grads.append(self._gradient(index, loss, leaf))
        losses_L = torch.stack([loss.to(logprobs_M.dtype) for loss in losses])
        return Evaluated(losses_L, torch.cat(grads) if backward else None, metrics)

    def _gradient(self, index: int, loss: torch.Tensor, leaf: torch.Tensor) -> torch.Tensor:
        try:
            (grad,) = torch.autograd.grad(loss, leaf)
        except RuntimeError as error:  # an operation without a derivative
            text = str(error).partition("\n")[0][:300]
            raise EngineError(f"datum {index}: custom loss {self.compiled.name!r} has no gradient: {text}") from error
        return grad.reshape(-1)
