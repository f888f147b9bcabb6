"""A session: a transport, the server's configuration, an id with its heartbeat.

It opens itself on first use. It stops when it is closed, or when the last client that holds it is
dropped.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import logging
import math
import threading
import time
import weakref
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from tinkex.client.futures.api_future import Future, start
from tinkex.client.futures.batch_polling import BatchPoller
from tinkex.client.futures.loop_thread import runtime
from tinkex.client.futures.queue_states import QueueStateLogger, QueueStateTracker
from tinkex.client.futures.result_polling import retrieve
from tinkex.client.http.exchange import origin_of
from tinkex.client.http.limits import DispatchGate, shared_gate, shared_response_budget
from tinkex.client.http.request_headers import forget_caller
from tinkex.client.http.transport import Transport
from tinkex.client.outbox import Submissions
from tinkex.client.settings.config import Config
from tinkex.errors import GoneError, NotFoundError, TinkerError
from tinkex.types.future_requests import CancelFutureRequest
from tinkex.types.sessions import (
    ClientConfigRequest,
    ClientDynamicConfigResponse,
    ClientSessionFinishReasonType,
    CreateSessionRequest,
    CreateSessionResponse,
    FinishReason,
    FinishSessionRequest,
    SessionHeartbeatRequest,
)
from tinkex.wire import protocol
from tinkex.wire.protocol import PROTOCOL_VERSION, Operation

if TYPE_CHECKING:
    from tinkex.telemetry import Reporter

T = TypeVar("T")
logger = logging.getLogger("tinkex")

HEARTBEAT_SECONDS, HEARTBEAT_TIMEOUT = 10.0, 10.0
SILENCE_SECONDS = 120.0
"""Seconds of failing heartbeats after which each failure is logged."""
SHORTEST_REFRESH = 10.0
CANCEL_PATIENCE = 10.0


class Session(Submissions):
    """The state that the clients of one ServiceClient share.

    With a `session_id`, it is the shadow of a session that another process owns: it keeps that
    session alive and never ends it.

    Heartbeats go on through every failure, unless a limit is set: more than `max_failure_count`
    failures in a row, or more than `max_failure_duration` seconds without a success, end them.
    Calls are still made then.
    """

    max_failure_count: float = math.inf
    max_failure_duration: float = math.inf

    def __init__(
        self, config: Config, *, display_name: str | None = None, session_id: str = ""
    ) -> None:
        super().__init__(Transport(config))
        self.config = config
        self.client_config_is_missing = False
        """True if the server is too old to give a client configuration."""
        self.dynamic_config = ClientDynamicConfigResponse()
        self.session_id = session_id
        self.is_shadow = bool(session_id)
        self.model_seq_ids = itertools.count()
        self.sampling_session_seq_ids = itertools.count()
        self.custom_loss_seq_ids = itertools.count()
        self.custom_losses: set[str] = set()
        """The keys of the custom losses of this session; each is made once."""
        self._display_name = display_name
        self._pauses = QueueStateLogger("Training")
        self._lock = threading.Lock()
        self._opening: Future[None] | None = None
        self._is_open = False
        self._gate: DispatchGate | None = None
        self._cancels: asyncio.Semaphore | None = None
        # for the finalizer, which must not refer to the session
        self._reporters: list[Reporter] = []
        self.pollers: weakref.WeakSet[BatchPoller] = weakref.WeakSet()
        """The batched polls of this session's samplers; each is flushed before the connections are
        closed."""
        self._finishing: asyncio.Future[None] | None = None
        self._releasing: asyncio.Task[None] | None = None
        self._renewing = asyncio.Lock()
        # When the last client is dropped, the transport must still be closed: on the loop, and
        # without a reference to the session.
        weakref.finalize(
            self, _close_transport, self.transport, self._reporters, self.pollers
        ).atexit = False

    def call(
        self,
        function: Callable[..., Coroutine[Any, Any, T]],
        *args: Any,
        kind: type[Future[T]] | None = None,
    ) -> Future[T]:
        """Run a function's coroutine once the session is open; it fails if opening fails."""
        if self.closed:
            raise RuntimeError("ServiceClient is closed")
        return start(self._call(function, args), kind)

    def create(self, function: Callable[..., Coroutine[Any, Any, T]], *args: Any) -> Future[T]:
        """Like `call`, for a client that is made: closing the session waits for it."""
        future = self.call(function, *args)
        self.track(future)
        return future

    async def _call(
        self, function: Callable[..., Coroutine[Any, Any, T]], args: tuple[Any, ...]
    ) -> T:
        if not self._is_open:
            await self.opened()
        try:
            return await function(*args)
        except Exception as error:
            self.report(error)
            raise

    async def opened(self) -> None:
        """Open the session if it is not open; after a failure the next call tries again."""
        if self._is_open:
            return
        with self._lock:
            if self._opening is None or (
                self._opening.done() and self._opening.exception() is not None
            ):
                self._opening = start(self._open())
        await self._opening

    async def _open(self) -> None:
        forget_caller()  # the session and its background work are shared by all calls
        runtime().at_stop(weakref.WeakMethod(self._abandon))
        await self._configure()
        if not self.is_shadow:
            await self._create()
            self._start_telemetry()
        runtime().task(_heartbeat(weakref.ref(self), self.session_id))
        runtime().task(_keep_informed(weakref.ref(self)))
        self._is_open = True

    def _start_telemetry(self) -> None:
        from tinkex import telemetry  # not needed before a session is open

        send, wanted = telemetry.sender(self.transport), telemetry.goes_by_itself(self.config)
        self.telemetry = telemetry.init(
            self.session_id, self.config, send, enabled=wanted, owner=self
        )
        if self.telemetry is not None:
            self._reporters.append(self.telemetry)

    async def _configure(self) -> None:
        """Ask the server for its client configuration; older servers have none."""
        hello = ClientConfigRequest(sdk_version=PROTOCOL_VERSION)
        patience = self.config.first_contact_patience
        try:
            self.client_config = await self.transport.call(
                protocol.CLIENT_CONFIG, hello, patience=patience
            )
        except NotFoundError:
            self.transport.is_older = self.client_config_is_missing = True
            return
        if self.client_config.batched_results:
            self.transport.is_older = False
        if self.client_config.pjwt_auth_enabled:
            self.transport.keys.use_tokens()
        self.transport.billing.limit = self.client_config.billing_exception_max_pause_duration_sec
        self.transport.response_budget = shared_response_budget(
            self._account, self.client_config.inflight_response_bytes_semaphore_size
        )
        await self.refresh()

    async def refresh(self) -> None:
        """Ask for the part of the configuration that may change."""
        hello = ClientConfigRequest(sdk_version=PROTOCOL_VERSION)
        with contextlib.suppress(TinkerError):
            self.dynamic_config = await self.transport.call(
                protocol.CLIENT_DYNAMIC_CONFIG, hello, timeout=10, patience=0
            )

    @property
    def _account(self) -> tuple[str, str | None]:
        """The key of shared budgets: the server and the API key."""
        return (origin_of(self.config.base_url), self.config.api_key)

    async def _create(self) -> None:
        request = CreateSessionRequest(
            tags=list(self.config.tags),
            user_metadata=dict(self.config.user_metadata or {}),
            sdk_version=PROTOCOL_VERSION,
            project_id=self.config.project_id,
            display_name=self._display_name,
        )
        # A first call fails in time if there is no answer, even if later calls are more patient.
        patience = min(self.config.patience, self.config.timeout)
        response: CreateSessionResponse = await self.transport.call(
            protocol.CREATE_SESSION, request, patience=patience
        )
        self.session_id = self.transport.facts["session_id"] = response.session_id
        for level, text in (
            (logging.INFO, response.info_message),
            (logging.WARNING, response.warning_message),
            (logging.ERROR, response.error_message),
        ):
            if text:
                logger.log(level, "%s", text)

    async def is_lost(self) -> bool:
        """Tell whether the server does not know this session, or has ended it."""
        request = SessionHeartbeatRequest(session_id=self.session_id)
        try:
            await self.transport.call(protocol.SESSION_HEARTBEAT, request)
        except (GoneError, NotFoundError):
            return True
        return False

    async def renew(self, lost: str) -> None:
        """Take a new id in place of a lost one; a second call does nothing."""
        if self.is_shadow:
            raise RuntimeError("a session of another process cannot be opened again here")
        async with self._renewing:
            if self.session_id != lost:
                return
            self.custom_losses.clear()
            await self._create()
            runtime().task(_heartbeat(weakref.ref(self), self.session_id))

    @property
    def gate(self) -> DispatchGate:
        """The limit on submissions of samples.

        All sessions of the same server and key share it.

        Use it on the loop only.
        """
        if self._gate is None:
            self._gate = shared_gate(
                self._account, self.client_config.sample_dispatch_bytes_semaphore_size
            )
        return self._gate

    async def run(self, op: Operation, request: Any) -> Any:
        """Submit an operation, wait for its result, and log a long pause."""
        number = getattr(request, "model_seq_id", None)
        name = self.session_id if number is None else f"{self.session_id}:train:{number}"
        listener = functools.partial(self._pauses.on_queue_state_change, name=name)
        tracker = QueueStateTracker(
            metadata={"session_id": self.session_id, "model_id": name}, listener=listener
        )
        try:
            receipt = await self.submit(op, request)
            return await retrieve(self.transport, receipt, notice=tracker.heard)
        finally:
            tracker.ended()

    async def cancel_future(self, request_id: str) -> None:
        """Tell the server that a result is no longer needed; failures are ignored."""
        if self._cancels is None:
            self._cancels = asyncio.Semaphore(
                max(1, self.dynamic_config.sample_cancel_max_batch_size)
            )
        async with self._cancels:
            with contextlib.suppress(TinkerError):
                request = CancelFutureRequest(request_id=request_id)
                await self.transport.call(
                    protocol.CANCEL_FUTURE, request, timeout=30, patience=CANCEL_PATIENCE
                )

    async def _settle(self, reason: ClientSessionFinishReasonType) -> None:
        """Wait for open calls, or log how many are dropped if the session ends badly."""
        # a session that is not open executes nothing
        pending = list(self.pending) if self._is_open else []
        if pending and reason == "success":
            logger.info("closing: waiting for %d calls under way", len(pending))
            await asyncio.gather(*pending, return_exceptions=True)
        elif pending:
            logger.warning(
                "the session ends with %d calls under way: they are dropped", len(pending)
            )

    async def _abandon(self) -> None:
        await self.finish("interrupted", "the program ended without closing the session")
        if self._releasing is not None:  # the program ends: wait now
            await asyncio.wait({self._releasing})

    async def finish(self, reason: ClientSessionFinishReasonType, detail: str | None) -> None:
        """Tell the server that this session is over, and close; the first reason counts."""
        self.closed = True
        if self._finishing is None:
            self._finishing = asyncio.ensure_future(self._finish(reason, detail))
        await asyncio.shield(self._finishing)

    async def _finish(self, reason: ClientSessionFinishReasonType, detail: str | None) -> None:
        await self._settle(reason)
        self.transport.keys.stop_renewal()
        await _flush(self.pollers)
        try:
            if self.session_id and not self.is_shadow:
                request = FinishSessionRequest(reason=FinishReason(type=reason), detail=detail)
                path = {"session_id": self.session_id}
                await self.transport.call(
                    protocol.FINISH_SESSION, request, path=path, timeout=10, patience=5
                )
        except NotFoundError:
            pass  # a server that knows no finish forgets the session by itself
        except TinkerError as error:
            logger.warning("the session could not be finished: %s", error)
        finally:
            if self.telemetry is None:
                await self.transport.close()
            else:  # do not wait for telemetry
                self._releasing = runtime().task(_let_go(self.transport, self._reporters))


