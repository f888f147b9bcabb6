"""Training platforms: what every one of them does, and that ours and peft's take the same steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from support import MODEL, make_data
from tinkex import LocalBackend, ServiceClient, types
from tinkex.adapters import (
    MemoryPlatform,
    PeftPlatform,
    SessionConfig,
    TinkexPlatform,
    TrainingPlatform,
)
from tinkex.errors import TinkerError
from tinkex.types import AdamParams, Datum, LoraConfig, ModelInput, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Iterator

STEP = AdamParams(learning_rate=0.01)
LORA = LoraConfig(rank=4, seed=7)
FRESH = SessionConfig(base_model=MODEL, lora=LORA)
DATA: list[Datum] = make_data(types)
GREEDY = SamplingParams(max_tokens=5, temperature=0, stop=[])


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("platform")


@pytest.fixture(scope="module")
def ours(model_dir: Path, data_dir: Path) -> Iterator[TinkexPlatform]:
    with (
        LocalBackend({MODEL: model_dir}, data_dir=data_dir) as backend,
        ServiceClient(base_url=backend.base_url) as service,
    ):
        yield TinkexPlatform(service)


@pytest.fixture(scope="module")
def theirs(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> PeftPlatform:
    return PeftPlatform(tmp_path_factory.mktemp("peft"), {MODEL: model_dir})


@pytest.fixture(params=["ours", "theirs", "memory"])
def platform(request: pytest.FixtureRequest) -> TrainingPlatform[Any]:
    """Each of them."""
    if request.param == "memory":
        return MemoryPlatform(vocab_size=320)
    found: TrainingPlatform[Any] = request.getfixturevalue(request.param)
    return found


def loss_of(platform: TrainingPlatform[Any], session: Any, data: list[Datum] = DATA) -> float:
    return platform.forward_backward(session, data, "cross_entropy").metrics["loss:sum"]


def train(
    platform: TrainingPlatform[Any], session: Any, steps: int, params: AdamParams = STEP
) -> list[float]:
    losses = []
    for _ in range(steps):
        losses.append(loss_of(platform, session))
        platform.optim_step(session, params)
    return losses


def logprobs_of(platform: TrainingPlatform[Any], session: Any) -> list[Any]:
    """The log-probabilities of the targets, without leaving a gradient behind."""
    weightless = [
        policy(datum, np.zeros(datum.model_input.length), 1.0, loss="weights") for datum in DATA
    ]
    output = platform.forward_backward(session, weightless, "cross_entropy")
    platform.optim_step(session, AdamParams(learning_rate=1e-30))
    return [record["logprobs"].to_numpy() for record in output.loss_fn_outputs]


def policy(datum: Datum, logprobs: Any, advantage: float, loss: str = "advantages") -> Datum:
    """The same targets, for a policy loss; or with weights of zero."""
    length = datum.model_input.length
    inputs: dict[str, Any] = {"target_tokens": datum.loss_fn_inputs["target_tokens"]}
    if loss == "weights":
        return Datum(datum.model_input, {**inputs, "weights": np.zeros(length, np.float32)})
    advantages = np.full(length, advantage, np.float32)
    return Datum(
        datum.model_input, {**inputs, "logprobs": np.float32(logprobs), "advantages": advantages}
    )


# ── every platform ────────────────────────────────────────────────────────────────────────────────


@pytest.mark.covers("4.1/5")
def test_loop_trains(platform: TrainingPlatform[Any]) -> None:
    assert isinstance(platform, TrainingPlatform)
    session = platform.create_session(FRESH)
    output = platform.forward_backward(session, DATA, "cross_entropy")
    assert [record["logprobs"].shape for record in output.loss_fn_outputs] == [[5], [11], [3]]
    total = -sum(float(record["logprobs"].to_numpy().sum()) for record in output.loss_fn_outputs)
    assert output.metrics["loss:sum"] == pytest.approx(total, rel=1e-5)
    assert output.metrics["tokens:sum"] == 19
    stepped = platform.optim_step(session, STEP)
    assert stepped.metrics is not None
    assert stepped.metrics["grad_norm:mean"] > 0
    assert stepped.metrics["learning_rate:mean"] == 0.01
    losses = train(platform, session, 4)
    assert [total, *losses] == sorted([total, *losses], reverse=True)


def test_same_calls_give_the_same_losses(platform: TrainingPlatform[Any]) -> None:
    first, second = (train(platform, platform.create_session(FRESH), 3) for _ in range(2))
    assert first == second


def test_gradients_of_passes_add_up_until_a_step(platform: TrainingPlatform[Any]) -> None:
    whole, parts = (platform.create_session(FRESH) for _ in range(2))
    loss_of(platform, whole)
    for datum in DATA:
        loss_of(platform, parts, [datum])
    norms = [platform.optim_step(session, STEP).metrics for session in (whole, parts)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)
    assert loss_of(platform, whole) == pytest.approx(loss_of(platform, parts), rel=1e-4)


def test_step_without_a_gradient_has_no_effect(platform: TrainingPlatform[Any]) -> None:
    session, other = (platform.create_session(FRESH) for _ in range(2))
    for each in (session, other):
        train(platform, each, 2)
    stepped = platform.optim_step(session, STEP)
    assert stepped.metrics is not None
    assert stepped.metrics["grad_norm:mean"] == 0
    assert train(platform, session, 2) == train(platform, other, 2)


def test_clipping_and_decay_are_those_of_the_step(platform: TrainingPlatform[Any]) -> None:
    plain, clipped, decayed = (platform.create_session(FRESH) for _ in range(3))
    changes = {"clipped": {"grad_clip_norm": 1e-6, "eps": 1.0}, "decayed": {"weight_decay": 50.0}}
    before = loss_of(platform, plain)
    for session in (clipped, decayed):
        loss_of(platform, session)
    platform.optim_step(plain, STEP)
    platform.optim_step(clipped, STEP.model_copy(update=changes["clipped"]))
    platform.optim_step(decayed, STEP.model_copy(update=changes["decayed"]))
    after = loss_of(platform, plain)
    assert after < before - 0.1
    assert loss_of(platform, clipped) == pytest.approx(before, rel=1e-4)
    platform.optim_step(decayed, STEP)  # decay shows on what was learnt
    assert loss_of(platform, decayed) != pytest.approx(after)


@pytest.mark.parametrize("loss_fn", ["importance_sampling", "ppo"])
@pytest.mark.parametrize("advantage", [1.0, -0.5])
def test_policies_follow_their_advantages(
    platform: TrainingPlatform[Any], loss_fn: str, advantage: float
) -> None:
    session = platform.create_session(FRESH)
    before = logprobs_of(platform, session)
    data = [
        policy(datum, logprobs, advantage) for datum, logprobs in zip(DATA, before, strict=True)
    ]
    output = platform.forward_backward(session, data, loss_fn)
    # every ratio is 1
    assert output.metrics["loss:sum"] == pytest.approx(-19 * advantage, rel=1e-4)
    platform.optim_step(session, STEP)
    change = sum((a - b).sum() for a, b in zip(logprobs_of(platform, session), before, strict=True))
    assert change * advantage > 0.01


def test_ratio_beyond_its_bound_has_no_gradient(platform: TrainingPlatform[Any]) -> None:
    session = platform.create_session(FRESH)
    found = logprobs_of(platform, session)
    data = [policy(datum, logprobs - 0.5, 1.0) for datum, logprobs in zip(DATA, found, strict=True)]
    ratio = float(np.exp(0.5))
    free = platform.forward_backward(session, data, "importance_sampling").metrics["loss:sum"]
    assert free == pytest.approx(-19 * ratio, rel=1e-4)
    pulled = platform.optim_step(session, AdamParams(learning_rate=1e-30)).metrics
    clipped = platform.forward_backward(session, data, "ppo").metrics["loss:sum"]
    assert clipped == pytest.approx(-19 * 1.2, rel=1e-4)
    still = platform.optim_step(session, AdamParams(learning_rate=1e-30)).metrics
    assert pulled is not None
    assert still is not None
    assert pulled["grad_norm:mean"] > 0.1
    assert still["grad_norm:mean"] == 0
    wide = platform.forward_backward(session, data, "ppo", {"clip_high_threshold": 3.0}).metrics[
        "loss:sum"
    ]
    assert wide == pytest.approx(free, rel=1e-5)
    worse = [
        policy(datum, logprobs - 0.5, -1.0) for datum, logprobs in zip(DATA, found, strict=True)
    ]
    assert platform.forward_backward(session, worse, "ppo").metrics["loss:sum"] == pytest.approx(
        19 * ratio, rel=1e-4
    )


@pytest.mark.covers("4.1/5")
def test_session_can_start_from_checkpoint_of_another(platform: TrainingPlatform[Any]) -> None:
    session = platform.create_session(FRESH)
    fresh = train(platform, session, 3)[0]
    path = platform.save_checkpoint(session, "kept")
    saved = loss_of(platform, session)
    train(platform, session, 2)
    again = platform.create_session(SessionConfig(base_model=MODEL, checkpoint=path))
    assert loss_of(platform, again) == pytest.approx(saved, rel=1e-6)
    assert saved < fresh
    with pytest.raises((ValueError, TinkerError)):
        platform.save_checkpoint(session, "kept")
    with pytest.raises((ValueError, TinkerError, OSError)):
        platform.create_session(
            SessionConfig(base_model=MODEL, checkpoint="tinker://nothing:train:0/weights/here")
        )


def test_samples_are_of_the_weights_as_they_are(platform: TrainingPlatform[Any]) -> None:
    session = platform.create_session(FRESH)
    taught = [10, 20, 30, 40, 50, 60]
    datum = Datum(ModelInput.from_ints(taught[:-1]), {"target_tokens": taught[1:]})
    prompt = ModelInput.from_ints(taught[:1])
    untaught = platform.sample(session, prompt, 1, GREEDY).sequences[0].tokens
    for _ in range(600):
        if loss_of(platform, session, [datum]) < 1:
            break
        platform.optim_step(session, STEP)
    [sequence] = platform.sample(session, prompt, 1, GREEDY).sequences
    assert sequence.tokens == taught[1:] != untaught
    output = platform.forward_backward(session, [datum], "cross_entropy")
    np.testing.assert_allclose(
        sequence.logprobs or [], output.loss_fn_outputs[0]["logprobs"].to_numpy(), atol=1e-4
    )
    stopped = platform.sample(
        session, prompt, 1, SamplingParams(max_tokens=5, temperature=0, stop=[40])
    ).sequences[0]
    assert (stopped.tokens, stopped.stop_reason, sequence.stop_reason) == (
        [20, 30, 40],
        "stop",
        "length",
    )


def test_samples_of_a_seed_are_always_the_same(platform: TrainingPlatform[Any]) -> None:
    session = platform.create_session(FRESH)
    prompt = ModelInput.from_ints([5, 6, 7])
    params = SamplingParams(max_tokens=6, seed=3, stop=[])
    drawn = [platform.sample(session, prompt, 4, params) for _ in range(2)]
    tokens, again = ([sequence.tokens for sequence in found.sequences] for found in drawn)
    assert tokens == again
    assert len({tuple(found) for found in tokens}) == 4
    assert all(len(found) == 6 for found in tokens)
    assert all(
        logprob < 0 for sequence in drawn[0].sequences for logprob in sequence.logprobs or []
    )
    best = platform.sample(session, prompt, 1, GREEDY).sequences[0].tokens
    narrow = SamplingParams(max_tokens=5, top_k=1, stop=[])
    assert platform.sample(session, prompt, 1, narrow).sequences[0].tokens == best
    tight = SamplingParams(max_tokens=5, top_p=1e-6, stop=[])
    assert platform.sample(session, prompt, 1, tight).sequences[0].tokens == best


@pytest.mark.parametrize("loss_fn", ["surprise", ""])
def test_unknown_loss_is_refused(platform: TrainingPlatform[Any], loss_fn: str) -> None:
    session = platform.create_session(FRESH)
    with pytest.raises(ValueError, match="there is no loss"):
        platform.forward_backward(session, DATA, loss_fn)
    with pytest.raises(ValueError, match="data is empty"):
        platform.forward_backward(session, [], "cross_entropy")


TOKENS = ModelInput.from_ints([5, 6])


@pytest.mark.parametrize(
    ("datum", "loss_fn"),
    [
        (Datum(TOKENS, {"weights": [1.0, 1.0]}), "cross_entropy"),
        (Datum(TOKENS, {"target_tokens": [5]}), "cross_entropy"),
        (Datum(TOKENS, {"target_tokens": [5, 999]}), "cross_entropy"),
        (Datum(TOKENS, {"target_tokens": [5, 6], "weights": [1.0]}), "cross_entropy"),
        (Datum(TOKENS, {"target_tokens": [5, 6], "weights": [1.0, float("nan")]}), "cross_entropy"),
        (Datum(TOKENS, {"target_tokens": [5, 6], "logprobs": [-1.0, -1.0]}), "ppo"),
        (Datum(ModelInput.from_ints([5] * 200), {"target_tokens": [5] * 200}), "cross_entropy"),
    ],
    ids=[
        "no-targets",
        "few-targets",
        "vocabulary",
        "few-weights",
        "not-a-number",
        "no-advantages",
        "too-long",
    ],
)
def test_data_at_fault_are_refused_and_leave_no_gradient(
    platform: TrainingPlatform[Any], datum: Datum, loss_fn: str
) -> None:
    session = platform.create_session(FRESH)
    with pytest.raises((ValueError, TinkerError)):
        platform.forward_backward(session, [DATA[0], datum], loss_fn)
    stepped = platform.optim_step(session, STEP)
    assert stepped.metrics is not None
    assert stepped.metrics["grad_norm:mean"] == 0


def test_setting_that_a_loss_has_not_is_refused(platform: TrainingPlatform[Any]) -> None:
    session = platform.create_session(FRESH)
    with pytest.raises((ValueError, TinkerError), match="surprise"):
        platform.forward_backward(session, DATA, "cross_entropy", {"surprise": 1.0})


# ── what a session is made of ─────────────────────────────────────────────────────────────────────


def test_session_has_a_shape_or_a_checkpoint() -> None:
    with pytest.raises(ValueError, match="not both"):
        SessionConfig(base_model=MODEL, lora=LORA, checkpoint="x")
    assert SessionConfig(base_model=MODEL).shape == LoraConfig(rank=32)
    assert FRESH.shape == LORA


@pytest.mark.covers("4.1/5")
def test_types_of_all_platforms_fit_the_protocol(
    ours: TinkexPlatform, theirs: PeftPlatform
) -> None:
    kept: list[TrainingPlatform[Any]] = [ours, theirs, MemoryPlatform()]
    assert all(isinstance(platform, TrainingPlatform) for platform in kept)
    assert not isinstance(object(), TrainingPlatform)


def test_memory_keeps_models_apart() -> None:
    platform = MemoryPlatform(vocab_size=320)
    session = platform.create_session(FRESH)
    path = platform.save_checkpoint(session, "a")
    with pytest.raises(ValueError, match="is of 'test/small', not of 'other'"):
        platform.create_session(SessionConfig(base_model="other", checkpoint=path))
    other = platform.create_session(SessionConfig(base_model="other"))
    assert loss_of(platform, other) != loss_of(platform, session)


@pytest.mark.parametrize("loss_fn", ["cross_entropy", "importance_sampling", "ppo"])
def test_memorys_gradients_are_true(loss_fn: str) -> None:
    platform = MemoryPlatform(vocab_size=6)
    session = platform.create_session(FRESH)
    inputs = {"target_tokens": [2, 3, 2], "weights": [1.0, -0.5, 2.0]}
    if loss_fn != "cross_entropy":
        inputs = {
            "target_tokens": [2, 3, 2],
            "logprobs": [-1.5, -2.5, -9.0],
            "advantages": [1.0, -0.5, 2.0],
        }
    data = [Datum(ModelInput.from_ints([1, 2, 1]), inputs)]

    def loss() -> float:
        return platform.forward_backward(session, data, loss_fn).metrics["loss:sum"]

    loss()
    assert session.grad is not None
    found, session.grad = session.grad, None
    assert np.abs(found).max() > 0.1
    for place in np.ndindex(*found.shape):
        sides = []
        for step in (1e-5, -1e-5):
            session.weights[place] += step
            sides.append(loss())
            session.weights[place] -= step
        assert found[place] == pytest.approx((sides[0] - sides[1]) / 2e-5, abs=1e-5, rel=1e-5)


@pytest.mark.parametrize("flag", ["train_attn", "train_mlp", "train_unembed"])
def test_peft_has_our_shape(
    theirs: PeftPlatform, ours: TinkexPlatform, data_dir: Path, flag: str
) -> None:
    flags = dict.fromkeys(("train_attn", "train_mlp", "train_unembed"), False) | {flag: True}
    config = SessionConfig(base_model=MODEL, lora=LoraConfig(rank=3, seed=1, **flags))
    saved = [
        _directory(data_dir, ours.save_checkpoint(ours.create_session(config), "shape")),
        Path(theirs.save_checkpoint(theirs.create_session(config), f"shape-{flag}")),
    ]
    from safetensors.numpy import load_file

    shapes = [
        {n: t.shape for n, t in load_file(path / "adapter_model.safetensors").items()}
        for path in saved
    ]
    assert shapes[0] == shapes[1]
    settings = [json.loads((path / "adapter_config.json").read_text()) for path in saved]
    for name in ("r", "lora_alpha", "base_model_name_or_path"):
        assert settings[0][name] == settings[1][name]


@pytest.mark.parametrize("name", ["", "../escape", "a/b"])
def test_peft_takes_plain_names_only(theirs: PeftPlatform, name: str) -> None:
    with pytest.raises(ValueError, match="plain one"):
        theirs.save_checkpoint(theirs.create_session(FRESH), name)


# ── ours and theirs ───────────────────────────────────────────────────────────────────────────────


def _directory(data_dir: Path, path: str) -> Path:
    """Return the directory of a checkpoint on our server."""
    _, _, run, kind, name = path.split("/")
    return data_dir / "checkpoints" / run.replace(":", "_") / kind / name


def test_fresh_adapters_compute_the_same_before_the_first_step(
    ours: TinkexPlatform, theirs: PeftPlatform
) -> None:
    outputs = [
        ours.forward_backward(ours.create_session(FRESH), DATA, "cross_entropy"),
        theirs.forward_backward(theirs.create_session(FRESH), DATA, "cross_entropy"),
    ]
    assert outputs[0].metrics["loss:sum"] == pytest.approx(outputs[1].metrics["loss:sum"], rel=1e-5)
    for mine, other in zip(outputs[0].loss_fn_outputs, outputs[1].loss_fn_outputs, strict=True):
        np.testing.assert_allclose(
            mine["logprobs"].to_numpy(), other["logprobs"].to_numpy(), atol=1e-4
        )


@pytest.mark.parametrize("loss_fn", ["cross_entropy", "importance_sampling", "ppo"])
def test_same_factors_take_the_same_steps(
    ours: TinkexPlatform, theirs: PeftPlatform, data_dir: Path, loss_fn: str
) -> None:
    path = ours.save_checkpoint(ours.create_session(FRESH), "start")
    mine = ours.create_session(SessionConfig(base_model=MODEL, checkpoint=path))
    other = theirs.create_session(
        SessionConfig(base_model=MODEL, checkpoint=str(_directory(data_dir, path)))
    )
    data = DATA
    if loss_fn != "cross_entropy":
        logprobs = logprobs_of(theirs, theirs.create_session(FRESH))
        data = [
            policy(datum, found + 0.1 * (-1) ** index, (-1.0) ** index)
            for index, (datum, found) in enumerate(zip(DATA, logprobs, strict=True))
        ]
    params = AdamParams(learning_rate=2e-3, weight_decay=0.1, grad_clip_norm=5.0)
    for step in range(4):
        outputs = [
            ours.forward_backward(mine, data, loss_fn).metrics["loss:sum"],
            theirs.forward_backward(other, data, loss_fn).metrics["loss:sum"],
        ]
        assert outputs[0] == pytest.approx(outputs[1], rel=1e-4, abs=1e-4), step
        norms = [ours.optim_step(mine, params).metrics, theirs.optim_step(other, params).metrics]
        assert norms[0] == pytest.approx(norms[1], rel=1e-3), step
    assert outputs[0] < -0.1 or loss_fn == "cross_entropy"
    tokens = [
        ours.sample(mine, ModelInput.from_ints([5, 6, 7]), 1, GREEDY).sequences[0].tokens,
        theirs.sample(other, ModelInput.from_ints([5, 6, 7]), 1, GREEDY).sequences[0].tokens,
    ]
    assert tokens[0] == tokens[1]
