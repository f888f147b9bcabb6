"""RestRuns: the methods of RestClient about training runs."""

from __future__ import annotations

import time

from tinkex.client.checkpoint_arguments import (
    AccessScope,
    checked_id,
    checkpoint_parts,
    scope_query,
)
from tinkex.client.futures.api_future import APIFuture
from tinkex.client.futures.result_polling import retrieve
from tinkex.client.futures.twins import value_twin
from tinkex.client.http.legacy_servers import read_receipt
from tinkex.client.http.transport import Transport
from tinkex.client.rest_parts.rest_base import RestBase
from tinkex.types.checkpoints import TrainingRun, TrainingRunsResponse
from tinkex.types.model_requests import UnloadModelRequest, UnloadModelResponse
from tinkex.types.training import ModelID
from tinkex.wire import codec, protocol


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
        op, request = (
            protocol.UNLOAD_MODEL,
            UnloadModelRequest(model_id=checked_id("model_id", model_id)),
        )

        async def work(transport: Transport) -> UnloadModelResponse:
            started = time.monotonic()
            reply = await transport.request(op, codec.encode(request))
            receipt = read_receipt(transport, op, reply, started)
            unloaded: UnloadModelResponse = await retrieve(transport, receipt)
            return unloaded

        return self._start(work)
