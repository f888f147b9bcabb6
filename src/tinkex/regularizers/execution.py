"""Execution of regularizers, in parallel or one after the other.

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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from tinkex import events
from tinkex.regularizers.gradients import UNTRACED, norm_of, traced
from tinkex.regularizers.specs import (
    Kind,
    Logprobs,
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
    call = _Call(data, logprobs, timeout, execution.track_grad_norms)
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
    timeout: float | None
    track: bool

    def patience(self, spec: RegularizerSpec) -> float:
        """Return the seconds that a regularizer may take in a thread."""
        if self.timeout is None:
            return math.inf
        return 2 * self.timeout + GRACE if spec.async_ else self.timeout

    def outcome(self, spec: RegularizerSpec) -> Outcome:
        """Compute a regularizer; return its term or its failure."""
        with torch.enable_grad() if self.track else contextlib.nullcontext():
            return self._outcome(spec)

    def _outcome(self, spec: RegularizerSpec) -> Outcome:
        try:
            answer = execute(spec.fn, self.data, self.logprobs, spec.opts)
        except Exception as error:
            return _failure("regularizer_failed", spec, error)
        if spec.async_:
            try:
                answer = waited(answer, self.timeout)
            except (Exception, asyncio.CancelledError) as error:
                return _failure("regularizer_exit", spec, error)
        try:
            loss, metrics = value_of(answer, f"regularizer {spec.name!r}")
            norm = self._norm(spec, loss) if self.track else None
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
        try:
            return norm_of(loss, self.logprobs)
        except RuntimeError as error:
            logger.warning(
                "the gradient norm of regularizer %r is reported as 0.0: %s", spec.name, error
            )
            return 0.0


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
