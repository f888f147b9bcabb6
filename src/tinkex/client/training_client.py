"""TrainingClient: passes, optimizer steps and checkpoints of one training run."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn
from urllib.parse import quote

from tinkex.client.futures.api_future import Future, unlisted
from tinkex.client.futures.result_polling import retrieve
from tinkex.client.futures.twins import deprecated
from tinkex.client.outbox import Fetch, Outbox, Poison
from tinkex.client.session_client import SessionClient, made_of
from tinkex.client.training_parts.training_passes import TrainingPasses
from tinkex.client.training_parts.training_saves import TrainingSaves
from tinkex.tokenizers import LoadFunction, get_or_load_tokenizer, tokenizer_id_of
from tinkex.types.checkpoints import CONSOLE
from tinkex.types.model_requests import (
    GetInfoRequest,
    GetInfoResponse,
    UnloadModelRequest,
    UnloadModelResponse,
)
from tinkex.wire import protocol

if TYPE_CHECKING:
    from tinkex.client.session import Session


@made_of(SessionClient, TrainingPasses, TrainingSaves)
class TrainingClient(TrainingSaves):
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

    def unload_model(self) -> UnloadModelResponse:
        """Let the server forget the live state of this run, on servers that offer it.

        The run's checkpoints stay.

        Example:
            >>> client.unload_model()
            UnloadModelResponse(model_id='...:train:0', ...)
        """
        return self._unloading().result()

    @unlisted
    async def unload_model_async(self) -> UnloadModelResponse:
        """Like `unload_model`."""
        return await self._unloading()

    def _unloading(self) -> Future[UnloadModelResponse]:
        async def turn(outbox: Outbox, place: int) -> Fetch[UnloadModelResponse]:
            request = UnloadModelRequest(model_id=outbox.model_id)
            receipt = await self._session.submit(protocol.UNLOAD_MODEL, request)
            return functools.partial(retrieve, self._session.transport, receipt)

        return self._outbox.put(protocol.UNLOAD_MODEL.name, turn, Poison.ALWAYS)

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

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a TrainingClient cannot be pickled: save its state, and resume that in the other "
            "process"
        )

    def __repr__(self) -> str:
        return f"TrainingClient({self.model_id!r})"


async def info_of(session: Session, model_id: str) -> GetInfoResponse:
    """Ask the server for the description of a run."""
    info: GetInfoResponse = await session.transport.call(
        protocol.GET_INFO, GetInfoRequest(model_id=model_id)
    )
    return info
