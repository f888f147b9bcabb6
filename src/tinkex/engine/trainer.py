"""Training passes: pack, run, log-probabilities of the targets, loss, backward into a scratch buffer.

Data are sorted by length, so that sequences of equal length lie side by side and share one attention call, and cut
into micro-batches under a token budget. The gradient of a pass is complete before it is added to an adapter's: a pass
that fails leaves no trace.

Axes: T packed tokens of a micro-batch, M targets (one or several per token), D hidden, V vocabulary, L values of a loss
(one per target, or one per datum), N data.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tinkex.engine import ADAMW, EngineError
from tinkex.engine.attention import PackedAttention, soft_cap_slope
from tinkex.engine.decoder import BARE, Decoder, Lora, cap_logits, hidden_states
from tinkex.engine.lora import Factors, Gradients, Layout, Linear, lora_backward, lora_linear
from tinkex.engine.losses import Examples, Room
from tinkex.engine.objectives import Evaluated, Objective
from tinkex.engine.optim import State, check, state_type, step
from tinkex.types.tensors import Array, TensorData
from tinkex.types.training import ForwardBackwardOutput, LoraConfig, OptimizerConfigBase, OptimParams

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tinkex.types.inputs import Datum, LossFnOutput

LOGITS_BUDGET = 1 << 20
"""How many logits are computed at once."""

KEPT_LOGITS = 1 << 24
"""A micro-batch with no more logits than this keeps them for backward; one with more computes them again."""


class Adapter:
    """A LoRA adapter in training: weights and optimizer state, and the gradient gathered since the last step."""

    def __init__(
        self, base_model: str, model: Decoder, lora: LoraConfig, optimizer: OptimizerConfigBase = ADAMW
    ) -> None:
        kind = state_type(optimizer)
        self.base_model = base_model
        self.model = model
        self.layout = Layout(model.linears(), lora)
        dtype = torch.promote_types(model.embed_VD.dtype, torch.float32)
        self.state: State = kind.fresh(self.layout.initial(dtype, model.embed_VD.device))
        self.grad: torch.Tensor | None = None

    def factors(self) -> dict[str, Factors]:
        """The present weights, as the linear layers take them."""
        return self.layout.factors(self.state.weights.to(self.model.embed_VD.dtype))

    def step(self, params: OptimParams) -> dict[str, float]:
        """Apply the gathered gradient, if there is one."""
        check(params, type(self.state))
        norm = 0.0
        if self.grad is not None:
            self.state, norm = step(self.state, self.grad, params, self.layout)
            self.grad = None
        return {"grad_norm:mean": norm, "learning_rate:mean": float(params.learning_rate)}


def run_pass(
    adapter: Adapter, data: Sequence[Datum], objective: Objective, *, backward: bool, micro_batch_tokens: int
) -> ForwardBackwardOutput:
    """Validate data and run them; with `backward`, add the gradient of the summed loss to the adapter's."""
    model = adapter.model
    examples = objective.read(data, Room(model.config.vocab, model.config.context))
    results = Results.of(examples, objective)
    scratch = torch.zeros_like(adapter.state.weights) if backward else None
    lora = _lora(adapter, scratch)
    with torch.set_grad_enabled(backward):
        for indices in micro_batches(examples, micro_batch_tokens):
            packed = Packed.of(examples, indices, model.embed_VD)
            attend = PackedAttention(packed.runs, model.attention)
            hidden_TD = hidden_states(model, packed.tokens_T, packed.positions_T, attend, lora)
            logprobs_M = target_logprobs(model, hidden_TD, packed.rows_M, packed.targets_M, lora)
            evaluated = objective.evaluate(logprobs_M, examples, indices, backward=backward)
            results.put(indices, logprobs_M, evaluated)
            if evaluated.grad_M is not None:
                _check_finite("gradient of the loss", evaluated.grad_M.cpu().numpy(), results.starts, indices)
                logprobs_M.backward(evaluated.grad_M)  # type: ignore[no-untyped-call]
    if scratch is not None:
        if not bool(torch.isfinite(scratch.sum())):
            raise EngineError("the gradient is not finite; nothing was added")
        adapter.grad = scratch if adapter.grad is None else adapter.grad + scratch
    return results.output(examples, objective)


def _lora(adapter: Adapter, scratch: torch.Tensor | None) -> Lora:
    if scratch is None:
        return Lora(adapter.factors())
    anchor = torch.zeros(0, device=scratch.device, requires_grad=True)
    return Lora(adapter.factors(), Gradients(adapter.layout.factors(scratch), anchor))


