"""RestClient and AdminClient: what is stored on the server, and who used it. Neither opens a
session.

Every method starts at once and returns a future: `await` it, or call `.result()`. What can be
checked here is checked before anything is sent, and raises ValueError.
"""

from __future__ import annotations

import asyncio
import copy
import datetime as dt
import logging
import os
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Coroutine, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, TypeAlias, TypeVar, get_args

from tinkex.client.experimental import CheckpointMethods, warn_experimental
from tinkex.client.futures.api_future import APIFuture, AwaitableConcurrentFuture, retrieve, start
from tinkex.client.futures.loop_thread import runtime
from tinkex.client.futures.twins import deprecated, value_twin
from tinkex.client.http.exchange import Reply
from tinkex.client.http.legacy_servers import read_receipt
from tinkex.client.http.request_names import name_requests
from tinkex.client.http.responses import wrapped
from tinkex.client.http.transport import Transport
from tinkex.client.settings.config import Config
from tinkex.client.settings.credentials import claims
from tinkex.errors import APIResponseValidationError, TinkerError
from tinkex.types.account import (
    AuditEventType,
    AuditLogResponse,
    AuthTokenResponse,
    BillingUsageResponse,
    CurrentCheckpointStorageUsageResponse,
    GetBillingUsageRequest,
    WhoamiResponse,
)
from tinkex.types.checkpoints import (
    SCHEME,
    CheckpointArchiveUrlResponse,
    CheckpointsListResponse,
    CopyWeightsRequest,
    CopyWeightsResponse,
    ExternalWeightsUrlsResponse,
    ParsedCheckpointTinkerPath,
    SetCheckpointTtlRequest,
    TrainingRun,
    TrainingRunsResponse,
    WeightsInfoRequest,
    WeightsInfoResponse,
)
from tinkex.types.record import to_builtins
from tinkex.types.sampling import GetSamplerResponse
from tinkex.types.sessions import (
    AssignSessionProjectRequest,
    ClientConfigRequest,
    ClientConfigResponse,
    ClientSessionFinishReasonType,
    Empty,
    FinishReason,
    FinishSessionRequest,
    GetServerCapabilitiesResponse,
    GetSessionResponse,
    ListSessionsResponse,
    SessionSearchRequest,
    SessionSearchResponse,
    SessionTraceExportResponse,
)
from tinkex.types.training import ModelID, UnloadModelRequest, UnloadModelResponse
from tinkex.wire import codec, protocol
from tinkex.wire.protocol import PROTOCOL_VERSION, Operation

if TYPE_CHECKING:
    from tinkex.client.session import Session
    from tinkex.telemetry import Reporter

T = TypeVar("T")
logger = logging.getLogger("tinkex")

AccessScope: TypeAlias = Literal["owned", "accessible"]

TRACE_POLL_SECONDS = 5.0
ARCHIVE_ATTEMPTS = 6
ARCHIVE_RETRY_SECONDS = 30.0
ARCHIVE_LIFETIME = dt.timedelta(minutes=15)
"""How long an archive's address is good for when the server does not say."""


