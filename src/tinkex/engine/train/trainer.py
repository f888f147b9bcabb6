"""Training passes: pack, run, log-probabilities of the targets, loss, backward into a scratch
buffer.

A pass is cut into pieces under a token budget: its data are sorted by length, so that sequences of
equal length lie side by side and share one attention call. A step takes pieces of as many passes as
fit the budget, of any adapters of one base model, fairly by owner, and runs them together. How a
pass is cut depends on that pass alone, and nothing is ever reduced over tokens of two pieces: so
its results do not depend on what runs beside it. The gradient of a pass is complete before it is
added to an adapter's: a pass that fails leaves no trace. A datum that is longer than a step's
budget is run with its layers' states alone kept for backward. Where the device runs on its own, the
results of a step are read when the next one is under way.

Axes: T packed tokens of a step, M targets (one or several per token), D hidden, V vocabulary, L
values of a loss (one per target, or one per datum), N data.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tinkex.engine.api import ADAMW, EngineError, PassDone
from tinkex.engine.fair_share import Shares
from tinkex.engine.losses.table import Evaluated, Examples, Room
from tinkex.engine.model.attention import PackedAttention, soft_cap_slope
from tinkex.engine.model.decoder import Decoder, cap_logits, hidden_states
from tinkex.engine.model.elementwise import kernels_for
from tinkex.engine.model.matmul import lowered
from tinkex.engine.torch.device_copies import mark, to_device, to_host
from tinkex.engine.torch.lora import Factors, Layout, Linear
from tinkex.engine.train.objectives import Objective
from tinkex.engine.train.optim import Overflow, State, check, state_type, step
from tinkex.engine.train.span_adapters import (
    ROWS,
    Span,
    SpanAdapters,
    backward as mixed_backward,
    forward as mixed_forward,
)
from tinkex.types.tensors import Array, TensorData
from tinkex.types.training import (
    ForwardBackwardOutput,
    LoraConfig,
    OptimizerConfigBase,
    OptimParams,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from tinkex.types.inputs import Datum, LossFnOutput

logger = logging.getLogger("tinkex.engine")

LOGITS_BUDGET = 1 << 24
"""How many logits are computed at once."""

LEAST_ROWS = 64
"""… but of so many tokens at least: reading the head's weights takes as long as a product with so
many."""

KEPT_LOGITS = 1 << 28
"""A step with no more logits than this keeps them for backward; one with more, or of one long
datum, does not."""

KEPT_SHARE = 0.2
"""On an accelerator it keeps those that take no more than this share of the memory that is free."""

ROOMIER = 16
"""An accelerator computes so many times as many at once."""

SPARE_BEYOND = 4
"""On a CPU, which has more memory than time, a datum may be so many times as long before its layers
run twice."""

GROW_AFTER = 500
"""Steps after which a budget that was halved is doubled again: what took the memory may have gone.
"""

MOST_PIECES = 64
"""How many pieces a step takes: each costs some small products of its own."""


class Adapter:
    """A LoRA adapter in training: weights and optimizer state, and the gradient gathered since the
    last step.
    """

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
        self.state: State = kind.fresh(self.layout.initial(dtype, model.embed_VD.device))
        self.grad: torch.Tensor | None = None
        self.largest: tuple[float, str] = (0.0, "")
        """The largest number in any gradient that was gathered, and the pass that it is from."""
        self._cast: tuple[torch.Tensor, dict[str, Factors]] | None = None

    def factors(self) -> dict[str, Factors]:
        """The present weights, as the linear layers take them."""
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

    def gather(self, gradient: torch.Tensor, largest: float, job: str) -> None:
        """Add the gradient of a pass."""
        self.grad = gradient if self.grad is None else self.grad + gradient
        self.largest = max(self.largest, (largest, job))

    def drop_gradients(self) -> None:
        """Forget what was gathered."""
        self.grad, self.largest = None, (0.0, "")

    def _stuck(self, norm: float) -> str:
        """Say why the step cannot be made, and what can be done about it: the gradient stays."""
        largest, job = self.largest
        clip = "clip the gradient (grad_clip_norm=1.0), " if math.isfinite(norm) else ""
        return (
            f"the step overflows: the gradient's norm is {norm:.3g}, and its largest number, "
            f"{largest:.3g}, is from "
            f"request {job}. Nothing was changed, and the next step has the same gradient: "
            f"{clip}drop it "
            "(drop_gradients) or load a saved state (load_state)"
        )


@dataclass(eq=False)
class Pass:
    """A pass under way."""

    job: str
    owner: str
    name: str
    """The adapter's, by which passes of one adapter keep their order."""
    adapter: Adapter
    examples: Examples
    objective: Objective
    backward: bool
    pieces: deque[list[int]] = field(default_factory=deque)
    left: int = 0
    """Pieces that have not been run."""
    results: Results = field(init=False)
    scratch: torch.Tensor | None = None

    def __post_init__(self) -> None:
        self.results = Results.of(self.examples, self.objective)

    def begin(self, budget: int) -> None:
        """Cut into pieces, and forget what was computed before."""
        self.pieces = deque(cut(self.examples, budget))
        self.left = len(self.pieces)
        self.results = Results.of(self.examples, self.objective)
        self.scratch = None

    def size(self, piece: list[int]) -> int:
        """The tokens of a piece."""
        return sum(self.examples.tokens[index].size for index in piece)

    def weight(self, piece: list[int], budget: int) -> int:
        """The tokens of a piece, and what its loss takes besides, as tokens."""
        return sum(self.examples.weight(index, budget) for index in piece)

    def finish(self, largest: float) -> ForwardBackwardOutput:
        """Add the gradient to the adapter's; everything has been run. Takes the largest number in
        the gradient.
        """
        if self.scratch is not None and not math.isfinite(largest):
            raise EngineError("the gradient is not finite; nothing was added")
        # what can still fail comes before what is kept
        output = self.results.output(self.examples, self.objective)
        if self.scratch is not None:
            self.adapter.gather(self.scratch, largest, self.job)
        return output


