"""A LoRA adapter in training."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tinkex.engine.api import ADAMW, EngineError
from tinkex.engine.model.decoder import Decoder
from tinkex.engine.torch.lora import Factors, Layout
from tinkex.engine.train.optim import Overflow, check, make_state, state_type, step
from tinkex.types.optimizers import OptimizerConfigBase, OptimParams
from tinkex.types.training import LoraConfig


class Adapter:
    """Weights and optimizer state, and the gradient gathered since the last step."""

    def __init__(
        self,
        base_model: str,
        model: Decoder,
        lora: LoraConfig,
        optimizer: OptimizerConfigBase = ADAMW,
    ) -> None:
        kind = state_type(optimizer)
        self.base_model = base_model
        self.model = model
        self.layout = Layout(model.linears(), lora)
        dtype = torch.promote_types(model.embed_VD.dtype, torch.float32)
        self.state = make_state(kind, self.layout.initial(dtype, model.embed_VD.device))
        self.grad: Tensor | None = None
        self.largest: tuple[float, str] = (0.0, "")
        """The largest number in the gathered gradients, and the pass that it is from."""
        self._cast: tuple[Tensor, dict[str, Factors]] | None = None

    def factors(self) -> dict[str, Factors]:
        """Return the present weights, as the linear layers take them."""
        weights = self.state.weights
        if self._cast is None or self._cast[0] is not weights:
            self._cast = weights, self.layout.factors(weights.to(self.model.embed_VD.dtype))
        return self._cast[1]

    def step(self, params: OptimParams) -> dict[str, float]:
        """Apply the gathered gradient, if there is one."""
        check(params, type(self.state))
        norm = 0.0
        if self.grad is not None:
            try:
                self.state, norm = step(self.state, self.grad, params, self.layout)
            except Overflow as error:
                raise EngineError(self._stuck(error.norm)) from None
            self.drop_gradients()
        return {"grad_norm:mean": norm, "learning_rate:mean": float(params.learning_rate)}

    def gather(self, gradient: Tensor, largest: float, job: str) -> None:
        """Add the gradient of a pass."""
        self.grad = gradient if self.grad is None else self.grad + gradient
        self.largest = max(self.largest, (largest, job))

    def drop_gradients(self) -> None:
        """Clear the gradient."""
        self.grad, self.largest = None, (0.0, "")

    def _stuck(self, norm: float) -> str:
        """Explain why the step cannot be made; the gradient stays."""
        largest, job = self.largest
        clip = "clip the gradient (grad_clip_norm=1.0), " if math.isfinite(norm) else ""
        return (
            f"the step overflows: the gradient's norm is {norm:.3g}, and its largest number, "
            f"{largest:.3g}, is from "
            f"request {job}. Nothing was changed, and the next step has the same gradient: "
            f"{clip}drop it "
            "(drop_gradients) or load a saved state (load_state)"
        )
