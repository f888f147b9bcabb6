"""Requests to any endpoint by its path, with the same retries, credentials and limits.

For endpoints without a method, and for the status and headers of answers.
"""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import math
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Literal, Self, TypeAlias, TypedDict, Unpack
from urllib.parse import parse_qsl, quote, urlencode

from tinkex.client.futures.api_future import Future, outcome_of, start
from tinkex.client.futures.loop_thread import runtime
from tinkex.client.futures.streams import Stream
from tinkex.client.http import multipart
from tinkex.client.http.exchange import Reply
from tinkex.client.http.responses import wrapped
from tinkex.client.http.transport import Transport
from tinkex.client.settings.config import Config
from tinkex.types.sessions import Empty
from tinkex.wire import codec, sse
from tinkex.wire.json_values import OMIT, Omit, transform
from tinkex.wire.protocol import BY_HANDLER, PREFIX, Operation

Method: TypeAlias = Literal["GET", "POST", "PUT", "DELETE"]
EventParser: TypeAlias = Literal["json", "raw"] | Callable[[sse.ServerSentEvent], Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Timeout:
    """The time limits of a request, as in the official SDK; here only `read` has an effect.

    Example:
        >>> Timeout(30.0).read, Timeout(30.0, read=5.0).read
        (30.0, 5.0)
    """

    timeout: float | None = None
    connect: float | None = None
    read: float | None = None
    write: float | None = None
    pool: float | None = None

    def __post_init__(self) -> None:
        """Fill in the defaults, and refuse values that have no effect."""
        for name in ("connect", "write", "pool"):
            given = getattr(self, name)
            if given is not None and given != self.timeout:
                raise ValueError(f"a {name} timeout of its own has no effect: give one for reading")
            object.__setattr__(self, name, self.timeout)
        if self.read is None:
            object.__setattr__(self, "read", self.timeout)


class RequestOptions(TypedDict, total=False):
    """Options of a single request.

    Example:
        >>> options: RequestOptions = {"timeout": 5.0, "max_retries": 1}
        >>> http.get("healthz", **options).result()
        {'status': 'ok'}
    """

    headers: Mapping[str, str]
    """Extra headers; they win over the configured ones."""
    max_retries: int
    """Limit of retries after a failure that may pass."""
    timeout: float | Timeout
    """Seconds that one attempt may take."""
    params: Mapping[str, Any]
    """The query; it wins over that of the path, which wins over the configured one."""
    extra_json: Mapping[str, Any]
    """Fields added to the body; one that is OMIT is taken out of it."""
    idempotency_key: str | Omit
    """Sent in place of a random one; OMIT sends none."""
    follow_redirects: bool
    """False returns a redirect as `{"url", "status", "expires"}`."""
    files: Any
    """Sent with the body as a form; see `tinkex.client.http.multipart`. They are read in a thread,
    so leave open files open until then."""
    transform: Mapping[str, Any]
    """Passed to `tinkex.wire.json_values.transform`: aliases, formats, drop_none."""
    response: Literal["data", "wrapped"]
    """"wrapped" gives an APIResponse."""
    metadata: Mapping[str, Any]
    """Added to the events of this request."""


class HttpClient:
    """Requests by path, relative to the base URL; a path without a leading slash is an endpoint's.

    Every method returns a `Future` of the decoded answer, or of an `APIResponse` with
    `response="wrapped"`.

    Example:
        >>> with HttpClient(base_url="local") as http:
        ...     http.get("healthz").result()
        {'status': 'ok'}
    """

    def __init__(
        self,
        *,
        base_url: str | None = None,
        api_key: str | None = None,
        config: Config | None = None,
    ) -> None:
        if config is not None and (base_url is not None or api_key is not None):
            raise ValueError("give a config, or base_url and api_key, not both")
        self.config = config or Config.resolve(base_url=base_url, api_key=api_key)
        self._transport = Transport(self.config)
        self._behind: HttpClient | None = None
        # A client that is not closed closes its connections when it is collected.
        weakref.finalize(self, _close, self._transport).atexit = False

    @property
    def with_raw_response(self) -> HttpClient:
        """The same client, whose answers are all `APIResponse`."""
        raw = copy.copy(self)
        raw._behind = self
        return raw

    def get(self, path: str, **options: Unpack[RequestOptions]) -> Future[Any]:
        """Read what is at a path.

        Args:
            path: The path below the base URL, e.g. `/api/v1/healthz`.
            options: As `RequestOptions` has them: headers, query, timeout and so on.

        Returns:
            A future of the decoded answer; of an `APIResponse` where that is asked for.

        Example:
            >>> http.get("training_runs", params={"limit": 5}).result()
            {'training_runs': [...], ...}
        """
        return self._start("GET", path, None, options)

    def post(self, path: str, body: Any = None, **options: Unpack[RequestOptions]) -> Future[Any]:
        """Send; `body` is anything with a JSON form.

        Args:
            path: The path below the base URL, e.g. `/api/v1/healthz`.
            body: Anything with a JSON form; files make it a form.
            options: As `RequestOptions` has them: headers, query, timeout and so on.

        Returns:
            A future of the decoded answer; of an `APIResponse` where that is asked for.

        Example:
            >>> http.post("weights_info", {"tinker_path": path}).result()
            {'base_model': 'tinkex/tiny', ...}
        """
        return self._start("POST", path, body, options)

    def put(self, path: str, body: Any = None, **options: Unpack[RequestOptions]) -> Future[Any]:
        """Like `post`, to replace what is at a path.

        Example:
            >>> checkpoint = f"training_runs/{client.model_id}/checkpoints/weights/step-100"
            >>> saved = client.save_state("step-100").result()
            >>> http.put(f"{checkpoint}/ttl", {"ttl_seconds": 3600}).result()
            {}
        """
        return self._start("PUT", path, body, options)

    def delete(self, path: str, **options: Unpack[RequestOptions]) -> Future[Any]:
        """Like `get`, to delete what is at a path.

        Example:
            >>> saved = client.save_state("step-100").result()
            >>> http.delete(
            ...     f"training_runs/{client.model_id}/checkpoints/weights/step-100"
            ... ).result()
            {}
        """
        return self._start("DELETE", path, None, options)

    def stream_get(
        self,
        path: str,
        *,
        params: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
        timeout: float | Timeout | None = None,
        event_parser: EventParser = "json",
    ) -> EventStream:
        """Read server-sent events as they come, without retries.

        Args:
            path: Where.
            params: The query.
            headers: Extra headers.
            timeout: Seconds of silence after which the stream fails.
            event_parser: What is made of an event: its decoded data, its text, or what a function
                gives. None and "" are left out.

        Returns:
            The events, to iterate over with `for` or `async for`.

        Raises:
            ValueError: `event_parser` is none of these.

        Example:
            >>> for event in http.stream_get("/events", timeout=60):  # doctest: +SKIP
            ...     print(event)
        """
        if event_parser not in ("json", "raw") and not callable(event_parser):
            raise ValueError(
                f'event_parser must be "json", "raw" or a function, got {event_parser!r}'
            )
        op, url, limit = _operation("GET", path), self._url(path, params), _seconds(timeout)
        stream = EventStream()
        stream.begin(start(self._read_events(stream, op, url, headers, limit, event_parser)))
        return stream

    def close(self) -> Future[None]:
        """Release the connections.

        Example:
            >>> http = HttpClient(base_url="local")
            >>> http.close().result()
        """
        return start(self._transport.close())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        outcome_of(self.close(), timeout=30)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _start(self, method: Method, path: str, body: Any, options: RequestOptions) -> Future[Any]:
        _check(method, options)
        op, url, fields = (
            _operation(method, path),
            self._url(path, options.get("params")),
            _fields(body, options),
        )
        ready = None if options.get("files") else _body(method, fields, options)
        return start(self._request(op, url, fields, ready, options))

    def _url(self, path: str, params: Mapping[str, Any] | None) -> str:
        """Return the path, with the query of the settings, the path and the call together."""
        plain, _, text = path.partition("?")
        if "://" in plain:
            raise ValueError(
                f"give a path, not an address: {plain!r}; the client's base URL says where "
                "requests go"
            )
        whole = quote(
            plain if plain.startswith("/") else f"{PREFIX}/{plain}", safe="!$%&'()*+,/:;=@[]~"
        )
        given: dict[str, Any] = {}
        for name, value in (params or {}).items():
            if not str(name).strip():
                raise ValueError("a query parameter has a blank name")
            if value is not None and not isinstance(value, str | int | float):
                raise ValueError(
                    f"query parameter {name!r} must be text or a number, got {value!r}"
                )
            given[str(name).strip()] = value
        own = [pair for pair in parse_qsl(text, keep_blank_values=True) if pair[0] not in given]
        named = given.keys() | dict(own).keys()
        pairs = [pair for pair in self.config.default_query.items() if pair[0] not in named] + own
        pairs += [(name, _text(value)) for name, value in given.items() if value is not None]
        return f"{whole}?{urlencode(pairs)}" if pairs else whole

    async def _request(
        self, op: Operation, url: str, fields: Any, body: codec.Body | None, options: RequestOptions
    ) -> Any:
        if options.get("files"):
            body = await asyncio.to_thread(_body, op.method, fields, options)
        # The body has its content type by now; that of a form names the boundary.
        given = options.get("headers") or {}
        headers = {name: value for name, value in given.items() if name.lower() != "content-type"}
        key = options.get("idempotency_key")
        if isinstance(key, str):
            headers["X-Idempotency-Key"] = key
        reply = await self._transport.request(
            op,
            body,
            headers=headers,
            without=("x-idempotency-key",) if key is OMIT else (),
            timeout=_seconds(options.get("timeout")),
            max_retries=options.get("max_retries"),
            metadata=options.get("metadata"),
            url=url,
            follow=options.get("follow_redirects", True),
        )
        data = _redirection(reply) or self._decode(op, reply)
        if self._behind is not None or options.get("response") == "wrapped":
            return wrapped(op, reply, data)
        return data

    def _decode(self, op: Operation, reply: Reply) -> Any:
        if not reply.body:
            return {}
        try:
            return codec.loads(reply.body)
        except ValueError as error:
            raise self._transport.errors.misread(
                op, reply, f"the answer is not JSON: {error}"
            ) from error

    async def _read_events(
        self,
        stream: EventStream,
        op: Operation,
        url: str,
        headers: Mapping[str, str] | None,
        timeout: float | None,
        parser: EventParser,
    ) -> None:
        try:
            async with self._transport.stream(
                op, headers=headers, timeout=timeout, url=url
            ) as reply:
                if not stream.head.done():
                    stream.head.set_result(
                        StreamHead(reply.status, reply.headers, op.method, reply.url)
                    )
                async for event in sse.events(reply.chunks):
                    value = (
                        event.json()
                        if parser == "json"
                        else event.data
                        if parser == "raw"
                        else parser(event)
                    )
                    if value is not None and value != "":
                        stream.put(value)
        except Exception as error:
            if not stream.head.done():
                stream.head.set_exception(error)
            raise
        finally:
            stream.head.cancel()  # no effect if there is one


@dataclasses.dataclass(frozen=True, slots=True)
class StreamHead:
    """The status and headers of a stream; names of headers are lower-case."""

    status: int
    headers: Mapping[str, str]
    method: str
    url: str


class EventStream(Stream[Any]):
    """Events as they come; `head` is a future of the status and headers, which come first."""

    def __init__(self) -> None:
        super().__init__()
        self.head: Future[StreamHead] = Future()


def _close(transport: Transport) -> None:
    """Close the connections of a client that was collected."""
    runtime().release(transport.close())


def _check(method: Method, options: RequestOptions) -> None:
    """Refuse unknown options and those without an effect."""
    if unknown := set(options) - RequestOptions.__annotations__.keys():
        raise TypeError(
            f"unknown option {min(unknown)!r}; known are "
            f"{', '.join(RequestOptions.__annotations__)}"
        )
    if method == "GET" and (idle := {"extra_json", "files", "transform"} & options.keys()):
        raise TypeError(f"a GET has no body: {min(idle)} would have no effect")
    if options.get("response", "data") not in ("data", "wrapped"):
        raise ValueError(f'response must be "data" or "wrapped", got {options["response"]!r}')
    _seconds(options.get("timeout"))


def _seconds(timeout: float | Timeout | None) -> float | None:
    seconds = timeout.read if isinstance(timeout, Timeout) else timeout
    if seconds is not None and not 0 < seconds < math.inf:
        raise ValueError(f"timeout must be a positive number of seconds, got {seconds!r}")
    return seconds


def _fields(body: Any, options: RequestOptions) -> Any:
    """Return the body as plain data, transformed and extended; text and bytes as they are."""
    wanted, extra = options.get("transform"), options.get("extra_json")
    if isinstance(body, str | bytes):
        if wanted or extra:
            raise TypeError(
                f"a body of {type(body).__name__} is sent as it is: give data to transform or "
                "extend it"
            )
        return body
    fields = transform(body, **(wanted or {}))
    if not extra:
        return fields
    if fields is not None and not isinstance(fields, dict):
        raise TypeError(f"extra_json extends mappings, and the body is a {type(body).__name__}")
    return transform({**(fields or {}), **extra})


def _body(method: Method, fields: Any, options: RequestOptions) -> codec.Body | None:
    """Encode a body; with files, only in a thread."""
    files = options.get("files")
    if fields is None and not files:
        return None if method in ("GET", "DELETE") else codec.Body(b"{}")
    content_type, data = multipart.body_for(fields, files, options.get("headers"))
    return codec.Body(data, content_type) if content_type else None


def _operation(method: Method, path: str) -> Operation:
    name = path.partition("?")[0]
    return Operation(
        f"{method} {name}",
        method,
        name.removeprefix(PREFIX).strip("/"),
        None,
        Empty,
        owned_by=BY_HANDLER,
    )


def _redirection(reply: Reply) -> dict[str, Any] | None:
    if not 300 <= reply.status < 400:
        return None
    return {
        "url": reply.headers.get("location"),
        "status": reply.status,
        "expires": reply.headers.get("expires"),
    }


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