_shadows: weakref.WeakValueDictionary[tuple[str, str, str | None], Session] = (
    weakref.WeakValueDictionary()
)


def shadow_of(config: Config, session_id: str) -> Session:
    """Return the shadow of a session in this process, one for all its clients."""
    key = (session_id, config.base_url, config.api_key)
    shadow = _shadows.get(key)
    if shadow is None or shadow.closed:
        shadow = _shadows[key] = Session(config, session_id=session_id)
    return shadow


def _close_transport(
    transport: Transport, reporters: list[Reporter], pollers: weakref.WeakSet[BatchPoller]
) -> None:
    async def close() -> None:
        await _flush(pollers)
        await _let_go(transport, reporters)

    runtime().release(close())


async def _flush(pollers: weakref.WeakSet[BatchPoller]) -> None:
    """Acknowledge the results of batched polls."""
    await asyncio.gather(*(poller.flush() for poller in list(pollers)))


async def _let_go(transport: Transport, reporters: list[Reporter]) -> None:
    try:
        for reporter in reporters:
            await reporter.aclose()
    finally:
        await transport.close()


async def _heartbeat(reference: weakref.ref[Session], session_id: str) -> None:
    """Send heartbeats until the session ends or a limit is reached."""
    request = SessionHeartbeatRequest(session_id=session_id)
    heard, failures = time.monotonic(), 0
    while True:
        await asyncio.sleep(HEARTBEAT_SECONDS)
        session = reference()
        if session is None or session.closed or session.session_id != session_id:
            return
        transport = session.transport
        del session  # the wait for an answer must not keep it alive
        try:
            await transport.call(
                protocol.SESSION_HEARTBEAT, request, timeout=HEARTBEAT_TIMEOUT, patience=0
            )
        except Exception as error:  # whatever it is, the next beat may get through
            if isinstance(error, GoneError):
                return
            failures += 1
            if (session := reference()) is None or session.closed:
                return
            silent = time.monotonic() - heard
            logger.debug("heartbeat of session %s: failure %d: %s", session_id, failures, error)
            if failures > session.max_failure_count or silent > session.max_failure_duration:
                logger.warning(
                    "Heartbeats of session %s are given up after %d failures in %.0f s: %s",
                    session_id,
                    failures,
                    silent,
                    error,
                )
                return
            del session
            if silent >= SILENCE_SECONDS:
                logger.warning(
                    "Heartbeat has failed for %.0f s: session %s: %s", silent, session_id, error
                )
        else:
            heard, failures = time.monotonic(), 0


async def _keep_informed(reference: weakref.ref[Session]) -> None:
    """Refresh the changing part of the configuration until the session ends."""
    while (session := reference()) is not None and not session.closed:
        pause = max(session.dynamic_config.refresh_interval_sec, SHORTEST_REFRESH)
        del session
        await asyncio.sleep(pause)
        session = reference()
        if session is not None and not session.closed:
            await session.refresh()
        del session
