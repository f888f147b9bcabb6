"""TrainingClient: passes, optimizer steps and checkpoints of one training run."""

from __future__ import annotations

import asyncio
import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, Unpack
from urllib.parse import quote

from tinkex.client.checkpoint_arguments import checked_choice, checked_ttl
from tinkex.client.futures.api_future import Future, unlisted, users_level
from tinkex.client.futures.result_polling import Receipt
from tinkex.client.futures.twins import deprecated, twin, value_twin
from tinkex.client.http.retry import RetryConfig
from tinkex.client.outbox import Fetch, Outbox
from tinkex.client.sampling_client import (
    BackcompatSamplingClientFuture,
    SamplingClient,
    open_later,
    open_sampler,
)
from tinkex.client.session_client import SessionClient, made_of
from tinkex.client.training_parts.call_arguments import CallOptions
from tinkex.client.training_parts.training_passes import TrainingPasses, info_of
from tinkex.errors import APIResponseValidationError
from tinkex.tokenizers import LoadFunction, get_or_load_tokenizer, tokenizer_id_of
from tinkex.types.checkpoints import CONSOLE
from tinkex.types.saves import (
    LoadWeightsRequest,
    LoadWeightsResponse,
    SamplingClientKind,
    SaveWeightsExternalRequest,
    SaveWeightsExternalResponse,
    SaveWeightsForSamplerRequest,
    SaveWeightsForSamplerResponse,
    SaveWeightsForSamplerResponseInternal,
    SaveWeightsRequest,
    SaveWeightsResponse,
)
from tinkex.types.sessions import GetInfoResponse
from tinkex.wire import protocol

FROM_STATE = "ServiceClient.create_training_client_from_state() makes a new run of a checkpoint"
FROM_STATE_WITH_OPTIMIZER = (
    "ServiceClient.create_training_client_from_state_with_optimizer() makes a new run of a "
    "checkpoint"
)


