"""A training loop that goes on when its run is lost: `with tinkex.resilient(client, every=20) as
trainer: …`.

The trainer is a TrainingClient. It saves a state every so many optimizer steps, in the background,
and keeps the calls made since. When the server has lost the run (it was unloaded, its session has
ended, the server came back without it, or says that it is corrupted), a new run is made of the last
state and those calls are made again, in their order: the results that were still waited for come
from there, and the weights end up where they would have been. On the CPU that is to the bit.

A state holds no gradient that waits for its step, so nothing may be pending when the block is
entered.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import secrets
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Literal, Self, TypeVar, Unpack

from tinkex import events
from tinkex.client.futures.api_future import Future, start
from tinkex.client.futures.backcompat import BackcompatClientFuture
from tinkex.client.futures.loop_thread import runtime
from tinkex.client.futures.queue_states import Observer
from tinkex.client.futures.sampling_future import BackcompatSamplingClientFuture
from tinkex.client.futures.streams import SampleStream
from tinkex.client.http.retry import RetryConfig, persist
from tinkex.client.losses import caller_losses
from tinkex.client.losses.loss_graphs import LossHandle
from tinkex.client.rest import RestClient
from tinkex.client.sampling_client import SamplingClient, checked_kind, open_sampling_client
from tinkex.client.service import ServiceClient
from tinkex.client.session import Session
from tinkex.client.training_client import CallOptions, TrainingClient
from tinkex.errors import (
    APIConnectionError,
    APITimeoutError,
    GoneError,
    NotFoundError,
    RequestFailedError,
    TinkerError,
)
from tinkex.recovery.monitor import told
from tinkex.recovery.policies import RecoveryError, RecoveryPolicy
from tinkex.types.checkpoints import (
    LoadWeightsRequest,
    LoadWeightsResponse,
    SamplingClientKind,
    SaveWeightsExternalResponse,
    SaveWeightsForSamplerResponse,
    SaveWeightsResponse,
)
from tinkex.types.custom_losses import RegularizerSpec
from tinkex.types.inputs import Datum
from tinkex.types.sampling import SampleRequest, SampleResponse
from tinkex.types.training import (
    AdamParams,
    DropGradientsResponse,
    ForwardBackwardInput,
    ForwardBackwardOutput,
    ForwardBackwardRequest,
    LossFnConfig,
    OptimParams,
    OptimStepResponse,
    UnloadModelResponse,
    UntypedAPIFuture,
)
from tinkex.wire import protocol

T = TypeVar("T")
logger = logging.getLogger("tinkex")

SAMPLER_TTL = 24 * 3600
"""Seconds that the weights behind a nameless sampler are kept for: so long it can be opened again.
"""
LOST = (GoneError, NotFoundError)
"""How a server answers a call for a run, a sampler or a session that it does not have."""


def resilient(
    training_client: TrainingClient,
    every: int = 10,
    *,
    policy: RecoveryPolicy | Mapping[str, Any] | None = None,
    keep: int = 2,
    name: str = "resilient",
    ttl_seconds: int | None = None,
) -> ResilientTrainingClient:
    """Wrap a training client so that a loop over it survives the loss of its run; use it in a
    `with` block.

    Args:
        training_client: The run to begin with, without a gradient that waits for its step.
        every: Save a state after so many optimizer steps. What is lost is at most computed so many
            times again.
        policy: How often to try and how long to wait in between, and whom to tell; `latest` with
            the optimizer's state is the only strategy that brings the same weights.
        keep: How many of the saved states are kept; older ones are deleted.
        name: What the names of the saved states begin with.
        ttl_seconds: Seconds after which a saved state expires; None keeps it.

    Returns:
        A training client with the same methods.

    Raises:
        ValueError: `every` or `keep` is less than one, or the policy would bring other weights.

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
        raise ValueError("this training client is a resilient one already")
    for option, value in (("every", every), ("keep", keep)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{option} must be a whole number from 1 on, got {value!r}")
    chosen = (
        RecoveryPolicy(enabled=True, backoff_ms=1000)
        if policy is None
        else RecoveryPolicy.of(policy)
    )
    if not chosen.enabled:
        raise ValueError("this policy is not enabled")
    if chosen.checkpoint_strategy != "latest" or not chosen.restore_optimizer:
        raise ValueError(
            "only the latest state, with the optimizer's, brings the weights that would have been"
        )
    return ResilientTrainingClient(training_client, every, chosen, keep, name, ttl_seconds)


@dataclass(eq=False, slots=True)
class _Entry:
    """A call since the last state: how to make it again, and what the user waits for."""

    name: str
    call: Callable[[TrainingClient], Future[Any]]
    future: Future[Any]
    changes: bool
    """Whether what is learnt depends on it: it is made again even when its result is known."""
    is_state: bool = False
    over: bool = False
    saved: str | None = None
    """Of a state that was saved, and is sound: its path."""


class ResilientTrainingClient(TrainingClient):
    """A TrainingClient whose run may be lost; `resilient` makes it.

    Cancelling a future gives up waiting for it: the call itself is always carried out. Receipts are
    for the run of the moment; after a loss their results have to be asked for anew.

    Example:
        >>> with resilient(client) as trainer:
        ...     trainer.checkpoint, trainer.recoveries
        ('tinker://.../weights/resilient-...', 0)
    """

    def __init__(
        self,
        client: TrainingClient,
        every: int,
        policy: RecoveryPolicy,
        keep: int,
        name: str,
        ttl_seconds: int | None,
    ) -> None:
        super().__init__(
            client.holder, client.model_seq_id, client.model_id, info=client._known_info
        )
        self._every, self._policy, self._keep, self._ttl = every, policy, keep, ttl_seconds
        self._prefix = f"{name}-{secrets.token_hex(4)}"
        self._service = ServiceClient.sharing(client.holder)
        self._rest = RestClient(client.holder)
        self._lock = threading.RLock()
        self._log: list[_Entry] = []
        self._life = 0
        """Counts the runs; what an earlier one still answers is of no interest."""
        self._is_between = False
        self._steps = self._samplers = self._in_a_row = 0
        self._states: list[str] = []
        self._metadata: dict[str, str] | None = None
        self._failure: Exception | None = None
        self._entered = False
        self._can_ask = True
        """Whether the server knows runs by their ids, and so can say that one is corrupted."""
        self._adopt(client)

    def _adopt(self, client: TrainingClient) -> None:
        self._outbox.poison.pass_on(client._outbox.poison)
        self._client = client
        self.model_id, self.model_seq_id, self._outbox = (
            client.model_id,
            client.model_seq_id,
            client._outbox,
        )
        self._known_info = client._known_info

    @property
    def checkpoint(self) -> str | None:
        """The path of the last state that was saved and counts."""
        return self._states[-1] if self._states else None

    @property
    def recoveries(self) -> int:
        """How many times the run was made anew."""
        return self._life

    # ── the block ─────────────────────────────────────────────────────────────────────────────────

    def __enter__(self) -> Self:
        self._enter().result()
        return self

    async def __aenter__(self) -> Self:
        await self._enter()
        return self

    def _enter(self) -> Future[Any]:
        if self._entered:
            raise RuntimeError("a resilient training client is entered once")
        self._entered = True
        return start(self._begin())

    async def _begin(self) -> None:
        """Save a first state: without it there would be nothing to go on from."""
        saved = await self._client.save_state(f"{self._prefix}-0", self._ttl)
        self._states.append(saved.path)
        try:
            self._metadata = (await self._rest.get_training_run(self.model_id)).user_metadata
        except TinkerError as error:
            self._can_ask = False
            logger.debug("the server says nothing of run %s: %s", self.model_id, error)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            concurrent.futures.wait(self._left())
            self._end()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            await asyncio.gather(*self._left(), return_exceptions=True)
            self._end()

    def _left(self) -> list[Future[Any]]:
        """What is to be waited for at the end of the block: all calls, and a last state that shows
        the run is sound.
        """
        with self._lock:
            if self._failure is None and any(entry.changes for entry in self._log):
                self._save(f"{self._prefix}-end")
            return [entry.future for entry in self._log if not entry.over]

    def _end(self) -> None:
        if isinstance(self._failure, RecoveryError):
            raise self._failure

    # ── keeping calls ─────────────────────────────────────────────────────────────────────────────

    def _put_down(
        self,
        name: str,
        call: Callable[[TrainingClient], Future[T]],
        *,
        changes: bool,
        is_state: bool = False,
    ) -> Future[T]:
        """Make a call, and remember how to make it again."""
        if not self._entered:
            raise RuntimeError(
                "use the resilient training client in a with block: `with tinkex.resilient(…) as …`"
            )
        future: Future[T] = Future()
        future._runtime = runtime()
        entry = _Entry(name, call, future, changes, is_state)
        with self._lock:
            if self._failure is not None:
                raise self._failure
            self._make(entry)  # what makes no sense is refused here, and leaves no trace
            self._log.append(entry)
        self._session.track(future)
        return future

    def _make(self, entry: _Entry) -> None:
        # between two runs a call is only looked at, not listened to
        life = -1 if self._is_between else self._life
        made = entry.call(self._client)
        made.add_done_callback(lambda done: runtime().call(self._ended, entry, life, done))

    def _ended(self, entry: _Entry, life: int, done: concurrent.futures.Future[Any]) -> None:
        """Take a call's outcome; on the loop."""
        if life != self._life or self._is_between:
            return
        if done.cancelled():
            self._deliver(entry, error=asyncio.CancelledError())
        elif (error := done.exception()) is None:
            self._in_a_row = 0 if not entry.over else self._in_a_row
            if entry.is_state:
                start(self._examine(entry, life, done.result()))
            else:
                self._deliver(entry, done.result())
        elif not isinstance(error, Exception) or self._failure is not None:
            self._deliver(entry, error=error)
        elif self._shows_loss(error):
            self._lose(life, error)
        elif isinstance(error, RequestFailedError):
            start(self._judge(entry, life, error))
        else:
            self._deliver(entry, error=error)

    @staticmethod
    def _shows_loss(error: Exception) -> bool:
        """Whether a failure means that the run is gone, or that nobody can say what became of the
        call.
        """
        return isinstance(error, LOST) or (
            isinstance(error, APIConnectionError) and not isinstance(error, APITimeoutError)
        )

    async def _judge(self, entry: _Entry, life: int, error: RequestFailedError) -> None:
        """Tell a call that was wrong from one that failed because its run, or its session, is no
        more.
        """
        try:
            lost = await self._is_corrupted() or await self._is_gone()
        except Exception as unknown:
            logger.debug("whether run %s is lost cannot be asked: %s", self.model_id, unknown)
            lost = False
        if life != self._life or self._is_between:
            return
        if lost:
            self._lose(life, error)
        else:
            self._deliver(entry, error=error)

    async def _is_corrupted(self) -> bool:
        if not self._can_ask:
            return False
        try:
            return (await self._rest.get_training_run(self.model_id)).corrupted
        except LOST:
            return True
        except TinkerError as error:
            logger.debug("whether run %s is corrupted cannot be asked: %s", self.model_id, error)
            return False

    async def _is_gone(self) -> bool:
        """Whether the server refuses calls for this run: asked with a pass over nothing, under a
        number long used.
        """
        nothing = ForwardBackwardInput(data=[], loss_fn="cross_entropy")
        request = ForwardBackwardRequest(
            model_id=self.model_id, seq_id=1, forward_only=True, forward_backward_input=nothing
        )
        try:
            await self._session.submit(protocol.FORWARD_BACKWARD, request)
        except LOST:
            return True
        except TinkerError as error:
            logger.debug("run %s is there, and says %s", self.model_id, error)
        return False

    async def _examine(self, entry: _Entry, life: int, saved: SaveWeightsResponse) -> None:
        """Take a state that was saved for one to go on from, unless the run was unsound by then."""
        corrupted = await self._is_corrupted()
        if life != self._life or self._is_between:
            return
        if corrupted:
            self._lose(life, TinkerError(f"the server says that run {self.model_id} is corrupted"))
            return
        entry.saved = saved.path
        self._deliver(entry, saved)

    def _deliver(
        self, entry: _Entry, result: Any = None, error: BaseException | None = None
    ) -> None:
        """Give an outcome to whoever waits for it; on the loop."""
        if entry.over:
            if error is not None:
                self._fail(
                    f"{entry.name}, which had succeeded, failed when it was made again: {error}",
                    error,
                )
            return
        with self._lock:
            entry.over = True
            if error is not None and not isinstance(error, APITimeoutError):
                entry.changes = False  # it was not carried out
            self._trim()
        if entry.is_state and error is not None:
            logger.warning("a state could not be saved to go on from: %s", error)
        if isinstance(error, asyncio.CancelledError):
            entry.future.cancel()
            return
        # given up by who waited for it
        with contextlib.suppress(concurrent.futures.InvalidStateError):
            entry.future.set_exception(error) if error is not None else entry.future.set_result(
                result
            )

    def _trim(self) -> None:
        """Forget what lies before the last sound state, once everything there has its result."""
        last = -1
        for index, entry in enumerate(self._log):
            if not entry.over:
                break
            if entry.saved is not None:
                last = index
        if last < 0:
            return
        self._states += [entry.saved for entry in self._log[: last + 1] if entry.saved is not None]
        del self._log[: last + 1]
        while len(self._states) > self._keep:
            runtime().task(self._discard(self._states.pop(0)))

    async def _discard(self, path: str) -> None:
        with contextlib.suppress(TinkerError):
            await self._rest.delete_checkpoint_from_tinker_path(path)

    # ── losing a run ──────────────────────────────────────────────────────────────────────────────

    def _lose(self, life: int, error: Exception) -> None:
        with self._lock:
            if life != self._life or self._is_between or self._failure is not None:
                return
            self._is_between = True
            self._in_a_row += 1
        runtime().task(self._recover(error))

    async def _recover(self, cause: Exception) -> None:
        old, path = self._client, self.checkpoint
        facts: dict[str, Any] = {"run_id": old.model_id, "strategy": "latest"}
        events.emit(events.RECOVERY_DETECTED, {}, {**facts, "checkpoint": path, "error": cause})
        logger.warning(
            "run %s is lost (%s): going on from %s",
            old.model_id,
            getattr(cause, "message", cause),
            path,
        )
        made = 0

        def told_of() -> tuple[dict[str, int], dict[str, Any]]:
            return {"attempt": made}, {**facts, "attempt": made}

        def attempt() -> Awaitable[TrainingClient]:
            nonlocal made
            made += 1
            events.emit(events.RECOVERY_STARTED, *told_of())
            return self._restore(*told_of())

        def delay_after(outcome: object) -> float | None:
            if not isinstance(outcome, Exception):
                return None
            number, named = told_of()
            events.emit(events.RECOVERY_FAILED, number, {**named, "error": outcome})
            is_last = isinstance(outcome, RecoveryError) or made == self._policy.max_attempts
            return None if is_last else self._policy.backoff(made)

        error = cause
        if self._in_a_row <= self._policy.max_attempts:
            try:
                client = await persist(attempt, delay_after)
            except Exception as failure:
                error = failure
            else:
                self._replay(client)
                number, named = told_of()
                facts = {**named, "client": client, "checkpoint": path}
                events.emit(events.RECOVERY_COMPLETED, number, facts)
                await told(self._policy.on_recovery, old, client, path)
                return
        number = {"attempt": self._policy.max_attempts}
        events.emit(events.RECOVERY_EXHAUSTED, number, {**facts, **number, "error": error})
        self._fail(f"run {old.model_id} is lost and could not be taken up again: {error}", error)
        await told(self._policy.on_failure, old.model_id, error)

    async def _restore(self, number: dict[str, int], facts: dict[str, Any]) -> TrainingClient:
        path = self.checkpoint
        if path is None:
            raise RecoveryError("no state was saved to go on from", "missing_checkpoint")
        events.emit(events.RECOVERY_CHECKPOINT_SELECTED, number, {**facts, "checkpoint": path})
        await reopened(self._session)
        client = await self._service.create_training_client_from_state_with_optimizer(
            path, user_metadata=self._metadata
        )
        events.emit(
            events.RECOVERY_CLIENT_CREATED, number, {**facts, "client": client, "checkpoint": path}
        )
        return client

    def _replay(self, client: TrainingClient) -> None:
        """Go over to a new run, and make the calls since the last state again."""
        failed: list[tuple[_Entry, Exception]] = []
        with self._lock:
            self._adopt(client)
            self._is_between, self._life = False, self._life + 1
            for entry in self._log:
                if entry.over and not entry.changes:
                    continue
                try:
                    self._make(entry)
                except Exception as error:
                    failed.append((entry, error))
        for entry, refusal in failed:
            self._deliver(entry, error=refusal)

    def _fail(self, message: str, cause: BaseException) -> None:
        """Give up: everything that is waited for, and every later call, fails with this."""
        reason = cause.reason if isinstance(cause, RecoveryError) else "exhausted"
        failure = RecoveryError(message, reason, hint=f"the last state is {self.checkpoint}")
        failure.__cause__ = cause
        with self._lock:
            self._failure, self._is_between = failure, False
            left = [entry for entry in self._log if not entry.over]
        for entry in left:
            self._deliver(entry, error=failure)

    # ── the calls of a TrainingClient ─────────────────────────────────────────────────────────────

    def forward(
        self,
        data: Sequence[Datum],
        loss_fn: str,
        loss_fn_config: LossFnConfig | None = None,
        **options: Unpack[CallOptions],
    ) -> Future[ForwardBackwardOutput]:
        """Compute the loss and log-probabilities of data, without a gradient."""
        items = _kept(data)
        return self._put_down(
            "forward",
            lambda client: client.forward(items, loss_fn, loss_fn_config, **options),
            changes=False,
        )

    def forward_backward(
        self,
        data: Sequence[Datum],
        loss_fn: str,
        loss_fn_config: LossFnConfig | None = None,
        **options: Unpack[CallOptions],
    ) -> Future[ForwardBackwardOutput]:
        """Compute the loss of data and add its gradient to what the next `optim_step` applies."""
        items = _kept(data)
        return self._put_down(
            "forward_backward",
            lambda client: client.forward_backward(items, loss_fn, loss_fn_config, **options),
            changes=True,
        )

    def _receipts_of_pass(
        self,
        data: Sequence[Datum],
        loss_fn: str,
        config: LossFnConfig | None,
        *,
        forward_only: bool,
    ) -> Future[list[UntypedAPIFuture]]:
        items = _kept(data)
        return self._put_down(
            "receipts",
            lambda client: client._receipts_of_pass(
                items, loss_fn, config, forward_only=forward_only
            ),
            changes=not forward_only,
        )

    def forward_backward_custom(
        self,
        data: Sequence[Datum],
        loss_fn: caller_losses.CustomLoss | LossHandle,
        *,
        loss_type_input: Literal["logprobs"] | None = None,
        regularizers: Sequence[RegularizerSpec] = (),
        **options: Unpack[CallOptions],
    ) -> Future[ForwardBackwardOutput]:
        """Train on any loss written in torch; after a loss of the run it may be called again with
        the same data.
        """
        items = _kept(data)

        def call(client: TrainingClient) -> Future[ForwardBackwardOutput]:
            chosen = loss_fn
            if isinstance(chosen, LossHandle) and chosen.session_id != client.holder.session_id:
                # The server's own copy went with its session; the graph is here.
                chosen = replace(chosen, session_id=client.holder.session_id, loss_id=None)
            return client.forward_backward_custom(
                items, chosen, loss_type_input=loss_type_input, regularizers=regularizers, **options
            )

        return self._put_down("forward_backward_custom", call, changes=True)

    def optim_step(
        self,
        optim_params: OptimParams | None = None,
        *,
        adam_params: AdamParams | None = None,
        **options: Unpack[CallOptions],
    ) -> Future[OptimStepResponse]:
        """Apply the accumulated gradient and clear it; every so many steps the state is saved after
        it.
        """
        return self._step(
            "optim_step",
            lambda client: client.optim_step(optim_params, adam_params=adam_params, **options),
        )

    def _receipt_of_step(
        self, optim_params: OptimParams | None, adam_params: AdamParams | None
    ) -> Future[UntypedAPIFuture]:
        return self._step(
            "receipts", lambda client: client._receipt_of_step(optim_params, adam_params)
        )

    def _step(self, name: str, call: Callable[[TrainingClient], Future[T]]) -> Future[T]:
        with self._lock:  # nobody's gradient may come between a step and the state after it
            stepped = self._put_down(name, call, changes=True)
            self._steps += 1
            if self._steps % self._every == 0:
                self._save(f"{self._prefix}-{self._steps}")
        return stepped

    def _save(self, name: str) -> None:
        self._put_down(
            "save_state",
            lambda client: client.save_state(name, self._ttl),
            changes=False,
            is_state=True,
        )

    def save_state(
        self,
        name: str,
        ttl_seconds: int | None = None,
        overwrite: bool = False,
        user_metadata: dict[str, str] | None = None,
        **options: Unpack[CallOptions],
    ) -> Future[SaveWeightsResponse]:
        """Save weights and optimizer state under a name; it is never deleted here."""
        return self._put_down(
            "save_state",
            lambda client: client.save_state(
                name, ttl_seconds, overwrite, user_metadata, **options
            ),
            changes=False,
        )

    def save_weights_for_sampler(
        self,
        name: str,
        ttl_seconds: int | None = None,
        user_metadata: dict[str, str] | None = None,
        **options: Unpack[CallOptions],
    ) -> Future[SaveWeightsForSamplerResponse]:
        """Save weights under a name, to sample from."""
        return self._put_down(
            "save_weights_for_sampler",
            lambda client: client.save_weights_for_sampler(
                name, ttl_seconds, user_metadata, **options
            ),
            changes=False,
        )

    def save_weights_external(
        self,
        name: str,
        ttl_seconds: int | None = None,
        age_encryption_recipients: list[str] | None = None,
        **options: Unpack[CallOptions],
    ) -> Future[SaveWeightsExternalResponse]:
        """Export weights as files that can be downloaded, on servers that offer it."""
        return self._put_down(
            "save_weights_external",
            lambda client: client.save_weights_external(
                name, ttl_seconds, age_encryption_recipients, **options
            ),
            changes=False,
        )

    def _load(
        self, path: str, optimizer: bool, token: str | None, options: CallOptions
    ) -> Future[LoadWeightsResponse]:
        def call(client: TrainingClient) -> Future[LoadWeightsResponse]:
            request = LoadWeightsRequest(
                model_id=client.model_id, path=path, optimizer=optimizer, weights_access_token=token
            )
            return client._put(protocol.LOAD_WEIGHTS, request, options)

        return self._put_down("load_state", call, changes=True)

    def _dropping(self) -> Future[DropGradientsResponse]:
        return self._put_down("drop_gradients", lambda client: client._dropping(), changes=True)

    def unload_model(self) -> UnloadModelResponse:
        """Let the server forget this run; that is the end of this client."""
        self._stop()
        return self._client.unload_model()

    async def unload_model_async(self) -> UnloadModelResponse:
        """Like `unload_model`."""
        self._stop()
        return await self._client.unload_model_async()

    def _stop(self) -> None:
        with self._lock:
            self._failure = self._failure or RuntimeError("the run was unloaded")

    # ── samplers ──────────────────────────────────────────────────────────────────────────────────

    def save_weights_and_get_sampling_client(
        self,
        name: str | None = None,
        retry_config: RetryConfig | None = None,
        record_stability_info: bool = False,
        kind: SamplingClientKind = "snapshot",
    ) -> BackcompatSamplingClientFuture:
        """A sampler of the weights as they are after the calls made so far; it outlives the run and
        the session.

        Args:
            name: Save the weights under this name; without one, under one that is kept for a day.
            retry_config: How samples that fail for a passing reason are treated.
            record_stability_info: Ask the server to keep what `stable_reinforce` needs.
            kind: "snapshot" only: a sampler that follows the weights could not be opened again.
        """
        if checked_kind(kind) != "snapshot":
            raise ValueError(
                f"a resilient training client makes samplers of kind 'snapshot' only, not {kind!r}"
            )
        ttl = None
        if name is None:
            self._samplers += 1
            name, ttl = f"{self._prefix}-sampler-{self._samplers}", SAMPLER_TTL
        saving = self.save_weights_for_sampler(name, ttl)
        return BackcompatSamplingClientFuture(
            start(self._sampler_of(saving, retry_config, record_stability_info))
        )

    async def _sampler_of(
        self,
        saving: Future[SaveWeightsForSamplerResponse],
        config: RetryConfig | None,
        stability: bool,
    ) -> SamplingClient:
        return await open_resilient(self._session, (await saving).path, config, stability)

    def create_sampling_client(
        self,
        model_path: str,
        retry_config: RetryConfig | None = None,
        record_stability_info: bool = False,
    ) -> BackcompatSamplingClientFuture:
        """A sampler of a saved checkpoint; it outlives the run and the session."""
        opening: Future[SamplingClient] = self._session.create(
            open_resilient, self._session, model_path, retry_config, record_stability_info
        )
        return BackcompatSamplingClientFuture(opening)

    def __repr__(self) -> str:
        return f"ResilientTrainingClient({self.model_id!r}, every={self._every})"


def _kept(data: Sequence[Datum]) -> list[Datum]:
    """Data as they are now: the caller's list may change before they are sent again."""
    return list(data) if not isinstance(data, Datum) else data  # type: ignore[return-value]


async def reopened(session: Session) -> None:
    """Open a session anew, if the server has lost it."""
    known = session.session_id
    if await session.is_lost():
        await session.renew(known)


# ── samplers ──────────────────────────────────────────────────────────────────────────────────────


class ResilientSamplingClient(SamplingClient):
    """A sampler of saved weights that is opened again when the server has lost it; the samples then
    come from there.
    """

    _model_path: str
    _reopening: asyncio.Lock

    async def _sample(
        self,
        request: SampleRequest,
        timeout: float | None = None,
        observer: Observer | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> SampleResponse:
        draw = super()._sample
        return await self._again(request, lambda asked: draw(asked, timeout, observer, headers))

    async def _stream(
        self, stream: SampleStream, request: SampleRequest, timeout: float | None
    ) -> None:
        read = super()._stream
        await self._again(request, lambda asked: read(stream, asked, timeout))

    async def _again(
        self, request: SampleRequest, call: Callable[[SampleRequest], Awaitable[T]]
    ) -> T:
        """Make a call, and once more if it failed because the sampler is no more."""
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
        fresh = await open_sampling_client(self._session, model_path=self._model_path)
        self.sampling_session_id, self._poller = fresh.sampling_session_id, None


async def open_resilient(
    session: Session, model_path: str, retry_config: RetryConfig | None, record_stability_info: bool
) -> ResilientSamplingClient:
    """Open a sampler of saved weights, and the session if the server has lost that."""
    try:
        opened = await open_sampling_client(session, model_path=model_path)
    except LOST:
        await reopened(session)
        opened = await open_sampling_client(session, model_path=model_path)
    client = ResilientSamplingClient(
        session,
        sampling_session_id=opened.sampling_session_id,
        base_model=opened._base_model,
        retry_config=retry_config,
        record_stability_info=record_stability_info,
    )
    client._model_path, client._reopening = model_path, asyncio.Lock()
    return client
