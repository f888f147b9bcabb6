"""RestBase: the connections and calls of RestClient and AdminClient."""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, Self, TypeVar

from tinkex.client.futures.api_future import APIFuture, AwaitableConcurrentFuture, outcome_of, start
from tinkex.client.futures.loop_thread import runtime
from tinkex.client.http.responses import wrapped
from tinkex.client.http.transport import Transport
from tinkex.client.settings.config import Config
from tinkex.types.sessions import Empty
from tinkex.wire import codec
from tinkex.wire.protocol import Operation

if TYPE_CHECKING:
    from tinkex.client.session import Session
    from tinkex.telemetry import Reporter

T = TypeVar("T")


class RestBase:
    """A transport, its own or that of a session, and a way to call over it."""

    def __init__(
        self,
        _session: Session | None = None,
        *,
        base_url: str | None = None,
        api_key: str | None = None,
        config: Config | None = None,
    ) -> None:
        if _session is not None and (base_url is not None or api_key is not None):
            raise ValueError(
                f"{type(self).__name__} takes a session or base_url and api_key, not both"
            )
        if config is not None and (
            _session is not None or base_url is not None or api_key is not None
        ):
            raise ValueError(
                f"{type(self).__name__} takes a config or the other arguments, not both"
            )
        self._session = _session
        known = _session.config if _session else config
        self._config = known or Config.resolve(base_url=base_url, api_key=api_key)
        self._own: Transport | None = None
        self._lock = threading.Lock()
        self._closed = False
        self._behind: Self | None = None

    @property
    def holder(self) -> Session | None:
        """The session whose connections this client uses; None if it has its own."""
        return self._session

    def get_telemetry(self) -> Reporter | None:
        """Return the session's reporter; None without a session, or if nothing is reported.

        Example:
            >>> rest.get_telemetry() is None
            True
        """
        return self._session.telemetry if self._session is not None else None

    @property
    def with_raw_response(self) -> Self:
        """The same client, whose methods of one request return an `APIResponse`."""
        raw = copy.copy(self)
        raw._behind = self
        return raw

    @property
    def transport(self) -> Transport:
        """The transport of this client; its interface may change in any release."""
        if self._behind is not None:
            return self._behind.transport
        if self._session is not None:
            return self._session.transport
        with self._lock:
            if self._closed:
                raise RuntimeError(f"{type(self).__name__} is closed")
            if self._own is None:
                self._own = Transport(self._config)
                # A client need not be closed: its connections are closed when it is dropped.
                weakref.finalize(self, _close, self._own).atexit = False
            return self._own

    def close(self) -> AwaitableConcurrentFuture[None]:
        """Close the connections, if they are this client's own.

        Example:
            >>> rest = RestClient(base_url="local")
            >>> rest.close().result()
        """
        with self._lock:
            self._closed, own, self._own = True, self._own, None
        return AwaitableConcurrentFuture(start(_closing(own)))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        outcome_of(self.close(), timeout=30)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(base_url={self._config.base_url!r})"

    def _start(
        self, work: Callable[[Transport], Coroutine[Any, Any, T]]
    ) -> AwaitableConcurrentFuture[T]:
        """Begin work over the transport, and keep the client alive until it is done."""
        transport = self.transport

        async def working(client: RestBase) -> T:
            return await work(transport)

        return AwaitableConcurrentFuture(start(working(self)))

    def _call(
        self,
        op: Operation,
        request: Any = None,
        convert: Callable[[Any], Any] | None = None,
        **options: Any,
    ) -> APIFuture[Any]:
        """Call an operation.

        Args:
            op: The operation.
            request: Its body.
            convert: Makes the method's result of the decoded answer.
            options: Path, query and headers, as `Transport.request` takes them.
        """

        async def work(transport: Transport) -> Any:
            body = None if request is None else codec.encode(request)
            reply = await transport.request(op, body, **options)
            answer = None if op.response is Empty else transport.decode(op, op.response, reply)
            if self._behind is not None:
                return wrapped(op, reply, answer)
            return convert(answer) if convert else answer

        return self._start(work)


async def _closing(transport: Transport | None) -> None:
    if transport is not None:
        await transport.close()


def _close(transport: Transport) -> None:
    runtime().release(transport.close())
