"""An engine for tests of everything around an engine: numpy only, microseconds a call.

Its weights are eight numbers. Log-probabilities are a hash of token, target and position moved a
little by the weights: so training changes them, checkpoints matter, and two runs of the same calls
agree to the bit.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tinkex.engine.api import (
    ADAMW,
    RECORDED_TOKENS,
    BaseModel,
    DrawnToken,
    Engine,
    EngineError,
    Optimizer,
    PassDone,
    PassJob,
    Place,
    Recording,
    SampleDone,
    SampleJob,
    Writer,
    check_optimizer,
    find,
)
from tinkex.engine.base_models import describe, locate_models
from tinkex.engine.losses.table import CUSTOM, STABLE_REINFORCE, find_loss
from tinkex.engine.registry import EngineKind
from tinkex.errors import ConfigurationError
from tinkex.types.inputs import Datum
from tinkex.types.optimizers import AdamParams, OptimParams
from tinkex.types.sampled import (
    EMPTY_CELL,
    SampledSequence,
    SampleResponse,
    StopReason,
    TopkLogprobs,
)
from tinkex.types.sessions import CreateCustomLossRequest
from tinkex.types.tensors import Array, TensorData
from tinkex.types.training import ForwardBackwardOutput, LoraConfig

SIZE = 8
STATE = "fake.json"


@dataclass
class _Adapter:
    base_model: str
    lora: LoraConfig
    weights: Array
    optimizer: Optimizer = ADAMW
    grad: Array | None = None
    step: int = 0


@dataclass(frozen=True)
class _Pass:
    job: str
    adapter: str
    arrays: Sequence[tuple[Array, Array, Array]]
    backward: bool


@dataclass
class _Job:
    weights: Array
    work: SampleJob
    target: str | None = None
    version: int | None = None
    drawn: list[tuple[Array, int | None]] = field(default_factory=list)
    """The weights that drew each token, and their version."""

    @property
    def steps(self) -> int:
        return len(self.drawn)

    @property
    def limit(self) -> int:
        asked = self.work.request.sampling_params.max_tokens
        return 16 if asked is None else asked


@dataclass(frozen=True)
class _FakeWriter(Writer):
    enter: Callable[[], None]
    text: str

    def write(self, place: Place) -> None:
        """Write the file."""
        self.enter()
        with place.file(STATE) as file:
            file.write(self.text.encode())


@dataclass
class FakeEngine(Engine):
    """A fake engine.

    `fail` is called with each method's name and subject first, and may raise. Every call takes
    `delay` seconds, and a step of sampling `step_delay` more. Prompts longer than `longest_prompt`
    fail when they are started: a server cannot know that before.
    """

    base_models: Sequence[BaseModel] = (
        BaseModel("fake", context_length=1 << 20, vocab_size=256, arch="fake"),
    )
    delay: float = 0.0
    step_delay: float = 0.0
    longest_prompt: int = 64
    fail: Callable[[str, str], None] = lambda method, subject: None
    _adapters: dict[str, _Adapter] = field(default_factory=dict)
    _losses: set[str] = field(default_factory=set)
    _samplers: dict[str, Array] = field(default_factory=dict)
    _targets: dict[str, tuple[str, int]] = field(default_factory=dict)
    _passes: list[_Pass] = field(default_factory=list)
    _dropped: list[PassDone] = field(default_factory=list)
    _jobs: dict[str, _Job] = field(default_factory=dict)

    def models(self) -> Sequence[BaseModel]:
        """Return the base models on offer."""
        return self.base_models

    def create(
        self, adapter: str, base_model: str, lora: LoraConfig, optimizer: Optimizer = ADAMW
    ) -> None:
        """Make a fresh adapter; all optimizers make the same steps."""
        self._enter("create", adapter)
        self._base(base_model)
        check_optimizer(optimizer)
        if adapter in self._adapters:
            raise EngineError(f"there is an adapter {adapter!r} already")
        self._adapters[adapter] = _Adapter(base_model, lora, np.zeros(SIZE), optimizer)

    def drop(self, adapter: str) -> None:
        """Forget an adapter; its passes fail with the next step."""
        self._adapters.pop(adapter, None)
        why = EngineError("the run was dropped")
        self._dropped += [PassDone(one.job, why) for one in self._passes if one.adapter == adapter]
        self._passes = [one for one in self._passes if one.adapter != adapter]

    def pass_start(self, work: PassJob) -> None:
        """Admit a pass; recordings move its weights, so that different ones show."""
        find(self._adapters, "adapter", work.adapter)
        find_loss(work.loss_fn)
        if work.loss_fn == CUSTOM and work.config.get("loss_id") not in self._losses:
            raise EngineError(f"there is no custom loss {work.config.get('loss_id')!r}")
        arrays = [
            (datum.model_input.to_numpy(), *_arrays(index, datum))
            for index, datum in enumerate(work.data)
        ]
        if work.loss_fn == STABLE_REINFORCE:
            if work.recalled is None or len(work.recalled) != len(work.data):
                raise EngineError("loss 'stable_reinforce' needs the recordings of its samples")
            for known, (_, _, weights) in zip(work.recalled, arrays, strict=True):
                weights[known.positions] += known.recording.top_logprobs.sum(-1)
        self._passes.append(_Pass(work.job, work.adapter, arrays, work.backward))

    def pass_step(self) -> Sequence[PassDone]:
        """Run one pass."""
        ended, self._dropped = self._dropped, []
        if self._passes:
            work = self._passes.pop(0)
            try:
                self._enter("forward_backward", work.adapter)
                ended.append(PassDone(work.job, self._run(work)))
            except Exception as error:
                ended.append(PassDone(work.job, error))
        return ended

    def _run(self, work: _Pass) -> ForwardBackwardOutput:
        """Make up log-probabilities; the gradient counts targets modulo eight."""
        target = find(self._adapters, "adapter", work.adapter)
        grad, total, outputs = np.zeros(SIZE), 0.0, []
        for tokens, targets, weights in work.arrays:
            logprobs = _logprobs(target.weights, tokens, targets)
            np.add.at(grad, targets % SIZE, -weights)
            total -= float((weights * logprobs).sum())
            outputs.append({"logprobs": TensorData.from_numpy(logprobs.astype(np.float32))})
        if work.backward:
            target.grad = grad if target.grad is None else target.grad + grad
        return ForwardBackwardOutput("ArrayRecord", outputs, {"loss:sum": total})

    def passing(self) -> bool:
        """True while a pass is unfinished."""
        return bool(self._passes or self._dropped)

    def create_loss(self, loss_id: str, request: CreateCustomLossRequest) -> None:
        """Take a loss; its passes are those of cross-entropy."""
        self._enter("create_loss", loss_id)
        self._losses.add(loss_id)

    def drop_losses(self, prefix: str) -> None:
        """Forget the losses whose ids begin with this."""
        self._losses = {loss_id for loss_id in self._losses if not loss_id.startswith(prefix)}

    def drop_gradients(self, adapter: str) -> None:
        """Forget the gradient."""
        self._enter("drop_gradients", adapter)
        find(self._adapters, "adapter", adapter).grad = None

    def optim_step(self, adapter: str, params: OptimParams) -> dict[str, float]:
        """Move against the gradient."""
        self._enter("optim_step", adapter)
        target = find(self._adapters, "adapter", adapter)
        given = "adamw" if isinstance(params, AdamParams) else params.type
        if given != target.optimizer.type:
            raise EngineError(
                f"this run's optimizer is {target.optimizer.type}: it takes no parameters of "
                f"{given}"
            )
        norm = 0.0
        if target.grad is not None:
            norm = float(np.linalg.norm(target.grad))
            target.weights = target.weights - float(params.learning_rate) * target.grad
            target.step, target.grad = target.step + 1, None
        return {"grad_norm:mean": norm, "learning_rate:mean": float(params.learning_rate)}

    def writer(self, adapter: str, *, optimizer: bool) -> Writer:
        """Return the writer of the weights as a small file."""
        saved = find(self._adapters, "adapter", adapter)
        fields = {
            "base_model": saved.base_model,
            "rank": saved.lora.rank,
            "weights": saved.weights.tolist(),
        }
        text = json.dumps(fields | ({"step": saved.step} if optimizer else {}))

        return _FakeWriter(partial(self._enter, "save", adapter), text)

    def load(self, adapter: str, directory: Path, *, optimizer: bool) -> None:
        """Read the file of a writer."""
        self._enter("load", adapter)
        target, fields = find(self._adapters, "adapter", adapter), _read(directory)
        if fields["rank"] != target.lora.rank:
            raise EngineError(
                f"the saved adapter has rank {fields['rank']}, this one has {target.lora.rank}"
            )
        if optimizer and "step" not in fields:
            raise EngineError(f"{directory} has no optimizer state")
        target.weights, target.grad = np.array(fields["weights"]), None
        target.step = fields["step"] if optimizer else 0

    def snapshot(self, adapter: str, sampler: str) -> None:
        """Freeze an adapter's present weights as a sampler."""
        self._enter("snapshot", adapter)
        self._samplers[sampler] = find(self._adapters, "adapter", adapter).weights

    def sampler_writer(self, sampler: str) -> Writer:
        """Return the writer of a snapshot's weights as a small file."""
        weights = find(self._samplers, "snapshot", sampler)
        text = json.dumps({"weights": weights.tolist()})

        return _FakeWriter(partial(self._enter, "save_sampler", sampler), text)

    def load_sampler(self, sampler: str, base_model: str, directory: Path | None) -> None:
        """Make a sampler of saved weights, or of the bare base model."""
        self._enter("load_sampler", sampler)
        self._base(base_model)
        self._samplers[sampler] = (
            np.zeros(SIZE) if directory is None else np.array(_read(directory)["weights"])
        )

    def point(self, target: str, sampler: str, version: int) -> None:
        """Give an in-flight target a sampler's weights."""
        self._enter("point", target)
        weights = find(self._samplers, "sampler", sampler)
        if target in self._targets and version <= self._targets[target][1]:
            return
        self._targets[target] = (sampler, version)
        self._samplers[target] = weights
        for job in self._jobs.values():
            if job.target == target:
                job.weights, job.version = weights, version

    def drop_sampler(self, sampler: str) -> None:
        """Forget a sampler, and the target that has its weights."""
        for target in [
            target for target, (pointed, _) in self._targets.items() if pointed == sampler
        ]:
            del self._targets[target], self._samplers[target]
        self._samplers.pop(sampler, None)

    def sample_start(self, work: SampleJob) -> None:
        """Admit a sampling job."""
        self._enter("sample_start", work.job)
        weights = find(self._samplers, "sampler", work.sampler)
        length, most = work.request.prompt.length, self.longest_prompt
        if not 0 < length <= most:
            raise EngineError(f"prompt: {length} tokens do not fit the context window of {most}")
        target = work.sampler if work.sampler in self._targets else None
        version = None if target is None else self._targets[target][1]
        self._jobs[work.job] = _Job(weights, work, target, version)

    def sample_step(self) -> Sequence[SampleDone]:
        """Advance every job by one token."""
        time.sleep(self.delay + self.step_delay)
        done = []
        for name, job in list(self._jobs.items()):
            job.drawn.append((job.weights, job.version))
            try:
                self.fail("sample_step", name)
                if job.work.listener is not None and job.steps <= job.limit:
                    job.work.listener(_drawn(job))
                result: SampleResponse | Exception | None = _finished(job)
            except Exception as error:
                result = error
            if result is not None:
                del self._jobs[name]
                recordings: Sequence[Recording] = ()
                if job.work.request.record_stability_info and isinstance(result, SampleResponse):
                    recordings = [
                        _recording(job.weights, sequence) for sequence in result.sequences
                    ]
                done.append(SampleDone(name, result, recordings))
        return done

    def sample_cancel(self, job: str) -> None:
        """Drop a job."""
        self._jobs.pop(job, None)

    def sampling(self) -> bool:
        """Return True if any job is unfinished."""
        return bool(self._jobs)

    def _enter(self, method: str, subject: str) -> None:
        self.fail(method, subject)
        time.sleep(self.delay)

    def _base(self, name: str) -> None:
        names = [model.name for model in self.base_models]
        if name not in names:
            raise EngineError(f"there is no base model {name!r}; there are {', '.join(names)}")


