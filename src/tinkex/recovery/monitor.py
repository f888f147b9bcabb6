"""Recovery of runs that the server reports as corrupted, from a checkpoint.

A `Monitor` polls runs, and hands lost ones to an `Executor`. That makes new clients from their
checkpoints, with a limit on attempts at once and on attempts per run. Nothing happens unless both
have a policy that is enabled. The steps are events (`tinkex.events`, RECOVERY_…). For a loop that
only has to go on, `tinkex.resilient` is simpler.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tinkex import events
from tinkex.client.futures.loop_thread import in_own_thread, runtime
from tinkex.client.http.retry import Sleep, persist
from tinkex.client.rest import RestClient
from tinkex.client.service import ServiceClient
from tinkex.client.session import Session
from tinkex.client.training_client import TrainingClient
from tinkex.errors import TinkerError
from tinkex.recovery.policies import (
    METRIC_PREFIX,
    Attempts,
    RecoveryError,
    RecoveryPolicy,
    metrics_metadata as metrics_metadata,
)
from tinkex.types.checkpoints import Checkpoint, TrainingRun

logger = logging.getLogger("tinkex")


def rest_client_of(service: ServiceClient) -> RestClient:
    """Make a client that looks up runs over the connections of a service."""
    return RestClient(service.holder)


# ── the monitor ───────────────────────────────────────────────────────────────────────────────────


@dataclass(slots=True)
class _Watched:
    service: ServiceClient
    rest: RestClient
    metadata: dict[str, Any]


class Monitor:
    """Polls training runs, and hands corrupted ones to an executor.

    A run that was handed over is no longer watched. Watch the run of the recovered client instead.

    Args:
        executor: The executor that recovers runs.
        policy: The policy; by default `recovery` of the service's Config.
        rest_client_fun: Makes the client that looks up runs, from the service.
        sleep: Waits for a number of seconds.

    Example:
        >>> monitor = Monitor(Executor(), RecoveryPolicy(enabled=True, poll_interval_ms=1000))
        >>> monitor.monitor_run(client.model_id, service, {"training_client": client})
        >>> monitor.run_ids
        ['...:train:0']
        >>> monitor.stop_monitoring(client.model_id)
    """

    def __init__(
        self,
        executor: Executor | None,
        policy: RecoveryPolicy | Mapping[str, Any] | None = None,
        *,
        rest_client_fun: Callable[[ServiceClient], RestClient] = rest_client_of,
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        self._executor = executor
        self._policy = None if policy is None else RecoveryPolicy.of(policy)
        self._rest_client_of = rest_client_fun
        self._sleep = sleep
        self._runs: dict[str, _Watched] = {}
        self._lock = threading.Lock()
        self._armed = False

    @property
    def run_ids(self) -> list[str]:
        """The runs that are watched."""
        with self._lock:
            return list(self._runs)

    def monitor_run(
        self, run_id: str, service: ServiceClient, metadata: Mapping[str, Any] | None = None
    ) -> None:
        """Watch a run; if it is watched already, replace its service and metadata.

        Args:
            run_id: The run.
            service: Makes the new client.
            metadata: Added to every event; `training_client` is the old client for `on_recovery`.

        Raises:
            RecoveryError: The policy is not enabled, or there is no executor.

        Example:
            >>> monitor = Monitor(Executor(), RecoveryPolicy(enabled=True, poll_interval_ms=1000))
            >>> monitor.monitor_run(client.model_id, service, {"training_client": client})
            >>> monitor.stop_monitoring(client.model_id)
        """
        policy = self._policy_for(service)
        if self._executor is None:
            raise RecoveryError("recovery needs an executor, got None", "no_executor")
        watched = _Watched(service, self._rest_client_of(service), _facts(metadata))
        with self._lock:
            self._runs[run_id] = watched
            if self._armed:
                return
            self._armed = True
        runtime().call(lambda: runtime().task(self._watch(policy.poll_interval_ms / 1000)))

    def stop_monitoring(self, run_id: str) -> None:
        """Stop watching a run; do nothing if it is not watched.

        Args:
            run_id: The run.

        Example:
            >>> monitor = Monitor(Executor(), RecoveryPolicy(enabled=True))
            >>> monitor.stop_monitoring(client.model_id)
            >>> monitor.run_ids
            []
        """
        with self._lock:
            self._runs.pop(run_id, None)

    def _policy_for(self, service: ServiceClient) -> RecoveryPolicy:
        return _enabled(service.holder.config.recovery if self._policy is None else self._policy)

    async def _watch(self, interval: float) -> None:
        while True:
            await self._sleep(interval)
            for run_id, watched in list(self._runs.items()):
                await self._look(run_id, watched)
            with self._lock:
                if not self._runs:
                    self._armed = False
                    return

    async def _look(self, run_id: str, watched: _Watched) -> None:
        try:
            run = await watched.rest.get_training_run(run_id)
        except Exception as error:  # whatever it is, the next look may get through
            logger.debug("run %s could not be polled: %s", run_id, error)
            events.emit(
                events.RECOVERY_POLL_ERROR,
                {},
                {**watched.metadata, "run_id": run_id, "error": error},
            )
            return
        if not run.corrupted or self._runs.get(run_id) is not watched:
            return
        facts = {**watched.metadata, "run_id": run_id, "checkpoint": run.last_checkpoint}
        events.emit(events.RECOVERY_DETECTED, {}, facts)
        assert self._executor is not None
        try:
            self._executor.recover(
                run_id,
                watched.service,
                self._policy_for(watched.service),
                metadata=watched.metadata,
                last_checkpoint=run.last_checkpoint,
                run=run,
                rest=watched.rest,
            )
        except RecoveryError as refused:  # the next look tries again
            logger.debug("run %s was not recovered: %s", run_id, refused)
            return
        with self._lock:
            if self._runs.get(run_id) is watched:
                del self._runs[run_id]


# ── the executor ──────────────────────────────────────────────────────────────────────────────────


def _enabled(given: RecoveryPolicy | Mapping[str, Any] | None) -> RecoveryPolicy:
    """Return a policy; raise if it is not enabled."""
    policy = RecoveryPolicy.of(given)
    if not policy.enabled:
        raise RecoveryError("recovery is not enabled by its policy", "recovery_disabled")
    return policy


def _facts(metadata: Mapping[str, Any] | None) -> dict[str, Any]:
    return dict(metadata) if isinstance(metadata, Mapping) else {}


class Executor:
    """Makes new clients of lost runs, in the order of the requests.

    Args:
        max_concurrent: The most attempts at once.
        sleep: Waits for a number of seconds between attempts.

    Example:
        >>> executor = Executor(max_concurrent=2)
        >>> executor.pending
        []
    """

    def __init__(self, max_concurrent: int = 1, *, sleep: Sleep = asyncio.sleep) -> None:
        self._sleep = sleep
        self._lock = threading.Lock()
        self._pending: set[str] = set()
        self._places = asyncio.Semaphore(max(1, max_concurrent))

    @property
    def pending(self) -> list[str]:
        """The runs that are queued, under way or waiting for another attempt."""
        with self._lock:
            return sorted(self._pending)

    def recover(
        self,
        run_id: str,
        service: ServiceClient,
        policy: RecoveryPolicy | Mapping[str, Any],
        *,
        metadata: Mapping[str, Any] | None = None,
        last_checkpoint: Checkpoint | Mapping[str, Any] | str | None = None,
        run: TrainingRun | None = None,
        rest: RestClient | None = None,
    ) -> None:
        """Recover a run in the background; callbacks and events report the result.

        Args:
            run_id: The lost run.
            service: Makes the new client; its session is opened again if it was lost.
            policy: The attempts, and the choice of the checkpoint.
            metadata: Added to every event; `training_client` is the old client for `on_recovery`.
            last_checkpoint: The latest checkpoint, if it is known.
            run: The run's record, if it is known; its last checkpoint is the default.
            rest: Looks checkpoints up; a client of the service's by default.

        Raises:
            RecoveryError: The policy is not enabled, or the run is already being recovered.

        Example:
            >>> recovered = Future()
            >>> policy = RecoveryPolicy(
            ...     enabled=True, on_recovery=lambda old, new, path: recovered.set_result(new)
            ... )
            >>> Executor().recover(client.model_id, service, policy, last_checkpoint=path)
            >>> recovered.result(timeout=60)
            TrainingClient('...:train:1')
        """
        chosen = _enabled(policy)
        attempts = Attempts(run_id, chosen, _facts(metadata))
        with self._lock:
            if run_id in self._pending:
                raise RecoveryError(f"run {run_id} is already being recovered", "already_pending")
            self._pending.add(run_id)
        looker = rest or rest_client_of(service)

        async def attempt() -> tuple[str, TrainingClient]:
            async with self._places:  # left between attempts, so that other runs go on
                attempts.begin()
                path = await select_checkpoint(chosen, run_id, looker, last_checkpoint, run)
                return path, await restore(attempts, service, path)

        runtime().call(lambda: runtime().task(self._run(attempts, attempt)))

    async def _run(
        self, attempts: Attempts, attempt: Callable[[], Awaitable[tuple[str, TrainingClient]]]
    ) -> None:
        policy, run_id = attempts.policy, attempts.run_id
        try:
            checkpoint, client = await persist(attempt, attempts.delay_after, self._sleep)
        except Exception as error:
            attempts.tell(events.RECOVERY_EXHAUSTED, error=error)
            self._forget(run_id)
            await told(policy.on_failure, run_id, error)
        else:
            attempts.tell(events.RECOVERY_COMPLETED, client=client, checkpoint=checkpoint)
            self._forget(run_id)
            old = attempts.metadata.get("training_client")
            await told(policy.on_recovery, old, client, checkpoint)

    def _forget(self, run_id: str) -> None:
        with self._lock:
            self._pending.discard(run_id)


async def reopened(session: Session) -> None:
    """Open a session again if the server has lost it."""
    known = session.session_id
    if known and await session.is_lost():
        await session.renew(known)


async def restore(
    attempts: Attempts, service: ServiceClient, checkpoint: str, **options: Any
) -> TrainingClient:
    """Make a run of a checkpoint, in a session that the server knows."""
    attempts.tell(events.RECOVERY_CHECKPOINT_SELECTED, checkpoint=checkpoint)
    await reopened(service.holder)
    if attempts.policy.restore_optimizer:
        make = service.create_training_client_from_state_with_optimizer
    else:
        make = service.create_training_client_from_state
    client = await make(checkpoint, **options)
    attempts.tell(events.RECOVERY_CLIENT_CREATED, client=client, checkpoint=checkpoint)
    return client


async def told(callback: Callable[..., object] | None, *facts: Any) -> None:
    """Call a user's function in a new thread; if it raises, log the error."""
    if callback is None:
        return
    try:
        await in_own_thread(callback, *facts)
    except Exception:
        logger.warning("a callback of the recovery policy failed", exc_info=True)


