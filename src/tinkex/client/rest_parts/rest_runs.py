"""RestRuns, RestSessions and RestExperimental: methods of RestClient, by subject."""

from __future__ import annotations

import functools
import logging
import time
import warnings
from typing import TYPE_CHECKING, Any

from tinkex.client.checkpoint_arguments import (
    AccessScope,
    checked_choice,
    checked_id,
    checkpoint_parts,
    scope_query,
)
from tinkex.client.futures.api_future import APIFuture, users_level
from tinkex.client.futures.result_polling import retrieve
from tinkex.client.futures.twins import value_twin
from tinkex.client.http.retry import persist
from tinkex.client.http.transport import Transport
from tinkex.client.outbox import read_receipt
from tinkex.client.rest_parts.rest_base import RestBase
from tinkex.errors import APIResponseValidationError, ExperimentalWarning
from tinkex.types.checkpoints import TrainingRun, TrainingRunsResponse
from tinkex.types.saves import (
    ExternalWeightsUploadFinishRequest,
    ExternalWeightsUploadFinishResult,
    ExternalWeightsUploadStartRequest,
    ExternalWeightsUploadStartResult,
)
from tinkex.types.search_requests import SessionSearchRequest, SessionSearchResponse
from tinkex.types.server_facts import GetServerCapabilitiesResponse
from tinkex.types.sessions import (
    AssignSessionProjectRequest,
    ClientSessionFinishReasonType,
    FinishReason,
    FinishSessionRequest,
    GetSamplerResponse,
    GetSessionResponse,
    ListSessionsResponse,
    SessionTraceExportResponse,
    UnloadModelRequest,
    UnloadModelResponse,
)
from tinkex.types.training import ModelID
from tinkex.wire import codec, protocol

if TYPE_CHECKING:
    from tinkex.types.search_requests import CheckpointSearchRequest, CheckpointSearchResponse
    from tinkex.types.training import LoraConfig

logger = logging.getLogger("tinkex")

TRACE_POLL_SECONDS = 5.0


class RestRuns(RestBase):
    """Training runs."""

    def get_training_run(
        self, training_run_id: ModelID, access_scope: AccessScope | None = "owned"
    ) -> APIFuture[TrainingRun]:
        """Look up a training run.

        Args:
            training_run_id: The run.
            access_scope: "owned" for your own runs, "accessible" for all that you may see; None
                sends no scope.

        Returns:
            A future of the run.

        Example:
            >>> rest.get_training_run(client.model_id).result().base_model
            'tinkex/tiny'
        """
        path = {"training_run_id": checked_id("training_run_id", training_run_id)}
        return self._call(protocol.GET_TRAINING_RUN, path=path, query=scope_query(access_scope))

    get_training_run_async = value_twin(get_training_run)

    def get_training_run_by_tinker_path(
        self, tinker_path: str, access_scope: AccessScope | None = "owned"
    ) -> APIFuture[TrainingRun]:
        """Look up the training run that a checkpoint belongs to.

        Args:
            tinker_path: The checkpoint's path, `tinker://RUN/KIND/NAME`.
            access_scope: "owned" for your own, "accessible" for all that you may see; None sends
                no scope.

        Returns:
            A future of the run.

        Raises:
            ValueError: The path is malformed.

        Example:
            >>> rest.get_training_run_by_tinker_path(path).result().lora_rank
            4
        """
        run = checkpoint_parts(tinker_path)["training_run_id"]
        return self.get_training_run(run, access_scope)

    get_training_run_by_tinker_path_async = value_twin(get_training_run_by_tinker_path)

    def list_training_runs(
        self,
        limit: int = 20,
        offset: int = 0,
        access_scope: AccessScope | None = "owned",
        project_id: str | None = None,
    ) -> APIFuture[TrainingRunsResponse]:
        """List training runs, a page at a time.

        Args:
            limit: The largest number of entries.
            offset: The number of entries to skip.
            access_scope: "owned" or "accessible".
            project_id: Only the runs of this project.

        Returns:
            A future of a page of runs; its cursor has the number of all runs.

        Example:
            >>> page = rest.list_training_runs(limit=10).result()
            >>> client.model_id in [run.training_run_id for run in page.training_runs]
            True
        """
        query = {
            "limit": limit,
            "offset": offset,
            **scope_query(access_scope),
            "project_id": project_id,
        }
        return self._call(protocol.LIST_TRAINING_RUNS, query=query)

    list_training_runs_async = value_twin(list_training_runs)

    def unload_model(self, model_id: ModelID) -> APIFuture[UnloadModelResponse]:
        """Let the server forget the live state of a training run.

        The run's checkpoints stay. Not all servers offer this.

        Args:
            model_id: The run. It may belong to a client in another program.

        Returns:
            A future of the answer. It is done after all earlier calls of the run.

        Raises:
            ValueError: The id is empty.

        Example:
            >>> rest.unload_model(client.model_id).result()
            UnloadModelResponse(model_id='...:train:0', ...)
        """
        op = protocol.UNLOAD_MODEL
        request = UnloadModelRequest(model_id=checked_id("model_id", model_id))

        async def work(transport: Transport) -> Any:
            started = time.monotonic()
            reply = await transport.request(op, codec.encode(request))
            receipt = read_receipt(transport, op, reply, started)
            return await retrieve(transport, receipt)

        return self._start(work)


