"""Endpoints beside the Tinker API: pages of the server itself, and signed addresses."""

from __future__ import annotations

from starlette.responses import JSONResponse, Response

from tinkex._version import __version__
from tinkex.server.access.endpoints import Access, Endpoint, Group
from tinkex.server.calls import Call
from tinkex.server.routes import openapi
from tinkex.server.routes.exports import DOWNLOAD, download
from tinkex.server.routes.handler_table import HANDLERS
from tinkex.server.routes.metrics_page import metrics_text
from tinkex.server.routes.records import MISNAMED, misnamed
from tinkex.server.routes.session_records import signed_trace, trace_path
from tinkex.server.routes.uploads import PATH as UPLOAD, upload
from tinkex.server.state import State
from tinkex.types.record import to_json
from tinkex.wire import codec
from tinkex.wire.prometheus import CONTENT_TYPE
from tinkex.wire.protocol import BY_HANDLER, OPEN, PREFIX

TRACE = trace_path("{session_id}")


async def front(state: State, call: Call) -> Response:
    """Say what this server is."""
    access = "key required" if await state.accounts.needs_key() else "open"
    return JSONResponse({"name": "tinkex", "version": __version__, "api": PREFIX, "access": access})


async def description(state: State, call: Call) -> Response:
    """Describe the operations that are served."""
    return Response(to_json(openapi.describe(frozenset(HANDLERS))), media_type=codec.JSON)


async def metrics(state: State, call: Call) -> Response:
    """Report all figures."""
    return Response(metrics_text(state), media_type=CONTENT_TYPE)


async def trace(state: State, call: Call) -> Response:
    """Send the timeline behind a signed link."""
    terms = (call.query.get(name, "") for name in ("expires", "key", "signature"))
    return Response(
        await signed_trace(state, call.path["session_id"], *terms), media_type=codec.JSON
    )


PUBLIC = Access.PUBLIC
"""Also for pages whose address is signed: no key is needed."""
PAGES = Group(
    "",
    [
        Endpoint("front", "GET", "/", front, access=PUBLIC, owned_by=OPEN),
        Endpoint("openapi", "GET", openapi.PATH, description, access=PUBLIC, owned_by=OPEN),
        Endpoint("metrics", "GET", "/metrics", metrics, owned_by=OPEN),
        Endpoint("trace", "GET", TRACE, trace, access=PUBLIC, owned_by=BY_HANDLER),
        Endpoint("download", "GET", DOWNLOAD, download, access=PUBLIC, owned_by=BY_HANDLER),
        Endpoint("upload", "PUT", UPLOAD, upload, access=PUBLIC, owned_by=OPEN),
        *(
            Endpoint("misnamed", method, MISNAMED, misnamed, access=PUBLIC, owned_by=BY_HANDLER)
            for method in ("GET", "POST", "PUT", "PATCH", "DELETE")
        ),
    ],
)