# ── checkpoints ───────────────────────────────────────────────────────────────────────────────────


async def select_checkpoint(
    policy: RecoveryPolicy,
    run_id: str,
    rest: RestClient,
    last_checkpoint: Checkpoint | Mapping[str, Any] | str | None = None,
    run: TrainingRun | None = None,
) -> str:
    """Return the path of the checkpoint that a policy chooses.

    Args:
        policy: The policy: latest, best, or one path.
        run_id: The lost run.
        rest: The client that looks up checkpoints.
        last_checkpoint: The last checkpoint, if it is known.
        run: The run's record, if it is known.

    Returns:
        The path.

    Raises:
        RecoveryError: There is none.

    Example:
        >>> import asyncio
        >>> saved = client.save_state("step-100").result()
        >>> asyncio.run(select_checkpoint(RecoveryPolicy(), client.model_id, rest))
        'tinker://.../weights/step-100'
    """
    if isinstance(policy.checkpoint_strategy, tuple):
        return policy.checkpoint_strategy[1]
    if policy.checkpoint_strategy == "best":
        return best_checkpoint(await _checkpoints(run_id, rest), policy, run_id)
    known = (
        last_checkpoint if last_checkpoint is not None else getattr(run, "last_checkpoint", None)
    )
    if known is None and run is None:
        known = (await rest.get_training_run(run_id)).last_checkpoint
    path = _path_of(known)
    if path is None:
        raise RecoveryError(
            f"run {run_id} has no checkpoint to recover from",
            "missing_checkpoint",
            hint="call save_state now and then",
        )
    return path


