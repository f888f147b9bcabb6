"""Recordings of samples on the server, and training data that name them by their provenance."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest

from support import Clock, Wire, sample_json, serving, step_json
from tinkex.engine.api import EngineError, Recording
from tinkex.engine.fake import FakeEngine
from tinkex.server.runs import journal
from tinkex.server.runs.journal import Committer, Journal, Segment
from tinkex.server.samples import sampling_records
from tinkex.server.samples.sampling_records import TRAINABLE_SECONDS, SamplingRecords

Serve: TypeAlias = Callable[..., Wire]
PROMPT = [5, 6, 7]
DAY = 86_400.0


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    """Starts servers on the test's data directory, each in place of the one before."""
    with ExitStack() as stack:

        def start(**options: Any) -> Wire:
            stack.close()
            return Wire(stack.enter_context(serving(FakeEngine(), tmp_path, **options)))

        yield start


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(sampling_records, "time", clock)
    return clock


def sampler_of(wire: Wire, session: str, number: int = 0) -> str:
    body = {"session_id": session, "sampling_session_seq_id": number, "base_model": "fake"}
    return str(wire.post("create_sampling_session", body)["sampling_session_id"])


def drawn(
    wire: Wire, sampler: str, seq_id: int = 0, prompt: list[int] = PROMPT, **fields: Any
) -> list[dict[str, Any]]:
    """Samples with their ids, as a client has them."""
    chunks = {"chunks": [{"tokens": prompt, "type": "encoded_text"}]}
    asked = {"record_stability_info": True, "num_samples": 2, "prompt": chunks, **fields}
    receipt = wire.post("asample", sample_json(sampler, seq_id, **asked))
    sequences = wire.result(receipt["request_id"])["sequences"]
    names = receipt["sample_sequence_ids"]
    return [{**sequence, "id": name} for sequence, name in zip(sequences, names, strict=True)]


def prompt(name: str, offset: int, length: int) -> dict[str, Any]:
    return {"prompt_tokens": {"sequence_id": name, "offset": offset, "length": length}}


def sampled(name: str, offset: int, length: int) -> dict[str, Any]:
    return {"sampled_tokens": {"sequence_id": name, "offset": offset, "length": length}}


def datum(sample: dict[str, Any], advantage: float = 1.0, **changes: Any) -> dict[str, Any]:
    """Return the datum for training on a sample; targets of the prompt are 0."""
    tokens, name = sample["tokens"], sample["id"]
    before, count = len(PROMPT) - 1, len(tokens)
    inputs = {
        "target_tokens": {"data": [0] * before + tokens, "dtype": "int64"},
        "logprobs": {"data": [0.0] * before + sample["logprobs"], "dtype": "float32"},
        "advantages": {"data": [0.0] * before + [advantage] * count, "dtype": "float32"},
    }
    return {
        "model_input": {"chunks": [{"tokens": PROMPT + tokens[:-1], "type": "encoded_text"}]},
        "loss_fn_inputs": inputs,
        "model_input_spans": [prompt(name, 0, before + 1), sampled(name, 0, count - 1)],
        "loss_fn_input_spans": [prompt(name, 1, before), sampled(name, 0, count)],
        **changes,
    }


def trained(
    wire: Wire, model: str, seq_id: int, *data: Any, loss: str = "stable_reinforce"
) -> dict[str, Any]:
    body = {"data": list(data), "loss_fn": loss}
    outcome = wire.run(
        "forward_backward", {"model_id": model, "seq_id": seq_id, "forward_backward_input": body}
    )
    assert isinstance(outcome, dict)
    return outcome


def refused(outcome: dict[str, Any]) -> str:
    assert outcome["category"] == "user", outcome
    return str(outcome["error"])


