"""Digests of saved files: a flipped bit is refused wherever the files are read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support import Wire, pass_json, serving
from tinkex.engine.api import BaseModel, EngineError
from tinkex.engine.base_models import weights_digest
from tinkex.engine.fake import FakeEngine
from tinkex.server.files.seals import SEAL, check, seal


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    made = tmp_path / "saved"
    made.mkdir()
    (made / "a.json").write_text("{}")
    (made / "b.bin").write_bytes(bytes(range(256)))
    seal(made)
    return made


def flip(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def test_seal_accepts_its_own_files_and_later_files(directory: Path) -> None:
    check(directory)
    (directory / "results.log").write_bytes(b"later")
    check(directory)


@pytest.mark.parametrize("name", ["a.json", "b.bin"])
def test_seal_finds_a_flipped_bit_also_after_a_good_check(directory: Path, name: str) -> None:
    check(directory)
    flip(directory / name, 9)
    with pytest.raises(EngineError, match=f"damaged: {name} of saved"):
        check(directory)


def test_seal_finds_a_missing_file(directory: Path) -> None:
    (directory / "a.json").unlink()
    with pytest.raises(EngineError, match=r"a\.json of saved is missing"):
        check(directory)


def test_directory_without_a_seal_is_refused(directory: Path) -> None:
    (directory / SEAL).unlink()
    with pytest.raises(EngineError, match=r"digests\.json of saved is missing"):
        check(directory)


def test_flipped_bit_of_a_seal_is_refused_or_harmless(directory: Path) -> None:
    whole = (directory / SEAL).read_bytes()
    told = json.loads(whole)
    for bit in range(8 * len(whole)):
        (directory / SEAL).write_bytes(whole)
        flip(directory / SEAL, bit)
        try:
            check(directory)
        except EngineError:
            continue
        assert json.loads((directory / SEAL).read_bytes()) == told  # white space


# ── what a server does with them ─────────────────────────────────────────────────────────────────


@pytest.fixture
def wire(tmp_path: Path) -> Iterator[Wire]:
    with serving(FakeEngine(), tmp_path) as url:
        yield Wire(url)


def sample_of(sampler: str) -> dict[str, Any]:
    return {
        "sampling_session_id": sampler,
        "seq_id": 1,
        "num_samples": 1,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]},
        "sampling_params": {"max_tokens": 2},
    }


def damage(tmp_path: Path, kind: str) -> None:
    [path] = (tmp_path / "checkpoints").glob(f"*/{kind}/a/fake.json")
    path.write_bytes(path.read_bytes().replace(b"0.0", b"0.5", 1))


def test_damaged_checkpoint_is_neither_loaded_nor_sampled_nor_copied(
    wire: Wire, tmp_path: Path
) -> None:
    model = wire.model()
    saved = {"model_id": model, "path": "a"}
    state = wire.run("save_weights", {**saved, "seq_id": 1})["path"]
    weights = wire.run("save_weights_for_sampler", {**saved, "seq_id": 2})["path"]
    damage(tmp_path, "weights")
    damage(tmp_path, "sampler_weights")
    load = {"model_id": model, "seq_id": 3, "path": state, "optimizer": False}
    assert "fake.json of a does not have the digest" in wire.run("load_weights", load)["error"]
    session = model.partition(":")[0]
    fresh = {"session_id": session, "model_seq_id": 1, "path": state, "optimizer": True}
    assert "damaged" in wire.run("load_weights", fresh)["error"]
    asked = {"session_id": session, "sampling_session_seq_id": 0, "model_path": weights}
    sampler = wire.post("create_sampling_session", asked)["sampling_session_id"]
    assert "damaged" in wire.run("asample", sample_of(sampler))["error"]
    address = f"training_runs/{model}/checkpoints/weights/a/archive"
    archive = wire.send(
        wire.send(address, method="GET").headers["location"].partition("/api/v1/")[2], method="GET"
    )
    assert (archive.status, "damaged" in archive.json["detail"]) == (500, True)
    copy = wire.send("copy_weights", {"source_path": state, "destination_project_id": "p"})
    assert (copy.status, "damaged" in copy.json["detail"]) == (400, True)


# ── another base model under an old name ─────────────────────────────────────────────────────────


def base(digest: str) -> FakeEngine:
    return FakeEngine([BaseModel("fake", 1 << 20, 256, "fake", digest=digest)])


def test_weights_of_another_base_model_of_the_same_name_are_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(base("one"), tmp_path) as url:
        wire = Wire(url)
        model = wire.model()
        session = model.partition(":")[0]
        state = wire.run("save_weights", {"model_id": model, "seq_id": 1, "path": "a"})["path"]
        named = {"model_id": model, "seq_id": 2, "path": "a"}
        weights = wire.run("save_weights_for_sampler", named)["path"]
        wire.run("forward_backward", pass_json(model, 3))
    load = {"session_id": session, "model_seq_id": 1, "path": state, "optimizer": True}
    sampler = {"session_id": session, "sampling_session_seq_id": 0, "model_path": weights}
    with serving(base("two"), tmp_path) as url:
        wire = Wire(url)
        assert wire.send("forward_backward", pass_json(model, 4)).status == 410
        assert "trained on other weights of 'fake'" in caplog.text
        assert wire.get(f"training_runs/{model}")["corrupted"] is False
        assert "trained on other weights of 'fake'" in wire.run("load_weights", load)["error"]
        made = wire.post("create_sampling_session", sampler)["sampling_session_id"]
        refused = wire.send("asample", sample_of(made))
        assert (refused.status, "other weights" in refused.json["detail"]) == (400, True)
    with serving(base("one"), tmp_path) as url:  # with the right one everything is there again
        wire = Wire(url)
        assert "metrics" in wire.run("forward_backward", pass_json(model, 4))
        assert wire.run("load_weights", {**load, "model_seq_id": 2})["path"] == state


def test_digest_of_a_base_model_changes_with_its_weights_and_its_configuration(
    model_dir: Path, tmp_path: Path
) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((model_dir / name).read_bytes())
    first = weights_digest(tmp_path)
    assert first == weights_digest(model_dir)
    flip(tmp_path / "model.safetensors", 8 * (tmp_path / "model.safetensors").stat().st_size - 3)
    second = weights_digest(tmp_path)
    (tmp_path / "config.json").write_text((tmp_path / "config.json").read_text() + " ")
    assert len({first, second, weights_digest(tmp_path)}) == 3
