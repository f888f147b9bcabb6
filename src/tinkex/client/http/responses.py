"""Answers with their status and headers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import msgspec

from tinkex.client.http.exchange import Reply
from tinkex.errors import APIResponseValidationError
from tinkex.types.record import from_builtins
from tinkex.wire.protocol import Operation


@dataclasses.dataclass(frozen=True, slots=True)
class APIResponse:
    """An answer with its status, headers and data; names of headers are lower-case.

    Example:
        >>> response = http.with_raw_response.get("healthz").result()
        >>> response.status, response.data
        (200, {'status': 'ok'})
    """

    status: int
    headers: Mapping[str, str]
    method: str
    url: str
    body: bytes
    data: Any
    """The decoded body."""
    elapsed: float
    retries: int

    @property
    def status_code(self) -> int:
        """The status, by another name."""
        return self.status

    def header(self, name: str) -> str | None:
        """Return a header, without regard to case.

        Args:
            name: The header.

        Returns:
            Its value, or None.

        Example:
            >>> http.with_raw_response.get("healthz").result().header("Content-Type")
            'application/json'
        """
        return self.headers.get(name.lower())

    def parse(self, parser: Any = None) -> Any:
        """Return the data as they are, as a record type, or passed through a function.

        Args:
            parser: A record type, a function of the data, or None for the data as they are.

        Returns:
            The parsed data.

        Raises:
            APIResponseValidationError: The parser does not accept the data.
            TypeError: The parser is neither a type nor a function.

        Example:
            >>> response = http.with_raw_response.get("get_server_capabilities").result()
            >>> response.parse(GetServerCapabilitiesResponse)
            GetServerCapabilitiesResponse(supported_models=[...])
            >>> response.parse(lambda data: len(data["supported_models"]))
            1
        """
        if parser is None:
            return self.data
        try:
            if isinstance(parser, type) and issubclass(parser, msgspec.Struct):
                return from_builtins(parser, self.data)
            if callable(parser):
                return parser(self.data)
        except Exception as error:
            raise APIResponseValidationError(
                f"{self.method} {self.url}: the answer is not what was asked for: {error}",
                body=self.data,
            ) from error
        raise TypeError(f"a parser is a record type or a function, got {type(parser).__name__}")


def wrapped(op: Operation, reply: Reply, data: Any) -> APIResponse:
    """Join a reply and its decoded data."""
    return APIResponse(
        reply.status,
        reply.headers,
        op.method,
        reply.url,
        reply.body,
        data,
        reply.elapsed,
        reply.retries,
    )
