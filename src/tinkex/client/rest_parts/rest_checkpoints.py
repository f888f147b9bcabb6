"""RestCheckpoints: the methods of RestClient about checkpoints."""

from __future__ import annotations

import datetime as dt
import os
import uuid
from collections.abc import Awaitable

from tinkex.client.checkpoint_arguments import checked_id, checked_ttl, checkpoint_parts
from tinkex.client.futures.api_future import APIFuture
from tinkex.client.futures.twins import value_twin
from tinkex.client.http.exchange import Reply
from tinkex.client.http.retry import persist
from tinkex.client.http.transport import Transport
from tinkex.client.rest_parts.rest_base import RestBase
from tinkex.types.checkpoints import CheckpointsListResponse, ParsedCheckpointTinkerPath
from tinkex.types.saves import (
    CheckpointArchiveUrlResponse,
    CopyWeightsRequest,
    CopyWeightsResponse,
    ExternalWeightsUrlsResponse,
    SetCheckpointTtlRequest,
    WeightsInfoRequest,
    WeightsInfoResponse,
)
from tinkex.types.training import ModelID
from tinkex.wire import protocol

ARCHIVE_ATTEMPTS = 6
ARCHIVE_RETRY_SECONDS = 30.0
ARCHIVE_LIFETIME = dt.timedelta(minutes=15)
"""The lifetime of an archive's address if the server names none."""


