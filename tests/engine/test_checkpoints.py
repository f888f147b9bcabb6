"""Saved adapters: resumed to the bit, readable by peft, refused when they do not fit."""

from __future__ import annotations

import json
import threading
import weakref
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import BytesIO
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors import safe_open
from safetensors.torch import load, load_file, save, save_file
from transformers import AutoModelForCausalLM

from tinkex.engine.api import Directory, EngineError, Place, run_pass
from tinkex.engine.torch.engine import TorchEngine
from tinkex.engine.train.optim import AdamState
from tinkex.types.inputs import Datum, ModelInput
from tinkex.types.optimizers import AdamParams
from tinkex.types.training import LoraConfig

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from engine.conftest import Checkpoint, Data, Sample

LR = AdamParams(learning_rate=1e-2, weight_decay=0.01)


def train(engine: TorchEngine, name: str, data: Data, seeds: range) -> list[Any]:
    results = []
    for seed in seeds:
        output = run_pass(engine, name, data(6, 9, 12, seed=seed), "cross_entropy", {})
        results.append((output.metrics, engine.optim_step(name, LR)))
    return results


@pytest.mark.covers("S24")
def test_resumed_run_continues_bit_equal(
    engine: TorchEngine, checkpoint: Checkpoint, data: Data, tmp_path: Path
) -> None:
    train(engine, "a", data, range(3))
    engine.writer("a", optimizer=True).write(Directory(tmp_path))
    expected = train(engine, "a", data, range(3, 6))

    other = TorchEngine({"small": checkpoint("llama")}, threads=1)
    other.create("b", "small", LoraConfig(rank=4, seed=99))
    train(other, "b", data, range(7, 8))
    run_pass(other, "b", data(5), "cross_entropy", {})  # a pending gradient, which loading drops
    other.load("b", tmp_path, optimizer=True)
    assert train(other, "b", data, range(3, 6)) == expected
    ours, theirs = engine._adapters["a"].state, other._adapters["b"].state
    assert ours.step == theirs.step == 6
    for name in ("weights", "exp_avg", "exp_avg_sq"):
        assert torch.equal(getattr(ours, name), getattr(theirs, name))


def test_writer_writes_its_snapshot_on_any_thread(
    engine: TorchEngine, data: Data, tmp_path: Path
) -> None:
    train(engine, "a", data, range(2))
    then, now, later = (tmp_path / name for name in ("then", "now", "later"))
    for directory in (then, now, later):
        directory.mkdir()
    engine.writer("a", optimizer=True).write(Directory(then))
    write = engine.writer("a", optimizer=True)
    train(engine, "a", data, range(2, 4))
    engine.writer("a", optimizer=True).write(Directory(now))
    engine.drop("a")
    thread = threading.Thread(target=write.write, args=(Directory(later),))
    thread.start()
    thread.join()
    names = {"adapter_config.json", "adapter_model.safetensors", "optimizer.safetensors"}
    assert {path.name for path in later.iterdir()} == names
    for name in ("adapter_model.safetensors", "optimizer.safetensors"):
        ours, theirs, others = (load_file(directory / name) for directory in (later, then, now))
        assert all(torch.equal(ours[key], theirs[key]) for key in ours.keys() | theirs.keys())
        assert not all(torch.equal(ours[key], others[key]) for key in ours)
    with safe_open(later / "optimizer.safetensors", "pt") as saved:
        assert saved.metadata()["step"] == "2"


@dataclass
class Memory(Place):
    """A place without a file system."""

    files: dict[str, bytes] = field(default_factory=dict)

    @contextmanager
    def file(self, name: str) -> Iterator[BinaryIO]:
        opened = BytesIO()
        yield opened
        self.files[name] = opened.getvalue()


