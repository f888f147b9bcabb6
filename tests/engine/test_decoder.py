"""Our decoder against transformers' on the same weights, and what is refused."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tinkex.engine.api import EngineError
from tinkex.engine.base_models import resolve
from tinkex.engine.families.family import parse_config
from tinkex.engine.model.attention import PackedAttention
from tinkex.engine.model.decoder import Decoder, hidden_states
from tinkex.engine.torch.engine import TorchEngine
from tinkex.engine.torch.model_files import load_decoder

if TYPE_CHECKING:
    from pathlib import Path

    from engine.conftest import Checkpoint

FAMILIES = [
    "llama",
    "llama-tied",
    "llama-bias",
    "llama3",
    "llama-linear",
    "mistral",
    "qwen2",
    "qwen3",
]


def load(directory: Path) -> Decoder:
    return load_decoder(directory, torch.float32, torch.device("cpu"))


def packed_logits(
    model: Decoder, sequences: list[torch.Tensor], runs: list[tuple[int, int]]
) -> torch.Tensor:
    positions = torch.cat([torch.arange(len(s)) for s in sequences])
    hidden = hidden_states(
        model, torch.cat(sequences), positions, PackedAttention(runs, model.attention)
    )
    return hidden @ model.head.weight_ND.t()


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_match_transformers(family: str, checkpoint: Checkpoint) -> None:
    reference = AutoModelForCausalLM.from_pretrained(checkpoint(family), dtype=torch.float32)
    generator = torch.Generator().manual_seed(1)
    lengths = [3, 7, 7, 7, 40]
    sequences = [torch.randint(0, 96, (n,), generator=generator) for n in lengths]
    with torch.no_grad():
        ours = packed_logits(load(checkpoint(family)), sequences, [(1, 3), (3, 7), (1, 40)])
        theirs = torch.cat([reference(s[None]).logits[0] for s in sequences])
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)


def rewritten(source: Path, target: Path, **changes: Any) -> Path:
    shutil.copytree(source, target)
    config = json.loads((target / "config.json").read_text())
    config = {key: value for key, value in {**config, **changes}.items() if value is not None}
    (target / "config.json").write_text(json.dumps(config))
    return target


def test_rope_is_read_in_both_forms(checkpoint: Checkpoint, tmp_path: Path) -> None:
    parameters = json.loads((checkpoint("llama3") / "config.json").read_text())["rope_parameters"]
    scaling = {key: value for key, value in parameters.items() if key != "rope_theta"}
    old = rewritten(
        checkpoint("llama3"),
        tmp_path / "old",
        rope_parameters=None,
        rope_theta=10000.0,
        rope_scaling=scaling,
    )
    assert torch.equal(load(old).frequencies, load(checkpoint("llama3")).frequencies)
    assert not torch.equal(load(old).frequencies, load(checkpoint("llama")).frequencies)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model_type": "mamba"},
            "'mamba' is not supported; supported are gemma2, gemma3_text, llama, mistral, qwen2",
        ),
        (
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0}},
            "'yarn'.*default, linear, llama3",
        ),
        ({"hidden_act": "gelu"}, "'gelu'"),
        (
            {"model_type": "mistral", "sliding_window": 0},
            "sliding_window is 0, and must be at least 1",
        ),
        ({"partial_rotary_factor": 0.5}, "partial rotary"),
        ({"quantization_config": {"bits": 4}}, "quantized"),
        ({"intermediate_size": 64}, r"gate_proj.weight has shape \[48, 32\], expected \[64, 32\]"),
        ({"num_hidden_layers": 3}, r"no tensor model.layers.2.*which its config.json needs"),
        (
            {"num_hidden_layers": 1},
            "9 tensors that the decoder does not use, such as model.layers.1.input_layernorm",
        ),
        ({"attention_bias": True}, "no tensor model.layers.0.self_attn.q_proj.bias"),
    ],
)
def test_uncovered_checkpoints_are_refused(
    changes: dict[str, Any], message: str, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    directory = rewritten(checkpoint("llama"), tmp_path / "changed", **changes)
    with pytest.raises(EngineError, match=message):
        load(directory)


def test_disabled_window_is_no_window() -> None:
    fields = {
        "model_type": "qwen2",
        "sliding_window": 16,
        "use_sliding_window": False,
        "hidden_size": 8,
    }
    sizes = dict.fromkeys(
        ["num_attention_heads", "vocab_size", "intermediate_size", "num_hidden_layers"], 2
    )
    config = parse_config(
        {**fields, **sizes, "max_position_embeddings": 64, "max_window_layers": 0}
    )
    assert [rule.window for rule in config.attention] == [None, None]


def test_sharded_checkpoints(checkpoint: Checkpoint, tmp_path: Path) -> None:
    whole = checkpoint("llama")
    sharded = tmp_path / "sharded"
    AutoModelForCausalLM.from_pretrained(whole, dtype=torch.float32).save_pretrained(
        sharded, max_shard_size="20KB"
    )
    shards = sorted(sharded.glob("model-*.safetensors"))
    assert len(shards) > 2
    for ours, theirs in zip(load(sharded).linears(), load(whole).linears(), strict=True):
        assert torch.equal(ours.weight_ND, theirs.weight_ND)
    shards[1].unlink()
    with pytest.raises(EngineError, match="lacks the shards of"):
        load(sharded)


def test_half_precision_files_are_widened(checkpoint: Checkpoint, tmp_path: Path) -> None:
    target = tmp_path / "half"
    shutil.copytree(checkpoint("llama"), target)
    tensors = load_file(target / "model.safetensors")
    save_file(
        {name: t.to(torch.bfloat16) for name, t in tensors.items()}, target / "model.safetensors"
    )
    assert load(target).embed_VD.dtype == torch.float32


def test_resolve(checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve(checkpoint("llama")) == checkpoint("llama")
    assert resolve(str(checkpoint("llama"))) == checkpoint("llama")
    with pytest.raises(
        EngineError, match="not a directory; give a checkpoint directory or a hub id"
    ):
        resolve(tmp_path / "absent")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(
        EngineError, match="nobody/nothing is not in the Hugging Face cache and HF_HUB_OFFLINE"
    ):
        resolve("nobody/nothing")


def test_resolve_honours_the_offline_cache(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = "0" * 40
    repository = tmp_path / "models--someone--small"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    shutil.copytree(checkpoint("llama"), repository / "snapshots" / commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert resolve("someone/small") == repository / "snapshots" / commit
    # as where only a tokenizer was fetched
    (repository / "snapshots" / commit / "model.safetensors").unlink()
    with pytest.raises(EngineError, match="someone/small is not in the Hugging Face cache"):
        resolve("someone/small")


def test_directories_that_are_no_checkpoints(tmp_path: Path, checkpoint: Checkpoint) -> None:
    with pytest.raises(EngineError, match=r"has no config\.json"):
        TorchEngine({"x": tmp_path})
    shutil.copy(checkpoint("llama") / "config.json", tmp_path)
    with pytest.raises(EngineError, match=r"no model\*\.safetensors"):
        TorchEngine({"x": tmp_path}).load_sampler("base", "x", None)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(EngineError, match="has no 'hidden_size'"):
        TorchEngine({"x": tmp_path})
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(EngineError, match="not valid JSON"):
        TorchEngine({"x": tmp_path})


def test_models_are_described_without_loading(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tinkex.engine.torch.engine.load_decoder", lambda *_: pytest.fail("loaded"))
    (model,) = TorchEngine({"small": checkpoint("qwen3")}, threads=1).models()
    assert (model.name, model.arch, model.context_length, model.vocab_size) == (
        "small",
        "qwen3",
        48,
        96,
    )
    assert model.eos_tokens == {2}
    assert model.directory == checkpoint("qwen3")


def test_linear_layers_name_every_projection(checkpoint: Checkpoint) -> None:
    linears = load(checkpoint("llama")).linears()
    names = [module for linear in linears for module in linear.modules]
    assert len(names) == len(set(names)) == 2 * 7 + 1
    assert np.array_equal([sum(x.sizes) for x in linears], [x.weight_ND.shape[0] for x in linears])
