"""ServiceClient: where every program starts."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Self, TypeAlias

from tinkex.client.futures.api_future import (
    APIFuture,
    AwaitableConcurrentFuture,
    Future,
    outcome_of,
    start,
)
from tinkex.client.futures.loop_thread import runtime
from tinkex.client.futures.sampling_future import BackcompatSamplingClientFuture, open_later
from tinkex.client.futures.training_future import BackcompatTrainingClientFuture
from tinkex.client.futures.twins import deprecated, value_twin
from tinkex.client.http.limits import BreakerState
from tinkex.client.http.request_names import name_requests
from tinkex.client.http.retry import RetryConfig
from tinkex.client.losses import loss_graphs
from tinkex.client.losses.loss_graphs import LossHandle, PerDatumLossFn
from tinkex.client.session import Session
from tinkex.client.settings.config import Config
from tinkex.client.training_client import TrainingClient, info_of
from tinkex.errors import NotFoundError, TinkerError
from tinkex.types.checkpoints import (
    CONSOLE,
    LoadWeightsRequest,
    LoadWeightsResponse,
    WeightsInfoRequest,
    WeightsInfoResponse,
)
from tinkex.types.custom_losses import CreateCustomLossResponse
from tinkex.types.sessions import ClientSessionFinishReasonType, GetServerCapabilitiesResponse
from tinkex.types.training import (
    AdamOptimizerConfig,
    CreateModelRequest,
    CreateModelResponse,
    LoraConfig,
    OptimizerConfig,
    UnloadModelRequest,
)
from tinkex.wire import protocol

if TYPE_CHECKING:
    from tinkex.client.rest import RestClient
    from tinkex.telemetry import Reporter

Rank: TypeAlias = Literal[0, 1, 2]

logger = logging.getLogger("tinkex")


@name_requests
class ServiceClient:
    """The way in: makes training and sampling clients. Making one costs nothing; its first call
    opens a session.

    Args:
        user_metadata: Kept with the session.
        project_id: The project the session belongs to; TINKER_PROJECT_ID by default.
        display_name: A name for the session.
        base_url: The server; "local" runs one inside this process. TINKER_BASE_URL by default.
        api_key: The key; TINKER_API_KEY by default. None is needed on this machine.
        default_headers_overrides: Extra headers for every request.
        config: All settings at once, in place of the arguments above; see `tinkex.Config.resolve`.

    Example:
        >>> with ServiceClient(base_url="local") as service:
        ...     client = service.create_lora_training_client("tinkex/tiny", rank=16).result()
        ...     tokens = client.encode("12+34=46")
        ...     data = [Datum(ModelInput.from_ints(tokens[:-1]), {"target_tokens": tokens[1:]})]
        ...     client.forward_backward(data, "cross_entropy").result().metrics["loss:sum"]
        10.6...
    """

    def __init__(
        self,
        user_metadata: dict[str, str] | None = None,
        project_id: str | None = None,
        *,
        display_name: str | None = None,
        base_url: str | None = None,
        api_key: str | None = None,
        default_headers_overrides: Mapping[str, str] | None = None,
        config: Config | None = None,
        **unknown: Any,
    ) -> None:
        if unknown:
            names = ", ".join(sorted(unknown))
            warnings.warn(
                f"ServiceClient ignores unknown arguments: {names}", FutureWarning, stacklevel=2
            )
        given = {
            "base_url": base_url,
            "api_key": api_key,
            "project_id": project_id,
            "user_metadata": user_metadata,
            "default_headers": default_headers_overrides,
        }
        if config is not None and any(value is not None for value in given.values()):
            raise ValueError("give a config, or settings one by one, not both")
        self._session = Session(config or Config.resolve(**given), display_name=display_name)

    @classmethod
    def sharing(cls, session: Session) -> Self:
        """Another client of a session that is there already.

        Args:
            session: The session.

        Returns:
            A client that makes others of that session; closing it ends the session for all.

        Example:
            >>> same = ServiceClient.sharing(client.holder)
            >>> same.session_id == service.session_id
            True
        """
        service = cls.__new__(cls)
        service._session = session
        return service

    @property
    def holder(self) -> Session:
        """The session behind this client; what it offers may change in any release."""
        return self._session

    @property
    def session_id(self) -> str:
        """The id of the session; empty until a call has opened it."""
        return self._session.session_id

    def get_telemetry(self) -> Reporter | None:
        """What reports this session's events to the hosted service; None when nothing does.

        Example:
            >>> from tinkex import telemetry
            >>> telemetry.log(
            ...     service.get_telemetry(), "evaluated", {"accuracy": 0.9}
            ... )  # False: nobody is told
            False
        """
        return self._session.telemetry

    # ── training ──────────────────────────────────────────────────────────────────────────────────

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
        """Start a training run of a fresh LoRA adapter.

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
            AssertionError: Nothing is to be adapted.
            BadRequestError: The future's: the server has no such model; the message lists the ones
                there are.

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
        number = next(self._session.model_seq_ids)
        return self._making(self._create_model, number, base_model, lora, user_metadata, optimizer)

    create_lora_training_client_async = value_twin(create_lora_training_client)

    def _making(
        self, make: Callable[..., Coroutine[Any, Any, TrainingClient]], *args: Any
    ) -> BackcompatTrainingClientFuture:
        return BackcompatTrainingClientFuture(self._session.create(make, *args))

    async def _create_model(
        self,
        number: int,
        base_model: str,
        lora: LoraConfig,
        user_metadata: dict[str, str] | None,
        optimizer: OptimizerConfig | None,
        first_seq_id: int = 1,
    ) -> TrainingClient:
        session = self._session
        request = CreateModelRequest(
            session_id=session.session_id,
            model_seq_id=number,
            base_model=base_model,
            lora_config=lora,
            optimizer_config=optimizer or AdamOptimizerConfig(),
            user_metadata=user_metadata,
        )
        created: CreateModelResponse = await session.run(protocol.CREATE_MODEL, request)
        return await self._client_of(number, created.model_id, first_seq_id)

    async def _client_of(self, number: int, model_id: str, first_seq_id: int = 1) -> TrainingClient:
        """The client of a new run, with what the server says that it trains."""
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
        """Start a training run from a checkpoint's weights; the optimizer starts afresh.

        Args:
            path: A `tinker://…/weights/…` path.
            base_model: The name of the model under it; what the checkpoint says by default.
            user_metadata: Kept with the run.
            weights_access_token: The key of the account that may read the checkpoint, when it is
                another one.
            optimizer: Another optimizer than the checkpoint's.

        Returns:
            A future of the client of the new run.

        Raises:
            TinkerError: The future's: there is no such checkpoint, or it is not one of training.

        Example:
            >>> path = client.save_state("step-100").result().path
            >>> service.create_training_client_from_state(path).result()
            TrainingClient('...:train:1')
        """
        number = next(self._session.model_seq_ids)
        return self._making(
            self._from_state,
            number,
            path,
            False,
            base_model,
            user_metadata,
            weights_access_token,
            optimizer,
        )

    create_training_client_from_state_async = value_twin(create_training_client_from_state)

    def create_training_client_from_state_with_optimizer(
        self,
        path: str,
        base_model: str | None = None,
        user_metadata: dict[str, str] | None = None,
        weights_access_token: str | None = None,
    ) -> BackcompatTrainingClientFuture:
        """Start a training run that carries on where a checkpoint left off, optimizer state
        included.

        Args:
            path: A `tinker://…/weights/…` path.
            base_model: The name of the model under it; what the checkpoint says by default.
            user_metadata: Kept with the run.
            weights_access_token: The key of the account that may read the checkpoint, when it is
                another one.

        Returns:
            A future of the client of the new run.

        Raises:
            TinkerError: The future's: there is no such checkpoint, or it holds no optimizer state.

        Example:
            >>> path = client.save_state("step-100").result().path
            >>> service.create_training_client_from_state_with_optimizer(path).result()
            TrainingClient('...:train:1')
        """
        number = next(self._session.model_seq_ids)
        return self._making(
            self._from_state,
            number,
            path,
            True,
            base_model,
            user_metadata,
            weights_access_token,
            None,
        )

    create_training_client_from_state_with_optimizer_async = value_twin(
        create_training_client_from_state_with_optimizer
    )

    async def _from_state(
        self,
        number: int,
        path: str,
        with_optimizer: bool,
        base_model: str | None,
        user_metadata: dict[str, str] | None,
        token: str | None,
        optimizer: OptimizerConfig | None,
    ) -> TrainingClient:
        """Make a run of a checkpoint: in one request, which the oldest servers do not know."""
        session = self._session
        if session.client_config_is_missing:
            return await self._as_described(
                number, path, with_optimizer, base_model, user_metadata, token, optimizer
            )
        request = LoadWeightsRequest(
            session_id=session.session_id,
            model_seq_id=number,
            path=path,
            optimizer=with_optimizer,
            base_model=base_model,
            user_metadata=user_metadata,
            optimizer_config=optimizer,
            weights_access_token=token,
        )
        loaded: LoadWeightsResponse = await session.run(protocol.LOAD_WEIGHTS, request)
        return await self._client_of(
            number, loaded.model_id or f"{session.session_id}:train:{number}"
        )

    async def _as_described(
        self,
        number: int,
        path: str,
        with_optimizer: bool,
        base_model: str | None,
        user_metadata: dict[str, str] | None,
        token: str | None,
        optimizer: OptimizerConfig | None,
    ) -> TrainingClient:
        """Make a run of the shape that a checkpoint has, and load the checkpoint into it."""
        session = self._session
        # a foreign checkpoint is described to its token alone
        headers = {"X-API-Key": token} if token else None
        info: WeightsInfoResponse = await session.transport.call(
            protocol.WEIGHTS_INFO, WeightsInfoRequest(tinker_path=path), headers=headers
        )
        if not info.is_lora or info.lora_rank is None:
            raise ValueError(f"{path} is not a LoRA checkpoint")
        lora = _checked(
            LoraConfig(
                rank=info.lora_rank,
                train_unembed=info.train_unembed is not False,
                train_mlp=info.train_mlp is not False,
                train_attn=info.train_attn is not False,
            )
        )
        chosen = optimizer or info.optimizer_config
        client = await self._create_model(
            number, base_model or info.base_model, lora, user_metadata, chosen, 2
        )
        request = LoadWeightsRequest(
            model_id=client.model_id,
            seq_id=1,
            path=path,
            optimizer=with_optimizer,
            weights_access_token=token,
        )
        try:
            await session.run(protocol.LOAD_WEIGHTS, request)
        except BaseException:
            # A run that is not what was asked for would hold memory. Nobody waits for it to be let
            # go.
            runtime().task(_forget(session, client.model_id))
            raise
        return client

    def create_custom_loss(
        self, fn: PerDatumLossFn, input_ranks: Mapping[str, Rank]
    ) -> Future[LossHandle]:
        """Make a loss that `forward_backward_custom` can use without a second pass, on servers that
        run such losses.

        Args:
            fn: Takes the log-probabilities of one datum and further inputs of it, by name; returns
                its loss and metrics named `custom/…:sum` or `custom/…:mean`. It is traced, not
                called with real data.
            input_ranks: For each parameter, how many axes it has: 0, 1 (one value a token) or 2.

        Returns:
            A future of the handle; it fails if the same loss was made before in this session.

        Raises:
            ValueError: The function cannot be traced, or uses what such losses may not.
            ImportError: torch is not installed.

        Example:
            >>> def weighted(logprobs, weights):
            ...     return -(logprobs * weights).sum(), {"custom/tokens:sum": weights.sum()}
            >>> handle = service.create_custom_loss(
            ...     weighted, {"logprobs": 1, "weights": 1}
            ... ).result()
            >>> client.forward_backward_custom(data, handle).result().metrics["custom/tokens:sum"]
            8.0
        """
        handle = loss_graphs.trace(fn, input_ranks, "")

        async def creating() -> LossHandle:
            session = self._session
            named = replace(handle, session_id=session.session_id)
            if named.key in session.custom_losses:
                raise ValueError(
                    f"the loss {named.name!r} was made before in this session: use its handle again"
                )
            session.custom_losses.add(named.key)
            if not session.client_config.custom_loss_server_side:
                return named
            request = loss_graphs.create_request(named, next(session.custom_loss_seq_ids))
            try:
                created: CreateCustomLossResponse = await session.run(
                    protocol.CREATE_CUSTOM_LOSS, request
                )
            except BaseException:
                session.custom_losses.discard(named.key)  # it was not made, and may be tried again
                raise
            return replace(named, loss_id=created.loss_id)

        return self._session.start(creating())

    # ── sampling ──────────────────────────────────────────────────────────────────────────────────

    def create_sampling_client(
        self,
        model_path: str | None = None,
        base_model: str | None = None,
        retry_config: RetryConfig | None = None,
        record_stability_info: bool = False,
    ) -> BackcompatSamplingClientFuture:
        """A sampler of a saved checkpoint or of a base model.

        Args:
            model_path: A `tinker://…/sampler_weights/…` path.
            base_model: The name of a base model.
            retry_config: How samples that fail for a passing reason are treated.
            record_stability_info: Ask the server to keep what `stable_reinforce` needs.

        Returns:
            A future of the sampler.

        Raises:
            ValueError: Neither was given; or, of the future, the path is not a `tinker://` path.
            BadRequestError: The future's: the server has no such model; the message lists the ones
                there are.

        Example:
            >>> sampler = service.create_sampling_client(base_model="tinkex/tiny").result()
            >>> sampler.sample(
            ...     prompt, num_samples=4, sampling_params=SamplingParams(max_tokens=8)
            ... ).result()
            SampleResponse([SampledSequence(...), ...])
        """
        if model_path is None and base_model is None:
            raise ValueError("give model_path or base_model")
        return open_later(
            self._session,
            model_path=model_path,
            base_model=base_model,
            retry_config=retry_config,
            record_stability_info=record_stability_info,
        )

    create_sampling_client_async = value_twin(create_sampling_client)

    @deprecated(
        "make a tinkex.RestClient(), which takes the same base_url and api_key and needs no "
        "ServiceClient"
    )
    def create_rest_client(self) -> RestClient:
        """Deprecated: use `RestClient`, made directly; this one uses the service client's
        connections.
        """
        from tinkex.client.rest import RestClient

        return RestClient(self._session)

    # ── the service ───────────────────────────────────────────────────────────────────────────────

    async def _capabilities(self) -> GetServerCapabilitiesResponse:
        answer: GetServerCapabilitiesResponse = await self._session.transport.call(
            protocol.GET_SERVER_CAPABILITIES
        )
        return answer

    @deprecated("call RestClient().get_server_capabilities()")
    def get_server_capabilities(self) -> GetServerCapabilitiesResponse:
        """Which models the server offers. Deprecated: use `RestClient.get_server_capabilities`.

        Example:
            >>> [model.model_name for model in service.get_server_capabilities().supported_models]
            ['tinkex/tiny']
        """
        return self._session.start(self._capabilities()).result()

    @deprecated("await RestClient().get_server_capabilities()")
    async def get_server_capabilities_async(self) -> GetServerCapabilitiesResponse:
        """Like `get_server_capabilities`. Deprecated: use `RestClient.get_server_capabilities`."""
        return await self._session.start(self._capabilities())

    def copy_weights(
        self, path: str, *, ttl_seconds: int | None = None, weights_access_token: str | None = None
    ) -> APIFuture[str]:
        """Copy a checkpoint into this client's project, on servers that offer it; the future gives
        the copy's path.

        Args:
            path: The checkpoint; the server judges the path.
            ttl_seconds: Seconds after which the copy expires; never by default.
            weights_access_token: The key of the account that may read the checkpoint, when it is
                another one.

        Returns:
            A future of the copy's path.

        Raises:
            ValueError: This client has no project.

        Example:
            >>> with ServiceClient(base_url="local", project_id="my-project") as service:
            ...     service.copy_weights(path, ttl_seconds=3600).result()
            'tinker://.../weights/step-100'
        """
        from tinkex.client.rest import RestClient

        return RestClient(self._session).copy_weights(
            path,
            self._session.config.project_id,
            ttl_seconds=ttl_seconds,
            weights_access_token=weights_access_token,
        )

    def get_console_url(self) -> str:
        """The session's page in the hosted service's console; all sessions' before there is one.

        Example:
            >>> service.get_console_url()
            'https://.../sessions'
        """
        session_id = self._session.session_id
        return f"{CONSOLE}/sessions/{session_id}" if session_id else f"{CONSOLE}/sessions"

    def circuit_breakers(self) -> dict[str, BreakerState]:
        """The state of each endpoint's circuit breaker, when `circuit_breaker` is configured.

        Example:
            >>> config = Config.resolve(base_url="local", circuit_breaker=True)
            >>> with ServiceClient(config=config) as service:
            ...     sampler = service.create_sampling_client(base_model="tinkex/tiny").result()
            ...     service.circuit_breakers()["POST create_sampling_session"]
            'closed'
        """
        return self._session.transport.breakers.states() if self._session.transport.breakers else {}

    def close(
        self, status: ClientSessionFinishReasonType = "success", detail: str | None = None
    ) -> AwaitableConcurrentFuture[None]:
        """Finish the session; a second call does nothing.

        Args:
            status: How the session ended: "success", "errored" or "interrupted".
            detail: What is to be said of that.

        Returns:
            A future that is done when the server knows; with "success", once all calls made before
            have been carried out.

        Example:
            >>> service = ServiceClient(base_url="local")
            >>> service.close("errored", "the data ran out").result()
        """
        return AwaitableConcurrentFuture(start(self._session.finish(status, detail)))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        status: ClientSessionFinishReasonType = "success"
        if kind is not None:
            status = "errored" if issubclass(kind, Exception) else "interrupted"
        # A `with` block inside an event loop blocks that loop here, as its author expects.
        closing = self.close(status, repr(error) if error is not None else None)
        if status == "success":
            outcome_of(closing)
            return
        try:
            outcome_of(closing, timeout=10)
        except TimeoutError:  # the error that ended the block matters more
            logger.warning("the session could not be finished within 10 s")

    def __reduce__(self) -> NoReturn:
        raise TypeError("a ServiceClient cannot be pickled: make one in the other process")

    def __repr__(self) -> str:
        return f"ServiceClient(base_url={self._session.config.base_url!r})"


def _checked(lora: LoraConfig) -> LoraConfig:
    if not (lora.train_mlp or lora.train_attn or lora.train_unembed):
        raise AssertionError("at least one of train_mlp, train_attn and train_unembed must be true")
    return lora


async def _forget(session: Session, model_id: str) -> None:
    """Have the server let go of a run, where it can."""
    with contextlib.suppress(TinkerError):
        request = UnloadModelRequest(model_id=model_id)
        await session.transport.call(protocol.UNLOAD_MODEL, request, timeout=10, patience=5)
