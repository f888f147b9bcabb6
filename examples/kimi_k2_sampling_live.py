"""The tokenizer of Kimi K2, which comes as a file for tiktoken: text to tokens and back, then a
sample.

Run it:  python examples/kimi_k2_sampling_live.py      (needs `pip install tiktoken`) Settings:
TINKER_PROMPT ("Say hi"), TINKER_MAX_TOKENS (32), TINKER_TEMPERATURE (0.7), TINKER_NUM_SAMPLES (1),
TINKER_SAMPLE_TIMEOUT (60000 ms); where to go: see common.py.

On a server without Kimi K2 there is nothing to show, and the example stops with status 0. The
backend inside this process has no Kimi either, but needs no network: there a small file of the same
form, made here, stands in for Kimi's, and the samples come from the bundled model.
"""

import base64
import json
import tempfile
from pathlib import Path
from typing import Any

import common

from tinkex import ModelInput, SamplingParams, ServiceClient, TinkerError, tokenizers

KIMI = "moonshotai/Kimi-K2-Thinking"
PROMPT = common.text("TINKER_PROMPT", "Say hi")


def advertised(model: str) -> bool:
    """Whether the server offers a model; one that cannot say is given a try."""
    try:
        return model in common.offered_models()
    except TinkerError as error:
        print(f"the server does not say what it offers ({error.format()}): trying anyway")
        return True


def stand_in_files(directory: Path) -> dict[str, str]:
    """Write a tiktoken file like Kimi's, but smaller: single bytes and a few merged pairs."""
    pieces = [bytes([byte]) for byte in range(256)] + [b"Sa", b"Say", b" h", b" hi"]
    ranks = directory / "tiktoken.model"
    ranks.write_text(
        "".join(f"{base64.b64encode(piece).decode()} {rank}\n" for rank, piece in enumerate(pieces))
    )
    config = directory / "tokenizer_config.json"
    config.write_text(
        json.dumps({"added_tokens_decoder": {str(len(pieces)): {"content": "[BOS]"}}})
    )
    return {"tiktoken_model_path": str(ranks), "tokenizer_config_path": str(config)}


def round_trip(**files: Any) -> list[int]:
    """Encode and decode the prompt by Kimi's tokenizer; without files of ours its own are fetched
    and kept.

    Nothing is returned when the tokenizer cannot be had.
    """
    try:
        ids = tokenizers.encode(PROMPT, KIMI, **files)
    except TinkerError as error:
        common.skipped(f"the tokenizer of {KIMI} cannot be had: {error.message}")
        return []
    decoded = tokenizers.decode(ids, KIMI, **files)
    print(f"prompt:     {PROMPT!r}\nids:        {ids}\nround trip: {decoded!r}")
    common.proof(decoded == PROMPT, "decoding gives the prompt back")
    return ids


def main() -> None:
    """Show the round trip, then sample."""
    with ServiceClient(base_url=common.BASE_URL) as service:
        model = common.text("TINKER_BASE_MODEL")
        if not tokenizers.kimi_tokenizer(tokenizers.get_tokenizer_id(model)):
            model = KIMI  # whatever else may be set: this is about Kimi
        if advertised(model):
            print(f"model: {model}")
            ids = round_trip()
        elif common.IS_LOCAL:
            model = common.base_model()
            print(f"model: {model}, with a small stand-in for Kimi's tokenizer")
            with tempfile.TemporaryDirectory() as directory:
                ids = round_trip(**stand_in_files(Path(directory))) and common.tokenizer_of(
                    model
                ).encode(PROMPT)
        else:
            common.skipped(f"{model} is not among the models of this server")
            return
        if not ids:
            return

        params = SamplingParams(
            max_tokens=common.whole("TINKER_MAX_TOKENS", 32),
            temperature=common.number("TINKER_TEMPERATURE", 0.7),
        )
        sampler = service.create_sampling_client(base_model=model).result()
        count, timeout = (
            common.whole("TINKER_NUM_SAMPLES", 1),
            common.whole("TINKER_SAMPLE_TIMEOUT", 60_000) / 1000,
        )
        response = sampler.sample(
            ModelInput.from_ints(ids), count, params, timeout=timeout
        ).result()
        for index, sequence in enumerate(response.sequences, 1):
            print(
                f"Sample {index}: "
                f"{tokenizers.decode(sequence.tokens, model, backend='tokenizers')!r}"
            )
    common.proof(response.sequences, f"{len(response.sequences)} sample(s) came back")


if __name__ == "__main__":
    common.run(main)
