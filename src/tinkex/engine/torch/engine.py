"""The engine on PyTorch: base models, and adapters and samplers beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from tinkex.engine.api import (
    ADAMW,
    BaseModel,
    Engine,
    EngineError,
    Optimizer,
    PassDone,
    PassJob,
    SampleDone,
    SampleJob,
    Writer,
    find,
)
from tinkex.engine.base_models import describe, resolve
from tinkex.engine.file_formats import read_lora_config
from tinkex.engine.losses.graph_compiler import compile_graph
from tinkex.engine.losses.graph_loss import CompiledLoss
from tinkex.engine.model.decoder import BARE, Decoder, Lora
from tinkex.engine.sample.jobs import Job
from tinkex.engine.sample.passes import Source
from tinkex.engine.sample.sampler import Sampler
from tinkex.engine.torch.lora import Layout, module_groups
from tinkex.engine.torch.model_files import AdapterWriter, load_adapter, load_decoder, load_factors
from tinkex.engine.torch.openmp import calm_openmp, usable_cores
from tinkex.engine.train.objectives import find_objective
from tinkex.engine.train.optim import Adapter
from tinkex.engine.train.trainer import Trainer
from tinkex.types.optimizers import OptimParams
from tinkex.types.sessions import CreateCustomLossRequest
from tinkex.types.training import LoraConfig

if TYPE_CHECKING:
    from tokenizers import Tokenizer

STEP_TOKENS = {"cpu": 1024, "cuda": 8192}
"""The tokens of a step of training: about a second's work, since sampling waits for it."""

ROOMY = 120 << 30
"""The memory from which an accelerator takes twice as many."""


@dataclass
class _Base:
    """A base model on offer; its weights are read when first needed."""

    name: str
    directory: Path
    dtype: torch.dtype
    device: torch.device
    about: BaseModel = field(init=False)

    def __post_init__(self) -> None:
        self.about = describe(self.name, self.directory)

    @cached_property
    def model(self) -> Decoder:
        return load_decoder(self.directory, self.dtype, self.device)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        if not (self.directory / "tokenizer.json").exists():
            raise EngineError(
                f"stop strings need a tokenizer, and {self.name} has no tokenizer.json; give token "
                "ids in `stop`"
            )
        found: Tokenizer = self.about.tokenizer().backend_tokenizer
        return found

    def source(self, lora: Lora) -> Source:
        return Source(self.model, lora, self.about.eos_tokens, lambda: self.tokenizer)


