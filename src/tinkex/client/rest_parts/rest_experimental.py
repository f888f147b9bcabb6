"""RestExperimental: checkpoint search and uploads of RestClient."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from tinkex.client.futures.api_future import APIFuture, users_level
from tinkex.client.rest_parts.rest_base import RestBase
from tinkex.errors import ExperimentalWarning
from tinkex.types.saves import (
    ExternalWeightsUploadFinishRequest,
    ExternalWeightsUploadFinishResult,
    ExternalWeightsUploadStartRequest,
    ExternalWeightsUploadStartResult,
)
from tinkex.wire import protocol

if TYPE_CHECKING:
    from tinkex.types.search_requests import CheckpointSearchRequest, CheckpointSearchResponse
    from tinkex.types.training import LoraConfig


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
