"""A training loop that goes on when its run is lost.

Use it as `with tinkex.resilient(client, every=20) as trainer: …`.

The trainer is a TrainingClient. It saves a state after every few optimizer steps, in the
background, and keeps the calls made since. The server may lose the run: it was unloaded, its
session has ended, the server restarted without it, or says that it is corrupted. Then a new run is
made from the last state, and those calls are made again in their order. Calls that still wait get
their results from the new run, and the weights end up as they would have been. On the CPU the
weights are the same to the bit.

A state holds no gradient that waits for its step, so there must be none when the block is entered.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import logging
import secrets
import weakref
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Self, TypeVar

from tinkex import events
from tinkex.client.checkpoint_arguments import checked_choice
from tinkex.client.futures.api_future import Future, start
from tinkex.client.futures.backcompat import BackcompatClientFuture
from tinkex.client.futures.streams import SampleStream
from tinkex.client.http.retry import RetryConfig, persist
from tinkex.client.rest import RestClient
from tinkex.client.sampling_client import (
    BackcompatSamplingClientFuture,
    SamplingClient,
    open_sampler,
)
from tinkex.client.service import ServiceClient
from tinkex.client.session import Session
from tinkex.client.training_client import TrainingClient
from tinkex.errors import RequestFailedError, TinkerError
from tinkex.recovery.monitor import reopened, restore, told
from tinkex.recovery.policies import Attempts, RecoveryError, RecoveryPolicy
from tinkex.recovery.recorder import LOST, Recorder
from tinkex.types.sampled import SampleResponse
from tinkex.types.sampling import SampleRequest
from tinkex.types.saves import SamplingClientKind, SaveWeightsRequest
from tinkex.wire import protocol

T = TypeVar("T")
logger = logging.getLogger("tinkex")

SAMPLER_TTL = 24 * 3600
"""Seconds to keep the weights of a nameless sampler, so that it can be opened again."""


def resilient(
    training_client: TrainingClient,
    every: int = 10,
    *,
    policy: RecoveryPolicy | Mapping[str, Any] | None = None,
    keep: int = 2,
    name: str = "resilient",
    ttl_seconds: int | None = None,
) -> ResilientTrainingClient:
    """Wrap a training client so that its loop survives the loss of the run.

    Use it in a `with` block.

    Args:
        training_client: The first run; it must have no gradient that waits for its step.
        every: Save a state after this many optimizer steps. After a loss, at most this many steps
            are computed again.
        policy: The attempts, the waits between them, and the callbacks. The strategy must be
            `latest` with the optimizer's state, because no other gives the same weights.
        keep: The number of saved states to keep; older ones are deleted.
        name: The prefix of the names of saved states.
        ttl_seconds: Seconds after which a saved state expires; None keeps it.

    Returns:
        A training client with the same methods.

    Raises:
        ValueError: `every` or `keep` is less than one, or the policy would give other weights.

    Example:
        >>> with resilient(client, every=20) as trainer:
        ...     for batch in [data, data]:
        ...         passed = trainer.forward_backward(batch, "cross_entropy")
        ...         stepped = trainer.optim_step(AdamParams(learning_rate=1e-3))
        ...         print(f"{passed.result().metrics['loss:sum']:.1f}")
        10.6
        9...
    """
    if isinstance(training_client, BackcompatClientFuture):
        training_client = training_client.result()
    if isinstance(training_client, ResilientTrainingClient):
        raise ValueError("this training client is already resilient")
    for option, value in (("every", every), ("keep", keep)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{option} must be a positive whole number, got {value!r}")
    given = {"enabled": True, "backoff_ms": 1000} if policy is None else policy
    chosen = RecoveryPolicy.of(given)
    if not chosen.enabled:
        raise ValueError("this policy is not enabled")
    if chosen.checkpoint_strategy != "latest" or not chosen.restore_optimizer:
        raise ValueError(
            "only the latest state, with the optimizer's, gives the same weights as without a loss"
        )
    return ResilientTrainingClient(training_client, every, chosen, keep, name, ttl_seconds)


class ResilientTrainingClient(TrainingClient):
    """A TrainingClient whose run may be lost; `resilient` makes it.

    Cancelling a future only ends the wait: the call itself is always executed. Receipts belong to
    the present run; after a loss, submit the call again to get its result.

    Example:
        >>> with resilient(client) as trainer:
        ...     trainer.checkpoint, trainer.recoveries
        ('tinker://.../weights/resilient-...', 0)
    """

    _takes_foreign_losses = True

    def __init__(
        self,
        client: TrainingClient,
        every: int,
        policy: RecoveryPolicy,
        keep: int,
        name: str,
        ttl_seconds: int | None,
    ) -> None:
        super().__init__(client.holder, client.model_seq_id, client.model_id)
        self._every, self._policy, self._ttl = every, policy, ttl_seconds
        self._prefix = f"{name}-{secrets.token_hex(4)}"
        self._service = ServiceClient.sharing(client.holder)
        self._steps = self._samplers = 0
        self._metadata: dict[str, str] | None = None
        self._outbox: Recorder = Recorder(
            client._outbox,
            RestClient(client.holder),
            keep,
            weakref.WeakMethod(self._after_step),
            weakref.WeakMethod(self._recover),
        )
        self._adopt(client)

    def _adopt(self, client: TrainingClient) -> None:
        self._client = client
        self.model_id, self.model_seq_id = client.model_id, client.model_seq_id
        self._known_info = client._known_info

    @property
    def checkpoint(self) -> str | None:
        """The path of the last state that was saved and counts."""
        return self._outbox.states[-1] if self._outbox.states else None

    @property
    def recoveries(self) -> int:
        """The number of runs that were made in place of a lost one."""
        return self._outbox.life

    # ── the block ─────────────────────────────────────────────────────────────────────────────────

    def __enter__(self) -> Self:
        self._enter().result()
        return self

    async def __aenter__(self) -> Self:
        await self._enter()
        return self

    def _enter(self) -> Future[Any]:
        if self._outbox.is_open:
            raise RuntimeError("a resilient training client is entered once")
        self._outbox.is_open = True
        return start(self._begin())

    async def _begin(self) -> None:
        """Save a first state: without it there would be nothing to go on from."""
        saved = await self._client.save_state(f"{self._prefix}-0", self._ttl)
        self._outbox.states.append(saved.path)
        try:
            run = await self._outbox.rest.get_training_run(self.model_id)
            self._metadata = run.user_metadata
        except TinkerError as error:
            self._outbox.knows_runs = False
            logger.debug("the server does not describe run %s: %s", self.model_id, error)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            concurrent.futures.wait(self._left())
            self._end()

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            await asyncio.gather(*self._left(), return_exceptions=True)
            self._end()

    def _left(self) -> list[Future[Any]]:
        """Save a last state if anything changed; return the open calls."""
        recorder = self._outbox
        with recorder.lock:
            if recorder.failure is None and any(entry.trains for entry in recorder.log):
                self._save("end")  # shows that the run is sound
            return [entry.future for entry in recorder.log if not entry.over]

    def _end(self) -> None:
        if isinstance(self._outbox.failure, RecoveryError):
            raise self._outbox.failure

    # ── states ────────────────────────────────────────────────────────────────────────────────────

    def _after_step(self) -> None:
        self._steps += 1
        if self._steps % self._every == 0:
            self._save(str(self._steps))

    def _save(self, suffix: str) -> None:
        """Save a state to go on from."""
        path = f"{self._prefix}-{suffix}"
        request = SaveWeightsRequest(model_id=self.model_id, path=path, ttl_seconds=self._ttl)
        turn = self._turn(protocol.SAVE_WEIGHTS, request, {})
        self._outbox.record(protocol.SAVE_WEIGHTS.name, turn, is_state=True)

    # ── recovery ──────────────────────────────────────────────────────────────────────────────────

    async def _recover(self, cause: Exception) -> None:
        """Make another run from the last state, and the calls since then again."""
        old, path, policy = self._client, self.checkpoint, self._policy
        attempts = Attempts(old.model_id, policy, final=(RecoveryError,))
        facts = {"run_id": old.model_id, "strategy": policy.strategy_name, "checkpoint": path}
        events.emit(events.RECOVERY_DETECTED, {}, {**facts, "error": cause})
        reason = getattr(cause, "message", cause)
        logger.warning("run %s is lost (%s): going on from %s", old.model_id, reason, path)
        error = cause
        if self._outbox.losses <= policy.max_attempts:
            try:
                restore = functools.partial(self._restore, attempts)
                client = await persist(restore, attempts.delay_after)
            except Exception as failure:
                error = failure
            else:
                with self._outbox.lock:
                    self._adopt(client)
                    self._outbox.replay(client._outbox)
                attempts.tell(events.RECOVERY_COMPLETED, client=client, checkpoint=path)
                await told(policy.on_recovery, old, client, path)
                return
        attempts.attempt = policy.max_attempts
        attempts.tell(events.RECOVERY_EXHAUSTED, error=error)
        self._outbox.fail(f"run {old.model_id} is lost and could not be recovered: {error}", error)
        await told(policy.on_failure, old.model_id, error)

    async def _restore(self, attempts: Attempts) -> TrainingClient:
        attempts.begin()
        path = self.checkpoint
        if path is None:
            raise RecoveryError("no state was saved to recover from", "missing_checkpoint")
        return await restore(attempts, self._service, path, user_metadata=self._metadata)

    # ── samplers ──────────────────────────────────────────────────────────────────────────────────

    def save_weights_and_get_sampling_client(
        self,
        name: str | None = None,
        retry_config: RetryConfig | None = None,
        record_stability_info: bool = False,
        kind: SamplingClientKind = "snapshot",
    ) -> BackcompatSamplingClientFuture:
        """Open a sampler of the weights as they are after the calls made so far.

        The sampler outlives the run and the session.

        Args:
            name: The name to save the weights under; by default a name that expires after a day.
            retry_config: How samples are retried.
            record_stability_info: Ask the server to keep what `stable_reinforce` needs.
            kind: Only "snapshot": a sampler that follows the weights could not be opened again.
        """
        if checked_choice("kind", kind, SamplingClientKind) != "snapshot":
            raise ValueError(
                f"a resilient training client makes samplers of kind 'snapshot' only, not {kind!r}"
            )
        ttl = None
        if name is None:
            self._samplers += 1
            name, ttl = f"{self._prefix}-sampler-{self._samplers}", SAMPLER_TTL
        saving = self.save_weights_for_sampler(name, ttl)

        async def opening() -> SamplingClient:
            path = (await saving).path
            return await open_resilient(self._session, path, retry_config, record_stability_info)

        return BackcompatSamplingClientFuture(start(opening()))

    def create_sampling_client(
        self,
        model_path: str,
        retry_config: RetryConfig | None = None,
        record_stability_info: bool = False,
    ) -> BackcompatSamplingClientFuture:
        """Open a sampler of a saved checkpoint; it outlives the run and the session."""
        opening: Future[SamplingClient] = self._session.create(
            open_resilient, self._session, model_path, retry_config, record_stability_info
        )
        return BackcompatSamplingClientFuture(opening)

    def __repr__(self) -> str:
        return f"ResilientTrainingClient({self.model_id!r}, every={self._every})"


# ── samplers that are opened again ────────────────────────────────────────────────────────────────


class ResilientSamplingClient(SamplingClient):
    """A sampler of saved weights that is opened again when the server has lost it."""

    _model_path: str
    _reopening: asyncio.Lock

    async def _sample(self, request: SampleRequest, *options: Any) -> SampleResponse:
        draw = super()._sample
        return await self._again(request, lambda asked: draw(asked, *options))

    async def _stream(
        self, stream: SampleStream, request: SampleRequest, timeout: float | None
    ) -> None:
        read = super()._stream
        await self._again(request, lambda asked: read(stream, asked, timeout))

    async def _again(
        self, request: SampleRequest, call: Callable[[SampleRequest], Awaitable[T]]
    ) -> T:
        """Make a call, and once more if it failed because the sampler is gone."""
        known = self.sampling_session_id
        try:
            return await call(request.model_copy(update={"sampling_session_id": known}))
        except (*LOST, RequestFailedError) as error:
            async with self._reopening:
                if self.sampling_session_id == known:
                    if isinstance(error, RequestFailedError) and not await self._session.is_lost():
                        raise
                    await self._reopen()
            return await call(
                request.model_copy(update={"sampling_session_id": self.sampling_session_id})
            )

    async def _reopen(self) -> None:
        await reopened(self._session)
        fresh = await open_sampler(self._session, SamplingClient, model_path=self._model_path)
        self.sampling_session_id, self._poller = fresh.sampling_session_id, None


async def open_resilient(
    session: Session, model_path: str, retry_config: RetryConfig | None, record_stability_info: bool
) -> ResilientSamplingClient:
    """Open a sampler of saved weights, and the session if the server has lost that."""
    opening = functools.partial(
        open_sampler,
        session,
        ResilientSamplingClient,
        model_path=model_path,
        retry_config=retry_config,
        record_stability_info=record_stability_info,
    )
    try:
        client = await opening()
    except LOST:
        await reopened(session)
        client = await opening()
    client._model_path, client._reopening = model_path, asyncio.Lock()
    return client