@made_of(SessionClient, TrainingPasses)
class TrainingClient(TrainingPasses):
    """One training run.

    Calls return at once. The server executes them in the order they were made.

    In the examples `client` is one; `help(tinkex)` shows how the others, such as `data`, are made.

    Example:
        >>> client = service.create_lora_training_client("tinkex/tiny", rank=16).result()
        >>> tokens = client.encode("12+34=46")
        >>> data = [Datum(ModelInput.from_ints(tokens[:-1]), {"target_tokens": tokens[1:]})]
        >>> passed = client.forward_backward(data, "cross_entropy")
        >>> stepped = client.optim_step(AdamParams(learning_rate=1e-3))
        >>> passed.result().metrics["loss:sum"], stepped.result().metrics["learning_rate:mean"]
        (10.6..., 0.001)
    """

    async def _info(self) -> GetInfoResponse:
        """Return the description of this run; ask the server once if it is not known."""
        async with self._asking:
            if self._known_info is None:
                self._known_info = await info_of(self._session, self.model_id)
            return self._known_info

    def get_info(self) -> GetInfoResponse:
        """Return the model and the adapter that this run trains; this sends no request.

        Example:
            >>> client.get_info().model_data.model_name
            'tinkex/tiny'
        """
        if self._known_info is None:
            return self._session.call(self._info).result()
        return self._known_info

    @deprecated("call TrainingClient.get_info(), which makes no request")
    async def get_info_async(self) -> GetInfoResponse:
        """Deprecated: use `get_info`, which makes no request."""
        if self._known_info is None:
            return await self._session.call(self._info)
        return self._known_info

    def get_tokenizer(
        self,
        *,
        backend: str | None = None,
        info_fun: Callable[[TrainingClient], Any] | None = None,
        load_fun: LoadFunction | None = None,
    ) -> Any:
        """Return the tokenizer of the base model.

        See `tinkex.tokenizers.get_or_load_tokenizer`.

        Args:
            backend: "transformers" or "tokenizers"; the first that is installed by default.
            info_fun: Returns the description of this run, in place of `get_info`.
            load_fun: Loads the tokenizer, in place of the libraries.

        Returns:
            transformers' tokenizer where that is installed, else a `tinkex.tokenizers.Tokenizer`
            with the same methods.

        Raises:
            ConfigurationError: The tokenizer is not on this machine and cannot be downloaded.

        Example:
            >>> tokenizer = client.get_tokenizer()
            >>> tokenizer.decode(tokenizer.encode("12+34=", add_special_tokens=False))
            '12+34='
        """
        info = self.get_info() if info_fun is None else info_fun(self)
        return get_or_load_tokenizer(tokenizer_id_of(info), backend=backend, load_fun=load_fun)

    def encode(self, text: str, **options: Any) -> list[int]:
        """Return the tokens of a text.

        Args:
            text: The text.
            options: Options of the tokenizer, e.g. `add_special_tokens`.

        Returns:
            The token ids.

        Example:
            >>> client.encode("12+34=")
            [0, 23, 24, 17, 25, 26, 35]
        """
        tokens: list[int] = self._tokenizer().encode(text, **options)
        return tokens

    def decode(self, tokens: Sequence[int], **options: Any) -> str:
        """Return the text of tokens.

        Args:
            tokens: The token ids.
            options: Options of the tokenizer, e.g. `skip_special_tokens`.

        Returns:
            The text.

        Example:
            >>> client.decode(client.encode("12+34="), skip_special_tokens=True)
            '12+34='
        """
        text: str = self._tokenizer().decode(tokens, **options)
        return text

    def _tokenizer(self) -> Any:
        if self._loaded_tokenizer is None:
            self._loaded_tokenizer = self.get_tokenizer()
        return self._loaded_tokenizer

    def get_console_url(self) -> str:
        """Return the address of this run's page in the hosted service's console.

        Example:
            >>> client.get_console_url()
            'https://.../training_runs/...'
        """
        return f"{CONSOLE}/training_runs/{quote(self.model_id, safe='')}"

    @unlisted
    async def get_tokenizer_async(
        self, *, backend: str | None = None, load_fun: LoadFunction | None = None
    ) -> Any:
        """Like `get_tokenizer`."""
        return await asyncio.to_thread(self.get_tokenizer, backend=backend, load_fun=load_fun)

    def save_state(
        self,
        name: str,
        ttl_seconds: int | None = None,
        overwrite: bool = False,
        user_metadata: dict[str, str] | None = None,
        **options: Unpack[CallOptions],
    ) -> Future[SaveWeightsResponse]:
        """Save weights and optimizer state under a name, to resume from.

        Args:
            name: Unique among this run's training checkpoints.
            ttl_seconds: Seconds after which the checkpoint expires; None keeps it.
            overwrite: Replace a checkpoint of that name.
            user_metadata: Kept beside the checkpoint.
            options: How to wait for the result; see `CallOptions`.

        Returns:
            A future of the answer; its `path` is what
            `ServiceClient.create_training_client_from_state` takes.

        Raises:
            ValueError: `ttl_seconds` is not a positive whole number.

        Example:
            >>> client.save_state("step-100", ttl_seconds=86400).result().path
            'tinker://.../weights/step-100'
        """
        request = SaveWeightsRequest(
            model_id=self.model_id,
            path=name,
            ttl_seconds=checked_ttl(ttl_seconds),
            overwrite=overwrite,
            user_metadata=user_metadata,
        )
        return self._put(protocol.SAVE_WEIGHTS, request, options)

    save_state_async = twin(save_state)

    def save_weights_for_sampler(
        self,
        name: str,
        ttl_seconds: int | None = None,
        user_metadata: dict[str, str] | None = None,
        **options: Unpack[CallOptions],
    ) -> Future[SaveWeightsForSamplerResponse]:
        """Save weights under a name, to sample from.

        Args:
            name: Unique among this run's sampler checkpoints.
            ttl_seconds: Seconds after which the checkpoint expires; None keeps it.
            user_metadata: Kept beside the checkpoint.
            options: How to wait for the result; see `CallOptions`.

        Returns:
            A future of the answer; its `path` is what `create_sampling_client` takes.

        Raises:
            ValueError: `ttl_seconds` is not a positive whole number.

        Example:
            >>> path = client.save_weights_for_sampler("final").result().path
            >>> path
            'tinker://.../sampler_weights/final'
            >>> sampler = service.create_sampling_client(model_path=path).result()
        """
        request = SaveWeightsForSamplerRequest(
            model_id=self.model_id,
            path=name,
            ttl_seconds=checked_ttl(ttl_seconds),
            user_metadata=user_metadata,
        )
        return self._put(
            protocol.SAVE_WEIGHTS_FOR_SAMPLER,
            request,
            options,
            lambda saved: SaveWeightsForSamplerResponse(
                path=self._path_of("save_weights_for_sampler", saved)
            ),
        )

    save_weights_for_sampler_async = twin(save_weights_for_sampler)

    def save_weights_external(
        self,
        name: str,
        ttl_seconds: int | None = None,
        age_encryption_recipients: list[str] | None = None,
        **options: Unpack[CallOptions],
    ) -> Future[SaveWeightsExternalResponse]:
        """Export weights as files that can be downloaded, on servers that offer it.

        Args:
            name: Unique among this run's exports.
            ttl_seconds: Seconds after which the export expires; None keeps it.
            age_encryption_recipients: Public keys to encrypt the files for.
            options: How to wait for the result; see `CallOptions`.

        Returns:
            A future of the answer; its `path` is what `tinkex.download` takes.

        Raises:
            ValueError: `ttl_seconds` is not a positive whole number.

        Example:
            >>> client.save_weights_external("final").result().path
            'tinker://.../external_weights/final'
        """
        request = SaveWeightsExternalRequest(
            model_id=self.model_id,
            path=name,
            ttl_seconds=checked_ttl(ttl_seconds),
            age_encryption_recipients=age_encryption_recipients,
        )
        return self._put(
            protocol.SAVE_WEIGHTS_EXTERNAL,
            request,
            options,
            lambda saved: SaveWeightsExternalResponse(
                path=self._path_of("save_weights_external", saved), type=saved.type
            ),
        )

    save_weights_external_async = twin(save_weights_external)

    def _path_of(self, operation: str, saved: Any) -> str:
        if not saved.path:
            raise APIResponseValidationError(
                f"{operation} at {self._session.transport.place}: the answer has no path"
            )
        return str(saved.path)

    def save_weights_and_get_sampling_client(
        self,
        name: str | None = None,
        retry_config: RetryConfig | None = None,
        record_stability_info: bool = False,
        kind: SamplingClientKind = "snapshot",
    ) -> BackcompatSamplingClientFuture:
        """Open a sampler of the weights as they are after the calls made so far.

        The sampler lives as long as the session.

        Args:
            name: Deprecated; it has no effect.
            retry_config: How samples are retried.
            record_stability_info: Ask the server to keep what `stable_reinforce` needs.
            kind: "snapshot" stays on these weights. "inflight" moves on to the weights of later
                saves of this kind.

        Returns:
            A future of the sampler. It fails with ValueError if there is no such kind.

        Example:
            >>> sampler = client.save_weights_and_get_sampling_client().result()
            >>> sampler.sample(prompt, 1, SamplingParams(max_tokens=8)).result()
            SampleResponse([SampledSequence(...)])
        """
        if name is not None:
            warnings.warn(
                "save_weights_and_get_sampling_client makes a nameless sampler, name has no "
                "effect: save_weights_for_sampler(name) saves under a name",
                DeprecationWarning,
                stacklevel=users_level(),
            )
        # The number is taken once: a request that is sent again must be the same request.
        request = SaveWeightsForSamplerRequest(
            model_id=self.model_id,
            sampling_session_seq_id=next(self._session.sampling_session_seq_ids),
            kind=kind,
        )

        async def turn(outbox: Outbox, place: int) -> Fetch[SamplingClient]:
            checked_choice("kind", kind, SamplingClientKind)
            receipt = await outbox.send(protocol.SAVE_WEIGHTS_FOR_SAMPLER, request)
            return functools.partial(fetch, receipt)

        async def fetch(receipt: Receipt) -> SamplingClient:
            saved: SaveWeightsForSamplerResponseInternal = await self._result(receipt, {})
            if saved.sampling_session_id is None and saved.path is None:
                raise APIResponseValidationError(
                    f"save_weights_for_sampler at {self._session.transport.place}: "
                    "the answer names neither a sampling session nor a path"
                )
            return await open_sampler(
                self._session,
                SamplingClient,
                model_path=saved.path,
                sampling_session_id=saved.sampling_session_id,
                known_model=self._base_model,
                retry_config=retry_config,
                record_stability_info=record_stability_info,
            )

        return BackcompatSamplingClientFuture(
            self._outbox.put(protocol.SAVE_WEIGHTS_FOR_SAMPLER.name, turn)
        )

    save_weights_and_get_sampling_client_async = value_twin(save_weights_and_get_sampling_client)

    def create_sampling_client(
        self,
        model_path: str,
        retry_config: RetryConfig | None = None,
        record_stability_info: bool = False,
    ) -> BackcompatSamplingClientFuture:
        """Open a sampler of a saved checkpoint.

        Args:
            model_path: A `tinker://…/sampler_weights/…` path.
            retry_config: How samples are retried.
            record_stability_info: Ask the server to keep what `stable_reinforce` needs.

        Returns:
            A future of the sampler.

        Example:
            >>> path = client.save_weights_for_sampler("final").result().path
            >>> client.create_sampling_client(path).result()
            SamplingClient('...:sample:0')
        """
        return open_later(
            self._session,
            model_path=model_path,
            retry_config=retry_config,
            record_stability_info=record_stability_info,
        )

    create_sampling_client_async = value_twin(create_sampling_client)

    @deprecated(FROM_STATE)
    def load_state(
        self, path: str, weights_access_token: str | None = None, **options: Unpack[CallOptions]
    ) -> Future[LoadWeightsResponse]:
        """Replace the weights of this run by those of a checkpoint.

        The optimizer starts from zero.

        Deprecated: `ServiceClient.create_training_client_from_state` makes a new run of a
        checkpoint, which works on every server.

        Args:
            path: A `tinker://…/weights/…` path.
            weights_access_token: The key of the account that may read the checkpoint, if it is
                another account.
            options: How to wait for the result; see `CallOptions`.

        Returns:
            A future of the answer; its `path` is the checkpoint's.

        Example:
            >>> path = client.save_state("step-100").result().path
            >>> client.load_state(path).result().path
            'tinker://.../weights/step-100'
        """
        return self._load(path, False, weights_access_token, options)

    @deprecated(FROM_STATE_WITH_OPTIMIZER)
    def load_state_with_optimizer(
        self, path: str, weights_access_token: str | None = None, **options: Unpack[CallOptions]
    ) -> Future[LoadWeightsResponse]:
        """Like `load_state`, with the optimizer state of the checkpoint as well.

        Deprecated: `ServiceClient.create_training_client_from_state_with_optimizer` makes a new run
        of a checkpoint, which works on every server.

        Example:
            >>> path = client.save_state("step-100").result().path
            >>> client.load_state_with_optimizer(path).result().path
            'tinker://.../weights/step-100'
        """
        return self._load(path, True, weights_access_token, options)

    load_state_async = twin(load_state, FROM_STATE)
    load_state_with_optimizer_async = twin(load_state_with_optimizer, FROM_STATE_WITH_OPTIMIZER)

    def _load(
        self, path: str, optimizer: bool, token: str | None, options: CallOptions
    ) -> Future[LoadWeightsResponse]:
        request = LoadWeightsRequest(
            model_id=self.model_id, path=path, optimizer=optimizer, weights_access_token=token
        )
        return self._put(protocol.LOAD_WEIGHTS, request, options)

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a TrainingClient cannot be pickled: save its state, and resume that in the other "
            "process"
        )

    def __repr__(self) -> str:
        return f"TrainingClient({self.model_id!r})"
