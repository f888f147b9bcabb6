"""The platform over transformers and peft, without tinkex's engine.

Use it to compare results, or to move away from tinkex. An adapter has the engine's shape: factors
on the same modules, alpha 32. Checkpoints are directories that peft reads.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tinkex.adapters.computing import Batch, ComputedSession, ComputingPlatform, Next
from tinkex.adapters.platforms import SessionConfig
from tinkex.types.optimizers import AdamParams
from tinkex.types.tensors import Array
from tinkex.types.training import LoraConfig

if TYPE_CHECKING:
    import torch

ALPHA = 32
MODULES = {
    "train_attn": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "train_mlp": ("gate_proj", "up_proj", "down_proj"),
    "train_unembed": ("lm_head",),
}


@dataclass(slots=True, kw_only=True)
class PeftSession(ComputedSession):
    """A model with its adapter, and the optimizer of its factors."""

    model: Any
    factors: list[torch.Tensor]
    optimizer: torch.optim.AdamW
    grads: list[torch.Tensor] | None = None


class PeftPlatform(ComputingPlatform[PeftSession]):
    """The platform over transformers and peft in this process; both must be installed.

    Its losses are cross_entropy, importance_sampling and ppo.

    Args:
        directory: The directory of the checkpoints; each gets a directory of its name.
        models: Directories of models by name; transformers finds the other names.
        device: The device to compute on.

    Example:
        >>> platform = PeftPlatform("checkpoints", {"tinkex/tiny": "path/to/tiny"})
        >>> session = platform.create_session(
        ...     SessionConfig(base_model="tinkex/tiny")
        ... )  # doctest: +SKIP
    """

    def __init__(
        self,
        directory: str | Path,
        models: Mapping[str, str | Path] | None = None,
        device: str = "cpu",
    ) -> None:
        self._directory, self._models, self._device = Path(directory), dict(models or {}), device

    def create_session(self, config: SessionConfig) -> PeftSession:
        """Load the model in float32, with a new adapter or that of a checkpoint."""
        import torch
        from peft import LoraConfig as PeftConfig, PeftModel, get_peft_model
        from transformers import AutoModelForCausalLM

        place = str(self._models.get(config.base_model, config.base_model))
        base = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32)
        with _calm(), torch.random.fork_rng():
            if config.checkpoint is not None:
                model: Any = PeftModel.from_pretrained(base, config.checkpoint, is_trainable=True)
            else:
                shape = config.shape
                torch.manual_seed(shape.seed or 0)
                targets = _targets(base, shape)
                settings = PeftConfig(
                    task_type="CAUSAL_LM", r=shape.rank, lora_alpha=ALPHA, target_modules=targets
                )
                model = get_peft_model(base, settings)
        # training differs from this only by dropout, which there is none of
        model = model.to(self._device).eval()
        factors = [parameter for parameter in model.parameters() if parameter.requires_grad]
        eos = base.generation_config.eos_token_id
        return PeftSession(
            base_model=config.base_model,
            vocab=base.config.vocab_size,
            context=base.config.max_position_embeddings,
            eos=frozenset([] if eos is None else [eos] if isinstance(eos, int) else eos),
            model=model,
            factors=factors,
            optimizer=torch.optim.AdamW(factors, foreach=False),
        )

    def _pass(self, session: PeftSession, batch: Batch) -> tuple[list[Array], list[Array]]:
        import torch

        sums = [torch.zeros_like(factor) for factor in session.factors]
        logprobs, values = [], []
        for example in batch.examples:
            tokens, targets = (
                torch.from_numpy(x).to(self._device) for x in (example.tokens, example.targets)
            )
            rows = session.model(tokens[None]).logits[0].float().log_softmax(-1)
            found = rows.gather(1, targets.reshape(len(tokens), -1)).reshape(targets.shape)
            logprobs.append(found.detach().cpu().numpy())
            value, slopes = batch.evaluate(example, logprobs[-1])
            values.append(value)
            pull = torch.from_numpy(slopes).to(found)
            for total, grad in zip(
                sums, torch.autograd.grad(found, session.factors, pull), strict=True
            ):
                total += grad
        pending = session.grads
        session.grads = (
            sums if pending is None else [a + b for a, b in zip(pending, sums, strict=True)]
        )
        return logprobs, values

    def _step(self, session: PeftSession, params: AdamParams) -> float:
        import torch

        if session.grads is None:
            return 0.0
        norm: float = float(sum(grad.double().square().sum() for grad in session.grads)) ** 0.5
        clip = params.grad_clip_norm
        scale = clip / norm if 0 < clip < norm else 1.0
        for factor, grad in zip(session.factors, session.grads, strict=True):
            factor.grad = grad * scale
        [group] = session.optimizer.param_groups
        group.update(lr=params.learning_rate, betas=(params.beta1, params.beta2), eps=params.eps)
        group["weight_decay"] = params.weight_decay
        with torch.enable_grad():
            session.optimizer.step()
        session.optimizer.zero_grad()
        session.grads = None
        return norm

    def save_checkpoint(self, session: PeftSession, name: str) -> str:
        """Write the adapter as peft does; return the directory."""
        if not name or Path(name).name != name:
            raise ValueError(f"a checkpoint's name must be a plain one, got {name!r}")
        directory = self._directory / name
        if directory.exists():
            raise ValueError(f"there is a checkpoint {name!r} already")
        session.model.save_pretrained(str(directory), save_embedding_layers=False)
        config = directory / "adapter_config.json"
        fields = json.loads(config.read_text()) | {"base_model_name_or_path": session.base_model}
        config.write_text(json.dumps(fields, indent=2) + "\n")
        return str(directory)

    def _begin(self, session: PeftSession, tokens: list[int]) -> tuple[Array, Next]:
        import torch

        cache: Any = None

        def logits(given: list[int]) -> Array:
            nonlocal cache
            with torch.inference_mode():
                batch = torch.tensor([given], device=self._device)
                out = session.model(batch, past_key_values=cache, use_cache=True)
                cache = out.past_key_values
                return np.asarray(out.logits[0, -1].float().cpu().numpy())

        return logits(tokens), lambda token: logits([token])


def _targets(model: Any, shape: LoraConfig) -> list[str]:
    """Return the modules of the model that an adapter of this shape changes."""
    present = {name.rsplit(".", 1)[-1] for name, _ in model.named_modules()}
    wanted = [name for flag, names in MODULES.items() if getattr(shape, flag) for name in names]
    if not (found := [name for name in wanted if name in present]):
        raise ValueError("the adapter's shape selects no module of this model")
    return found


@contextmanager
def _calm() -> Iterator[None]:
    """Hide the advice on tied embeddings, which is about merged weights."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Model has .tie_word_embeddings")
        yield
