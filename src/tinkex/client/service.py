"""ServiceClient: the start of every program."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Self, TypeAlias

from tinkex.client.futures.api_future import (
    APIFuture,
    AwaitableConcurrentFuture,
    Future,
    outcome_of,
    start,
)
from tinkex.client.futures.twins import deprecated, value_twin
from tinkex.client.http.limits import BreakerState
from tinkex.client.http.retry import RetryConfig
from tinkex.client.losses import loss_graphs
from tinkex.client.losses.loss_graphs import LossHandle, PerDatumLossFn
from tinkex.client.sampling_client import BackcompatSamplingClientFuture, open_later
from tinkex.client.service_parts.training_starts import TrainingStarts
from tinkex.client.session import Session
from tinkex.client.session_client import SessionClient, made_of
from tinkex.client.settings.config import Config
from tinkex.types.checkpoints import CONSOLE
from tinkex.types.server_facts import GetServerCapabilitiesResponse
from tinkex.types.sessions import ClientSessionFinishReasonType, CreateCustomLossResponse
from tinkex.wire import protocol

if TYPE_CHECKING:
    from tinkex.client.rest import RestClient

Rank: TypeAlias = Literal[0, 1, 2]

logger = logging.getLogger("tinkex")


@made_of(SessionClient, TrainingStarts)
class ServiceClient(TrainingStarts):
    """Makes training and sampling clients; the first call of a program is to one.

    Making a ServiceClient sends nothing. Its first call opens a session.

    Args:
        user_metadata: Kept with the session.
        project_id: The project of the session; TINKER_PROJECT_ID by default.
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
        """Make another client of an existing session.

        Args:
            session: The session.

        Returns:
            A client that makes others of that session. Closing it ends the session for all.

        Example:
            >>> same = ServiceClient.sharing(client.holder)
            >>> same.session_id == service.session_id
            True
        """
        service = cls.__new__(cls)
        service._session = session
        return service

    @property
    def session_id(self) -> str:
        """The id of the session; empty until a call has opened it."""
        return self._session.session_id

    def create_custom_loss(
        self, fn: PerDatumLossFn, input_ranks: Mapping[str, Rank]
    ) -> Future[LossHandle]:
        """Make a loss that `forward_backward_custom` can use without a second pass.

        The server must run such losses; otherwise the client makes the second pass.

        Args:
            fn: Takes the log-probabilities of one datum and further inputs of it, by name; returns
                its loss and metrics named `custom/…:sum` or `custom/…:mean`. It is traced, not
                called with real data.
            input_ranks: The number of axes of each parameter: 0, 1 (one value a token) or 2.

        Returns:
            A future of the handle. It fails if the same loss was made before in this session.

        Raises:
            ValueError: The function cannot be traced, or uses an operation that is not supported.
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

        return self._session.call(creating)

    def create_sampling_client(
        self,
        model_path: str | None = None,
        base_model: str | None = None,
        retry_config: RetryConfig | None = None,
        record_stability_info: bool = False,
    ) -> BackcompatSamplingClientFuture:
        """Open a sampler of a saved checkpoint or of a base model.

        Args:
            model_path: A `tinker://…/sampler_weights/…` path.
            base_model: The name of a base model.
            retry_config: How samples are retried.
            record_stability_info: Ask the server to keep what `stable_reinforce` needs.

        Returns:
            A future of the sampler.

        Raises:
            ValueError: Neither was given. Raised by the future when the path is not a `tinker://`
                path.
            BadRequestError: Raised by the future when the server has no such model; the message
                lists its models.

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
        """Deprecated: use `RestClient`; this one shares the service client's connections."""
        from tinkex.client.rest import RestClient

        return RestClient(self._session)

    def _capabilities(self) -> Future[GetServerCapabilitiesResponse]:
        return self._session.call(self._session.transport.call, protocol.GET_SERVER_CAPABILITIES)

    @deprecated("call RestClient().get_server_capabilities()")
    def get_server_capabilities(self) -> GetServerCapabilitiesResponse:
        """Return the models that the server offers.

        Deprecated: use `RestClient.get_server_capabilities`.

        Example:
            >>> [model.model_name for model in service.get_server_capabilities().supported_models]
            ['tinkex/tiny']
        """
        return self._capabilities().result()

    @deprecated("await RestClient().get_server_capabilities()")
    async def get_server_capabilities_async(self) -> GetServerCapabilitiesResponse:
        """Like `get_server_capabilities`."""
        return await self._capabilities()

    def copy_weights(
        self, path: str, *, ttl_seconds: int | None = None, weights_access_token: str | None = None
    ) -> APIFuture[str]:
        """Copy a checkpoint into this client's project, on servers that offer it.

        Args:
            path: The checkpoint; the server checks the path.
            ttl_seconds: Seconds after which the copy expires; never by default.
            weights_access_token: The key of the account that may read the checkpoint, if it is
                another account.

        Returns:
            A future of the path of the copy.

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
        """Return the address of the session's page in the hosted service's console.

        Before there is a session it is the address of the list of sessions.

        Example:
            >>> service.get_console_url()
            'https://.../sessions'
        """
        session_id = self._session.session_id
        return f"{CONSOLE}/sessions/{session_id}" if session_id else f"{CONSOLE}/sessions"

    def circuit_breakers(self) -> dict[str, BreakerState]:
        """Return the state of each endpoint's circuit breaker, if they are configured.

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
            detail: Any further text about the end.

        Returns:
            A future that is done when the server has noted it; with "success", after all earlier
            calls have ended.

        Example:
            >>> service = ServiceClient(base_url="local")
            >>> service.close("errored", "the data ran out").result()
        """
        return AwaitableConcurrentFuture(start(self._session.finish(status, detail)))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, *_: object
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