def test_writers_take_any_place_and_equal_safetensors(
    engine: TorchEngine, data: Data, tmp_path: Path
) -> None:
    train(engine, "a", data, range(2))
    writer, memory = engine.writer("a", optimizer=True), Memory()
    writer.write(memory)
    writer.write(Directory(tmp_path))
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == memory.files
    weights = memory.files["adapter_model.safetensors"]
    assert weights == save(load(weights), metadata={"format": "pt"})
    optimizer = memory.files["optimizer.safetensors"]
    # the library writes more than one entry of metadata in any order
    size, others = int.from_bytes(optimizer[:8], "little"), save(load(optimizer), {"a": "b"})
    header = json.loads(optimizer[8 : 8 + size])
    assert header.pop("__metadata__") == {"format": "pt", "optimizer": "adamw", "step": "2"}
    expected = json.loads(others[8 : 8 + int.from_bytes(others[:8], "little")])
    assert list(header.items()) == [item for item in expected.items() if item[0] in header]


def test_snapshot_costs_the_adapters_bytes_and_no_optimizers(
    engine: TorchEngine, data: Data, tmp_path: Path
) -> None:
    train(engine, "a", data, range(1))
    engine.snapshot("a", "frozen")
    write, write_all = engine.writer("a", optimizer=False), engine.writer("a", optimizer=True)
    state = engine._adapters["a"].state
    assert isinstance(state, AdamState)
    moments = weakref.ref(state.exp_avg)
    del state
    engine.drop("a")
    assert moments() is not None, "one writer needs it"
    del write_all
    assert moments() is None
    write.write(Directory(tmp_path))
    assert not (tmp_path / "optimizer.safetensors").exists()


@pytest.mark.covers("S24")
def test_weights_alone_start_a_fresh_optimizer(
    engine: TorchEngine, data: Data, tmp_path: Path
) -> None:
    train(engine, "a", data, range(2))
    engine.writer("a", optimizer=False).write(Directory(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    engine.create("b", "small", LoraConfig(rank=4))
    engine.load("b", tmp_path, optimizer=False)
    state = engine._adapters["b"].state
    assert torch.equal(state.weights, engine._adapters["a"].state.weights)
    assert state.step == 0
    assert isinstance(state, AdamState)
    assert not state.exp_avg.any()
    with pytest.raises(EngineError, match=r"has no optimizer\.safetensors"):
        engine.load("b", tmp_path, optimizer=True)


FLAGS = [
    {},
    {"train_unembed": False},
    {"train_mlp": False, "train_unembed": False},
    {"train_attn": False, "train_mlp": False},
]


@pytest.mark.covers("S41")
@pytest.mark.parametrize("flags", FLAGS)
def test_peft_reads_the_files(
    flags: dict[str, bool], checkpoint: Checkpoint, data: Data, tmp_path: Path
) -> None:
    engine = TorchEngine({"small": checkpoint("llama")}, threads=1)
    engine.create("a", "small", LoraConfig(rank=4, **flags))
    train(engine, "a", data, range(4))
    engine.writer("a", optimizer=True).write(Directory(tmp_path))
    base = AutoModelForCausalLM.from_pretrained(checkpoint("llama"), dtype=torch.float32)
    model = PeftModel.from_pretrained(base, str(tmp_path))
    tokens, targets = [5, 9, 60, 33, 7], [9, 60, 33, 7, 1]
    with torch.no_grad():
        logprobs = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
    theirs = logprobs[torch.arange(5), torch.tensor(targets)].numpy()
    datum = Datum(ModelInput.from_ints(tokens), {"target_tokens": targets})
    ours = run_pass(engine, "a", [datum], "cross_entropy", {}, backward=False)
    np.testing.assert_allclose(ours.loss_fn_outputs[0]["logprobs"].to_numpy(), theirs, atol=1e-5)


@pytest.mark.covers("S41")
def test_files(engine: TorchEngine, tmp_path: Path) -> None:
    engine.writer("a", optimizer=True).write(Directory(tmp_path))
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    expected = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": 4,
        "lora_alpha": 32,
        "lora_dropout": 0.0,
    }
    assert {key: config[key] for key in expected} == expected
    assert config["base_model_name_or_path"] == "small"
    assert config["target_modules"] == sorted(
        ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"]
    )
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    assert tensors["base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"].shape == (
        4,
        32,
    )
    assert tensors["base_model.model.model.layers.1.mlp.down_proj.lora_A.weight"].shape == (4, 48)
    assert tensors["base_model.model.lm_head.lora_B.weight"].shape == (96, 4)
    assert len(tensors) == 2 * (2 * 7 + 1)
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}
    assert len(load_file(tmp_path / "optimizer.safetensors")) == 2 * len(tensors)