# ── provenance ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.covers("U52", "U53", "U54")
def test_recorded_samples_can_be_trained_on(serve: Serve) -> None:
    wire = serve()
    session = wire.session()
    model, sampler = wire.model(session), sampler_of(wire, session)
    samples = drawn(wire, sampler)
    outcome = trained(wire, model, 1, *map(datum, samples))
    assert [len(output["logprobs"]["data"]) for output in outcome["loss_fn_outputs"]] == [5, 5]
    forward = {"model_id": model, "seq_id": 2, "forward_only": True}
    body = {
        "data": [datum(samples[0])],
        "loss_fn": "stable_reinforce",
        "loss_fn_config": {"kl_coeff": 0.0},
    }
    assert "loss_fn_outputs" in wire.run(
        "forward_backward", {**forward, "forward_backward_input": body}
    )


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"model_input_spans": None, "loss_fn_input_spans": None}, "datum 0 has no provenance"),
    ({"model_input_spans": [], "loss_fn_input_spans": []}, "spans of model_input cover 0 positions "
                                                           "of 5"),
    ({"loss_fn_input_spans": [sampled("A", 0, 3)]},
     "spans of target_tokens cover 3 positions of 5"),
    ({"model_input_spans": [prompt("A", 0, 3), sampled("A", 0, 3)]}, "spans of model_input cover 6 "
                                                                     "positions of 5"),
    ({"loss_fn_input_spans": [prompt("A", 2, 2), sampled("A", 0, 3)]}, "tokens 2 to 4 of the "
                                                                       "prompt .* has 3"),
    ({"loss_fn_input_spans": [prompt("A", 1, 2), sampled("A", 1, 3)]}, "tokens 1 to 4 of the "
                                                                       "sample .* has 3"),
    ({"loss_fn_input_spans": [prompt("A", 1, 2), prompt("A", 0, 3)]}, "none of its targets was "
                                                                      "sampled"),
    ({"loss_fn_input_spans": [prompt("A", 1, 2), sampled("A:9", 0, 3)]}, "is not known: it was not "
                                                                         "sampled with"),
    ({"loss_fn_input_spans": [prompt("A", 1, 2), sampled("A0", 0, 3)]}, "is not known"),
    ({"loss_fn_input_spans": [prompt("A", 1, 2), sampled("plain", 0, 3)]}, "is not known"),
    ({"loss_fn_input_spans": [prompt("plain", 1, 2), sampled("A", 0, 3)]}, "is not known"),
    ({"loss_fn_input_spans": [prompt("A", 1, 2), sampled("foreign", 0, 3)]}, "was sampled in "
                                                                             "another session"),
    ({"loss_fn_input_spans": [prompt("A", 1, 2), sampled("nowhere", 0, 3)]}, "was sampled in "
                                                                             "another session"),
    ({"model_input_spans": [prompt("foreign", 0, 0), prompt("A", 0, 3), sampled("A", 0, 2)]},
     "another session"),
]  # fmt: skip


@pytest.mark.covers("U52", "U53")
def test_bad_provenance_is_refused_in_band(serve: Serve) -> None:
    wire = serve()
    session, other = wire.session(), wire.session()
    model, sampler = wire.model(session), sampler_of(wire, session)
    sample = drawn(wire, sampler)[0]
    names = {
        "A": sample["id"],
        "A:9": sample["id"][:-1] + "9",
        "A0": f"{sample['id'][:-1]}0{sample['id'][-1]}",
        "plain": drawn(wire, sampler, 7, record_stability_info=False)[0]["id"],
        "foreign": drawn(wire, sampler_of(wire, other))[0]["id"],
        "nowhere": "nowhere:sample:0:0:0",
    }

    def named(spans: list[dict[str, Any]] | None) -> Any:
        if spans is None:
            return None
        return [
            {
                kind: {**span, "sequence_id": names[span["sequence_id"]]}
                for kind, span in entry.items()
            }
            for entry in spans
        ]

    for number, (changes, message) in enumerate(REFUSED, 1):
        bad = datum(sample, **{field: named(spans) for field, spans in changes.items()})
        told = refused(trained(wire, model, number, bad))
        assert re.search(message, told), told
    last = len(REFUSED) + 1
    assert "loss_fn_outputs" in trained(wire, model, last, datum(sample))  # the run goes on
    again = {
        "model_id": model,
        "seq_id": 1,
        "forward_backward_input": {"data": [], "loss_fn": "stable_reinforce"},
    }
    assert "was used before" in refused(wire.run("forward_backward", again))