class RestSessions(RestBase):
    """Sessions, samplers and the server's models."""

    def get_session(
        self, session_id: str, access_scope: AccessScope | None = "owned"
    ) -> APIFuture[GetSessionResponse]:
        """Return the training runs and samplers of a session.

        Args:
            session_id: The session.
            access_scope: "owned" for your own, "accessible" for all that you may see; None sends
                no scope.

        Returns:
            A future of their ids.

        Example:
            >>> rest.get_session(client.holder.session_id).result().training_run_ids
            ['...:train:0']
        """
        path = {"session_id": checked_id("session_id", session_id)}
        return self._call(protocol.GET_SESSION, path=path, query=scope_query(access_scope))

    get_session_async = value_twin(get_session)

    def list_sessions(
        self, limit: int = 20, offset: int = 0, access_scope: AccessScope | None = "owned"
    ) -> APIFuture[ListSessionsResponse]:
        """List the ids of sessions, a page at a time.

        Args:
            limit: The largest number of entries.
            offset: The number of entries to skip.
            access_scope: "owned" for your own, "accessible" for all that you may see; None sends
                no scope.

        Returns:
            A future of a page of ids.

        Example:
            >>> client.holder.session_id in rest.list_sessions().result().sessions
            True
        """
        query = {"limit": limit, "offset": offset, **scope_query(access_scope)}
        return self._call(protocol.LIST_SESSIONS, query=query)

    list_sessions_async = value_twin(list_sessions)

    def finish_session(
        self,
        session_id: str,
        reason: ClientSessionFinishReasonType = "success",
        detail: str | None = None,
    ) -> APIFuture[None]:
        """Finish a session that a program left open.

        Args:
            session_id: The session.
            reason: "success", "errored" or "interrupted".
            detail: Any further text about the end.

        Returns:
            A future that is done when the server has noted it.

        Raises:
            ValueError: There is no such reason.

        Example:
            >>> rest.finish_session(
            ...     client.holder.session_id, "interrupted", "the machine was needed"
            ... ).result()
        """
        checked_choice("reason", reason, ClientSessionFinishReasonType)
        path = {"session_id": checked_id("session_id", session_id)}
        request = FinishSessionRequest(reason=FinishReason(type=reason), detail=detail)
        return self._call(protocol.FINISH_SESSION, request, path=path)

    finish_session_async = value_twin(finish_session)

    def assign_session_project(self, session_id: str, project_id: str) -> APIFuture[None]:
        """Move a session, with its runs and samplers, into a project.

        Args:
            session_id: The session.
            project_id: The project.

        Returns:
            A future that is done when the session is moved.

        Example:
            >>> rest.assign_session_project(client.holder.session_id, "my-project").result()
        """
        path = {"session_id": checked_id("session_id", session_id)}
        request = AssignSessionProjectRequest(project_id=project_id)
        return self._call(protocol.ASSIGN_SESSION_PROJECT, request, path=path)

    assign_session_project_async = value_twin(assign_session_project)

    def export_session_trace(
        self, session_id: str, *, poll_seconds: float = TRACE_POLL_SECONDS
    ) -> APIFuture[str]:
        """Have a session's timeline written as a Perfetto trace.

        Args:
            session_id: The session.
            poll_seconds: Seconds between two questions for its progress.

        Returns:
            A future of a signed address of the trace.

        Raises:
            RuntimeError: Raised by the future when the trace could not be made.

        Example:
            >>> rest.export_session_trace(client.holder.session_id).result()
            'file:///.../traces/....json'
        """
        path = {"session_id": checked_id("session_id", session_id)}
        op = protocol.EXPORT_SESSION_TRACE

        async def work(transport: Transport) -> str:
            told = False

            def delay_after(answer: SessionTraceExportResponse | Exception) -> float | None:
                nonlocal told
                if isinstance(answer, Exception) or answer.status in ("failed", "ready"):
                    return None
                if not told:
                    logger.warning(
                        "the trace of session %s is being made; that may take a while", session_id
                    )
                    told = True
                return poll_seconds

            ask = functools.partial(transport.call, op, path=path)
            answer: SessionTraceExportResponse = await persist(ask, delay_after)
            if answer.status == "failed":
                raise RuntimeError(
                    f"the trace of session {session_id} could not be made: {answer.error}"
                )
            if answer.url is None:
                raise APIResponseValidationError(
                    f"{op.name} at {transport.place}: ready, but without a url"
                )
            return answer.url

        return self._start(work)

    export_session_trace_async = value_twin(export_session_trace)

    def search_sessions(self, request: SessionSearchRequest) -> APIFuture[SessionSearchResponse]:
        """Search sessions, newest first. Experimental: it may change in any release.

        A page's `next_cursor` is the next request's `cursor`; the last page has none.

        Args:
            request: The filters, and the cursor of the page.

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
        """Return the base model and the checkpoint that a sampler samples from.

        Args:
            sampler_id: The sampling session's id.

        Returns:
            A future of its base model and, if there is one, its checkpoint.

        Example:
            >>> rest.get_sampler(sampler.sampling_session_id).result().base_model
            'tinkex/tiny'
        """
        path = {"sampler_id": checked_id("sampler_id", sampler_id)}
        return self._call(protocol.GET_SAMPLER, path=path)

    get_sampler_async = value_twin(get_sampler)

    def get_server_capabilities(self) -> APIFuture[GetServerCapabilitiesResponse]:
        """Return the models that the server offers.

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