class TorchEngine(Engine):
    """Trains and samples LoRA adapters on base models.

    Models are directories or hub ids by name, and are loaded when first used. Weights are float32
    on a CPU and bfloat16 on an accelerator unless `dtype` says otherwise; LoRA factors and
    optimizer state are float32 at least. `threads` is fixed at the start: on a CPU it decides the
    last bits of results.
    """

    def __init__(
        self,
        models: Mapping[str, Path | str],
        *,
        device: str = "cpu",
        dtype: torch.dtype | None = None,
        threads: int | None = None,
        micro_batch_tokens: int | None = None,
    ) -> None:
        calm_openmp()
        torch.set_num_threads(threads or min(torch.get_num_threads(), usable_cores()))
        where = torch.device(device)
        self.repeats = where.type == "cpu"  # on a GPU, last bits depend on the batch
        dtype = dtype or (torch.float32 if where.type == "cpu" else torch.bfloat16)
        self._bases = {
            name: _Base(name, resolve(source), dtype, where) for name, source in models.items()
        }
        self._trainer = Trainer(
            micro_batch_tokens or _step_tokens(where), ahead=where.type == "cuda"
        )
        self._dropped: list[PassDone] = []
        self._adapters: dict[str, Adapter] = {}
        self._losses: dict[str, CompiledLoss] = {}
        self._samplers: dict[str, Source] = {}
        self._frozen: dict[str, tuple[str, Layout, torch.Tensor]] = {}
        self._targets: dict[str, str] = {}
        """The sampler whose weights each in-flight target has."""
        self._sampler = Sampler()

    def models(self) -> Sequence[BaseModel]:
        """Return the base models on offer."""
        return [base.about for base in self._bases.values()]

    def create(
        self, adapter: str, base_model: str, lora: LoraConfig, optimizer: Optimizer = ADAMW
    ) -> None:
        """Make a fresh adapter: A seeded, B zero, no gradient, no optimizer state."""
        if adapter in self._adapters:
            raise EngineError(f"there is an adapter {adapter!r} already")
        self._adapters[adapter] = Adapter(base_model, self._base(base_model).model, lora, optimizer)

    def drop(self, adapter: str) -> None:
        """Forget an adapter; unknown names are ignored. Its passes fail."""
        self._adapters.pop(adapter, None)
        self._dropped += self._trainer.drop(adapter)

    def pass_start(self, work: PassJob) -> None:
        """Validate and admit a pass."""
        objective = find_objective(work.loss_fn, work.config, self._losses, work.recalled)
        self._trainer.start(work, self._adapter(work.adapter), objective)

    def pass_step(self) -> Sequence[PassDone]:
        """Advance the passes by a step and return those that ended."""
        dropped, self._dropped = self._dropped, []
        return dropped + (self._trainer.step() if self._trainer.busy() else [])

    def passing(self) -> bool:
        """Return True if any pass is unfinished."""
        return bool(self._dropped) or self._trainer.busy()

    def create_loss(self, loss_id: str, request: CreateCustomLossRequest) -> None:
        """Rebuild a loss from its graph, for passes to use by its id."""
        if loss_id in self._losses:
            raise EngineError(f"there is a custom loss {loss_id!r} already")
        self._losses[loss_id] = compile_graph(request)

    def drop_losses(self, prefix: str) -> None:
        """Forget the losses whose ids begin with this."""
        for loss_id in [known for known in self._losses if known.startswith(prefix)]:
            del self._losses[loss_id]

    def drop_gradients(self, adapter: str) -> None:
        """Clear the gradient buffer without a step."""
        self._adapter(adapter).drop_gradients()

    def optim_step(self, adapter: str, params: OptimParams) -> dict[str, float]:
        """Apply and clear the gradient buffer; returns metrics named `name:reduction`."""
        return self._adapter(adapter).step(params)

    def writer(self, adapter: str, *, optimizer: bool) -> Writer:
        """Return the writer of an adapter as it is now: PEFT files, and optimizer state."""
        saved = self._adapter(adapter)
        return AdapterWriter.of(
            saved.base_model, saved.layout, saved.state.weights, saved.state if optimizer else None
        )

    def load(self, adapter: str, directory: Path, *, optimizer: bool) -> None:
        """Replace an adapter's weights, and its optimizer state, by saved ones.

        Pending gradients are dropped.
        """
        target = self._adapter(adapter)
        target.state = load_adapter(directory, target.layout, target.state, optimizer=optimizer)
        target.drop_gradients()

    def snapshot(self, adapter: str, sampler: str) -> None:
        """Freeze an adapter's present weights as a sampler."""
        frozen = self._adapter(adapter)
        self._samplers[sampler] = self._base(frozen.base_model).source(Lora(frozen.factors()))
        self._frozen[sampler] = (frozen.base_model, frozen.layout, frozen.state.weights)

    def sampler_writer(self, sampler: str) -> Writer:
        """Return the writer of a snapshot's weights as PEFT files."""
        return AdapterWriter.of(*find(self._frozen, "snapshot", sampler))

    def load_sampler(self, sampler: str, base_model: str, directory: Path | None) -> None:
        """Make a sampler of saved weights; of the bare base model without a directory."""
        base = self._base(base_model)
        lora = BARE
        if directory is not None:
            linears = base.model.linears()
            layout = Layout(linears, read_lora_config(directory, module_groups(linears)))
            lora = Lora(layout.factors(load_factors(directory, layout, base.model.embed_VD)))
        self._samplers[sampler] = base.source(lora)

    def point(self, target: str, sampler: str, version: int) -> None:
        """Give an in-flight target a sampler's weights; its running samples use them."""
        source, present = self._source(sampler), self._samplers.get(target)
        if present is not None and present.version is not None and version <= present.version:
            return
        self._samplers[target] = source.as_version(version)
        self._targets[target] = sampler
        self._sampler.move(target, self._samplers[target])

    def drop_sampler(self, sampler: str) -> None:
        """Forget a sampler; running jobs hold its weights until they end."""
        for target in [target for target, pointed in self._targets.items() if pointed == sampler]:
            del self._targets[target], self._samplers[target]
        self._samplers.pop(sampler, None)
        self._frozen.pop(sampler, None)

    def sample_start(self, work: SampleJob) -> None:
        """Validate and admit a sampling job; it advances with each `sample_step`."""
        target = work.sampler if work.sampler in self._targets else None
        job = Job(self._source(work.sampler), work, target)
        self._sampler.start(work.job, job, work.owner)

    def sample_step(self) -> Sequence[SampleDone]:
        """Advance the jobs by one step, and return those that ended."""
        return self._sampler.step()

    def sample_cancel(self, job: str) -> None:
        """Drop a job without a result; unknown names are ignored."""
        self._sampler.cancel(job)

    def sampling(self) -> bool:
        """Return True if any job is unfinished."""
        return self._sampler.busy()

    def _base(self, name: str) -> _Base:
        if name not in self._bases:
            raise EngineError(
                f"there is no base model {name!r}; there are {', '.join(self._bases) or 'none'}"
            )
        return self._bases[name]

    def _source(self, sampler: str) -> Source:
        return find(self._samplers, "sampler", sampler)

    def _adapter(self, name: str) -> Adapter:
        return find(self._adapters, "adapter", name)


def _step_tokens(device: torch.device) -> int:
    if device.type == "cuda" and torch.cuda.get_device_properties(device).total_memory >= ROOMY:
        return 2 * STEP_TOKENS["cuda"]
    return STEP_TOKENS.get(device.type, STEP_TOKENS["cuda"])