@pytest.mark.covers("U53")
def test_provenance_as_programs_make_it_is_accepted(serve: Serve) -> None:
    wire = serve()
    session = wire.session()
    model, sampler = wire.model(session), sampler_of(wire, session)
    a = drawn(wire, sampler, 0, [1, 2, 3], sampling_params={"max_tokens": 2, "seed": 1})[0]
    longer = [1, 2, 3, *a["tokens"], 40, 41]
    b = drawn(wire, sampler, 1, longer, sampling_params={"max_tokens": 3, "seed": 2})[0]
    turns = {
        "model_input": {"chunks": [{"tokens": longer + b["tokens"][:-1], "type": "encoded_text"}]},
        "loss_fn_inputs": {
            "target_tokens": {"data": [0, 0, *a["tokens"], 0, 0, *b["tokens"]], "dtype": "int64"},
            "logprobs": {"data": [0.0] * 9, "dtype": "float32"},
            # the first turn is masked
            "advantages": {"data": [0.0] * 6 + [1.0] * 3, "dtype": "float32"},
        },
        "model_input_spans": [
            prompt(a["id"], 0, 3), sampled(a["id"], 0, 2),
            prompt(b["id"], 5, 2), sampled(b["id"], 0, 2)
        ],
        "loss_fn_input_spans": [
            prompt(a["id"], 1, 2), sampled(a["id"], 0, 2),
            prompt(b["id"], 5, 2), sampled(b["id"], 0, 3)
        ],
    }  # fmt: skip
    assert "loss_fn_outputs" in trained(wire, model, 1, turns)
    one = drawn(wire, sampler, 2, [9], sampling_params={"max_tokens": 1, "seed": 1})[0]
    single = {
        "model_input": {"chunks": [{"tokens": [9], "type": "encoded_text"}]},
        "loss_fn_inputs": {
            "target_tokens": {"data": one["tokens"], "dtype": "int64"},
            "logprobs": {"data": one["logprobs"], "dtype": "float32"},
            "advantages": {"data": [1.0], "dtype": "float32"},
        },
        "model_input_spans": [prompt(one["id"], 0, 1), sampled(one["id"], 0, 0)],
        "loss_fn_input_spans": [prompt(one["id"], 1, 0), sampled(one["id"], 0, 1)],
    }
    assert "loss_fn_outputs" in trained(wire, model, 2, single)


@pytest.mark.covers("U53")
@pytest.mark.parametrize("loss", ["importance_sampling", "ppo", "cross_entropy"])
def test_other_losses_do_not_look_at_provenance(loss: str, serve: Serve) -> None:
    wire = serve()
    session = wire.session()
    model, sampler = wire.model(session), sampler_of(wire, session)
    sample = drawn(wire, sampler, record_stability_info=False)[0] | {"id": "of:nobody:0"}
    assert "loss_fn_outputs" in trained(wire, model, 1, datum(sample), loss=loss)


@pytest.mark.covers("U54")
def test_capabilities_name_the_form_of_the_loss_as_our_own(serve: Serve) -> None:
    answer = serve().get("get_server_capabilities")
    assert answer["supported_models"]
    assert "tinkex's own form" in answer["own_losses"]["stable_reinforce"]


# ── how long, and how much ────────────────────────────────────────────────────────────────────────


@pytest.mark.covers("U52")
def test_recording_is_kept_for_a_day_from_its_last_use(serve: Serve, clock: Clock) -> None:
    wire = serve()
    session = wire.session()
    model, sampler = wire.model(session), sampler_of(wire, session)
    used, unused = drawn(wire, sampler)
    clock.ahead = DAY - 60
    assert "loss_fn_outputs" in trained(wire, model, 1, datum(used))
    clock.ahead = DAY + 60
    assert "can no longer be trained on: not used for 24 hours" in refused(
        trained(wire, model, 2, datum(unused))
    )
    assert "loss_fn_outputs" in trained(wire, model, 3, datum(used))
    wire = serve()  # which a restart does not change
    clock.ahead = 2 * DAY
    assert "loss_fn_outputs" in trained(wire, model, 4, datum(used))
    assert "can no longer be trained on" in refused(trained(wire, model, 5, datum(unused)))
    clock.ahead = 3 * DAY + 60
    assert "can no longer be trained on" in refused(trained(wire, model, 6, datum(used)))


@pytest.mark.covers("U52")
def test_pass_is_done_again_with_recordings_that_have_expired(serve: Serve, clock: Clock) -> None:
    wire = serve()
    session = wire.session()
    model, sampler = wire.model(session), sampler_of(wire, session)
    sample = drawn(wire, sampler)[0]
    first = trained(wire, model, 1, datum(sample))
    clock.ahead = 5 * DAY
    again = serve().result(f"{model}:1")
    assert again == first
    wire = serve()
    norm = wire.run("optim_step", step_json(model, 2))["metrics"]["grad_norm:mean"]
    assert norm == pytest.approx(wire_norm(serve, first, sample))


