"""TrainingStarts: the methods of ServiceClient that start training runs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Coroutine
from typing import Any

from tinkex.client.futures.backcompat import BackcompatClientFuture, forwarding
from tinkex.client.futures.loop_thread import runtime
from tinkex.client.futures.twins import value_twin
from tinkex.client.http.request_headers import name_requests
from tinkex.client.session import Session
from tinkex.client.session_client import SessionClient
from tinkex.client.training_client import TrainingClient
from tinkex.client.training_parts.training_passes import info_of
from tinkex.errors import NotFoundError, TinkerError
from tinkex.types.optimizers import AdamOptimizerConfig, OptimizerConfig
from tinkex.types.saves import (
    LoadWeightsRequest,
    LoadWeightsResponse,
    WeightsInfoRequest,
    WeightsInfoResponse,
)
from tinkex.types.sessions import CreateModelRequest, CreateModelResponse, UnloadModelRequest
from tinkex.types.training import LoraConfig
from tinkex.wire import protocol


@name_requests
@forwarding(TrainingClient)
class BackcompatTrainingClientFuture(BackcompatClientFuture[TrainingClient], TrainingClient):
    """The future of a TrainingClient: `await` it, or call `.result()`.

    It can still be used as if it were the client, with a warning.

    Example:
        >>> service.create_lora_training_client("tinkex/tiny").result()
        TrainingClient('...:train:0')
    """

    def __copy__(self) -> BackcompatTrainingClientFuture:
        return type(self)(self._future)


class TrainingStarts(SessionClient):
    """New training runs, and runs of checkpoints."""

    def create_lora_training_client(
        self,
        base_model: str,
        rank: int = 32,
        seed: int | None = None,
        train_mlp: bool = True,
        train_attn: bool = True,
        train_unembed: bool = True,
        user_metadata: dict[str, str] | None = None,
        optimizer: OptimizerConfig | None = None,
    ) -> BackcompatTrainingClientFuture:
        """Start a training run with a new LoRA adapter.

        Args:
            base_model: The name of the model to adapt.
            rank: The adapter's rank.
            seed: Seed of its A matrices (B starts at zero).
            train_mlp: Adapt the feed-forward layers.
            train_attn: Adapt the attention layers.
            train_unembed: Adapt the output layer.
            user_metadata: Kept with the run.
            optimizer: AdamW by default.

        Returns:
            A future of the client of the new run.

        Raises:
            AssertionError: No layers are to be adapted.
            BadRequestError: Raised by the future when the server has no such model; the message
                lists its models.

        Example:
            >>> client = service.create_lora_training_client("tinkex/tiny", rank=16).result()
            >>> client.get_info().lora_rank
            16
        """
        lora = _checked(
            LoraConfig(
                rank=rank,
                seed=seed,
                train_unembed=train_unembed,
                train_mlp=train_mlp,
                train_attn=train_attn,
            )
        )
        return self._making(
            self._create_model,
            base_model=base_model,
            lora_config=lora,
            user_metadata=user_metadata,
            optimizer_config=optimizer or AdamOptimizerConfig(),
        )

    create_lora_training_client_async = value_twin(create_lora_training_client)

    def _making(
        self, make: Callable[..., Coroutine[Any, Any, TrainingClient]], *args: Any, **fields: Any
    ) -> BackcompatTrainingClientFuture:
        """Begin to make a run under the next number; `fields` are those of the request."""
        number = next(self._session.model_seq_ids)
        return BackcompatTrainingClientFuture(self._session.create(make, number, *args, fields))

    async def _create_model(
        self, number: int, fields: dict[str, Any], first_seq_id: int = 1
    ) -> TrainingClient:
        session = self._session
        request = CreateModelRequest(session_id=session.session_id, model_seq_id=number, **fields)
        created: CreateModelResponse = await session.run(protocol.CREATE_MODEL, request)
        return await self._client_of(number, created.model_id, first_seq_id)

    async def _client_of(self, number: int, model_id: str, first_seq_id: int = 1) -> TrainingClient:
        """Return the client of a new run, with the server's description of it."""
        try:
            info = await info_of(self._session, model_id)
        except NotFoundError:
            if not self._session.transport.is_older:
                raise
            info = None
        return TrainingClient(self._session, number, model_id, info=info, first_seq_id=first_seq_id)

    def create_training_client_from_state(
        self,
        path: str,
        base_model: str | None = None,
        user_metadata: dict[str, str] | None = None,
        weights_access_token: str | None = None,
        optimizer: OptimizerConfig | None = None,
    ) -> BackcompatTrainingClientFuture:
        """Start a training run from the weights of a checkpoint.

        The optimizer starts from zero.

        Args:
            path: A `tinker://…/weights/…` path.
            base_model: The name of the base model; that of the checkpoint by default.
            user_metadata: Kept with the run.
            weights_access_token: The key of the account that may read the checkpoint, if it is
                another account.
            optimizer: An optimizer in place of the checkpoint's.

        Returns:
            A future of the client of the new run.

        Raises:
            TinkerError: Raised by the future when there is no such checkpoint, or it is not a
                training checkpoint.

        Example:
            >>> path = client.save_state("step-100").result().path
            >>> service.create_training_client_from_state(path).result()
            TrainingClient('...:train:1')
        """
        return self._making(
            self._from_state,
            path,
            base_model=base_model,
            optimizer=False,
            user_metadata=user_metadata,
            weights_access_token=weights_access_token,
            optimizer_config=optimizer,
        )

    create_training_client_from_state_async = value_twin(create_training_client_from_state)

    def create_training_client_from_state_with_optimizer(
        self,
        path: str,
        base_model: str | None = None,
        user_metadata: dict[str, str] | None = None,
        weights_access_token: str | None = None,
    ) -> BackcompatTrainingClientFuture:
        """Like `create_training_client_from_state`, with the optimizer state of the checkpoint.

        The future also fails with `TinkerError` if the checkpoint holds no optimizer state.

        Example:
            >>> path = client.save_state("step-100").result().path
            >>> service.create_training_client_from_state_with_optimizer(path).result()
            TrainingClient('...:train:1')
        """
        return self._making(
            self._from_state,
            path,
            base_model=base_model,
            optimizer=True,
            user_metadata=user_metadata,
            weights_access_token=weights_access_token,
        )

    create_training_client_from_state_with_optimizer_async = value_twin(
        create_training_client_from_state_with_optimizer
    )

    async def _from_state(self, number: int, path: str, fields: dict[str, Any]) -> TrainingClient:
        """Make a run of a checkpoint in one request, which the oldest servers do not know."""
        session = self._session
        request = LoadWeightsRequest(
            session_id=session.session_id, model_seq_id=number, path=path, **fields
        )
        if session.client_config_is_missing:
            return await self._as_described(number, request)
        loaded: LoadWeightsResponse = await session.run(protocol.LOAD_WEIGHTS, request)
        return await self._client_of(
            number, loaded.model_id or f"{session.session_id}:train:{number}"
        )

    async def _as_described(self, number: int, request: LoadWeightsRequest) -> TrainingClient:
        """Make a run of a checkpoint's shape, and load the checkpoint into it."""
        session, token = self._session, request.weights_access_token
        # only the token may read a foreign checkpoint
        headers = {"X-API-Key": token} if token else None
        info: WeightsInfoResponse = await session.transport.call(
            protocol.WEIGHTS_INFO, WeightsInfoRequest(tinker_path=request.path), headers=headers
        )
        if not info.is_lora or info.lora_rank is None:
            raise ValueError(f"{request.path} is not a LoRA checkpoint")
        lora = _checked(
            LoraConfig(
                rank=info.lora_rank,
                train_unembed=info.train_unembed is not False,
                train_mlp=info.train_mlp is not False,
                train_attn=info.train_attn is not False,
            )
        )
        chosen = request.optimizer_config or info.optimizer_config
        fields = {
            "base_model": request.base_model or info.base_model,
            "lora_config": lora,
            "user_metadata": request.user_metadata,
            "optimizer_config": chosen or AdamOptimizerConfig(),
        }
        client = await self._create_model(number, fields, first_seq_id=2)
        load = LoadWeightsRequest(
            model_id=client.model_id,
            seq_id=1,
            path=request.path,
            optimizer=request.optimizer,
            weights_access_token=token,
        )
        try:
            await session.run(protocol.LOAD_WEIGHTS, load)
        except BaseException:
            # The run would hold memory. Its unloading is not waited for.
            runtime().task(_forget(session, client.model_id))
            raise
        return client


def _checked(lora: LoraConfig) -> LoraConfig:
    if not (lora.train_mlp or lora.train_attn or lora.train_unembed):
        raise AssertionError("at least one of train_mlp, train_attn and train_unembed must be true")
    return lora


async def _forget(session: Session, model_id: str) -> None:
    """Unload a run, if the server can."""
    with contextlib.suppress(TinkerError):
        request = UnloadModelRequest(model_id=model_id)
        await session.transport.call(protocol.UNLOAD_MODEL, request, timeout=10, patience=5)
