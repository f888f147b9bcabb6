"""The bundled model: small enough, loads everywhere, and is the pupil the demo needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import tinkex
from tinkex.models import addition
from tinkex.tokenizers import BUNDLED, load_tokenizer

TINY = BUNDLED["tinkex/tiny"]


def test_files_fit_into_twelve_mebibytes() -> None:
    sizes = {file.name: file.stat().st_size for file in TINY.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "README.md"} <= sizes.keys()
    assert sum(sizes.values()) <= 12 * 2**20


def test_transformers_loads_it_and_agrees_with_the_engine() -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from tinkex.engine.api import run_pass
    from tinkex.engine.torch.engine import TorchEngine
    from tinkex.types import LoraConfig

    tokenizer = AutoTokenizer.from_pretrained(TINY)
    chat: Any = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is a kite?"}], return_dict=True
    )
    ids: list[int] = chat["input_ids"]
    reference = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    with torch.no_grad():
        logprobs = reference(torch.tensor([ids[:-1]])).logits[0].log_softmax(-1)
    expected = logprobs[range(len(ids) - 1), ids[1:]]

    engine = TorchEngine({"tiny": TINY})
    engine.create("a", "tiny", LoraConfig(rank=4))
    datum = tinkex.Datum(tinkex.ModelInput.from_ints(ids[:-1]), {"target_tokens": ids[1:]})
    output = run_pass(engine, "a", [datum], "cross_entropy", {}, backward=False)
    assert output.loss_fn_outputs[0]["logprobs"].tolist() == pytest.approx(
        expected.tolist(), abs=1e-4
    )


def test_both_tokenizers_agree() -> None:
    fast, full = load_tokenizer("tinkex/tiny", backend="tokenizers"), load_tokenizer("tinkex/tiny")
    text = "Mia had 37+45 kites.\nWhat now?"
    assert fast.encode(text) == full.encode(text)
    assert fast.decode(fast.encode(text, add_special_tokens=False)) == text
    chat = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]
    rendered = fast.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert rendered == full.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert (fast.bos_token_id, fast.eos_token_id) == (full.bos_token_id, full.eos_token_id)


def test_held_out_problems_are_no_training_problems() -> None:
    held_out, training = set(addition.held_out_problems()), set(addition.training_problems())
    assert len(held_out) >= 300
    assert not held_out & training
    assert not {(b, a) for a, b in held_out} & training
    assert len(held_out | training) == 90 * 90


def test_base_model_has_something_to_learn(tmp_path: Path) -> None:
    """Greedy accuracy between 10 and 40 %, through the whole stack."""
    with (
        tinkex.LocalBackend(data_dir=tmp_path) as backend,
        tinkex.ServiceClient(base_url=backend.base_url) as service,
    ):
        sampler = service.create_sampling_client(base_model="tinkex/tiny").result()
        tokenizer = sampler.get_tokenizer(backend="tokenizers")
        params = tinkex.SamplingParams(max_tokens=addition.MAX_ANSWER_TOKENS, temperature=0.0)
        problems = addition.held_out_problems()[::4]
        futures = [
            sampler.sample(
                tinkex.ModelInput.from_ints(tokenizer.encode(addition.prompt(a, b))), 1, params
            )
            for a, b in problems
        ]
        texts = [tokenizer.decode(future.result().sequences[0].tokens) for future in futures]
    right = [addition.reward(text, a, b) for text, (a, b) in zip(texts, problems, strict=True)]
    assert 0.1 <= sum(right) / len(right) <= 0.4