def wire_norm(serve: Serve, first: dict[str, Any], sample: dict[str, Any]) -> float:
    """Return what the same pass gives an untouched run; equal seeds draw equal samples."""
    wire = serve()
    session = wire.session()
    model, sampler = wire.model(session), sampler_of(wire, session)
    fresh = drawn(wire, sampler)[0]
    assert fresh["tokens"] == sample["tokens"]
    assert trained(wire, model, 1, datum(fresh)) == first
    return float(wire.run("optim_step", step_json(model, 2))["metrics"]["grad_norm:mean"])


@pytest.mark.covers("U52")
def test_recordings_go_with_their_session(serve: Serve, tmp_path: Path) -> None:
    wire = serve()
    session, other = wire.session(), wire.session()
    for each in (session, other):
        drawn(wire, sampler_of(wire, each))
    assert {path.name for path in (tmp_path / "recordings").iterdir()} == {session, other}
    wire.post(f"sessions/{session}/finish", {"reason": {"type": "success"}})
    assert {path.name for path in (tmp_path / "recordings").iterdir()} == {other}


@pytest.mark.covers("U52")
def test_recording_needs_a_request_and_an_owner(serve: Serve, tmp_path: Path) -> None:
    wire = serve()
    drawn(wire, sampler_of(wire, wire.session()), record_stability_info=False)
    direct = {"base_model": "fake", "sampling_session_id": None, "record_stability_info": True}
    receipt = wire.post("asample", sample_json("", None, **direct))
    assert wire.result(receipt["request_id"])["sequences"]
    assert not (tmp_path / "recordings").exists()


def recording(seed: int, length: int = 10) -> Recording:
    random = np.random.default_rng(seed)
    one, two = (random.random(length).astype(np.float32) for _ in range(2))
    ids = random.integers(0, 100, (length, 20)).astype(np.int32)
    tokens = random.integers(0, 100, length).astype(np.int32)
    return Recording(tokens, one, two, ids, random.random((length, 20)).astype(np.float32))


def sizes(directory: Path) -> list[int]:
    """Of all segments."""
    return [path.stat().st_size for path in directory.glob("*/*")]


Use: TypeAlias = Callable[[SamplingRecords], Awaitable[None]]


def with_records(directory: Path, *uses: Use, memory: int = 1 << 20, disk: int = 1 << 20) -> None:
    """Run each on records over the directory, as after a restart."""

    async def run(use: Use) -> None:
        journals: dict[Path, Journal] = {}
        committer = Committer()

        def journal_of(place: Path) -> Journal:
            return journals.setdefault(place, Journal(place, committer))

        await use(SamplingRecords(directory, journal_of, memory_bytes=memory, disk_bytes=disk))
        committer.stop()
        for each in journals.values():
            each.close()

    for use in uses:
        asyncio.run(run(use))


async def found(records: SamplingRecords, name: str) -> Recording | None:
    return (await records.recall("s", [name], [name]))[name].recording


def assert_same(one: Recording | None, other: Recording) -> None:
    assert one is not None
    for name in ("tokens", "logprobs", "model_logprobs", "top_tokens", "top_logprobs"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name))


@pytest.mark.covers("U52")
def test_memory_is_bounded_and_the_disk_has_the_rest(tmp_path: Path) -> None:
    size = recording(0).nbytes

    async def use(records: SamplingRecords) -> None:
        for number in range(20):
            await records.keep(
                "s", f"s:sample:0:{number}", 3, [recording(number), recording(100 + number, 0)]
            )
            assert records.bytes_in_memory <= 3 * size
        await check(records)

    async def check(records: SamplingRecords) -> None:
        for number in range(20):
            assert_same(await found(records, f"s:sample:0:{number}:0"), recording(number))
            assert_same(await found(records, f"s:sample:0:{number}:1"), recording(100 + number, 0))
            assert records.bytes_in_memory <= 3 * size

    with_records(tmp_path, use, check, memory=3 * size)


@pytest.mark.covers("U52")
def test_disk_is_bounded_and_the_oldest_make_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "SEGMENT_BYTES", 4000)
    budget = 20_000

    async def use(records: SamplingRecords) -> None:
        await records.keep("other", "other:sample:0:0", 3, [recording(0)])
        for number in range(40):
            await records.keep("s", f"s:sample:0:{number}", 3, [recording(number)])
            assert sum(sizes(tmp_path)) <= budget + 4000
        await check(records)

    async def check(records: SamplingRecords) -> None:
        assert_same(await found(records, "s:sample:0:39:0"), recording(39))
        with pytest.raises(
            EngineError, match=r"dropped for want of room \(recordings_disk_bytes\)"
        ):
            await found(records, "s:sample:0:0:0")
        small = await records.recall("other", ["other:sample:0:0:0"], ["other:sample:0:0:0"])
        # who takes little loses nothing
        assert_same(small["other:sample:0:0:0"].recording, recording(0))

    with_records(tmp_path, use, check, disk=budget)