def _drop_tensor(directory: Path) -> None:
    tensors = load_file(directory / "adapter_model.safetensors")
    del tensors["base_model.model.lm_head.lora_A.weight"]
    save_file(tensors, directory / "adapter_model.safetensors")


def _reshape(directory: Path) -> None:
    tensors = load_file(directory / "adapter_model.safetensors")
    tensors["base_model.model.lm_head.lora_A.weight"] = torch.zeros(4, 31)
    save_file(tensors, directory / "adapter_model.safetensors")


def _poison(directory: Path) -> None:
    tensors = load_file(directory / "adapter_model.safetensors")
    tensors["base_model.model.lm_head.lora_A.weight"][0, 0] = float("nan")
    save_file(tensors, directory / "adapter_model.safetensors")


def _truncate(directory: Path) -> None:
    path = directory / "optimizer.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def _configure(**changes: Any) -> Callable[[Path], None]:
    def change(directory: Path) -> None:
        path = directory / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_drop_tensor, "only one of file and run has tensor .*lm_head.lora_A.weight"),
        (_reshape, r"lm_head.lora_A.weight has shape \[4, 31\], expected \[4, 32\]"),
        (_poison, "adapter_model.safetensors holds NaN or infinity"),
        (_truncate, "optimizer.safetensors cannot be read"),
        (_configure(r=8), "has rank 8, this one has 4"),
        (_configure(target_modules=["lm_head"]), "has train_attn False, this one has True"),
        (
            _configure(target_modules=["q_proj"]),
            r"target_modules \['q_proj'\] are not whole groups",
        ),
        (_configure(lora_alpha=16), "lora_alpha is 16; only 32 is supported"),
        (_configure(use_dora=True), "use_dora is True"),
        (
            lambda directory: (directory / "adapter_config.json").unlink(),
            r"has no adapter_config\.json",
        ),
        (lambda directory: (directory / "adapter_config.json").write_text("{"), "not valid JSON"),
    ],
)
def test_mismatched_checkpoint_is_refused_unchanged(
    damage: Callable[[Path], None], message: str, engine: TorchEngine, data: Data, tmp_path: Path
) -> None:
    engine.writer("a", optimizer=True).write(Directory(tmp_path))
    damage(tmp_path)
    run_pass(engine, "a", data(5), "cross_entropy", {})
    adapter = engine._adapters["a"]
    state, grad = adapter.state, adapter.grad
    with pytest.raises(EngineError, match=message):
        engine.load("a", tmp_path, optimizer=True)
    assert adapter.state is state
    assert adapter.grad is grad


def test_samplers_of_files_and_of_snapshots_agree(
    engine: TorchEngine, data: Data, sample: Sample, tmp_path: Path
) -> None:
    train(engine, "a", data, range(3))
    engine.writer("a", optimizer=False).write(Directory(tmp_path))
    engine.snapshot("a", "live")
    engine.load_sampler("saved", "small", tmp_path)
    engine.load_sampler("base", "small", None)
    live, saved, base = (
        sample(engine, [4, 5], sampler=name, max_tokens=12, stop=[]).sequences[0]
        for name in ("live", "saved", "base")
    )
    assert (live.tokens, live.logprobs) == (saved.tokens, saved.logprobs)
    assert live.logprobs != base.logprobs


@pytest.mark.covers("S31")
def test_snapshots_stay_as_they_were(engine: TorchEngine, data: Data, sample: Sample) -> None:
    train(engine, "a", data, range(1))
    engine.snapshot("a", "s")
    before = sample(engine, [4, 5], max_tokens=12, stop=[]).sequences[0]
    train(engine, "a", data, range(1, 4))
    after = sample(engine, [4, 5], max_tokens=12, stop=[]).sequences[0]
    assert (before.tokens, before.logprobs) == (after.tokens, after.logprobs)
    engine.snapshot("a", "s2")
    assert (
        sample(engine, [4, 5], sampler="s2", max_tokens=12, stop=[]).sequences[0].logprobs
        != before.logprobs
    )
