"""SampleStreams: the methods of SamplingClient that stream tokens."""

from __future__ import annotations

import logging

from tinkex.client.futures.result_polling import failure_of
from tinkex.client.futures.stream_text import StreamTexts
from tinkex.client.futures.streams import SampleStream, chunks_of
from tinkex.client.futures.twins import twin
from tinkex.client.http.retry import persist
from tinkex.client.sampling_parts.sample_calls import Notice, SampleCalls
from tinkex.errors import (
    APIConnectionError,
    APIResponseValidationError,
    APIStatusError,
    TinkerError,
)
from tinkex.types.inputs import ModelInput
from tinkex.types.sampling import SampleRequest, SampleStreamChunk, SamplingParams
from tinkex.wire import protocol, sse

logger = logging.getLogger("tinkex")

NO_STREAMS = frozenset({404, 405, 501})
"""Status codes of servers that cannot stream."""


class SampleStreams(SampleCalls):
    """Streams of samples."""

    def sample_stream(
        self,
        prompt: ModelInput,
        sampling_params: SamplingParams,
        num_samples: int = 1,
        *,
        timeout: float | None = None,
    ) -> SampleStream:
        """Draw samples, and return each token when it is drawn.

        Args:
            prompt: The text to continue, as tokens.
            sampling_params: Temperature, stop and the other settings.
            num_samples: The number of samples; the `index` of a chunk tells its sample.
            timeout: Seconds of silence after which the stream fails; the configured timeout by
                default.

        Returns:
            A stream to iterate over with `for` or `async for`. Servers that cannot stream return
            all tokens at the end.

        Example:
            >>> for chunk in sampler.sample_stream(
            ...     prompt, SamplingParams(max_tokens=2, temperature=0)
            ... ):
            ...     print(chunk.text, end="", flush=True)
            46
        """
        request = self._request(prompt, num_samples, sampling_params)
        stream: SampleStream = SampleStream()
        stream.begin(self._session.call(self._stream, stream, request, timeout))
        return stream

    sample_stream_async = twin(sample_stream, is_ours=True)

    async def _stream(
        self, stream: SampleStream, request: SampleRequest, timeout: float | None
    ) -> None:
        if self._streams:
            size = request.prompt.estimated_bytes
            numbered = request.model_copy(update={"seq_id": await self._number()})

            async def read() -> None:
                await self._session.gate.backoff.wait()
                await self._read_stream(stream, numbered, timeout)

            try:
                await persist(read, self._repeating(size, Notice(self, None)))
                return
            except APIStatusError as error:
                if error.status_code not in NO_STREAMS or "sampling session" in str(error.body):
                    raise
            self._streams = False
            logger.info(
                "%s does not stream: the tokens of a sample come all at once",
                self._session.transport.place,
            )
        texts = self._texts()
        for chunk in chunks_of(await self._sample(request, timeout)):
            stream.put(texts.add(chunk))

    def _texts(self) -> StreamTexts:
        return StreamTexts(self.get_tokenizer)

    async def _read_stream(
        self, stream: SampleStream, request: SampleRequest, timeout: float | None
    ) -> None:
        transport, op = self._session.transport, protocol.STREAM_SAMPLE
        open_samples, texts = request.num_samples, self._texts()
        try:
            async with transport.stream(op, request, timeout=timeout) as reply:
                async for event in sse.events(reply.chunks):
                    told = event.json()
                    if not isinstance(told, dict):
                        continue  # the closing event, or an unknown one
                    if event.event == "error" or told.get("error") is not None:
                        raise failure_of(transport, op, told, request.sampling_session_id or "")
                    chunk = SampleStreamChunk.from_map(told)
                    open_samples -= chunk.is_done
                    stream.put(texts.add(chunk))
        except APIConnectionError:
            if open_samples > 0:
                raise  # else only the closing event is missing
        except (OverflowError, ValueError) as error:
            if isinstance(error, TinkerError):
                raise
            raise APIResponseValidationError(
                f"{op.title} at {transport.place}: an event is malformed: {error}"
            ) from error
        if open_samples > 0:
            raise APIConnectionError(
                f"{op.title} at {transport.place}: the stream ended before {open_samples} of its "
                "samples did"
            )
