"""Endpoints and groups of them: what a route declares about itself.

All endpoints have the same middleware, whether or not they belong to the Tinker API. To mount
others, hand their `Group` to `create_app`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeAlias

from starlette.responses import Response

from tinkex.server.http_errors import Refusal, refused
from tinkex.wire.protocol import Owned

Answer: TypeAlias = Callable[..., Awaitable[Any]]
"""Takes the server's state and a `Call`. Returns a record, a body, or a response; a
`StreamingResponse` is sent as it comes."""


class Access(Enum):
    """The callers that an endpoint answers."""

    KEY = "those with a key; on an open server, programs of this machine"
    NO_KEY = "everyone; on an open server, programs of this machine"
    PUBLIC = "everyone"


@dataclass(frozen=True, slots=True)
class Endpoint(Owned):
    """One route.

    `owned_by` declares the fields of its body or path that must name objects of the caller's
    account; an endpoint that does not declare it does not import.
    """

    name: str
    """Its name in metrics, logs and spans."""
    method: str
    path: str
    """The path below that of its group."""
    answer: Answer
    request: type[Any] | None = None
    """The type that the body is decoded to; `bytes` takes it as it is. None leaves the body to the
    handler, which reads it from `call.http` and sets its own limits."""
    access: Access = Access.KEY
    is_bulky: bool = False
    """True if bodies may be as large as `body_bytes` allows, instead of 4 MiB."""

    on_unreadable: Answer | None = None
    """Called with the state, the call and the error when the body cannot be decoded."""

    def __post_init__(self) -> None:
        self.check_declaration(self.name, self.path, self.request)


@dataclass(frozen=True, slots=True)
class Group:
    """Endpoints below one path."""

    prefix: str
    endpoints: Sequence[Endpoint]
    takes_bearer: bool = False
    """True if keys may also come as `Authorization: Bearer`."""
    refused: Callable[[Refusal], Response] = refused
    """Makes the answer of an error, for clients that read another form than `{"detail": …}`."""
