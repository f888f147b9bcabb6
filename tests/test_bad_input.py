"""Bad input through our client and the real engine: a clear error, and the next good call as if
nothing had been."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import tinkex
from support import MODEL, Wire, make_data
from tinkex import ServiceClient, TrainingClient, types

STEP = types.AdamParams(learning_rate=0.01)
CONTEXT = 128
VOCAB = 320


@pytest.fixture(scope="module")
def service(server_url: str) -> Iterator[ServiceClient]:
    with ServiceClient(base_url=server_url) as client:
        yield client


@pytest.fixture(scope="module")
def pair(service: ServiceClient) -> tuple[TrainingClient, TrainingClient]:
    """Two equal runs: one is only ever asked good things."""
    clean, tried = (
        service.create_lora_training_client(MODEL, rank=2, seed=3).result() for _ in range(2)
    )
    return clean, tried


def one_step(client: TrainingClient) -> tuple[Any, ...]:
    """A pass and a step: everything that comes back, to the bit."""
    passed = client.forward_backward(make_data(types), "cross_entropy")
    stepped = client.optim_step(STEP).result(60).metrics
    output = passed.result(60)
    logprobs = [tuple(record["logprobs"].data) for record in output.loss_fn_outputs]
    return output.metrics["loss:sum"], tuple(logprobs), tuple((stepped or {}).items())


def spoiled(**inputs: Any) -> list[types.Datum]:
    """Good data, with one input of the second datum replaced."""
    data = make_data(types)
    data[1] = types.Datum(data[1].model_input, {**data[1].loss_fn_inputs, **inputs})
    return data


def with_tokens(tokens: list[int]) -> list[types.Datum]:
    model_input = types.ModelInput.from_ints(tokens)
    targets = {"target_tokens": np.zeros(len(tokens), np.int64)}
    return [*make_data(types)[:1], types.Datum(model_input, targets)]


def with_chunk(chunk: Any) -> list[types.Datum]:
    return [types.Datum(types.ModelInput(chunks=[chunk]), {"target_tokens": [1, 2]})]


LENGTH = make_data(types)[1].model_input.length
NAN, INF = float("nan"), float("inf")
PASSES: dict[str, tuple[Callable[[], list[types.Datum]], str, dict[str, Any], list[str]]] = {
    "short-weights": (
        lambda: spoiled(weights=[1.0, 2.0]),
        "cross_entropy",
        {},
        ["datum 1", "'weights'", "length 2", f"length {LENGTH}"],
    ),
    "long-targets": (
        lambda: spoiled(target_tokens=[1] * (LENGTH + 1)),
        "cross_entropy",
        {},
        ["datum 1", "'target_tokens'", f"length {LENGTH + 1}", f"length {LENGTH}"],
    ),
    "nan-weights": (
        lambda: spoiled(weights=[NAN] + [1.0] * (LENGTH - 1)),
        "cross_entropy",
        {},
        ["datum 1", "'weights'", "NaN"],
    ),
    "infinite-weights": (
        lambda: spoiled(weights=[1.0] * (LENGTH - 1) + [INF]),
        "cross_entropy",
        {},
        ["datum 1", "'weights'", "infinity"],
    ),
    "unknown-setting": (
        lambda: spoiled(),
        "cross_entropy",
        {"temperature": 0.5},
        ["cross_entropy", "'temperature'"],
    ),
    "missing-advantages": (
        lambda: make_data(types),
        "importance_sampling",
        {},
        ["datum 0", "missing"],
    ),
    "missing-targets": (
        lambda: [types.Datum(types.ModelInput.from_ints([1, 2]))],
        "cross_entropy",
        {},
        ["datum 0", "'target_tokens'", "missing"],
    ),
    "unknown-input": (
        lambda: spoiled(wieghts=np.ones(LENGTH, np.float32)),
        "cross_entropy",
        {},
        ["datum 1", "'wieghts'", "weights"],
    ),
    "target-outside-the-vocabulary": (
        lambda: spoiled(target_tokens=[VOCAB] * LENGTH),
        "cross_entropy",
        {},
        ["datum 1", "'target_tokens'", str(VOCAB)],
    ),
    "negative-target": (
        lambda: spoiled(target_tokens=[-1] * LENGTH),
        "cross_entropy",
        {},
        ["datum 1", "-1"],
    ),
    "token-outside-the-vocabulary": (
        lambda: with_tokens([1, VOCAB + 5]),
        "cross_entropy",
        {},
        ["datum 1", "model_input", str(VOCAB + 5)],
    ),
    "beyond-the-window": (
        lambda: with_tokens([1] * (CONTEXT + 1)),
        "cross_entropy",
        {},
        ["datum 1", str(CONTEXT + 1), str(CONTEXT)],
    ),
    "empty-input": (lambda: with_tokens([]), "cross_entropy", {}, ["datum 1", "empty"]),
    "image": (
        lambda: with_chunk(types.ImageChunk(data=b"\x89PNG", format="png", expected_tokens=2)),
        "cross_entropy",
        {},
        ["datum 0", "mage", "not supported"],
    ),
    "audio": (
        lambda: with_chunk(types.DmelChunk(dmel=b"\x00\x02\x02\x50")),
        "cross_entropy",
        {},
        ["datum 0", "udio", "not supported"],
    ),
}


@pytest.mark.parametrize("name", PASSES)
def test_bad_pass_is_explained_and_has_no_effect(
    pair: tuple[TrainingClient, TrainingClient], name: str
) -> None:
    clean, tried = pair
    make, loss_fn, config, words = PASSES[name]
    half = make_data(types, seed=5)
    for client in pair:  # a gradient is pending while the bad call comes
        client.forward_backward(half, "cross_entropy")
    with pytest.raises(tinkex.RequestFailedError) as caught:
        tried.forward_backward(make(), loss_fn, config or None).result(60)
    assert caught.value.category == "user"
    for word in words:
        assert word in str(caught.value)
    assert one_step(tried) == one_step(clean)


@pytest.mark.parametrize(
    ("params", "words"),
    [
        (types.AdamParams(learning_rate=-1.0), "learning_rate"),
        (types.AdamParams(beta1=1.0), "beta1"),
        (types.AdamParams(beta2=-0.1), "beta2"),
        (types.AdamParams(eps=-1.0), "eps"),
        (types.AdamParams(grad_clip_norm=-1.0), "grad_clip_norm"),
        (types.DimuonParams(learning_rate=0.1), "adamw"),
    ],
    ids=lambda value: repr(value)[:60],
)
def test_bad_step_is_explained_and_keeps_the_gradient(
    pair: tuple[TrainingClient, TrainingClient], params: Any, words: str
) -> None:
    clean, tried = pair
    half = make_data(types, seed=6)
    for client in pair:
        client.forward_backward(half, "cross_entropy")
    with pytest.raises(tinkex.RequestFailedError, match=words) as caught:
        tried.optim_step(params).result(60)
    assert caught.value.category == "user"
    assert one_step(tried) == one_step(clean)


def test_bad_checkpoints_have_no_effect(
    pair: tuple[TrainingClient, TrainingClient], service: ServiceClient
) -> None:
    clean, tried = pair
    other = service.create_lora_training_client(MODEL, rank=4).result()
    path = other.save_state("other-rank").result(60).path
    sampler = other.save_weights_for_sampler("a").result(60).path
    for bad, words in (
        (path, "rank"),
        (sampler, "sampler checkpoint"),
        ("tinker://nobody/weights/a", "no checkpoint"),
        ("weights/a", "not a checkpoint path"),
    ):
        with pytest.warns(FutureWarning, match="load_state"):
            loading = tried.load_state_with_optimizer(bad)
        with pytest.raises(tinkex.RequestFailedError, match=words):
            loading.result(60)
    with pytest.raises(tinkex.RequestFailedError, match="not allowed"):
        tried.save_state("../../escape").result(60)
    assert one_step(tried) == one_step(clean)


def test_wrong_model_name_lists_the_known_models(service: ServiceClient) -> None:
    with pytest.raises(tinkex.BadRequestError, match=f"'test/smal'.*{MODEL}"):
        service.create_lora_training_client("test/smal").result()
    with pytest.raises(tinkex.BadRequestError, match=f"'test/smal'.*{MODEL}"):
        service.create_sampling_client(base_model="test/smal").result()


@pytest.mark.parametrize("rank", [0, -1])
def test_rank_must_be_positive(service: ServiceClient, rank: int) -> None:
    with pytest.raises(tinkex.RequestFailedError, match="rank"):
        service.create_lora_training_client(MODEL, rank=rank).result()


PROMPT = types.ModelInput.from_ints([5, 6, 7])
SAMPLES: dict[str, tuple[dict[str, Any], str]] = {
    "beyond-the-window": (
        {"prompt": types.ModelInput.from_ints([1] * (CONTEXT + 1))},
        rf"{CONTEXT + 1}.*{CONTEXT}",
    ),
    "no-room-left": (  # in the words that the cookbook's proxy looks for
        {"sampling_params": types.SamplingParams(max_tokens=CONTEXT)},
        rf"Prompt length plus max_tokens exceeds .* 3 prompt tokens \+ {CONTEXT} max_tokens > "
        rf"{CONTEXT}",
    ),
    "empty-prompt": ({"prompt": types.ModelInput.empty()}, "empty"),
    "unknown-token": ({"prompt": types.ModelInput.from_ints([VOCAB])}, str(VOCAB)),
    "image": (
        {
            "prompt": types.ModelInput(
                chunks=[types.ImageChunk(data=b"x", format="png", expected_tokens=1)]
            )
        },
        "not supported",
    ),
    "image-of-unknown-size": (
        {"prompt": types.ModelInput(chunks=[types.ImageChunk(data=b"x", format="png")])},
        "not supported",
    ),
    "broken-audio": (
        {"prompt": types.ModelInput(chunks=[types.DmelChunk(dmel=b"")])},
        "not supported",
    ),
    "empty-stop": ({"sampling_params": types.SamplingParams(stop=[""], max_tokens=2)}, "stop"),
}


@pytest.mark.parametrize("name", SAMPLES)
def test_bad_sample_is_explained(service: ServiceClient, name: str) -> None:
    changes, words = SAMPLES[name]
    sampler = service.create_sampling_client(base_model=MODEL).result()
    good: dict[str, Any] = {
        "prompt": PROMPT,
        "num_samples": 2,
        "sampling_params": types.SamplingParams(max_tokens=3, seed=1),
    }
    before = sampler.sample(**good).result(60)
    # what does not fit the window is refused at once, as programs expect it; the rest fails when it
    # is looked at
    kind = tinkex.BadRequestError if str(CONTEXT) in words else tinkex.RequestFailedError
    with pytest.raises(kind, match=words) as caught:
        sampler.sample(**good | changes).result(60)
    assert caught.value.category == "user"
    after = sampler.sample(**good).result(60)
    assert [s.tokens for s in after.sequences] == [s.tokens for s in before.sequences]
    assert [s.logprobs for s in after.sequences] == [s.logprobs for s in before.sequences]


def test_malformed_messages_and_unknown_requests_have_no_effect(
    pair: tuple[TrainingClient, TrainingClient], server_url: str
) -> None:
    clean, tried = pair
    wire = Wire(server_url)
    malformed = wire.send(
        "forward_backward", b"\xff\xfe", headers={"Content-Type": "application/x-protobuf"}
    )
    assert malformed.status == 400
    assert "malformed protobuf" in malformed.json["detail"]
    unknown = wire.send("retrieve_future", {"request_id": f"{tried.model_id}:9999"})
    assert unknown.status == 404
    assert "9999" in unknown.json["detail"]
    assert one_step(tried) == one_step(clean)
