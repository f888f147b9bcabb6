"""SampledModel: the base model and the tokenizer of a SamplingClient."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from tinkex.client.futures.api_future import unlisted
from tinkex.client.futures.twins import deprecated
from tinkex.client.sampling_parts.sample_calls import SampleCalls
from tinkex.client.session import Session
from tinkex.tokenizers import LoadFunction, get_or_load_tokenizer, get_tokenizer_id
from tinkex.types.sampling import GetSamplerResponse
from tinkex.wire import protocol


class SampledModel(SampleCalls):
    """The model that is sampled."""

    async def _model(self) -> str:
        """Return the name of the base model; ask the server once if it is not known."""
        async with self._asking:
            if self._base_model is None:
                self._base_model = await base_model_of(self._session, self.sampling_session_id)
            return self._base_model

    def get_base_model(self) -> str:
        """Return the name of the base model of this sampler; this sends no request.

        Example:
            >>> sampler.get_base_model()
            'tinkex/tiny'
        """
        if self._base_model is None:
            return self._session.call(self._model).result()
        return self._base_model

    @deprecated("call SamplingClient.get_base_model(), which makes no request")
    async def get_base_model_async(self) -> str:
        """Deprecated: use `get_base_model`, which makes no request."""
        if self._base_model is None:
            return await self._session.call(self._model)
        return self._base_model

    def get_tokenizer(
        self,
        *,
        backend: str | None = None,
        sampler_fun: Callable[[Any], Any] | None = None,
        load_fun: LoadFunction | None = None,
    ) -> Any:
        """Return the tokenizer of the base model.

        See `tinkex.tokenizers.get_or_load_tokenizer`.

        Args:
            backend: "transformers" or "tokenizers"; the first that is installed by default.
            sampler_fun: Returns an object with `base_model`, in place of the server.
            load_fun: Loads the tokenizer, in place of the libraries.

        Returns:
            transformers' tokenizer where that is installed, else a `tinkex.tokenizers.Tokenizer`.

        Example:
            >>> tokenizer = sampler.get_tokenizer()
            >>> tokenizer.decode(tokenizer.encode("12+34=", add_special_tokens=False))
            '12+34='
        """
        base_model = self.get_base_model() if sampler_fun is None else sampler_fun(self).base_model
        return get_or_load_tokenizer(
            get_tokenizer_id(base_model), backend=backend, load_fun=load_fun
        )

    @unlisted
    async def get_tokenizer_async(
        self, *, backend: str | None = None, load_fun: LoadFunction | None = None
    ) -> Any:
        """Like `get_tokenizer`."""
        tokenizer_id = get_tokenizer_id(await self._session.call(self._model))
        return await asyncio.to_thread(
            get_or_load_tokenizer, tokenizer_id, backend=backend, load_fun=load_fun
        )


async def base_model_of(session: Session, sampling_session_id: str) -> str:
    """Ask the server for the base model of a sampling session."""
    path = {"sampler_id": sampling_session_id}
    sampler: GetSamplerResponse = await session.transport.call(protocol.GET_SAMPLER, path=path)
    return sampler.base_model
