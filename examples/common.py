"""Helpers of all examples: settings from the environment, printing, and `proof`.

Without settings the examples run on the backend inside this process (`base_url="local"`) with its
bundled model and no key. These variables choose another server:

    TINKER_BASE_URL    a server, such as http://127.0.0.1:8000; with a key alone, the hosted service
    TINKER_API_KEY     its key; none is needed on this machine
    TINKER_BASE_MODEL  the model; by default the example's own, else the first that the server has
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from tinkex import (
    AdamParams,
    Datum,
    HttpClient,
    ModelInput,
    RestClient,
    SampledSequence,
    ServiceClient,
    TinkerError,
    TrainingClient,
    tokenizers,
    types,
)
from tinkex.client.settings.config import mask_api_key

LLAMA = "meta-llama/Llama-3.1-8B"
ASSETS = Path(__file__).parent / "assets"
CHECKPOINT_CACHE = Path(tempfile.gettempdir()) / "tinkex_checkpoints" / "default.path"
"""Where one example leaves the path of a checkpoint for another."""
DAY = 86_400

# ── settings ──────────────────────────────────────────────────────────────────────────────────────


def text(name: str, default: str = "") -> str:
    """A setting as text; blank counts as unset."""
    return os.environ.get(name, "").strip() or default


def whole(name: str, default: int, least: int = 1) -> int:
    """A setting as a whole number; one that is none, or too small, counts as unset."""
    try:
        value = int(text(name))
    except ValueError:
        return default
    return value if value >= least else default


def number(name: str, default: float) -> float:
    """A setting as a number, 0 or more; anything else counts as unset."""
    try:
        value = float(text(name))
    except ValueError:
        return default
    return value if 0 <= value < float("inf") else default


def flag(name: str) -> bool:
    """Whether a setting says yes."""
    return text(name).lower() in {"1", "true", "yes", "on"}


API_KEY = text("TINKER_API_KEY")
BASE_URL = text("TINKER_BASE_URL") or (None if API_KEY else "local")
"""What every client is given: an address, "local", or None, by which it finds the hosted service.
"""
IS_LOCAL = BASE_URL == "local"


def offered_models() -> list[str]:
    """Return the names of the models that the server offers."""
    with RestClient(base_url=BASE_URL) as rest:
        return [name for name in rest.get_server_capabilities().result().model_names() if name]


def base_model(wanted: str = LLAMA) -> str:
    """The model to use: the one in TINKER_BASE_MODEL, else the wanted one, else the first that the
    server offers.
    """
    if named := text("TINKER_BASE_MODEL"):
        return named
    offered = offered_models()
    if not offered:
        fail("the server offers no models; name one in TINKER_BASE_MODEL")
    return wanted if wanted in offered else offered[0]


def connection_options() -> list[str]:
    """What the command line is told so that it goes where the other clients go."""
    address = ["--base-url", BASE_URL] if BASE_URL else []
    return address + (["--api-key", API_KEY] if API_KEY else [])


def masked(words: list[str]) -> list[str]:
    """Words of a command that can be shown: of the key only its ends."""
    return [mask_api_key(word) or "" if API_KEY and word == API_KEY else word for word in words]


# ── printing ──────────────────────────────────────────────────────────────────────────────────────

_began = time.monotonic()


def step(said: str) -> None:
    """Print a line with the seconds since the start."""
    print(f"[step {time.monotonic() - _began:5.1f} s] {said}")


def section(title: str) -> None:
    """Print a heading."""
    print(f"\n== {title} ==")


def proof(condition: object, said: str) -> None:
    """Say that something holds; if it does not, end the program with status 1."""
    if not condition:
        fail(f"this does not hold: {said}")
    print(f"[proof] {said}")


def fail(said: str) -> NoReturn:
    """End the program with a message and status 1."""
    sys.stdout.flush()
    sys.exit(f"[failed] {said}")


def skipped(reason: str) -> None:
    """Say that something is not shown here, and why; the runner counts these lines."""
    print(f"[skipped] {reason}")


def run(main: Callable[[], object]) -> None:
    """Run an example; an error of tinkex ends it with its message and status 1 instead of a
    traceback.
    """
    try:
        main()
    except TinkerError as error:
        fail(error.format() if error.hint is None else f"{error.format()}\nhint: {error.hint}")


# ── what several examples do ──────────────────────────────────────────────────────────────────────


def tokenizer_of(model: str) -> tokenizers.Tokenizer:
    """The model's tokenizer, by the library that is quick to import; `client.get_tokenizer()` is
    the usual way.
    """
    loaded: tokenizers.Tokenizer = tokenizers.get_or_load_tokenizer(
        tokenizers.get_tokenizer_id(model), backend="tokenizers"
    )
    return loaded


def next_token_datum(tokens: list[int]) -> Datum:
    """An example to learn from: at every position the next token is the target, and all weigh the
    same.
    """
    targets = tokens[1:]
    return Datum(
        model_input=ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": targets, "weights": [1.0] * len(targets)},
    )


def show_samples(sequences: list[SampledSequence], tokenizer: tokenizers.Tokenizer) -> list[str]:
    """Print samples as text, and return the texts."""
    texts = [tokenizer.decode(sequence.tokens, skip_special_tokens=True) for sequence in sequences]
    for index, (sequence, said) in enumerate(zip(sequences, texts, strict=True), 1):
        print(
            f"Sample {index}: {said.strip()!r} ({len(sequence.tokens)} tokens, "
            f"{sequence.stop_reason})"
        )
    return texts


def trained_a_little(service: ServiceClient, model: str, rank: int = 8) -> TrainingClient:
    """A new run that has made one step, for examples that need something to save."""
    client = service.create_lora_training_client(model, rank=rank).result()
    data = [
        next_token_datum(tokenizer_of(model).encode("The quick brown fox jumps over the lazy dog."))
    ]
    client.forward_backward(data, "cross_entropy")
    client.optim_step(AdamParams(learning_rate=1e-3)).result()
    return client


class TelemetryPost:
    """Posts batches of telemetry to the server, and remembers the kinds of events that went out."""

    def __init__(self, http: HttpClient) -> None:
        self._http = http
        self.sent: list[str] = []

    async def __call__(self, batch: types.TelemetrySendRequest) -> types.TelemetryResponse:
        """Post one batch; an error is the reporter's to deal with."""
        answer = await self._http.post("telemetry", batch)
        self.sent += [event["event"] for event in batch.events]
        return types.TelemetryResponse.model_validate(answer)
