"""Everything that all endpoints have in common.

The key of a request, its body and the objects that it names are checked before the handler runs.
Every failure becomes an HTTP error. Each request is counted, logged and traced.
"""

from __future__ import annotations

import time
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from tinkex.server.access.accounts import Account
from tinkex.server.access.bodies import read_body
from tinkex.server.access.endpoints import Endpoint, Group
from tinkex.server.access.ownership import check_ownership
from tinkex.server.calls import Call
from tinkex.server.http_errors import refusal_of
from tinkex.server.state import State
from tinkex.server.tracing import Tracing
from tinkex.types.record import to_json
from tinkex.wire import codec


class GuardedEndpoint:
    """An endpoint behind the middleware, as an ASGI application."""

    def __init__(
        self, endpoint: Endpoint, group: Group, state: State, tracing: Tracing | None
    ) -> None:
        self._endpoint, self._group, self._state = endpoint, group, state
        self._tracing, self._owned_fields = tracing, endpoint.owned_fields
        self.method, self.path = endpoint.method, f"{group.prefix}{endpoint.path}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        request = Request(scope, receive, send)
        response = await (self._observed if self._tracing is None else self._traced)(request)
        await response(scope, receive, send)

    def route(self) -> Route:
        """Return the route of the endpoint."""
        return Route(self.path, self, methods=[self.method], name=self._endpoint.name)

    async def _traced(self, request: Request) -> Response:
        assert self._tracing is not None
        name = self._endpoint.name
        with self._tracing.request(self.method, self.path, name, request.headers) as told:
            return await self._observed(request, told)

    async def _observed(self, request: Request, told: dict[str, Any] | None = None) -> Response:
        endpoint, state = self._endpoint, self._state
        began, owner, request_id = time.perf_counter(), None, None
        try:
            account = await state.accounts.authorize(
                request.headers, endpoint.access, takes_bearer=self._group.takes_bearer
            )
            owner = account.owner or None
            call = _call(endpoint, request, account)
            if endpoint.request is None:
                call.http = request
            else:
                await read_body(state, endpoint, call, request)
                request_id = getattr(call.request, "request_id", None)
            await check_ownership(state, self._owned_fields, call.owner, call.path, call.request)
            result = await endpoint.answer(state, call)
            request_id = getattr(result, "request_id", request_id)
            response = _response(result)
        except ClientDisconnect:
            response = Response(status_code=499)
        except Exception as error:
            response = self._group.refused(refusal_of(error, endpoint.name, state.without_paths))
        seconds, status = time.perf_counter() - began, response.status_code
        state.metrics.observe(endpoint.name, self.method, status, seconds, owner, request_id)
        if told is not None:
            told |= {"status": status, "owner": owner, "request_id": request_id}
        return response


def _call(endpoint: Endpoint, request: Request, account: Account) -> Call:
    headers, scope = request.headers, request.scope
    return Call(
        None,
        {name: str(value) for name, value in request.path_params.items()},
        b"",
        op=endpoint.name,
        owner=account.owner,
        query=dict(request.query_params) if scope["query_string"] else {},
        headers=headers,
        key_id=account.key_id,
        base_url=f"{scope['scheme']}://{headers['host']}" if "host" in headers else None,
    )


def _response(result: Any) -> Response:
    if isinstance(result, Response):
        return result
    if isinstance(result, codec.Body):
        return Response(result.data, media_type=result.content_type)
    return Response(to_json(result), media_type=codec.JSON)