class _Client:
    """What both clients are: a transport, their own or a session's, and a way to call over it."""

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
        """The session whose connections this client uses; None when they are its own."""
        return self._session

    def get_telemetry(self) -> Reporter | None:
        """What reports the session's events to the hosted service; None when nothing does.

        Example:
            >>> from tinkex import telemetry
            >>> telemetry.log(
            ...     rest.get_telemetry(), "evaluated", {"accuracy": 0.9}
            ... )  # False: nobody is told
            False
        """
        return self._session.telemetry if self._session is not None else None

    @property
    def with_raw_response(self) -> Self:
        """The same client, whose methods of one request give an `APIResponse`: status, headers,
        body and data.
        """
        raw = copy.copy(self)
        raw._behind = self
        return raw

    @property
    def transport(self) -> Transport:
        """The transport of this client's requests; what it offers may change in any release."""
        if self._behind is not None:
            return self._behind.transport
        if self._session is not None:
            return self._session.transport
        with self._lock:
            if self._closed:
                raise RuntimeError(f"{type(self).__name__} is closed")
            if self._own is None:
                self._own = Transport(self._config)
                # Nobody need close a client: its connections go when it does.
                weakref.finalize(self, _close, self._own).atexit = False
            return self._own

    def close(self) -> AwaitableConcurrentFuture[None]:
        """Let go of the connections, if they are this client's own.

        Example:
            >>> rest = RestClient(base_url="local")
            >>> rest.close().result()
        """
        with self._lock:
            self._closed, own, self._own = True, self._own, None
        return AwaitableConcurrentFuture(start(_closing(own)))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()._own._outcome(timeout=30)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(base_url={self._config.base_url!r})"

    def _start(
        self, work: Callable[[Transport], Coroutine[Any, Any, T]]
    ) -> AwaitableConcurrentFuture[T]:
        """Begin work over the transport; the client stays until it is done."""
        transport = self.transport

        async def working(client: _Client) -> T:
            return await work(transport)

        return AwaitableConcurrentFuture(start(working(self)))

    def _call(
        self,
        op: Operation,
        request: Any = None,
        *,
        path: Mapping[str, str] | None = None,
        query: Mapping[str, object] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> APIFuture[Any]:
        """Call an operation."""

        async def work(transport: Transport) -> Any:
            body = None if request is None else codec.encode(request)
            reply = await transport.request(op, body, path=path, query=query, headers=headers)
            answer = None if op.response is Empty else transport.decode(op, op.response, reply)
            return answer if self._behind is None else wrapped(op, reply, answer)

        return self._start(work)

    def _audit_log(
        self, event_type: AuditEventType, day: dt.date | None
    ) -> APIFuture[AuditLogResponse]:
        if event_type not in get_args(AuditEventType):
            raise ValueError(
                f"event_type is {event_type!r}; expected one of "
                f"{', '.join(get_args(AuditEventType))}"
            )
        if day is not None and not isinstance(day, dt.date):
            raise ValueError(f"day must be a date, got {day!r}")
        date = day.date() if isinstance(day, dt.datetime) else day
        query = {"event_type": event_type, "day": date.isoformat() if date else None}
        return self._call(protocol.GET_AUDIT_LOG, query=query)

    def _billing_usage(
        self, starting_on: dt.datetime | str, ending_before: dt.datetime | str
    ) -> APIFuture[BillingUsageResponse]:
        span = GetBillingUsageRequest(
            starting_on=_time("starting_on", starting_on),
            ending_before=_time("ending_before", ending_before),
        )
        return self._call(protocol.GET_BILLING_USAGE, query=to_builtins(span))

    def _storage_usage(
        self, project_id: str | None
    ) -> APIFuture[CurrentCheckpointStorageUsageResponse]:
        op = protocol.GET_CURRENT_CHECKPOINT_STORAGE_USAGE
        return self._call(op, query={"project_id": project_id})


@name_requests
class RestClient(_Client, CheckpointMethods):
    """Training runs, checkpoints and sessions: look them up, share them, copy them, let them
    expire.

    In the examples `rest` is one; `help(tinkex)` shows how the others, such as `client`, are made.

    Args:
        base_url: The server; TINKER_BASE_URL by default.
        api_key: The key; TINKER_API_KEY by default.
        config: All settings at once, in place of these.

    Example:
        >>> saved = client.save_state("step-100").result()
        >>> with RestClient(base_url="local") as rest:
        ...     for checkpoint in rest.list_checkpoints(client.model_id).result().checkpoints:
        ...         print(checkpoint.tinker_path, checkpoint.size_bytes)
        tinker://.../weights/step-100 ...
    """

    # ── training runs ─────────────────────────────────────────────────────────────────────────────

    def get_training_run(
        self, training_run_id: ModelID, access_scope: AccessScope | None = "owned"
    ) -> APIFuture[TrainingRun]:
        """Look a training run up.

        Args:
            training_run_id: The run.
            access_scope: "owned" for one's own runs, "accessible" for all that one may see; None
                leaves it open.

        Returns:
            A future of the run.

        Example:
            >>> rest.get_training_run(client.model_id).result().base_model
            'tinkex/tiny'
        """
        return self._get_training_run(training_run_id, access_scope)

    get_training_run_async = value_twin(get_training_run)

    def get_training_run_by_tinker_path(
        self, tinker_path: str, access_scope: AccessScope | None = "owned"
    ) -> APIFuture[TrainingRun]:
        """Look up the training run that a checkpoint belongs to.

        Args:
            tinker_path: The checkpoint's path, `tinker://RUN/KIND/NAME`.
            access_scope: "owned" for one's own, "accessible" for all that one may see; None leaves
                it open.

        Returns:
            A future of the run.

        Raises:
            ValueError: The path is malformed.

        Example:
            >>> rest.get_training_run_by_tinker_path(path).result().lora_rank
            4
        """
        run = _checkpoint(tinker_path)["training_run_id"]
        return self._get_training_run(run, access_scope)

    get_training_run_by_tinker_path_async = value_twin(get_training_run_by_tinker_path)

    def _get_training_run(self, run: str, scope: AccessScope | None) -> APIFuture[TrainingRun]:
        path = {"training_run_id": _part("training_run_id", run)}
        return self._call(protocol.GET_TRAINING_RUN, path=path, query=_scope(scope))

    def list_training_runs(
        self,
        limit: int = 20,
        offset: int = 0,
        access_scope: AccessScope | None = "owned",
        project_id: str | None = None,
    ) -> APIFuture[TrainingRunsResponse]:
        """List training runs, a page at a time.

        Args:
            limit: How many to give at most.
            offset: How many to pass over.
            access_scope: "owned" or "accessible".
            project_id: Only the runs of this project.

        Returns:
            A future of a page of runs; its cursor says how many there are in all.

        Example:
            >>> page = rest.list_training_runs(limit=10).result()
            >>> client.model_id in [run.training_run_id for run in page.training_runs]
            True
        """
        query = {"limit": limit, "offset": offset, **_scope(access_scope), "project_id": project_id}
        return self._call(protocol.LIST_TRAINING_RUNS, query=query)

    list_training_runs_async = value_twin(list_training_runs)

    def unload_model(self, model_id: ModelID) -> APIFuture[UnloadModelResponse]:
        """Let the server forget the live state of a training run, on servers that offer it; its
        checkpoints stay.

        Args:
            model_id: The run; that of a client in another program, too.

        Returns:
            A future of the answer, once everything asked of the run before has been done.

        Raises:
            ValueError: The id is empty.

        Example:
            >>> rest.unload_model(client.model_id).result()
            UnloadModelResponse(model_id='...:train:0', ...)
        """
        op, request = (
            protocol.UNLOAD_MODEL,
            UnloadModelRequest(model_id=_part("model_id", model_id)),
        )

        async def work(transport: Transport) -> UnloadModelResponse:
            started = time.monotonic()
            reply = await transport.request(op, codec.encode(request))
            receipt = read_receipt(transport, op, reply, started)
            if receipt.request_id is None:
                unloaded: UnloadModelResponse = receipt.result
            else:
                unloaded = await retrieve(transport, op, receipt.request_id, started)
            return unloaded

        return self._start(work)

    # ── checkpoints ───────────────────────────────────────────────────────────────────────────────

    def get_weights_info_by_tinker_path(self, tinker_path: str) -> APIFuture[WeightsInfoResponse]:
        """What a checkpoint holds; the server judges the path.

        Args:
            tinker_path: The checkpoint's path, `tinker://RUN/KIND/NAME`.

        Returns:
            A future of the base model, the rank and what was trained.

        Example:
            >>> info = rest.get_weights_info_by_tinker_path(path).result()
            >>> info.base_model, info.lora_rank
            ('tinkex/tiny', 4)
        """
        request = WeightsInfoRequest(tinker_path=tinker_path)
        return self._call(protocol.WEIGHTS_INFO, request)

    def list_checkpoints(self, training_run_id: ModelID) -> APIFuture[CheckpointsListResponse]:
        """List the checkpoints of a training run.

        Args:
            training_run_id: The run.

        Returns:
            A future of the checkpoints.

        Example:
            >>> saved = client.save_state("step-100").result()
            >>> [
            ...     checkpoint.checkpoint_id
            ...     for checkpoint in rest.list_checkpoints(client.model_id).result().checkpoints
            ... ]
            ['weights/step-100']
        """
        path = {"training_run_id": _part("training_run_id", training_run_id)}
        return self._call(protocol.LIST_CHECKPOINTS, path=path)

    list_checkpoints_async = value_twin(list_checkpoints)

    def list_user_checkpoints(
        self, limit: int = 100, offset: int = 0
    ) -> APIFuture[CheckpointsListResponse]:
        """List the checkpoints of all one's training runs, a page at a time.

        Args:
            limit: How many to give at most.
            offset: How many to pass over.

        Returns:
            A future of a page of checkpoints, newest first.

        Example:
            >>> saved = client.save_state("step-100").result()
            >>> rest.list_user_checkpoints(limit=1).result().checkpoints[
            ...     0
            ... ].tinker_path == saved.path
            True
        """
        query = {"limit": limit, "offset": offset}
        return self._call(protocol.LIST_USER_CHECKPOINTS, query=query)

    list_user_checkpoints_async = value_twin(list_user_checkpoints)

    def get_external_weights_urls(self, tinker_path: str) -> APIFuture[ExternalWeightsUrlsResponse]:
        """Signed addresses of the files of an exported checkpoint.

        Args:
            tinker_path: The export's path, `tinker://RUN/external_weights/NAME`.

        Returns:
            A future of an address for each file, good for a while and without the key.

        Raises:
            ValueError: The path is malformed, or not of an exported checkpoint.

        Example:
            >>> export = client.save_weights_external("final").result().path
            >>> sorted(rest.get_external_weights_urls(export).result().urls)
            ['adapter_config.json', 'adapter_model.safetensors']
        """
        parsed = ParsedCheckpointTinkerPath.from_tinker_path(tinker_path)
        if parsed.checkpoint_type != "external":
            raise ValueError(
                f"{tinker_path!r} is no export; expected tinker://<run>/external_weights/<name>"
            )
        path = _checkpoint(tinker_path)
        return self._call(protocol.GET_EXTERNAL_WEIGHTS_URLS, path=path)

    get_external_weights_urls_async = value_twin(get_external_weights_urls)

    def get_checkpoint_archive_url(
        self,
        training_run_id: str,
        checkpoint_id: str | None = None,
        *,
        max_retries: int = ARCHIVE_ATTEMPTS,
        retry_delay: float = ARCHIVE_RETRY_SECONDS,
    ) -> APIFuture[CheckpointArchiveUrlResponse]:
        """The signed address of a checkpoint packed into one file, once a server that still packs
        has done so.

        Args:
            training_run_id: The run, or the whole `tinker://` path of a checkpoint.
            checkpoint_id: `<kind>/<name>`, when the first argument is a run.
            max_retries: How many times to ask in all; only the answer "still packing" (503) is
                worth another try.
            retry_delay: Seconds between one try and the next.

        Returns:
            A future of the address and when it expires.

        Raises:
            ValueError: The checkpoint is malformed, or `max_retries` is less than one.

        Example:
            >>> rest.get_checkpoint_archive_url(path).result().url
            'http.../weights/step-100/archive.tar?...'
        """
        return self._archive(training_run_id, checkpoint_id, max_retries, retry_delay)

    get_checkpoint_archive_url_async = value_twin(get_checkpoint_archive_url)

    def get_checkpoint_archive_url_from_tinker_path(
        self,
        tinker_path: str,
        *,
        max_retries: int = ARCHIVE_ATTEMPTS,
        retry_delay: float = ARCHIVE_RETRY_SECONDS,
    ) -> APIFuture[CheckpointArchiveUrlResponse]:
        """Like `get_checkpoint_archive_url` with a path."""
        parsed = ParsedCheckpointTinkerPath.from_tinker_path(tinker_path)
        return self._archive(parsed.training_run_id, parsed.checkpoint_id, max_retries, retry_delay)

    get_checkpoint_archive_url_from_tinker_path_async = value_twin(
        get_checkpoint_archive_url_from_tinker_path
    )

    def _archive(
        self, run: str, checkpoint_id: str | None, attempts: int, delay: float
    ) -> APIFuture[CheckpointArchiveUrlResponse]:
        path = _checkpoint(run, checkpoint_id)
        if isinstance(attempts, bool) or not isinstance(attempts, int) or attempts < 1:
            raise ValueError(f"max_retries must be at least 1, got {attempts!r}")
        if delay < 0:
            raise ValueError(f"retry_delay must not be negative, got {delay!r}")
        op = protocol.GET_CHECKPOINT_ARCHIVE

        async def work(transport: Transport) -> CheckpointArchiveUrlResponse:
            for attempt in range(1, attempts + 1):
                reply = await transport.poll(op, path=path)
                if reply.status != 503 or attempt == attempts:
                    break
                await asyncio.sleep(delay)
            if (url := transport.redirection(op, path, reply)) is not None:
                return CheckpointArchiveUrlResponse(url=url, expires=_expiry(reply))
            if reply.status >= 300:
                error = transport.errors.refusal(op, reply)
                error.attempts = attempt
                raise error
            answer: CheckpointArchiveUrlResponse = transport.decode(op, op.response, reply)
            return answer

        return self._start(work)

    def delete_checkpoint(
        self, training_run_id: ModelID, checkpoint_id: str | None = None
    ) -> APIFuture[None]:
        """Delete a checkpoint for good.

        Args:
            training_run_id: The run, or the whole `tinker://` path of a checkpoint.
            checkpoint_id: `<kind>/<name>`, when the first argument is a run.

        Returns:
            A future that is done when it is gone.

        Raises:
            ValueError: The checkpoint is malformed.

        Example:
            >>> saved = client.save_state("step-100").result()
            >>> rest.delete_checkpoint(client.model_id, "weights/step-100").result()
        """
        path = _checkpoint(training_run_id, checkpoint_id)
        return self._call(protocol.DELETE_CHECKPOINT, path=path)

    delete_checkpoint_async = value_twin(delete_checkpoint)

    def delete_checkpoint_from_tinker_path(self, tinker_path: str) -> APIFuture[None]:
        """Delete a checkpoint for good.

        Args:
            tinker_path: The checkpoint's path, `tinker://RUN/KIND/NAME`.

        Returns:
            A future that is done when it is gone.

        Raises:
            ValueError: The path is malformed.

        Example:
            >>> path = client.save_state("step-100").result().path
            >>> rest.delete_checkpoint_from_tinker_path(path).result()
        """
        path = _checkpoint(tinker_path)
        return self._call(protocol.DELETE_CHECKPOINT, path=path)

    delete_checkpoint_from_tinker_path_async = value_twin(delete_checkpoint_from_tinker_path)

    def publish_checkpoint(
        self, training_run_id: ModelID, checkpoint_id: str | None = None
    ) -> APIFuture[None]:
        """Let everyone use a checkpoint.

        Args:
            training_run_id: The run, or the whole `tinker://` path of a checkpoint.
            checkpoint_id: `<kind>/<name>`, when the first argument is a run.

        Returns:
            A future that is done when it is public.

        Raises:
            ValueError: The checkpoint is malformed.

        Example:
            >>> saved = client.save_state("step-100").result()
            >>> rest.publish_checkpoint(client.model_id, "weights/step-100").result()
        """
        path = _checkpoint(training_run_id, checkpoint_id)
        return self._call(protocol.PUBLISH_CHECKPOINT, path=path)

    publish_checkpoint_async = value_twin(publish_checkpoint)

    def publish_checkpoint_from_tinker_path(self, tinker_path: str) -> APIFuture[None]:
        """Let everyone use a checkpoint.

        Args:
            tinker_path: The checkpoint's path, `tinker://RUN/KIND/NAME`.

        Returns:
            A future that is done when it is public.

        Raises:
            ValueError: The path is malformed.

        Example:
            >>> rest.publish_checkpoint_from_tinker_path(path).result()
            >>> rest.list_checkpoints(client.model_id).result().checkpoints[0].public
            True
        """
        path = _checkpoint(tinker_path)
        return self._call(protocol.PUBLISH_CHECKPOINT, path=path)

    publish_checkpoint_from_tinker_path_async = value_twin(publish_checkpoint_from_tinker_path)

    def unpublish_checkpoint(
        self, training_run_id: ModelID, checkpoint_id: str | None = None
    ) -> APIFuture[None]:
        """Keep a published checkpoint to oneself again.

        Args:
            training_run_id: The run, or the whole `tinker://` path of a checkpoint.
            checkpoint_id: `<kind>/<name>`, when the first argument is a run.

        Returns:
            A future that is done when it is private.

        Raises:
            ValueError: The checkpoint is malformed.

        Example:
            >>> saved = client.save_state("step-100").result()
            >>> rest.unpublish_checkpoint(client.model_id, "weights/step-100").result()
        """
        path = _checkpoint(training_run_id, checkpoint_id)
        return self._call(protocol.UNPUBLISH_CHECKPOINT, path=path)

    unpublish_checkpoint_async = value_twin(unpublish_checkpoint)

    def unpublish_checkpoint_from_tinker_path(self, tinker_path: str) -> APIFuture[None]:
        """Keep a published checkpoint to oneself again.

        Args:
            tinker_path: The checkpoint's path, `tinker://RUN/KIND/NAME`.

        Returns:
            A future that is done when it is private.

        Raises:
            ValueError: The path is malformed.

        Example:
            >>> rest.unpublish_checkpoint_from_tinker_path(path).result()
            >>> rest.list_checkpoints(client.model_id).result().checkpoints[0].public
            False
        """
        path = _checkpoint(tinker_path)
        return self._call(protocol.UNPUBLISH_CHECKPOINT, path=path)

    unpublish_checkpoint_from_tinker_path_async = value_twin(unpublish_checkpoint_from_tinker_path)

    def set_checkpoint_ttl_from_tinker_path(
        self, tinker_path: str, ttl_seconds: int | None
    ) -> APIFuture[None]:
        """Let a checkpoint expire after so many seconds from now; None keeps it for good.

        Args:
            tinker_path: The checkpoint's path, `tinker://RUN/KIND/NAME`.
            ttl_seconds: Seconds from now; None for no expiry.

        Returns:
            A future that is done when it is on record.

        Raises:
            ValueError: The path is malformed, or the time no positive whole number.

        Example:
            >>> rest.set_checkpoint_ttl_from_tinker_path(path, 3600).result()
            >>> rest.list_checkpoints(client.model_id).result().checkpoints[0].expires_at
            datetime.datetime(...)
        """
        path, request = (
            _checkpoint(tinker_path),
            SetCheckpointTtlRequest(ttl_seconds=_ttl(ttl_seconds)),
        )
        return self._call(protocol.SET_CHECKPOINT_TTL, request, path=path)

    set_checkpoint_ttl_from_tinker_path_async = value_twin(set_checkpoint_ttl_from_tinker_path)

    def copy_weights(
        self,
        path: str,
        destination_project_id: str | None = None,
        *,
        ttl_seconds: int | None = None,
        weights_access_token: str | None = None,
    ) -> APIFuture[str]:
        """Copy a checkpoint into a project; the future gives the copy's path.

        Args:
            path: The checkpoint; the server judges the path.
            destination_project_id: The project; TINKER_PROJECT_ID by default.
            ttl_seconds: Seconds after which the copy expires; never by default.
            weights_access_token: The key of the account that may read the checkpoint, when it is
                another one.

        Returns:
            A future of the copy's path.

        Raises:
            ValueError: Nothing names a project.

        Example:
            >>> rest.copy_weights(path, "my-project", ttl_seconds=86400).result()
            'tinker://.../weights/step-100'
        """
        project = destination_project_id or os.environ.get("TINKER_PROJECT_ID", "").strip()
        if not project:
            raise ValueError("give destination_project_id, or set TINKER_PROJECT_ID")
        request = CopyWeightsRequest(
            source_path=path, destination_project_id=project, ttl_seconds=_ttl(ttl_seconds)
        )
        headers = {"X-Idempotency-Key": str(uuid.uuid4())}
        if weights_access_token is not None:
            headers["X-Tinker-Weights-Access-Token"] = weights_access_token

        async def work(transport: Transport) -> str:
            copied: CopyWeightsResponse = await transport.call(
                protocol.COPY_WEIGHTS, request, headers=headers
            )
            return copied.tinker_path

        return self._start(work)

    copy_weights_async = value_twin(copy_weights)

    # ── sessions and samplers ─────────────────────────────────────────────────────────────────────

    def get_session(
        self, session_id: str, access_scope: AccessScope | None = "owned"
    ) -> APIFuture[GetSessionResponse]:
        """The training runs and samplers of a session.

        Args:
            session_id: The session.
            access_scope: "owned" for one's own, "accessible" for all that one may see; None leaves
                it open.

        Returns:
            A future of their ids.

        Example:
            >>> rest.get_session(client.holder.session_id).result().training_run_ids
            ['...:train:0']
        """
        path = {"session_id": _part("session_id", session_id)}
        return self._call(protocol.GET_SESSION, path=path, query=_scope(access_scope))

    get_session_async = value_twin(get_session)

    def list_sessions(
        self, limit: int = 20, offset: int = 0, access_scope: AccessScope | None = "owned"
    ) -> APIFuture[ListSessionsResponse]:
        """List the ids of sessions, a page at a time.

        Args:
            limit: How many to give at most.
            offset: How many to pass over.
            access_scope: "owned" for one's own, "accessible" for all that one may see; None leaves
                it open.

        Returns:
            A future of a page of ids.

        Example:
            >>> client.holder.session_id in rest.list_sessions().result().sessions
            True
        """
        query = {"limit": limit, "offset": offset, **_scope(access_scope)}
        return self._call(protocol.LIST_SESSIONS, query=query)

    list_sessions_async = value_twin(list_sessions)

    def finish_session(
        self,
        session_id: str,
        reason: ClientSessionFinishReasonType = "success",
        detail: str | None = None,
    ) -> APIFuture[None]:
        """Finish a session that a program has left open.

        Args:
            session_id: The session.
            reason: "success", "errored" or "interrupted".
            detail: What else there is to say of its end.

        Returns:
            A future that is done when the server knows.

        Raises:
            ValueError: There is no such reason.

        Example:
            >>> rest.finish_session(
            ...     client.holder.session_id, "interrupted", "the machine was needed"
            ... ).result()
        """
        if reason not in get_args(ClientSessionFinishReasonType):
            allowed = ", ".join(get_args(ClientSessionFinishReasonType))
            raise ValueError(f"reason is {reason!r}; expected one of {allowed}")
        path = {"session_id": _part("session_id", session_id)}
        request = FinishSessionRequest(reason=FinishReason(type=reason), detail=detail)
        return self._call(protocol.FINISH_SESSION, request, path=path)

    finish_session_async = value_twin(finish_session)

    def assign_session_project(self, session_id: str, project_id: str) -> APIFuture[None]:
        """Move a session, with its runs and samplers, into a project.

        Args:
            session_id: The session.
            project_id: The project.

        Returns:
            A future that is done when it has been moved.

        Example:
            >>> rest.assign_session_project(client.holder.session_id, "my-project").result()
        """
        path = {"session_id": _part("session_id", session_id)}
        request = AssignSessionProjectRequest(project_id=project_id)
        return self._call(protocol.ASSIGN_SESSION_PROJECT, request, path=path)

    assign_session_project_async = value_twin(assign_session_project)

    def export_session_trace(
        self, session_id: str, *, poll_seconds: float = TRACE_POLL_SECONDS
    ) -> APIFuture[str]:
        """Have a session's timeline written as a Perfetto trace; the future gives a signed address
        to fetch it from.

        Args:
            session_id: The session.
            poll_seconds: Seconds between one look at how far it is and the next.

        Returns:
            A future of the address.

        Raises:
            RuntimeError: The future's, when the trace could not be made.

        Example:
            >>> rest.export_session_trace(client.holder.session_id).result()
            'file:///.../traces/....json'
        """
        path = {"session_id": _part("session_id", session_id)}
        op = protocol.EXPORT_SESSION_TRACE

        async def work(transport: Transport) -> str:
            told = False
            while True:
                answer: SessionTraceExportResponse = await transport.call(op, path=path)
                if answer.status == "failed":
                    raise RuntimeError(
                        f"the trace of session {session_id} could not be made: {answer.error}"
                    )
                if answer.status == "ready":
                    if answer.url is None:
                        raise APIResponseValidationError(
                            f"{op.name} at {transport.place}: ready, but without a url"
                        )
                    return answer.url
                if not told:
                    logger.warning(
                        "the trace of session %s is being made; that may take a while", session_id
                    )
                    told = True
                await asyncio.sleep(poll_seconds)

        return self._start(work)

    export_session_trace_async = value_twin(export_session_trace)

    def search_sessions(self, request: SessionSearchRequest) -> APIFuture[SessionSearchResponse]:
        """Search sessions, newest first. Experimental: it may change in any release.

        A page's `next_cursor` is the next request's `cursor`; the last page has none.

        Args:
            request: What to look for, and from where on.

        Returns:
            A future of a page of sessions.

        Example:
            >>> page = rest.search_sessions(SessionSearchRequest()).result()
            >>> page.sessions[0].session_id == client.holder.session_id
            True
        """
        warn_experimental("search_sessions")
        return self._call(protocol.SEARCH_SESSIONS, request)

    def get_sampler(self, sampler_id: str) -> APIFuture[GetSamplerResponse]:
        """What a sampler samples from.

        Args:
            sampler_id: The sampling session's id.

        Returns:
            A future of its base model and, where there is one, its checkpoint.

        Example:
            >>> rest.get_sampler(sampler.sampling_session_id).result().base_model
            'tinkex/tiny'
        """
        return self._call(
            protocol.GET_SAMPLER, path={"sampler_id": _part("sampler_id", sampler_id)}
        )

    get_sampler_async = value_twin(get_sampler)

    # ── the server ────────────────────────────────────────────────────────────────────────────────

    def get_server_capabilities(self) -> APIFuture[GetServerCapabilitiesResponse]:
        """Which models the server offers.

        Returns:
            A future of the answer.

        Example:
            >>> [
            ...     model.model_name
            ...     for model in rest.get_server_capabilities().result().supported_models
            ... ]
            ['tinkex/tiny']
        """
        return self._call(protocol.GET_SERVER_CAPABILITIES)

    # ── the account ───────────────────────────────────────────────────────────────────────────────

    def whoami(self) -> APIFuture[WhoamiResponse]:
        """Whom the key belongs to, as the token that the server gives for it says.

        Raises:
            RuntimeError: The future's, when the server gives no tokens and the key is a plain one.

        Example:
            >>> RestClient(api_key=token).whoami().result().email
            'ada@example.org'
        """
        key = self._config.api_key or ""

        async def work(transport: Transport) -> WhoamiResponse:
            said = _claims(key) if key.startswith("eyJ") else {}
            if not str(said.get("iss", "")).startswith("passport-"):
                said = await _exchange_key(transport)
            try:
                return WhoamiResponse(
                    user_urn=said["sub"],
                    org_urn=f"tml:organization:{said['org_id']}",
                    email=said.get("email") or None,
                )
            except KeyError as error:
                raise RuntimeError(
                    f"the token does not say who it is for: {error} is missing"
                ) from None

        return self._start(work)

    @deprecated("call AdminClient.get_audit_log(); an AdminClient is made the same way")
    def get_audit_log(
        self, event_type: AuditEventType = "all", day: dt.date | None = None
    ) -> APIFuture[AuditLogResponse]:
        """Deprecated: use `AdminClient.get_audit_log`."""
        return self._audit_log(event_type, day)

    get_audit_log_async = value_twin(get_audit_log, "await AdminClient.get_audit_log()")

    @deprecated("call AdminClient.get_billing_usage(); an AdminClient is made the same way")
    def get_billing_usage(
        self, starting_on: dt.datetime | str, ending_before: dt.datetime | str
    ) -> APIFuture[BillingUsageResponse]:
        """Deprecated: use `AdminClient.get_billing_usage`."""
        return self._billing_usage(starting_on, ending_before)

    get_billing_usage_async = value_twin(get_billing_usage, "await AdminClient.get_billing_usage()")

    @deprecated(
        "call AdminClient.get_current_checkpoint_storage_usage(); an AdminClient is made the same "
        "way"
    )
    def get_current_checkpoint_storage_usage(
        self, project_id: str | None = None
    ) -> APIFuture[CurrentCheckpointStorageUsageResponse]:
        """Deprecated: use `AdminClient.get_current_checkpoint_storage_usage`."""
        return self._storage_usage(project_id)

    get_current_checkpoint_storage_usage_async = value_twin(
        get_current_checkpoint_storage_usage,
        "await AdminClient.get_current_checkpoint_storage_usage()",
    )


@name_requests
class AdminClient(_Client):
    """What an organization's administrators may see: what was done, and what was used.

    Args:
        base_url: The server; TINKER_BASE_URL by default.
        api_key: The key; TINKER_API_KEY by default.
        config: All settings at once, in place of these.

    Example:
        >>> with AdminClient(base_url="local") as admin:
        ...     admin.get_billing_usage("2026-07-13T00:00:00Z", "2026-07-14T00:00:00Z").result()
        BillingUsageResponse(...)
    """

    def get_audit_log(
        self, event_type: AuditEventType = "all", day: dt.date | None = None
    ) -> APIFuture[AuditLogResponse]:
        """What was done on a day.

        Args:
            event_type: "all", "checkpoints", "projects", "teams" or "organizations".
            day: The day, from midnight to midnight UTC; today by default.

        Returns:
            A future of the day's events.

        Raises:
            ValueError: There is no such kind of events, or the day is no date.

        Example:
            >>> saved = client.save_state("step-100").result()
            >>> admin.get_audit_log("checkpoints").result().entries[-1].event
            'checkpoint_saved'
        """
        return self._audit_log(event_type, day)

    get_audit_log_async = value_twin(get_audit_log)

    def get_billing_usage(
        self, starting_on: dt.datetime | str, ending_before: dt.datetime | str
    ) -> APIFuture[BillingUsageResponse]:
        """What was used, hour by hour.

        Args:
            starting_on: The first hour: a datetime, or text such as `2026-07-13T00:00:00Z`; UTC if
                no zone is given.
            ending_before: The hour after the last one; at most 14 days later.

        Returns:
            A future of what was used, by hour.

        Raises:
            ValueError: A time cannot be read.

        Example:
            >>> admin.get_billing_usage("2026-07-13T00:00:00Z", "2026-07-14T00:00:00Z").result()
            BillingUsageResponse(...)
        """
        return self._billing_usage(starting_on, ending_before)

    get_billing_usage_async = value_twin(get_billing_usage)

    def get_current_checkpoint_storage_usage(
        self, project_id: str | None = None
    ) -> APIFuture[CurrentCheckpointStorageUsageResponse]:
        """What checkpoints take up now, in one project or in all.

        Args:
            project_id: The project; all by default.

        Returns:
            A future of count and bytes, by project and owner.

        Example:
            >>> saved = client.save_state("step-100").result()
            >>> [
            ...     item.size_bytes
            ...     for item in admin.get_current_checkpoint_storage_usage().result().data
            ... ]
            [...]
        """
        return self._storage_usage(project_id)

    get_current_checkpoint_storage_usage_async = value_twin(get_current_checkpoint_storage_usage)


# ── what is checked before anything is sent ───────────────────────────────────────────────────────


def _part(name: str, value: str) -> str:
    """An id that becomes a part of a path: a dot segment or nothing at all would name another
    resource.
    """
    if not isinstance(value, str) or value in ("", ".", ".."):
        raise ValueError(f"{name} must be an id, got {value!r}")
    return value


def _checkpoint(run_or_path: str, checkpoint_id: str | None = None) -> dict[str, str]:
    """The parts of a checkpoint's address, from its path or from its run and id."""
    if checkpoint_id is not None:
        _part("training_run_id", run_or_path)
        run_or_path = f"{SCHEME}{run_or_path}/{checkpoint_id}"
    parsed = ParsedCheckpointTinkerPath.from_tinker_path(run_or_path)
    return {
        "training_run_id": _part("training_run_id", parsed.training_run_id),
        "kind": parsed.checkpoint_id.split("/", 1)[0],
        "name": _part("the checkpoint's name", parsed.name),
    }


def _scope(scope: str | None) -> dict[str, object]:
    if scope is not None and scope not in get_args(AccessScope):
        raise ValueError(
            f"access_scope is {scope!r}; expected one of {', '.join(get_args(AccessScope))}"
        )
    return {"access_scope": scope}


def _ttl(seconds: int | None) -> int | None:
    if seconds is not None and (
        isinstance(seconds, bool) or not isinstance(seconds, int) or seconds <= 0
    ):
        raise ValueError(
            f"ttl_seconds must be a positive whole number, or None for no expiry; got {seconds!r}"
        )
    return seconds


def _time(name: str, value: dt.datetime | str) -> dt.datetime:
    if isinstance(value, dt.datetime):
        return value
    try:
        return dt.datetime.fromisoformat(value)
    except (TypeError, ValueError):
        raise ValueError(f"{name} must be a datetime or RFC 3339 text, got {value!r}") from None


# ── odds and ends of the answers ──────────────────────────────────────────────────────────────────


def _expiry(reply: Reply) -> dt.datetime:
    """When a redirect's address expires: its Expires header, or a quarter of an hour from now."""
    # used by this old endpoint alone, and not free to import
    from email.utils import parsedate_to_datetime

    try:
        return parsedate_to_datetime(reply.headers["expires"])
    except (KeyError, ValueError):
        return dt.datetime.now(dt.UTC) + ARCHIVE_LIFETIME


def _claims(token: str) -> dict[str, Any]:
    """What a token says of itself; nothing, when it cannot be read."""
    try:
        return claims(token)
    except TinkerError:
        return {}


async def _exchange_key(transport: Transport) -> dict[str, Any]:
    """What the token says that the server gives in exchange for the key."""
    hello = ClientConfigRequest(sdk_version=PROTOCOL_VERSION)
    config: ClientConfigResponse = await transport.call(protocol.CLIENT_CONFIG, hello)
    if not config.pjwt_auth_enabled:
        raise RuntimeError(
            "whoami needs a token: there is none, and this server gives none in exchange for keys"
        )
    token: AuthTokenResponse = await transport.call(protocol.AUTH_TOKEN, Empty())
    return _claims(token.jwt)


async def _closing(transport: Transport | None) -> None:
    if transport is not None:
        await transport.close()


def _close(transport: Transport) -> None:
    runtime().release(transport.close())