def micro_batches(examples: Examples, budget: int) -> Iterator[list[int]]:
    """Indices of the data, shortest first, in groups of at most `budget` tokens (or one datum)."""
    batch: list[int] = []
    total = 0
    for index in sorted(range(len(examples.tokens)), key=lambda i: examples.tokens[i].size):
        size = examples.tokens[index].size
        if batch and total + size > budget:
            yield batch
            batch, total = [], 0
        batch.append(index)
        total += size
    yield batch


@dataclass(frozen=True, slots=True)
class Packed:
    """A micro-batch on the device."""

    tokens_T: torch.Tensor
    positions_T: torch.Tensor
    runs: list[tuple[int, int]]
    rows_M: torch.Tensor
    targets_M: torch.Tensor

    @classmethod
    def of(cls, examples: Examples, indices: list[int], like: torch.Tensor) -> Packed:
        """Concatenate the chosen data."""

        def put(arrays: Sequence[Array]) -> torch.Tensor:
            return torch.from_numpy(np.concatenate(arrays)).to(device=like.device, dtype=torch.int64)

        lengths = [examples.tokens[i].size for i in indices]
        targets = [examples.targets[i].reshape(-1) for i in indices]
        per_token = np.repeat([t.size // n for t, n in zip(targets, lengths, strict=True)], lengths)
        return cls(
            tokens_T=put([examples.tokens[i] for i in indices]),
            positions_T=put([np.arange(n) for n in lengths]),
            runs=[(len(list(run)), length) for length, run in groupby(lengths)],
            rows_M=put([np.repeat(np.arange(per_token.size), per_token)]),
            targets_M=put(targets),
        )


@dataclass(frozen=True, slots=True)
class Results:
    """Log-probabilities of every target of a pass and values of its loss, datum after datum in the order given."""

    starts: Array
    logprobs_M: Array
    loss_starts: Array
    losses_L: Array
    metrics_N: dict[str, Array]

    @classmethod
    def of(cls, examples: Examples, objective: Objective) -> Results:
        """Room for the results of these examples."""
        starts = np.cumsum([0, *(t.size for t in examples.targets)])
        loss_starts = np.cumsum([0, *objective.sizes(examples)])
        return cls(starts, np.zeros(starts[-1]), loss_starts, np.zeros(loss_starts[-1]), {})

    def put(self, indices: list[int], logprobs_M: torch.Tensor, evaluated: Evaluated) -> None:
        """Store the results of a micro-batch; losses that overflowed are refused."""
        losses_L = evaluated.losses_L.detach().double().cpu().numpy()
        _check_finite("loss", losses_L, self.loss_starts, indices)
        self.losses_L[_places(self.loss_starts, indices)] = losses_L
        self.logprobs_M[_places(self.starts, indices)] = logprobs_M.detach().double().cpu().numpy()
        for name, values in evaluated.metrics.items():
            self.metrics_N.setdefault(name, np.zeros(self.starts.size - 1))[indices] = values

    def output(self, examples: Examples, objective: Objective) -> ForwardBackwardOutput:
        """One record per datum, and the sums."""
        columns = {"logprobs": self.logprobs_M} | ({"elementwise_loss": self.losses_L} if objective.elementwise else {})
        singles = {name: column.astype(np.float32) for name, column in columns.items()}
        outputs: list[LossFnOutput] = []
        for index, targets in enumerate(examples.targets):
            span = slice(self.starts[index], self.starts[index + 1])
            outputs.append(
                {
                    name: TensorData(column[span], "float32", targets.shape)  # a view: no copy per datum
                    for name, column in singles.items()
                }
            )
        tokens = sum(t.size for t in examples.tokens)
        metrics = {"loss:sum": float(self.losses_L.sum()), "tokens:sum": float(tokens)}
        for name, values_N in self.metrics_N.items():
            metrics[name] = float(values_N.mean() if name.endswith(":mean") else values_N.sum())
        return ForwardBackwardOutput("ArrayRecord", outputs, metrics)


def _places(starts: Array, indices: list[int]) -> Array:
    return np.concatenate([np.arange(starts[i], starts[i + 1]) for i in indices])


def _check_finite(what: str, values: Array, starts: Array, indices: list[int]) -> None:
    """Refuse what overflowed, such as a ratio to a log-probability of -1000, and name its datum."""
    bad = np.flatnonzero(~np.isfinite(values))
    if bad.size:
        index = int(np.searchsorted(starts, _places(starts, indices)[bad[0]], side="right")) - 1
        raise EngineError(f"datum {index}: the {what} is not finite; nothing was added")


def target_logprobs(
    model: Decoder, hidden_TD: torch.Tensor, rows_M: torch.Tensor, targets_M: torch.Tensor, lora: Lora = BARE
) -> torch.Tensor:
    """Log-probabilities of targets (target m belongs to row `rows_M[m]`, ascending), never holding all logits."""
    anchor = lora.gradients.anchor if lora.gradients else torch.zeros(0)
    logprobs_M: torch.Tensor = _TargetLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden_TD, anchor, model.head, rows_M, targets_M, lora, model.config.logit_cap
    )
    return logprobs_M


def _chunks(rows: int, head: Linear, rows_M: torch.Tensor) -> Iterator[tuple[slice, slice]]:
    """Slices of rows whose logits fit the budget, with the slices of targets that belong to them."""
    step = max(1, LOGITS_BUDGET // head.weight_ND.shape[0])
    starts = torch.arange(0, rows + step, step, device=rows_M.device).clamp_(max=rows)
    firsts = torch.searchsorted(rows_M, starts).tolist()
    for chunk, row in enumerate(range(0, rows, step)):
        yield slice(row, min(row + step, rows)), slice(firsts[chunk], firsts[chunk + 1])


class _TargetLogprobs(torch.autograd.Function):
    """Log-softmax at the targets. Backward needs the probabilities again: kept when few, else recomputed by chunk."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_TD: torch.Tensor,
        anchor: torch.Tensor,
        head: Linear,
        rows_M: torch.Tensor,
        targets_M: torch.Tensor,
        lora: Lora,
        cap: float | None,
    ) -> torch.Tensor:
        keep = lora.gradients is not None and hidden_TD.shape[0] * head.weight_ND.shape[0] <= KEPT_LOGITS
        keep = keep and cap is None  # the slope of the cap is read off the logits, which are not what is kept
        out, kept = [], []
        for rows, span in _chunks(hidden_TD.shape[0], head, rows_M):
            logits_TV = cap_logits(lora_linear(hidden_TD[rows], head, lora.factors.get(head.name), None), cap)
            logprobs_TV = log_softmax(logits_TV)
            out.append(logprobs_TV[rows_M[span] - rows.start, targets_M[span]])
            if keep:
                kept.append(logprobs_TV)
        ctx.save_for_backward(hidden_TD, rows_M, targets_M)
        ctx.head, ctx.lora, ctx.cap, ctx.kept = head, lora, cap, kept
        return torch.cat(out)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        hidden_TD, rows_M, targets_M = ctx.saved_tensors
        dhidden_TD = torch.empty_like(hidden_TD) if ctx.needs_input_grad[0] else None
        for chunk, (rows, span) in enumerate(_chunks(hidden_TD.shape[0], ctx.head, rows_M)):
            kept = ctx.kept[chunk] if ctx.kept else None
            dhidden = _head_backward(
                ctx.head,
                ctx.lora,
                ctx.cap,
                hidden_TD[rows],
                kept,
                rows_M[span] - rows.start,
                targets_M[span],
                grads[0][span],
            )
            if dhidden_TD is not None:
                dhidden_TD[rows] = dhidden
        return dhidden_TD, None, None, None, None, None, None


def log_softmax(logits_TV: torch.Tensor) -> torch.Tensor:
    """Log-softmax in float32 at least."""
    return torch.log_softmax(logits_TV, dim=-1, dtype=torch.promote_types(logits_TV.dtype, torch.float32))


def _head_backward(
    head: Linear,
    lora: Lora,
    cap: float | None,
    hidden_TD: torch.Tensor,
    kept_TV: torch.Tensor | None,
    rows_M: torch.Tensor,
    targets_M: torch.Tensor,
    grad_M: torch.Tensor,
) -> torch.Tensor:
    """Gradient of one chunk's hidden states: d logits = scattered gradient - softmax * its sum over the row."""
    factors = lora.factors.get(head.name)
    slope_TV = None
    if kept_TV is None:
        logits_TV = cap_logits(lora_linear(hidden_TD, head, factors, None), cap)
        slope_TV = None if cap is None else soft_cap_slope(logits_TV, cap)
        kept_TV = log_softmax(logits_TV)
    row_grad_T1 = torch.zeros(hidden_TD.shape[0], 1, dtype=grad_M.dtype, device=grad_M.device)
    row_grad_T1.index_add_(0, rows_M, grad_M[:, None])
    dlogits_TV = kept_TV.exp_().mul_(-row_grad_T1)
    dlogits_TV.index_put_((rows_M, targets_M), grad_M, accumulate=True)
    if slope_TV is not None:
        dlogits_TV.mul_(slope_TV)
    dlogits_TV = dlogits_TV.to(hidden_TD.dtype)
    if factors is None or lora.gradients is None:
        return dlogits_TV @ head.weight_ND
    low_TR = hidden_TD @ factors.a_RD.t()
    return lora_backward(dlogits_TV, hidden_TD, low_TR, head, factors, lora.gradients.factors[head.name])