class RestExperimental(RestBase):
    """Methods that may change in any release."""

    def search_checkpoints(
        self, request: CheckpointSearchRequest
    ) -> APIFuture[CheckpointSearchResponse]:
        """Search your checkpoints, newest first.

        Experimental: it may change in any release.

        A page's `next_cursor` is the next request's `cursor`; the last page has none.

        Args:
            request: The checkpoints to look for, and the place to go on from.

        Returns:
            A future of a page of checkpoints.

        Example:
            >>> saved = client.save_state("step-100").result()
            >>> request = types.CheckpointSearchRequest(checkpoint_type="training", limit=1)
            >>> page = rest.search_checkpoints(request).result()
            >>> [checkpoint.base_model for checkpoint in page.checkpoints]
            ['tinkex/tiny']
        """
        warn_experimental("search_checkpoints")
        return self._call(protocol.SEARCH_CHECKPOINTS, request)

    def external_weights_upload_start(
        self,
        *,
        base_model: str,
        lora_config: LoraConfig,
        destination_project_id: str | None = None,
    ) -> APIFuture[ExternalWeightsUploadStartResult]:
        """Begin an upload of weights. Experimental.

        PUT each file to its address, then finish the upload.

        The files are those that `save_weights_external` exports: `adapter_config.json` and
        `adapter_model.safetensors`.

        Args:
            base_model: The base model of the weights.
            lora_config: Their rank, and the layers that they change.
            destination_project_id: The project of the checkpoint.

        Returns:
            A future of the upload's id and the addresses of its files.

        Example:
            >>> shape = LoraConfig(rank=8, train_unembed=False)
            >>> begun = rest.external_weights_upload_start(
            ...     base_model="tinkex/tiny", lora_config=shape
            ... ).result()
            >>> sorted(begun.urls)
            ['adapter_config.json', 'adapter_model.safetensors']
        """
        warn_experimental("external_weights_upload_start")
        request = ExternalWeightsUploadStartRequest(
            base_model=base_model,
            lora_config=lora_config,
            destination_project_id=destination_project_id,
        )

        return self._call(
            protocol.EXTERNAL_WEIGHTS_UPLOAD_START,
            request,
            lambda answer: ExternalWeightsUploadStartResult(
                answer.upload_id, answer.urls, answer.expires
            ),
        )

    def external_weights_upload_finish(
        self, upload_id: str
    ) -> APIFuture[ExternalWeightsUploadFinishResult]:
        """End an upload: its files become a checkpoint of external weights. Experimental.

        Args:
            upload_id: The id that `external_weights_upload_start` gave.

        Returns:
            A future of the path of the checkpoint, to sample from or to begin a run with.

        Example:
            >>> rest.external_weights_upload_finish("0" * 32).result()  # or begun.upload_id
            Traceback (most recent call last):
            ...
            tinkex.errors.NotFoundError: ...
        """
        warn_experimental("external_weights_upload_finish")
        request = ExternalWeightsUploadFinishRequest(upload_id=upload_id)

        return self._call(
            protocol.EXTERNAL_WEIGHTS_UPLOAD_FINISH,
            request,
            lambda answer: ExternalWeightsUploadFinishResult(answer.tinker_path),
        )


def warn_experimental(method: str) -> None:
    """Tell a method's caller that it may change."""
    warnings.warn(
        f"RestClient.{method} is experimental: it may change or go in any release without notice",
        ExperimentalWarning,
        stacklevel=users_level(),
    )
