"""Execution of regularizers, in parallel or one after the other, and norms of their gradients.

A regularizer is called once in either mode, and its gradient is taken from that call.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import math
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from tinkex import events
from tinkex.regularizers.specs import (
    Kind,
    Logprobs,
    LossFn,
    RegularizerError,
    RegularizerSpec,
    execute,
    value_of,
    waited,
)
from tinkex.types.custom_losses import RegularizerOutput
from tinkex.types.inputs import Datum

logger = logging.getLogger("tinkex")

TIMEOUT = 30.0
"""Seconds that a regularizer may take in a thread, and that an asynchronous one may take."""

GRACE = 1.0
"""Seconds after which an asynchronous regularizer is given up, beyond its own limit."""


@dataclass(frozen=True, slots=True)
class Execution:
    """Options of a computation; see `execute_all`.

    Example:
        >>> Execution(parallel=False).timeout
        30.0
    """

    track_grad_norms: bool = False
    parallel: bool = True
    timeout: float | None = TIMEOUT
    max_concurrency: int | None = None


@dataclass(frozen=True, slots=True)
class Term:
    """The result of a regularizer: its loss, not weighted, and its numbers.

    Example:
        >>> Term(
        ...     torch.tensor(4.0), RegularizerOutput.from_computation("l2", 4.0, 0.5)
        ... ).output.contribution
        2.0
    """

    loss: torch.Tensor
    output: RegularizerOutput


Outcome: TypeAlias = Term | RegularizerError


def execute_all(
    specs: Sequence[RegularizerSpec],
    data: Sequence[Datum],
    logprobs: Logprobs,
    *,
    parallel: bool = True,
    timeout: float | None = TIMEOUT,
    track_grad_norms: bool = False,
    max_concurrency: int | None = None,
) -> list[RegularizerOutput]:
    """Compute regularizers, and return their outputs in the order of the specs.

    Args:
        specs: The regularizers.
        data: The examples.
        logprobs: Their log-probabilities.
        parallel: Compute each in a thread; the results are the same.
        timeout: Seconds that each may take in a thread, and that an asynchronous one may take;
            None for no limit.
        track_grad_norms: Report the norms of their gradients.
        max_concurrency: The most threads at once; by default as many as there are processors.

    Returns:
        An output for each spec.

    Raises:
        RegularizerError: A regularizer failed; the first one in the order of the specs.

    Example:
        >>> from tinkex.regularizers import L1, L2
        >>> specs = [RegularizerSpec(L1(), weight=0.5), RegularizerSpec(L2(), weight=0.1)]
        >>> [(term.name, term.value) for term in execute_all(specs, [], torch.tensor([-1.0, -3.0]))]
        [('l1_sparsity', 4.0), ('l2_weight_decay', 10.0)]
    """
    tracked = traced(logprobs) if track_grad_norms else logprobs
    execution = Execution(track_grad_norms, parallel, timeout, max_concurrency)
    return [term.output for term in run_all(specs, data, tracked, execution)]


def execute_one(
    spec: RegularizerSpec,
    data: Sequence[Datum],
    logprobs: Logprobs,
    *,
    timeout: float | None = TIMEOUT,
    track_grad_norms: bool = False,
) -> RegularizerOutput:
    """Compute one regularizer in this thread.

    Args:
        spec: The regularizer and its weight.
        data: The examples.
        logprobs: Their log-probabilities: one tensor, or one for each datum.
        timeout: Seconds that an asynchronous regularizer may take.
        track_grad_norms: Report the norm of its gradient.

    Returns:
        Its value, contribution and metrics.

    Raises:
        RegularizerError: It failed, or did not return a loss.

    Example:
        >>> from tinkex.regularizers import L1
        >>> term = execute_one(
        ...     RegularizerSpec(L1(), weight=0.5),
        ...     [],
        ...     torch.tensor([-1.0, -3.0]),
        ...     track_grad_norms=True,
        ... )
        >>> term.value, term.contribution, round(term.grad_norm, 4)
        (4.0, 2.0, 1.4142)
    """
    return execute_all(
        [spec], data, logprobs, parallel=False, timeout=timeout, track_grad_norms=track_grad_norms
    )[0]


def run_all(
    specs: Sequence[RegularizerSpec],
    data: Sequence[Datum],
    logprobs: Logprobs,
    execution: Execution,
) -> list[Term]:
    """Compute regularizers; to track gradients, `logprobs` must require them."""
    most, timeout = execution.max_concurrency, execution.timeout
    if most is not None and (isinstance(most, bool) or most < 1):
        raise ValueError(f"max_concurrency must be at least 1, got {most!r}")
    if timeout is not None and not timeout > 0:
        raise ValueError(f"timeout must be a positive number of seconds or None, got {timeout!r}")
    call = _Call(data, logprobs, execution)
    if execution.parallel:
        return _side_by_side(specs, call, most or os.cpu_count() or 1)
    terms = []
    for spec in specs:
        _tell_start(spec)
        began = time.perf_counter()
        terms.append(_settled(spec, call.outcome(spec), began))
    return terms


@dataclass(frozen=True, slots=True)
class _Call:
    """The arguments of all regularizers of one loss."""

    data: Sequence[Datum]
    logprobs: Logprobs
    execution: Execution

    def patience(self, spec: RegularizerSpec) -> float:
        """Return the seconds that a regularizer may take in a thread."""
        timeout = self.execution.timeout
        if timeout is None:
            return math.inf
        return 2 * timeout + GRACE if spec.async_ else timeout

    def outcome(self, spec: RegularizerSpec) -> Outcome:
        """Compute a regularizer; return its term or its failure."""
        with torch.enable_grad() if self.execution.track_grad_norms else contextlib.nullcontext():
            return self._outcome(spec)

    def _outcome(self, spec: RegularizerSpec) -> Outcome:
        try:
            answer = execute(spec.fn, self.data, self.logprobs, spec.opts)
        except Exception as error:
            return _failure("regularizer_failed", spec, error)
        if spec.async_:
            try:
                answer = waited(answer, self.execution.timeout)
            except (Exception, asyncio.CancelledError) as error:
                return _failure("regularizer_exit", spec, error)
        try:
            loss, metrics = value_of(answer, f"regularizer {spec.name!r}")
            norm = self._norm(spec, loss) if self.execution.track_grad_norms else None
            value = float(loss.detach())
            output = RegularizerOutput.from_computation(
                spec.name, value, spec.weight, custom=metrics, grad_norm=norm
            )
        except Exception as error:
            return _failure("regularizer_failed", spec, error)
        return Term(loss, output)

    def _norm(self, spec: RegularizerSpec, loss: torch.Tensor) -> float:
        if spec.async_:
            logger.warning(UNTRACED, spec.name)
            return 0.0
        return norm_or_none(loss, self.logprobs, f"regularizer {spec.name!r}") or 0.0


def _failure(kind: Kind, spec: RegularizerSpec, error: BaseException) -> RegularizerError:
    message = f"regularizer {spec.name!r}: {type(error).__name__}: {error}"
    failure = RegularizerError(message, kind=kind, name=spec.name)
    failure.__cause__ = error
    return failure


def _timed_out(spec: RegularizerSpec) -> RegularizerError:
    return RegularizerError(
        f"regularizer {spec.name!r}: it took too long", kind="timeout", name=spec.name
    )


def _side_by_side(specs: Sequence[RegularizerSpec], call: _Call, most: int) -> list[Term]:
    """Compute in threads; do not wait for one that takes too long."""
    for spec in specs:
        _tell_start(spec)
    done: queue.SimpleQueue[tuple[int, Outcome]] = queue.SimpleQueue()
    began: dict[int, float] = {}
    running: dict[int, float] = {}  # when each must have ended
    terms: dict[int, Term] = {}
    failures: dict[int, RegularizerError] = {}

    def start(index: int) -> None:
        began[index] = time.perf_counter()
        running[index] = began[index] + call.patience(specs[index])
        context = contextvars.copy_context()

        def work() -> None:
            try:
                outcome = context.run(call.outcome, specs[index])
            except BaseException as error:  # else the caller would wait for ever
                outcome = _failure("regularizer_failed", specs[index], error)
            done.put((index, outcome))

        threading.Thread(
            target=work, name=f"tinkex-regularizer-{specs[index].name}", daemon=True
        ).start()

    def settle(index: int, outcome: Outcome) -> None:
        running.pop(index)
        try:
            terms[index] = _settled(specs[index], outcome, began[index])
        except RegularizerError as error:
            failures[index] = error

    waiting = list(range(len(specs)))[::-1]
    while waiting or running:
        while waiting and len(running) < most:
            start(waiting.pop())
        for index, outcome in _news(done, running, specs):
            settle(index, outcome)
        if failures and all(index in terms for index in range(min(failures))):
            raise failures[min(failures)]
    return [terms[index] for index in range(len(specs))]


def _news(
    done: queue.SimpleQueue[tuple[int, Outcome]],
    running: Mapping[int, float],
    specs: Sequence[RegularizerSpec],
) -> list[tuple[int, Outcome]]:
    """Wait for the next outcome; include those that took too long."""
    deadline = min(running.values())
    try:
        index, outcome = done.get(
            timeout=None if math.isinf(deadline) else max(0.0, deadline - time.perf_counter())
        )
    except queue.Empty:
        late = [index for index, deadline in running.items() if time.perf_counter() >= deadline]
        return [(index, _timed_out(specs[index])) for index in late]
    return [(index, outcome)] if index in running else []  # one that was given up may still end


# ── events ────────────────────────────────────────────────────────────────────────────────────────


def _tell_start(spec: RegularizerSpec) -> None:
    facts = {"regularizer_name": spec.name, "weight": spec.weight, "async": spec.async_}
    events.emit(events.REGULARIZER_START, {"system_time": time.time()}, facts)


def _settled(spec: RegularizerSpec, outcome: Outcome, began: float) -> Term:
    """Emit the event of an outcome; return the term or raise the failure."""
    facts = {"regularizer_name": spec.name, "weight": spec.weight}
    numbers = {"duration": (time.perf_counter() - began) * 1000}
    if isinstance(outcome, RegularizerError):
        events.emit(events.REGULARIZER_EXCEPTION, numbers, {**facts, "reason": outcome.message})
        raise outcome
    output = outcome.output
    numbers |= {"value": output.value, "contribution": output.contribution}
    if output.grad_norm is not None:
        numbers["grad_norm"] = output.grad_norm
    events.emit(events.REGULARIZER_STOP, numbers, {**facts, "async": spec.async_})
    return outcome


# ── gradients ─────────────────────────────────────────────────────────────────────────────────────

UNTRACED = (
    "the gradient of the asynchronous regularizer %r is not traced: its norm is reported as 0.0"
)


def parts(logprobs: Logprobs) -> list[torch.Tensor]:
    """Return the tensors as a list.

    Example:
        >>> len(parts([torch.zeros(2), torch.zeros(3)])), len(parts(torch.zeros(2)))
        (2, 1)
    """
    return [logprobs] if isinstance(logprobs, torch.Tensor) else list(logprobs)


def traced(logprobs: Logprobs) -> Logprobs:
    """Return log-probabilities that can have a gradient: the same, or copies.

    Example:
        >>> traced(torch.zeros(2)).requires_grad
        True
    """
    found = parts(logprobs)
    if found and all(part.requires_grad for part in found):
        return logprobs
    return _copied(logprobs)


def _copied(logprobs: Logprobs) -> Logprobs:
    copies = [part.detach().clone().requires_grad_(True) for part in parts(logprobs)]
    return copies[0] if isinstance(logprobs, torch.Tensor) else copies


def norm_of(loss: torch.Tensor, logprobs: Logprobs) -> float:
    """Return the norm of a loss's gradient; 0 if the loss is constant.

    Example:
        >>> logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
        >>> norm_of((3 * logprobs[0] + 4 * logprobs[1]), logprobs)
        5.0
    """
    found = parts(logprobs)
    if not loss.requires_grad or not found:
        return 0.0
    ones = torch.ones_like(loss)
    grads = torch.autograd.grad(loss, found, ones, retain_graph=True, allow_unused=True)
    return math.sqrt(sum(float(grad.double().square().sum()) for grad in grads if grad is not None))


def norm_or_none(loss: torch.Tensor, logprobs: Logprobs, whose: str) -> float | None:
    """Return the norm of a loss's gradient; log a warning if it cannot be computed.

    Example:
        >>> norm_or_none(torch.tensor(4.0), torch.tensor([-1.0]), "the base loss")
        0.0
    """
    try:
        return norm_of(loss, logprobs)
    except RuntimeError as error:
        logger.warning("the gradient norm of %s cannot be computed: %s", whose, error)
        return None


def compute_grad_norm(loss_fn: Callable[[Any], Any], logprobs: Logprobs) -> float:
    """Return the norm of the gradient of a function of log-probabilities of any shape.

    Args:
        loss_fn: Takes the log-probabilities and returns one number as a tensor.
        logprobs: Their log-probabilities: one tensor, or one for each datum.

    Returns:
        The norm.

    Example:
        >>> round(compute_grad_norm(torch.sum, torch.tensor([1.0, 2.0, 3.0])), 4)
        1.7321
    """
    leaves = _copied(logprobs)
    with torch.enable_grad():
        loss = loss_fn(leaves)
    return norm_of(loss, leaves) if isinstance(loss, torch.Tensor) else 0.0


def grad_norm_for_regularizer(
    spec: RegularizerSpec, data: Sequence[Datum], logprobs: Logprobs
) -> float:
    """Return the norm of a regularizer's gradient, not weighted.

    If it fails or is asynchronous, log a warning and return 0.0.

    Args:
        spec: The regularizer.
        data: The examples.
        logprobs: Their log-probabilities: one tensor, or one for each datum.

    Returns:
        The norm.

    Example:
        >>> spec = RegularizerSpec(
        ...     lambda data, logprobs: (logprobs.square().sum(), {}), weight=0.5, name="square"
        ... )
        >>> grad_norm_for_regularizer(spec, [], torch.tensor([-3.0, -4.0]))
        10.0
    """
    if spec.async_:
        logger.warning(UNTRACED, spec.name)
        return 0.0

    def loss(leaves: Any) -> torch.Tensor:
        return value_of(execute(spec.fn, data, leaves, spec.opts), f"regularizer {spec.name!r}")[0]

    return _or_zero(loss, logprobs, f"regularizer {spec.name!r}")


def total_grad_norm(
    base_fn: LossFn, specs: Sequence[RegularizerSpec], data: Sequence[Datum], logprobs: Logprobs
) -> float:
    """Like `grad_norm_for_regularizer`, of the whole loss: a base loss and weighted regularizers.

    Asynchronous regularizers are waited for.

    Example:
        >>> spec = RegularizerSpec(
        ...     lambda data, logprobs: (logprobs.square().sum(), {}), weight=0.5, name="square"
        ... )
        >>> total_grad_norm(
        ...     lambda data, logprobs: (logprobs.sum() * 0, {}),
        ...     [spec],
        ...     [],
        ...     torch.tensor([-3.0, -4.0]),
        ... )
        5.0
    """

    def loss(leaves: Any) -> torch.Tensor:
        total = value_of(base_fn(data, leaves), "the base loss")[0]
        for spec in specs:
            answer = execute(spec.fn, data, leaves, spec.opts)
            answer = waited(answer, None) if spec.async_ else answer
            total = total + spec.weight * value_of(answer, f"regularizer {spec.name!r}")[0]
        return total

    return _or_zero(loss, logprobs, "the composed loss")


def _or_zero(loss_fn: Callable[[Any], torch.Tensor], logprobs: Logprobs, whose: str) -> float:
    try:
        return compute_grad_norm(loss_fn, logprobs)
    except Exception as error:
        logger.warning(
            "the gradient norm of %s cannot be computed and is reported as 0.0: %s", whose, error
        )
        return 0.0