@pytest.mark.covers("U52")
def test_recording_needed_by_a_journalled_pass_stays(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "SEGMENT_BYTES", 100)

    async def use(records: SamplingRecords) -> None:
        for number in range(3):
            await records.keep("s", f"s:sample:0:{number}", 3, [recording(number)])
        records.hold("s", "s:train:0", 4, ["s:sample:0:0:0"])
        clock.ahead = 2 * DAY
        records.sweep()
        assert len(sizes(tmp_path)) == 2  # that, and the one which is written to
        assert (await records.recall("s", ["s:sample:0:0:0"], [], expired=True))[
            "s:sample:0:0:0"
        ].length == 10
        records.release("s:train:0", 3)
        records.sweep()
        assert len(sizes(tmp_path)) == 2
        records.release("s:train:0", 4)
        records.sweep()
        assert len(sizes(tmp_path)) == 1

    with_records(tmp_path, use)
    assert TRAINABLE_SECONDS == DAY


@pytest.mark.covers("U52")
def test_record_that_cannot_be_written_fails_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = Segment.write

    def failing(segment: Segment, pieces: Any, *, flush: bool) -> None:
        if any(b"sample:0:1" in piece for piece in pieces):
            raise OSError(28, "No space left on device")
        write(segment, pieces, flush=flush)

    monkeypatch.setattr(Segment, "write", failing)

    async def use(records: SamplingRecords) -> None:
        await records.keep("s", "s:sample:0:0", 3, [recording(0)])
        failed, later = await asyncio.gather(
            records.keep("s", "s:sample:0:1", 3, [recording(1)]),
            asyncio.sleep(0.05, records.keep("s", "s:sample:0:2", 3, [recording(2)])),
            return_exceptions=True,
        )
        assert isinstance(failed, EngineError)
        assert failed.category == "server"
        assert not isinstance(later, BaseException)
        await later
        await check(records)

    async def check(records: SamplingRecords) -> None:
        for number in (0, 2):
            assert_same(await found(records, f"s:sample:0:{number}:0"), recording(number))
        with pytest.raises(EngineError, match="is not known"):
            await found(records, "s:sample:0:1:0")

    with_records(tmp_path, use, check, memory=0)


@pytest.mark.covers("U52")
def test_sample_that_is_drawn_again_differently_fails(tmp_path: Path) -> None:
    async def use(records: SamplingRecords) -> None:
        await records.keep("s", "s:sample:0:0", 3, [recording(0)])

    async def again(records: SamplingRecords) -> None:
        await records.keep("s", "s:sample:0:0", 3, [recording(0)])
        with pytest.raises(EngineError, match="is different now") as caught:
            await records.keep("s", "s:sample:0:0", 3, [recording(1)])
        assert caught.value.category == "server"
        assert_same(await found(records, "s:sample:0:0:0"), recording(0))

    with_records(tmp_path, use, again)


@pytest.mark.parametrize(
    ("at", "lost"), [(2, 2), (journal.HEADER.size + 30, 1), (-1, 0)], ids=["head", "facts", "body"]
)
def test_damaged_recording_is_reported_with_its_file(
    serve: Serve, tmp_path: Path, caplog: pytest.LogCaptureFixture, at: int, lost: int
) -> None:
    wire = serve()
    session = wire.session()
    model, sampler = wire.model(session), sampler_of(wire, session)
    samples = [drawn(wire, sampler, number)[0] for number in range(2)]
    (segment,) = (tmp_path / "recordings").glob("*/segment-*.log")
    wire = serve()
    data = bytearray(segment.read_bytes())
    data[at] ^= 4
    segment.write_bytes(data)
    outcomes = [
        trained(wire, model, number, datum(sample)) for number, sample in enumerate(samples, 1)
    ]
    fails = ["error" in outcome for outcome in outcomes]
    assert fails == ([True] * lost + [False] * (2 - lost) if lost else [False, True])
    assert f"{segment} is damaged" in caplog.text