class RestCheckpoints(RestBase):
    """Checkpoints: list, download, share, copy and delete them."""

    def get_weights_info_by_tinker_path(self, tinker_path: str) -> APIFuture[WeightsInfoResponse]:
        """Return the base model and the shape of a checkpoint; the server checks the path.

        Args:
            tinker_path: The checkpoint's path, `tinker://RUN/KIND/NAME`.

        Returns:
            A future of the base model, the rank and the layers that were trained.

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
        path = {"training_run_id": checked_id("training_run_id", training_run_id)}
        return self._call(protocol.LIST_CHECKPOINTS, path=path)

    list_checkpoints_async = value_twin(list_checkpoints)

    def list_user_checkpoints(
        self, limit: int = 100, offset: int = 0
    ) -> APIFuture[CheckpointsListResponse]:
        """List the checkpoints of all your training runs, a page at a time.

        Args:
            limit: The largest number of entries.
            offset: The number of entries to skip.

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
        """Return signed addresses of the files of an exported checkpoint.

        Args:
            tinker_path: The export's path, `tinker://RUN/external_weights/NAME`.

        Returns:
            A future of an address for each file. It expires, and needs no key.

        Raises:
            ValueError: The path is malformed, or is not the path of an exported checkpoint.

        Example:
            >>> export = client.save_weights_external("final").result().path
            >>> sorted(rest.get_external_weights_urls(export).result().urls)
            ['adapter_config.json', 'adapter_model.safetensors']
        """
        parsed = ParsedCheckpointTinkerPath.from_tinker_path(tinker_path)
        if parsed.checkpoint_type != "external":
            raise ValueError(
                f"{tinker_path!r} is not an export; expected tinker://<run>/external_weights/<name>"
            )
        path = checkpoint_parts(tinker_path)
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
        """Return the signed address of a checkpoint packed into one file.

        If the server is still packing (status 503), ask again after a while.

        Args:
            training_run_id: The run, or the whole `tinker://` path of a checkpoint.
            checkpoint_id: `<kind>/<name>`, when the first argument is a run.
            max_retries: The number of attempts in all. Only status 503 leads to another one.
            retry_delay: Seconds between two attempts.

        Returns:
            A future of the address and its expiry.

        Raises:
            ValueError: The checkpoint is malformed, or `max_retries` is less than one.

        Example:
            >>> rest.get_checkpoint_archive_url(path).result().url
            'http.../weights/step-100/archive.tar?...'
        """
        path = checkpoint_parts(training_run_id, checkpoint_id)
        if isinstance(max_retries, bool) or not isinstance(max_retries, int) or max_retries < 1:
            raise ValueError(f"max_retries must be at least 1, got {max_retries!r}")
        if retry_delay < 0:
            raise ValueError(f"retry_delay must not be negative, got {retry_delay!r}")
        op = protocol.GET_CHECKPOINT_ARCHIVE

        async def work(transport: Transport) -> CheckpointArchiveUrlResponse:
            made = 0

            def ask() -> Awaitable[Reply]:
                nonlocal made
                made += 1
                return transport.poll(op, path=path)

            def delay_after(reply: Reply | Exception) -> float | None:
                is_packing = isinstance(reply, Reply) and reply.status == 503
                return retry_delay if is_packing and made < max_retries else None

            reply = await persist(ask, delay_after)
            if (url := transport.redirection(op, path, reply)) is not None:
                return CheckpointArchiveUrlResponse(url=url, expires=_expiry(reply))
            if reply.status >= 300:
                error = transport.errors.refusal(op, reply)
                error.attempts = made
                raise error
            answer: CheckpointArchiveUrlResponse = transport.decode(op, op.response, reply)
            return answer

        return self._start(work)

    get_checkpoint_archive_url_async = value_twin(get_checkpoint_archive_url)

    def get_checkpoint_archive_url_from_tinker_path(
        self,
        tinker_path: str,
        *,
        max_retries: int = ARCHIVE_ATTEMPTS,
        retry_delay: float = ARCHIVE_RETRY_SECONDS,
    ) -> APIFuture[CheckpointArchiveUrlResponse]:
        """Like `get_checkpoint_archive_url` with a path."""
        return self.get_checkpoint_archive_url(
            tinker_path, max_retries=max_retries, retry_delay=retry_delay
        )

    get_checkpoint_archive_url_from_tinker_path_async = value_twin(
        get_checkpoint_archive_url_from_tinker_path
    )

    def delete_checkpoint(
        self, training_run_id: ModelID, checkpoint_id: str | None = None
    ) -> APIFuture[None]:
        """Delete a checkpoint for good.

        Args:
            training_run_id: The run, or the whole `tinker://` path of a checkpoint.
            checkpoint_id: `<kind>/<name>`, when the first argument is a run.

        Returns:
            A future that is done when the checkpoint is deleted.

        Raises:
            ValueError: The checkpoint is malformed.

        Example:
            >>> saved = client.save_state("step-100").result()
            >>> rest.delete_checkpoint(client.model_id, "weights/step-100").result()
        """
        path = checkpoint_parts(training_run_id, checkpoint_id)
        return self._call(protocol.DELETE_CHECKPOINT, path=path)

    delete_checkpoint_async = value_twin(delete_checkpoint)

    def delete_checkpoint_from_tinker_path(self, tinker_path: str) -> APIFuture[None]:
        """Like `delete_checkpoint`, by the path `tinker://RUN/KIND/NAME`.

        Example:
            >>> path = client.save_state("step-100").result().path
            >>> rest.delete_checkpoint_from_tinker_path(path).result()
        """
        return self.delete_checkpoint(tinker_path)

    delete_checkpoint_from_tinker_path_async = value_twin(delete_checkpoint_from_tinker_path)

    def publish_checkpoint(
        self, training_run_id: ModelID, checkpoint_id: str | None = None
    ) -> APIFuture[None]:
        """Let everyone use a checkpoint.

        Args:
            training_run_id: The run, or the whole `tinker://` path of a checkpoint.
            checkpoint_id: `<kind>/<name>`, when the first argument is a run.

        Returns:
            A future that is done when the checkpoint is public.

        Raises:
            ValueError: The checkpoint is malformed.

        Example:
            >>> saved = client.save_state("step-100").result()
            >>> rest.publish_checkpoint(client.model_id, "weights/step-100").result()
        """
        path = checkpoint_parts(training_run_id, checkpoint_id)
        return self._call(protocol.PUBLISH_CHECKPOINT, path=path)

    publish_checkpoint_async = value_twin(publish_checkpoint)

    def publish_checkpoint_from_tinker_path(self, tinker_path: str) -> APIFuture[None]:
        """Like `publish_checkpoint`, by the path `tinker://RUN/KIND/NAME`.

        Example:
            >>> rest.publish_checkpoint_from_tinker_path(path).result()
            >>> rest.list_checkpoints(client.model_id).result().checkpoints[0].public
            True
        """
        return self.publish_checkpoint(tinker_path)

    publish_checkpoint_from_tinker_path_async = value_twin(publish_checkpoint_from_tinker_path)

    def unpublish_checkpoint(
        self, training_run_id: ModelID, checkpoint_id: str | None = None
    ) -> APIFuture[None]:
        """Like `publish_checkpoint`, in reverse: make a published checkpoint private again.

        Example:
            >>> rest.publish_checkpoint(path).result()
            >>> rest.unpublish_checkpoint(path).result()
        """
        path = checkpoint_parts(training_run_id, checkpoint_id)
        return self._call(protocol.UNPUBLISH_CHECKPOINT, path=path)

    unpublish_checkpoint_async = value_twin(unpublish_checkpoint)

    def unpublish_checkpoint_from_tinker_path(self, tinker_path: str) -> APIFuture[None]:
        """Like `unpublish_checkpoint`, by the path `tinker://RUN/KIND/NAME`.

        Example:
            >>> rest.unpublish_checkpoint_from_tinker_path(path).result()
            >>> rest.list_checkpoints(client.model_id).result().checkpoints[0].public
            False
        """
        return self.unpublish_checkpoint(tinker_path)

    unpublish_checkpoint_from_tinker_path_async = value_twin(unpublish_checkpoint_from_tinker_path)

    def set_checkpoint_ttl_from_tinker_path(
        self, tinker_path: str, ttl_seconds: int | None
    ) -> APIFuture[None]:
        """Set when a checkpoint expires.

        Args:
            tinker_path: The checkpoint's path, `tinker://RUN/KIND/NAME`.
            ttl_seconds: Seconds from now; None for no expiry.

        Returns:
            A future that is done when the server has saved it.

        Raises:
            ValueError: The path is malformed, or the time is not a positive whole number.

        Example:
            >>> rest.set_checkpoint_ttl_from_tinker_path(path, 3600).result()
            >>> rest.list_checkpoints(client.model_id).result().checkpoints[0].expires_at
            datetime.datetime(...)
        """
        path = checkpoint_parts(tinker_path)
        request = SetCheckpointTtlRequest(ttl_seconds=checked_ttl(ttl_seconds))
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
            path: The checkpoint; the server checks the path.
            destination_project_id: The project; TINKER_PROJECT_ID by default.
            ttl_seconds: Seconds after which the copy expires; never by default.
            weights_access_token: The key of the account that may read the checkpoint, if it is
                another account.

        Returns:
            A future of the copy's path.

        Raises:
            ValueError: There is no project.

        Example:
            >>> rest.copy_weights(path, "my-project", ttl_seconds=86400).result()
            'tinker://.../weights/step-100'
        """
        project = destination_project_id or os.environ.get("TINKER_PROJECT_ID", "").strip()
        if not project:
            raise ValueError("give destination_project_id, or set TINKER_PROJECT_ID")
        request = CopyWeightsRequest(
            source_path=path, destination_project_id=project, ttl_seconds=checked_ttl(ttl_seconds)
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


def _expiry(reply: Reply) -> dt.datetime:
    """Return the expiry of a redirect's address, by default in 15 minutes."""
    # slow to import, and only this old endpoint needs it
    from email.utils import parsedate_to_datetime

    try:
        return parsedate_to_datetime(reply.headers["expires"])
    except (KeyError, ValueError):
        return dt.datetime.now(dt.UTC) + ARCHIVE_LIFETIME