async def _checkpoints(run_id: str, rest: RestClient) -> list[Checkpoint]:
    try:
        return (await rest.list_checkpoints(run_id)).checkpoints
    except TinkerError as error:
        raise RecoveryError(
            f"the checkpoints of run {run_id} cannot be listed: {error.message}",
            "missing_checkpoint",
        ) from error


def best_checkpoint(checkpoints: list[Checkpoint], policy: RecoveryPolicy, run_id: str = "") -> str:
    """Return the path of the training checkpoint with the best metric.

    Of two equal ones take the later one.

    Args:
        checkpoints: The checkpoints to choose from.
        policy: The metric, and whether less is better.
        run_id: The run of the checkpoints, for the error.

    Returns:
        The path.

    Raises:
        RecoveryError: No checkpoint has that metric.

    Example:
        >>> for step, loss in enumerate([0.5, 0.2, 0.3]):
        ...     saved = client.save_state(
        ...         f"step-{step}", user_metadata=metrics_metadata(loss=loss)
        ...     ).result()
        >>> best_checkpoint(
        ...     rest.list_checkpoints(client.model_id).result().checkpoints, RecoveryPolicy()
        ... )
        'tinker://.../weights/step-1'
    """
    sign = 1 if policy.metric_mode == "max" else -1
    scored = [
        (sign * value, checkpoint.time.timestamp(), checkpoint.tinker_path)
        for checkpoint in checkpoints
        if checkpoint.checkpoint_type == "training"
        and not math.isnan(value := metric_of(checkpoint, policy.metric))
    ]
    if not scored:
        raise RecoveryError(
            f"no checkpoint of run {run_id} was saved with the metric {policy.metric!r}",
            "missing_checkpoint",
            hint=f"save_state(name, user_metadata=metrics_metadata({policy.metric}=…))",
        )
    return max(scored)[2]


def metric_of(checkpoint: Checkpoint, name: str) -> float:
    """Return a metric that was saved with a checkpoint, or NaN.

    Args:
        checkpoint: The checkpoint.
        name: The metric.

    Returns:
        The number, or NaN.

    Example:
        >>> saved = client.save_state(
        ...     "step-100", user_metadata=metrics_metadata(loss=0.25)
        ... ).result()
        >>> metric_of(rest.list_checkpoints(client.model_id).result().checkpoints[0], "loss")
        0.25
    """
    try:
        return float((checkpoint.user_metadata or {})[f"{METRIC_PREFIX}{name}"])
    except (KeyError, ValueError):
        return math.nan


def _path_of(checkpoint: Checkpoint | Mapping[str, Any] | str | None) -> str | None:
    if isinstance(checkpoint, Mapping):
        checkpoint = checkpoint.get("tinker_path") or checkpoint.get("path")
    path = checkpoint.tinker_path if isinstance(checkpoint, Checkpoint) else checkpoint
    return path or None