def _hash(*values: Array | int) -> Array:
    """Return a number in [0, 1) for each element of the broadcast values."""
    state = np.zeros(1, dtype=np.uint64)
    for value in values:
        state = (state ^ np.atleast_1d(value).astype(np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
        state = state ^ (state >> np.uint64(29))
    return (state >> np.uint64(12)) * 2.0**-52


def _logprobs(weights: Array, tokens: Array, targets: Array) -> Array:
    positions = np.arange(tokens.size).reshape(-1, *[1] * (targets.ndim - 1))
    base = _hash(positions, tokens.reshape(positions.shape), targets)
    moved: Array = -(1 + 4 * base) * np.exp(-weights[targets % SIZE])
    return moved.reshape(targets.shape)


def _arrays(index: int, datum: Datum) -> tuple[Array, Array]:
    if "target_tokens" not in datum.loss_fn_inputs:
        raise EngineError(f"datum {index}: input 'target_tokens' is missing")
    targets = datum.loss_fn_inputs["target_tokens"].to_numpy()
    for key, tensor in datum.loss_fn_inputs.items():
        found, expected = tensor.to_numpy().shape[0], datum.model_input.length
        if found != expected:
            raise EngineError(
                f"datum {index}: {key!r} has length {found} but the model input has length "
                f"{expected}"
            )
    weights = datum.loss_fn_inputs.get("weights", datum.loss_fn_inputs.get("advantages"))
    return targets, np.ones(targets.shape) if weights is None else weights.to_numpy().copy()


def _finished(job: _Job) -> SampleResponse | None:
    """Return the result of a job that has all its tokens, else None."""
    request = job.work.request
    if job.steps < job.limit:
        return None
    sequences = [_sequence(job, index) for index in range(request.num_samples)]
    if not (request.prompt_logprobs or request.topk_prompt_logprobs):
        return SampleResponse(sequences)
    prompt = request.prompt.to_numpy()
    logprobs = np.full(prompt.size, np.nan, dtype=np.float32)
    logprobs[1:] = _logprobs(job.weights, prompt[:-1], prompt[1:])
    logprobs[: max(1, prompt.size - (request.prompt_logprobs_last_n or prompt.size))] = np.nan
    k = request.topk_prompt_logprobs
    return SampleResponse(sequences, logprobs, _topk(prompt, logprobs, k) if k else None)


def _drawn(job: _Job) -> list[DrawnToken]:
    """Return the tokens of a job's latest step."""
    drawn = []
    last: StopReason | None = "length" if job.steps == job.limit else None
    for index in range(job.work.request.num_samples):
        sequence = _sequence(job, index)
        assert sequence.logprobs is not None
        at = job.steps - 1
        drawn.append(
            DrawnToken(index, sequence.tokens[at], sequence.logprobs[at], last, job.version)
        )
    return drawn


def _sequence(job: _Job, index: int) -> SampledSequence:
    prompt = job.work.request.prompt.to_numpy()
    numbers = _hash(job.work.seed % 2**64, index, int(prompt.sum()), np.arange(job.limit))
    tokens = (numbers * 100).astype(np.int32) + 100
    logprobs, versions = _logprobs(job.weights, tokens, tokens), None
    if job.target is not None:
        for at, (weights, _) in enumerate(job.drawn[: job.limit]):
            logprobs[at] = _logprobs(weights, tokens, tokens)[at]
        versions = np.array([version for _, version in job.drawn[: job.limit]], np.int64)
    return SampledSequence(
        "length", tokens_np=tokens, logprobs_np=logprobs.astype("f4"), weights_versions_np=versions
    )


def _recording(weights: Array, sequence: SampledSequence) -> Recording:
    assert sequence.tokens_np is not None
    assert sequence.logprobs_np is not None
    tokens = sequence.tokens_np
    top = (tokens[:, None] + np.arange(RECORDED_TOKENS)).astype(np.int32)
    logprobs = _logprobs(weights, tokens, top).astype(np.float32)
    return Recording(tokens, sequence.logprobs_np, sequence.logprobs_np, top, logprobs)


def _topk(prompt: Array, logprobs: Array, k: int) -> TopkLogprobs:
    ids, values = (
        np.zeros((prompt.size, k), np.int32),
        np.full((prompt.size, k), EMPTY_CELL, np.float32),
    )
    known = ~np.isnan(logprobs)
    ids[known, 0], values[known, 0] = prompt[known], logprobs[known]
    return TopkLogprobs(ids, values)


def _read(directory: Path) -> dict[str, Any]:
    path = directory / STATE
    if not path.exists():
        raise EngineError(f"{directory} has no {STATE}")
    fields: dict[str, Any] = json.loads(path.read_text())
    return fields


def _pick_device(device: str) -> str:
    if device not in ("auto", "cpu"):
        raise ConfigurationError(f"the fake engine has no device {device!r}; there are auto, cpu")
    return "cpu"


def _make(models: Mapping[str, str | Path], device: str, dtype: str | None) -> Engine:
    places = locate_models(models)
    return FakeEngine([describe(name, directory) for name, directory in places.items()])


FAKE = EngineKind(_make, _pick_device)