def cut(examples: Examples, budget: int) -> Iterator[list[int]]:
    """Indices of the data, shortest first, in pieces that weigh at most `budget` tokens (or one
    datum).
    """
    piece: list[int] = []
    total = 0
    for index in sorted(range(len(examples.tokens)), key=lambda i: examples.tokens[i].size):
        size = examples.weight(index, budget)
        if piece and total + size > budget:
            yield piece
            piece, total = [], 0
        piece.append(index)
        total += size
    yield piece


class Trainer:
    """The passes under way on any adapters, advanced by a step at a time."""

    def __init__(self, budget: int, *, ahead: bool = False) -> None:
        self.budget = budget
        """How many tokens a step may take; halved when memory runs out."""
        self._whole, self._since_halved = budget, 0
        self.ahead = ahead
        """Whether a step may be begun before the results of the one before have been read."""
        self._passes: dict[str, deque[Pass]] = {}
        """By adapter, in order."""
        self._owners = Shares()
        self._adapters: dict[str, Shares] = {}
        """By owner, the shares of the owner's adapters."""
        self._unread: Launched | None = None

    def start(
        self,
        job: str,
        name: str,
        adapter: Adapter,
        data: Sequence[Datum],
        objective: Objective,
        *,
        backward: bool,
        owner: str = "",
    ) -> None:
        """Validate a pass and take it in."""
        config = adapter.model.config
        examples = objective.read(data, Room(config.vocab, config.context))
        admitted = Pass(job, owner, name, adapter, examples, objective, backward)
        admitted.begin(self.budget)
        self._passes.setdefault(name, deque()).append(admitted)

    def busy(self) -> bool:
        """Whether any pass is unfinished."""
        return bool(self._passes)

    def drop(self, name: str) -> list[PassDone]:
        """Forget an adapter; its passes fail."""
        dropped = [
            PassDone(p.job, EngineError("the run was dropped")) for p in self._passes.pop(name, ())
        ]
        if not self._passes:  # nobody will read it, and it holds the adapter
            self._unread = None
        return dropped

    def step(self) -> list[PassDone]:
        """Run a few pieces together, and return the passes that ended; after a fault of ours, that
        is all of them.
        """
        done: list[PassDone] = []
        try:
            self._step(done)
        except Exception as error:
            logger.exception("a step of training failed; the passes under way are lost")
            done += [
                PassDone(work.job, error) for passes in self._passes.values() for work in passes
            ]
            self._passes, self._unread = {}, None
        return done

    def _step(self, done: list[PassDone]) -> None:
        """Add those that ended to `done` at once: no one else knows of them any more."""
        chosen, before, self._unread = self._choose(), self._unread, None
        if not chosen:
            done += self._read(before)
            return
        try:
            is_long = sum(work.size(piece) for work, piece in chosen) > self.budget
            launched = launch(chosen, keep_logits=not is_long, sparing=self._sparing(chosen))
        except Exception as error:
            done += self._read(before)  # which may hold other pieces of the same passes
            if _is_out_of_memory(error):
                done += self._ended(chosen, self._halve(chosen, error))
            else:
                done += self._ended(chosen, dict.fromkeys((work.job for work, _ in chosen), error))
            return
        self._grow()
        done += self._read(before)
        if self.ahead and self._next(None) is not None:
            self._unread = launched
        else:  # nothing is to be gained by waiting
            done += self._read(launched)

    def _sparing(self, chosen: Sequence[tuple[Pass, list[int]]]) -> bool:
        """Whether a step has to be, since its one datum exceeds what the budget allows to keep."""
        return sum(work.size(piece) for work, piece in chosen) > self.budget * (
            1 if self.ahead else SPARE_BEYOND
        )

    def _read(self, launched: Launched | None) -> list[PassDone]:
        """Take in the results of a step."""
        if launched is None:
            return []
        outcomes: dict[str, Exception | None] = {}
        try:
            for work, error in launched.read():
                outcomes[work.job] = outcomes.get(work.job) or error
        except Exception as error:
            outcomes = dict.fromkeys((work.job for work, _ in launched.chosen), error)
        return self._ended(launched.chosen, outcomes, launched.largest)

    def _choose(self) -> list[tuple[Pass, list[int]]]:
        """Pieces of one base model, with or without gradients, whoever has had least first."""
        self._note()
        chosen: list[tuple[Pass, list[int]]] = []
        total = 0
        while (
            len(chosen) < MOST_PIECES
            and (work := self._next(chosen[0][0] if chosen else None)) is not None
        ):
            size = work.weight(work.pieces[0], self.budget)
            if chosen and total + size > self.budget:
                break
            chosen.append((work, work.pieces.popleft()))
            total += size
            self._owners.charge(work.owner, size)
            self._adapters[work.owner].charge(work.name, size)
        return chosen

    def _next(self, like: Pass | None) -> Pass | None:
        open_: dict[str, dict[str, Pass]] = {}
        for name, passes in self._passes.items():
            work = next((work for work in passes if work.pieces), None)
            if work is not None and (like is None or _go_together(work, like)):
                open_.setdefault(work.owner, {})[name] = work
        if not open_:
            return None
        owner = self._owners.first(open_)
        return open_[owner][self._adapters[owner].first(open_[owner])]

    def _note(self) -> None:
        waiting: dict[str, list[str]] = {}
        for name, passes in self._passes.items():
            for owner in dict.fromkeys(work.owner for work in passes):
                waiting.setdefault(owner, []).append(name)
        self._owners.note(waiting.keys())
        self._adapters = {owner: self._adapters.get(owner, Shares()) for owner in waiting}
        for owner, names in waiting.items():
            self._adapters[owner].note(names)

    def _ended(
        self,
        chosen: Sequence[tuple[Pass, list[int]]],
        outcomes: dict[str, Exception | None],
        largest: Mapping[str, torch.Tensor] | None = None,
    ) -> list[PassDone]:
        done = []
        works = {work.job: work for work, _ in chosen}
        for job, error in outcomes.items():
            work = works[job]
            passes = self._passes.get(work.name, deque())
            if work not in passes or (error is None and work.left):
                continue  # its adapter was dropped meanwhile; or it goes on
            try:
                peak = 0.0 if largest is None or job not in largest else float(largest[job])
                result: ForwardBackwardOutput | Exception = error or work.finish(peak)
            except Exception as refusal:  # there may be no memory left for the sum of gradients
                result = refusal
            passes.remove(work)
            if not passes:
                del self._passes[work.name]
            done.append(PassDone(job, result))
        return done

    def _halve(
        self, chosen: list[tuple[Pass, list[int]]], error: Exception
    ) -> dict[str, Exception | None]:
        """Begin the passes of a step anew under a smaller budget; what took the least it can fails,
        and is returned.
        """
        works = {work.job: work for work, _ in chosen}
        if (
            len(chosen) == 1
            and len(chosen[0][1]) == 1
            and (self._sparing(chosen) or self.budget == 1)
        ):
            (work, [index]), size = chosen[0], chosen[0][0].size(chosen[0][1])
            text = f"datum {index}: {size} tokens need more memory than there is; nothing was added"
            refusal = EngineError(text, "server")
            refusal.__cause__ = error
            return {work.job: refusal}
        tokens = sum(work.size(piece) for work, piece in chosen)
        self.budget, self._since_halved = max(1, min(self.budget, tokens) // 2), 0
        logger.warning(
            "memory ran out at %d tokens in a step; from now on it takes %d", tokens, self.budget
        )
        for work in works.values():
            work.begin(self.budget)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return {}

    def _grow(self) -> None:
        """After many steps under a halved budget, try twice as much."""
        self._since_halved += 1
        if self.budget < self._whole and self._since_halved >= GROW_AFTER:
            self.budget, self._since_halved = min(self._whole, 2 * self.budget), 0


def _go_together(one: Pass, other: Pass) -> bool:
    return one.adapter.model is other.adapter.model and one.backward == other.backward


def _is_out_of_memory(error: Exception) -> bool:
    """Of an accelerator, or of the machine, for which torch has no class of its own."""
    return isinstance(
        error, torch.OutOfMemoryError | MemoryError
    ) or "can't allocate memory" in str(error)


@dataclass(frozen=True, slots=True)
class Launched:
    """A step that the device has been given, and where its results will be."""

    chosen: Sequence[tuple[Pass, list[int]]]
    losses: Sequence[Evaluated | EngineError]
    logprobs: Sequence[torch.Tensor]
    largest: Mapping[str, torch.Tensor]
    """The largest number in the gradient of a pass, by job, for those of which this was the last
    step."""
    done: torch.cuda.Event | None

    def read(self) -> Iterator[tuple[Pass, Exception | None]]:
        """Wait for the results and store them; gives each piece with what was wrong with it, if
        anything was.
        """
        if self.done is not None:
            self.done.synchronize()
        for (work, piece), logprobs_M, loss in zip(
            self.chosen, self.logprobs, self.losses, strict=True
        ):
            work.left -= 1
            yield (
                work,
                loss if isinstance(loss, EngineError) else _put(work, piece, logprobs_M, loss),
            )


def launch(
    chosen: Sequence[tuple[Pass, list[int]]], *, keep_logits: bool, sparing: bool
) -> Launched:
    """Run pieces beside each other; what is wrong with one never reaches another's tokens.

    If `sparing`, layers are computed again in backward rather than kept; without `keep_logits`,
    those are.
    """
    model, wants_gradient = chosen[0][0].adapter.model, chosen[0][0].backward
    packed = Packed.of(chosen, model.embed_VD)
    adapters = SpanAdapters(
        [_span(work, rows) for (work, _), rows in zip(chosen, packed.spans, strict=True)],
        packed.device,
    )
    with torch.set_grad_enabled(wants_gradient):
        attend = PackedAttention(packed.runs, model.attention, packed.device)
        hidden_TD = hidden_states(
            *(model, packed.tokens_T, packed.positions_T, attend, adapters),
            sparing=sparing and wants_gradient,
        )
        wanted = packed.wanted(model.head, adapters.spans)
        logprobs_M = target_logprobs(model, hidden_TD, wanted, adapters, keep=keep_logits)
        parts = torch.split(logprobs_M.detach(), packed.sizes)
        losses = [
            _evaluate(work, piece, part) for (work, piece), part in zip(chosen, parts, strict=True)
        ]
        if wants_gradient and not all(isinstance(loss, EngineError) for loss in losses):
            grads = [_gradient(loss, part) for loss, part in zip(losses, parts, strict=True)]
            logprobs_M.backward(torch.cat(grads))  # type: ignore[no-untyped-call]
    last = {
        work.job: work.scratch for work, _ in chosen if work.scratch is not None and not work.pieces
    }
    largest = {
        job: to_host(torch.linalg.vector_norm(scratch, math.inf)) for job, scratch in last.items()
    }
    logprobs = torch.split(to_host(logprobs_M.detach()), packed.sizes)
    losses = [loss if isinstance(loss, EngineError) else loss.to_host() for loss in losses]
    return Launched(chosen, losses, logprobs, largest, mark(packed.device))


def _span(work: Pass, rows: tuple[int, int]) -> Span:
    if not work.backward:
        return Span(*rows, work.adapter.factors())
    if work.scratch is None:
        work.scratch = torch.zeros_like(work.adapter.state.weights)
    return Span(*rows, work.adapter.factors(), work.adapter.layout.factors(work.scratch))


def _evaluate(work: Pass, piece: list[int], logprobs_M: torch.Tensor) -> Evaluated | EngineError:
    """The loss of a piece and its gradient by the log-probabilities; what is wrong with it concerns
    its pass alone.
    """
    try:
        return work.objective.evaluate(logprobs_M, work.examples, piece, backward=work.backward)
    except EngineError as error:
        return error


def _gradient(loss: Evaluated | EngineError, logprobs_M: torch.Tensor) -> torch.Tensor:
    if isinstance(loss, EngineError) or loss.grad_M is None:
        return torch.zeros_like(logprobs_M)
    return loss.grad_M


def _put(
    work: Pass, piece: list[int], logprobs_M: torch.Tensor, loss: Evaluated
) -> EngineError | None:
    """Store the results of a piece, if they are numbers."""
    try:
        own = work.examples.own(piece)
        work.results.put(piece, logprobs_M if own is None else logprobs_M[own], loss)
        if loss.grad_M is not None:
            starts = work.examples.starts() if work.examples.others else work.results.starts
            _check_finite("gradient of the loss", loss.grad_M.numpy(), starts, piece)
    except EngineError as error:
        return error
    return None


@dataclass(frozen=True, slots=True)
class Packed:
    """The pieces of a step on the device."""

    tokens_T: torch.Tensor
    positions_T: torch.Tensor
    runs: list[tuple[int, int]]
    rows: Array
    """To which token each target belongs, ascending; here and …"""
    rows_M: torch.Tensor
    """… on the device."""
    targets_M: torch.Tensor
    spans: list[tuple[int, int]]
    """The tokens of each piece, padded; and …"""
    sizes: list[int]
    """… how many targets it has."""

    @property
    def device(self) -> torch.device:
        """Where they are."""
        return self.tokens_T.device

    def wanted(self, head: Linear, spans: Sequence[Span]) -> Wanted:
        """The targets, in chunks whose logits fit the budget."""
        distinct = bool((np.diff(self.rows) > 0).all())
        return Wanted(
            self.rows_M, self.targets_M, _chunks(head, self.rows, spans, self.device), distinct
        )

    @classmethod
    def of(cls, chosen: Sequence[tuple[Pass, list[int]]], like: torch.Tensor) -> Packed:
        """Concatenate pieces; each is padded with a sequence of its own that nothing reads."""
        tokens: list[Array] = []
        rows: list[Array] = []
        targets: list[Array] = []
        lengths: list[int] = []
        runs: list[tuple[int, int]] = []
        spans: list[tuple[int, int]] = []
        sizes: list[int] = []
        start = 0
        for work, piece in chosen:
            examples = work.examples
            sequences = [examples.tokens[index] for index in piece]
            wanted = [examples.wanted(index) for index in piece]
            flat, per_token = (
                [tokens for tokens, _ in wanted],
                np.concatenate([counts for _, counts in wanted]),
            )
            if padding := -per_token.size % ROWS:
                sequences.append(np.zeros(padding, dtype=np.int64))
            here = [sequence.size for sequence in sequences]
            tokens += sequences
            lengths += here
            runs += [(len(list(run)), length) for length, run in groupby(here)]
            rows.append(start + np.repeat(np.arange(per_token.size), per_token))
            targets += flat
            spans.append((start, start + sum(here)))
            sizes.append(sum(t.size for t in flat))
            start += sum(here)

        def put(array: Array) -> torch.Tensor:
            return to_device(array, like.device)

        positions, flat_rows = np.concatenate([np.arange(n) for n in lengths]), np.concatenate(rows)
        return cls(
            put(np.concatenate(tokens)),
            put(positions),
            runs,
            flat_rows,
            put(flat_rows),
            put(np.concatenate(targets)),
            spans,
            sizes,
        )


@dataclass(frozen=True, slots=True)
class Wanted:
    """The targets whose log-probabilities are wanted."""

    rows_M: torch.Tensor
    targets_M: torch.Tensor
    chunks: Sequence[tuple[slice, slice]]
    """Slices of tokens whose logits are computed at once, with the slices of targets that belong to
    them."""
    distinct: bool
    """Whether no token has two targets."""


@dataclass(frozen=True, slots=True)
class Results:
    """Log-probabilities of every target of a pass and values of its loss, datum after datum in the
    order given.
    """

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
        losses_L = evaluated.losses_L.double().numpy()
        _check_finite("loss", losses_L, self.loss_starts, indices)
        self.losses_L[_places(self.loss_starts, indices)] = losses_L
        self.logprobs_M[_places(self.starts, indices)] = logprobs_M.double().numpy()
        for name, values in evaluated.metrics.items():
            self.metrics_N.setdefault(name, np.zeros(self.starts.size - 1))[indices] = values

    def output(self, examples: Examples, objective: Objective) -> ForwardBackwardOutput:
        """One record per datum, and the sums."""
        columns = {"logprobs": self.logprobs_M} | (
            {"elementwise_loss": self.losses_L} if objective.elementwise else {}
        )
        singles = {name: column.astype(np.float32) for name, column in columns.items()}
        outputs: list[LossFnOutput] = []
        for index, targets in enumerate(examples.targets):
            span = slice(self.starts[index], self.starts[index + 1])
            outputs.append(
                {
                    # a view: no copy per datum
                    name: TensorData(column[span], "float32", targets.shape)
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
    model: Decoder, hidden_TD: torch.Tensor, wanted: Wanted, adapters: SpanAdapters, *, keep: bool
) -> torch.Tensor:
    """Log-probabilities of targets, never holding all logits unless they are few and may be kept
    for backward.
    """
    logprobs_M: torch.Tensor = _TargetLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden_TD, adapters.anchor, model.head, wanted, adapters, model.config.logit_cap, keep
    )
    return logprobs_M


def _may_keep(logits: int, like: torch.Tensor) -> bool:
    """Whether so many logits are kept."""
    if not like.is_cuda:
        return logits <= KEPT_LOGITS
    unused = torch.cuda.memory_reserved(like.device) - torch.cuda.memory_allocated(like.device)
    free: int = torch.cuda.mem_get_info(like.device)[0] + unused
    return logits * torch.float32.itemsize <= KEPT_SHARE * free


def _chunks(
    head: Linear, rows: Array, spans: Sequence[Span], device: torch.device
) -> list[tuple[slice, slice]]:
    """Slices of tokens whose logits fit the budget, with the slices of targets that belong to them.

    Spans that fit a chunk are never cut, and one that does not is cut by itself: neighbours decide
    nothing.
    """
    budget = LOGITS_BUDGET * (ROOMIER if device.type == "cuda" else 1)
    room = max(LEAST_ROWS, budget // head.weight_ND.shape[0]) // ROWS * ROWS
    stops: list[int] = []
    begun = end = 0
    for span in spans:
        if end > begun and span.stop - begun > room:
            stops.append(end)
            begun = end
        while span.stop - begun > room:
            begun += room
            stops.append(begun)
        end = span.stop
    bounds = [0, *stops, end]
    firsts = np.searchsorted(rows, bounds).tolist()
    return [
        (slice(start, stop), slice(first, last))
        for start, stop, first, last in zip(bounds, bounds[1:], firsts, firsts[1:], strict=False)
        if start < stop
    ]


class _TargetLogprobs(torch.autograd.Function):
    """Log-softmax at the targets. Backward needs the logits again: kept when few, else recomputed
    by chunk.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_TD: torch.Tensor,
        anchor: torch.Tensor | None,
        head: Linear,
        wanted: Wanted,
        adapters: SpanAdapters,
        cap: float | None,
        keep: bool,
    ) -> torch.Tensor:
        keep = (
            keep
            and anchor is not None
            and _may_keep(hidden_TD.shape[0] * head.weight_ND.shape[0], hidden_TD)
        )
        out, kept = [], []
        for rows, span in wanted.chunks:
            logits_TV, _ = mixed_forward(
                hidden_TD[rows], head, adapters.shares(head, rows.start, rows.stop)
            )
            scored = Scored.of(cap_logits(logits_TV, cap))
            out.append(scored.at(wanted.rows_M[span] - rows.start, wanted.targets_M[span]))
            if keep:
                kept.append(scored)
        ctx.save_for_backward(hidden_TD)
        ctx.head, ctx.wanted, ctx.adapters, ctx.cap, ctx.kept = head, wanted, adapters, cap, kept
        return torch.cat(out)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (hidden_TD,), wanted = ctx.saved_tensors, ctx.wanted
        dhidden_TD = torch.empty_like(hidden_TD)
        for chunk, (rows, span) in enumerate(wanted.chunks):
            shares = ctx.adapters.shares(ctx.head, rows.start, rows.stop)
            x_TD = hidden_TD[rows]
            if ctx.kept:
                scored, ctx.kept[chunk] = ctx.kept[chunk], None
                lows = [
                    lowered(x_TD[share.start : share.stop], share.factors.a_RD) for share in shares
                ]
            else:
                logits_TV, lows = mixed_forward(x_TD, ctx.head, shares)
                scored = Scored.of(cap_logits(logits_TV, ctx.cap))
            slope_TV = None if ctx.cap is None else soft_cap_slope(scored.logits_TV, ctx.cap)
            here_M, targets_M = wanted.rows_M[span] - rows.start, wanted.targets_M[span]
            dtype = x_TD.dtype if slope_TV is None else slope_TV.dtype
            dlogits_TV = scored.gradient(
                here_M, targets_M, grads[0][span], dtype, distinct=wanted.distinct
            )
            if slope_TV is not None:
                dlogits_TV.mul_(slope_TV)
            dx_TD = mixed_backward(
                dlogits_TV.to(x_TD.dtype), x_TD, lows, ctx.head, shares, wants_input=True
            )
            assert dx_TD is not None
            dhidden_TD[rows] = dx_TD
        return dhidden_TD, None, None, None, None, None, None


@dataclass(frozen=True, slots=True)
class Scored:
    """Logits of some tokens, and the logarithm of the sum of their exponentials."""

    logits_TV: torch.Tensor
    sums_T1: torch.Tensor

    @classmethod
    def of(cls, logits_TV: torch.Tensor) -> Scored:
        """Sum in float32 at least."""
        fused = kernels_for(logits_TV)
        return cls(logits_TV, _log_sum(logits_TV) if fused is None else fused.log_sums(logits_TV))

    def at(self, rows_M: torch.Tensor, targets_M: torch.Tensor) -> torch.Tensor:
        """Log-probabilities of targets."""
        return self.logits_TV[rows_M, targets_M].to(self.sums_T1.dtype) - self.sums_T1[rows_M, 0]

    def gradient(
        self,
        rows_M: torch.Tensor,
        targets_M: torch.Tensor,
        grad_M: torch.Tensor,
        dtype: torch.dtype,
        *,
        distinct: bool,
    ) -> torch.Tensor:
        """Of the logits: at targets theirs, less softmax times its sum over the row. The logits may
        be overwritten.

        Where softmax is near one the two nearly cancel out: so they are subtracted before anything
        is rounded.
        """
        row_grad_T1 = torch.zeros(
            self.logits_TV.shape[0], 1, dtype=grad_M.dtype, device=grad_M.device
        )
        row_grad_T1.index_add_(0, rows_M, grad_M[:, None])
        if dtype == self.sums_T1.dtype:
            dlogits_TV = self.logits_TV.sub_(self.sums_T1).exp_().mul_(-row_grad_T1)
            return dlogits_TV.index_put_((rows_M, targets_M), grad_M, accumulate=True)
        if not distinct:  # those that are the same token of the same row become one
            places_M, back_M = torch.unique(
                rows_M * self.logits_TV.shape[1] + targets_M, return_inverse=True
            )
            summed_M = torch.zeros(places_M.shape[0], dtype=grad_M.dtype, device=grad_M.device)
            grad_M = summed_M.index_add_(0, back_M, grad_M)
            rows_M, targets_M = (
                places_M // self.logits_TV.shape[1],
                places_M % self.logits_TV.shape[1],
            )
        theirs_M = grad_M - self.at(rows_M, targets_M).exp() * row_grad_T1[rows_M, 0]
        dlogits_TV = self._softmax_gradient(row_grad_T1, dtype)
        return dlogits_TV.index_put_((rows_M, targets_M), theirs_M.to(dtype))

    def _softmax_gradient(self, row_grad_T1: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if (fused := kernels_for(self.logits_TV)) is not None:
            gradient: torch.Tensor = fused.softmax_gradient(
                self.logits_TV, self.sums_T1, row_grad_T1, dtype
            )
            return gradient
        return (-torch.exp(self.logits_TV.float() - self.sums_T1) * row_grad_T1).to(dtype)


def _log_sum(logits_TV: torch.Tensor) -> torch.Tensor:
    return torch.logsumexp(
        logits_TV.to(torch.promote_types(logits_TV.dtype, torch.float32)), -1, keepdim=True
    )


def log_softmax(logits_TV: torch.Tensor) -> torch.Tensor:
    """Log-softmax in float32 at least."""
    return torch.log_softmax(
        logits_TV, dim=-1, dtype=torch.promote_types(logits_TV.dtype, torch.float32)
    )
