"""The text of streamed samples: never half a character, and all of it in the end."""

from __future__ import annotations

import random
from typing import Any

import pytest

from support import MODEL
from tinkex import ModelInput, SamplingParams, ServiceClient
from tinkex.client.futures.streams import StreamTexts
from tinkex.types.sampling import SampleStreamChunk


class Bytes:
    """A tokenizer whose tokens are single bytes."""

    def decode(self, tokens: list[int], **_: Any) -> str:
        return bytes(tokens).decode(errors="replace")


TEXT = "naïve — 日本語 🦊 done"


def told(text: str | bytes, index: int = 0) -> list[SampleStreamChunk]:
    body = text.encode() if isinstance(text, str) else text
    tokens = [SampleStreamChunk(token_id=byte, index=index) for byte in body]
    return [*tokens, SampleStreamChunk(finish_reason="stop", index=index, event_type="done")]


@pytest.mark.parametrize("order", ["forward", "backward", "shuffled"])
def test_text_of_chunks_is_whole_characters_in_any_order(order: str) -> None:
    texts = StreamTexts(Bytes)
    chunks = [texts.add(chunk) for chunk in told(TEXT)]
    seen = list(enumerate(chunks))
    if order == "backward":
        seen.reverse()
    elif order == "shuffled":
        random.Random(1).shuffle(seen)
    found = {at: chunk.text for at, chunk in seen}
    assert "".join(found[at] for at in range(len(chunks))) == TEXT
    assert not any("\N{REPLACEMENT CHARACTER}" in text for text in found.values())
    assert found[2] == "" and found[3] == "ï"  # noqa: PT018


def test_half_a_character_at_the_end_is_in_the_last_chunk() -> None:
    texts = StreamTexts(Bytes)
    chunks = [texts.add(chunk) for chunk in told("a日".encode()[:-1])]
    assert [chunk.text for chunk in chunks] == ["a", "", "", "\N{REPLACEMENT CHARACTER}"]


def test_samples_of_one_stream_are_kept_apart() -> None:
    texts, mixed = StreamTexts(Bytes), []
    for one, two in zip(told("äöü", 0), told("日本", 1), strict=True):
        mixed += [texts.add(one), texts.add(two)]
    for index, text in enumerate(("äöü", "日本")):
        assert "".join(chunk.text for chunk in mixed if chunk.index == index) == text


def test_tokenizer_is_loaded_once_and_only_when_it_is_needed() -> None:
    loaded: list[int] = []

    def load() -> Bytes:
        loaded.append(1)
        return Bytes()

    texts = StreamTexts(load)
    chunks = [texts.add(chunk) for chunk in told(TEXT)]
    assert loaded == []
    # the text is no part of it
    assert chunks[0] == SampleStreamChunk(token_id=TEXT.encode()[0], index=0)
    assert "".join(chunk.text for chunk in chunks) == TEXT
    assert loaded == [1]
    assert SampleStreamChunk(token="Hel").text == "Hel"


def test_stream_gives_the_text_of_its_tokens(service: ServiceClient) -> None:
    sampler = service.create_sampling_client(base_model=MODEL).result()
    tokenizer = sampler.get_tokenizer()
    params = SamplingParams(max_tokens=40, seed=5, stop=[])  # random weights: bytes of all kinds
    chunks = list(sampler.sample_stream(ModelInput.from_ints([5, 6, 7]), params))
    tokens = [chunk.token_id for chunk in chunks if chunk.token_id is not None]
    assert "".join(chunk.text for chunk in chunks) == tokenizer.decode(
        tokens, skip_special_tokens=True
    )
