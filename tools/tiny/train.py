"""Makes the bundled model: writes its text, trains its tokenizer and weights, and measures it.

Run ``PYTHONPATH=src python -m tools.tiny.train --out src/tinkex/models/tiny --figures
figures.json`` on a machine with a GPU. The defaults of `Settings` are those of the stored model;
`card.py` writes its card from the figures.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    pre_tokenizers,
    processors,
    trainers,
)
from tools.tiny import corpus, evaluate
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from tinkex.models import addition

# Words with their leading space, single digits, runs of signs, single line breaks, other white
# space.
_PATTERN = r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|[\r\n]|\s+(?!\S)|\s+"

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('Unknown role: ' + message['role']) }}{% endif %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

Tokens = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Settings:
    """Everything that decides what the model becomes."""

    seed: int = 1
    documents: int = 200_000
    held_out_documents: int = 2_000
    mix: corpus.Mix = field(default_factory=corpus.Mix)
    vocabulary: int = 2048
    hidden: int = 256
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    mlp: int = 704
    context: int = 512
    steps: int = 2400
    batch: int = 64
    learning_rate: float = 2e-3
    weight_decay: float = 0.1
    begin_share: float = 0.75


def train_tokenizer(texts: Sequence[str], settings: Settings) -> Tokenizer:
    """Train the byte-level BPE tokenizer; digits and line breaks stay tokens of their own."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=settings.vocabulary,
        special_tokens=[
            AddedToken(token, special=True, normalized=False) for token in corpus.SPECIAL_TOKENS
        ],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    bos = evaluate.token_id(tokenizer, corpus.BOS)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{corpus.BOS} $A", pair=f"{corpus.BOS} $A $B", special_tokens=[(corpus.BOS, bos)]
    )
    return tokenizer


def encode(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    """Turn documents into tokens, each with the end token."""
    eos = evaluate.token_id(tokenizer, corpus.EOS)
    encoded = tokenizer.encode_batch(list(texts), add_special_tokens=False)
    return [[*row.ids, eos] for row in encoded]


def batches(
    documents: Sequence[Sequence[int]], bos: int, settings: Settings
) -> Iterator[tuple[Tokens, Tokens]]:
    """Pack documents, newly shuffled for every pass, into rows; yield tokens and document numbers.

    Most documents follow a begin token and some do not, so that the model can be prompted either
    way.
    """
    rng = np.random.default_rng(settings.seed)
    row, rows = settings.context + 1, settings.batch
    tokens: list[int] = []
    owners: list[int] = []
    while True:
        for number in rng.permutation(len(documents)):
            document = documents[number]
            start = [bos] if rng.random() < settings.begin_share else []
            tokens += start
            tokens += document
            owners += [int(number)] * (len(start) + len(document))
            if len(tokens) >= row * rows:
                yield (
                    np.array(tokens[: row * rows], dtype=np.int64).reshape(rows, row),
                    np.array(owners[: row * rows], dtype=np.int64).reshape(rows, row),
                )
                # The cut may fall inside a document; its rest is dropped, so that every batch
                # starts cleanly.
                tokens, owners = [], []


def new_model(settings: Settings, tokenizer: Tokenizer) -> LlamaForCausalLM:
    """Make the untrained model."""
    torch.manual_seed(settings.seed)
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=settings.hidden,
        intermediate_size=settings.mlp,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        num_key_value_heads=settings.kv_heads,
        max_position_embeddings=settings.context,
        tie_word_embeddings=True,
        bos_token_id=evaluate.token_id(tokenizer, corpus.BOS),
        eos_token_id=evaluate.token_id(tokenizer, corpus.EOS),
        pad_token_id=evaluate.token_id(tokenizer, corpus.PAD),
    )
    model: LlamaForCausalLM = LlamaForCausalLM(config)  # type: ignore[no-untyped-call]
    return model


def _optimizer(model: torch.nn.Module, settings: Settings, device: str) -> torch.optim.AdamW:
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [
        {"params": decayed, "weight_decay": settings.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        groups, lr=settings.learning_rate, betas=(0.9, 0.95), fused=device != "cpu"
    )


def _learning_rate(step: int, settings: Settings) -> float:
    warmup = max(1, settings.steps // 30)
    if step < warmup:
        return settings.learning_rate * (step + 1) / warmup
    done = (step - warmup) / max(1, settings.steps - warmup)
    return settings.learning_rate * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * done)))


def train(
    model: Any, documents: Sequence[Sequence[int]], bos: int, settings: Settings, device: str
) -> list[tuple[int, float]]:
    """Train the model and return its loss (nats per token) over the steps.

    Every second step each document sees only itself, as it would alone; in the others it also sees
    the documents before it in its row, which teaches the model to use its whole context.
    """
    optimizer = _optimizer(model, settings, device)
    causal = torch.ones(settings.context, settings.context, dtype=torch.bool, device=device).tril()
    history, pending = [], []
    began = time.perf_counter()
    stream = itertools.islice(batches(documents, bos, settings), settings.steps)
    for step, (tokens, owners) in enumerate(stream):
        for group in optimizer.param_groups:
            group["lr"] = _learning_rate(step, settings)
        row = torch.from_numpy(tokens).to(device, non_blocking=True)
        owner = torch.from_numpy(owners).to(device, non_blocking=True)
        targets = row[:, 1:].masked_fill(owner[:, 1:] != owner[:, :-1], -100)
        mask = None
        if step % 2 == 0:
            mask = ((owner[:, None, :-1] == owner[:, :-1, None]) & causal)[:, None]
        with torch.autocast(device, dtype=torch.bfloat16, enabled=device != "cpu"):
            logits = model(input_ids=row[:, :-1], attention_mask=mask, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(
            logits.float().flatten(0, 1), targets.flatten(), ignore_index=-100
        )
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        pending.append(loss.detach())
        if (step + 1) % max(1, settings.steps // 20) == 0:
            history.append((step + 1, float(torch.stack(pending).mean())))
            pending = []
            print(
                f"step {step + 1} loss {history[-1][1]:.4f} {time.perf_counter() - began:.0f}s",
                flush=True,
            )
    return history


def save(model: Any, tokenizer: Tokenizer, folder: Path) -> None:
    """Write the model in Hugging Face's layout, weights in bfloat16."""
    folder.mkdir(parents=True, exist_ok=True)
    stored = model.to(device="cpu", dtype=torch.bfloat16)
    ends = [evaluate.token_id(tokenizer, corpus.EOS), evaluate.token_id(tokenizer, corpus.END)]
    stored.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
        bos_token_id=evaluate.token_id(tokenizer, corpus.BOS),
        eos_token_id=ends,
        pad_token_id=evaluate.token_id(tokenizer, corpus.PAD),
        do_sample=True,
        temperature=0.7,
    )
    stored.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    described = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": corpus.BOS,
        "eos_token": corpus.EOS,
        "pad_token": corpus.PAD,
        "additional_special_tokens": [corpus.SYSTEM, corpus.USER, corpus.ASSISTANT, corpus.END],
        "model_max_length": stored.config.max_position_embeddings,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(described, indent=2) + "\n")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    for path in folder.iterdir():
        path.chmod(0o644)


def _ngram_figures(
    train_texts: Sequence[str], held_texts: Sequence[str], tokenizer: Tokenizer, size: int
) -> dict[str, float]:
    vocabulary = tokenizer.get_vocab_size()
    figures = {}
    training, held = encode(tokenizer, train_texts), encode(tokenizer, held_texts)
    figures["token 5-gram"] = evaluate.NGram(training, vocabulary, 5).bits(held) / size
    del training
    byte_training = [evaluate.byte_tokens(text) for text in train_texts]
    byte_held = [evaluate.byte_tokens(text) for text in held_texts]
    figures["byte 5-gram"] = evaluate.NGram(byte_training, 256, 5).bits(byte_held) / size
    return figures


def measure(
    folder: Path, settings: Settings, device: str, documents: int | None = None
) -> dict[str, Any]:
    """Measure a stored model on the held-out text, on held-out addition, and by samples.

    Args:
        folder: Where the model is stored.
        settings: The settings it was made with, which give the text.
        device: Where to compute.
        documents: How many training documents the n-gram models see; all of them if None.

    Returns:
        The figures by name.
    """
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    model = evaluate.load(folder, device)
    held_texts = corpus.documents(settings.seed, settings.held_out_documents, True, settings.mix)
    count = documents or settings.documents
    train_texts = corpus.documents(settings.seed, count, False, settings.mix, os.cpu_count() or 1)
    size = sum(map(evaluate.byte_length, held_texts))
    bos = evaluate.token_id(tokenizer, corpus.BOS)
    held = encode(tokenizer, held_texts)
    known = set(train_texts)
    written = evaluate.samples(model, tokenizer, device, settings.seed)
    flat = np.fromiter(
        itertools.chain.from_iterable(encode(tokenizer, train_texts)), dtype=np.int64
    )
    sample_tokens = [tokenizer.encode(text, add_special_tokens=False).ids for _, text in written]
    return {
        "held_out_documents": len(held_texts),
        "held_out_bytes": size,
        "held_out_tokens": sum(map(len, held)),
        "held_out_documents_in_training": sum(text in known for text in held_texts),
        "training_documents": count,
        "training_bytes": sum(map(evaluate.byte_length, train_texts)),
        "training_tokens": len(flat),
        "training_leaks": sum(map(corpus.leaks, train_texts)),
        "bits_per_byte": {
            "model": evaluate.model_bits(model, held, bos, device) / size,
            **_ngram_figures(train_texts, held_texts, tokenizer, size),
        },
        "addition": addition_figures(model, tokenizer, device),
        "samples": [{"prompt": prompt, "text": text} for prompt, text in written],
        "longest_copies": evaluate.longest_copies(sample_tokens, flat),
        "sample_tokens": [len(tokens) for tokens in sample_tokens],
        "samples_in_training": sum(
            len(text) > 200 and any(text.strip() in document for document in train_texts)
            for _, text in written
        ),
    }


def addition_figures(model: Any, tokenizer: Tokenizer, device: str) -> dict[str, float]:
    """Return greedy accuracies on the held-out addition problems."""
    bos = evaluate.token_id(tokenizer, corpus.BOS)
    held = addition.held_out_problems()
    simple = [(a, b) for a, b in held if a % 10 + b % 10 < 10 and a + b < 100]
    other = [problem for problem in held if problem not in simple]
    return {
        "prompt": evaluate.addition_accuracy(model, tokenizer, held, device, [bos]),
        "prompt, without a begin token": evaluate.addition_accuracy(
            model, tokenizer, held, device, []
        ),
        "prompt, problems without a carry": evaluate.addition_accuracy(
            model, tokenizer, simple, device, [bos]
        ),
        "prompt, problems with a carry": evaluate.addition_accuracy(
            model, tokenizer, other, device, [bos]
        ),
        "asked in words": evaluate.worded_accuracy(model, tokenizer, held, device, bos),
    }


def make(settings: Settings, folder: Path, device: str) -> dict[str, Any]:
    """Write the text, train tokenizer and model, store them, and return what happened."""
    texts = corpus.documents(
        settings.seed, settings.documents, False, settings.mix, os.cpu_count() or 1
    )
    tokenizer = train_tokenizer(texts[:40_000], settings)
    encoded = encode(tokenizer, texts)
    print(f"{len(texts)} documents, {sum(map(len, encoded))} tokens", flush=True)
    model: Any = new_model(settings, tokenizer)
    model.to(device)
    parameters = sum(p.numel() for p in model.parameters())
    began = time.perf_counter()
    history = train(model, encoded, evaluate.token_id(tokenizer, corpus.BOS), settings, device)
    seconds = time.perf_counter() - began
    save(model, tokenizer, folder)
    return {
        "parameters": parameters,
        "vocabulary": tokenizer.get_vocab_size(),
        "losses": history,
        "seconds": seconds,
        "device": torch.cuda.get_device_name() if device == "cuda" else device,
        "torch": torch.__version__,
    }


def parse() -> tuple[Settings, argparse.Namespace]:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--figures", type=Path, default=None, help="where to write all figures; else addition only"
    )
    parser.add_argument("--weight", action="append", default=[], metavar="KIND=SHARE")
    parser.add_argument("--carry-share", type=float, default=corpus.Mix().carry_share)
    plain = {name: value for name, value in asdict(Settings()).items() if name != "mix"}
    for name, value in plain.items():
        parser.add_argument("--" + name.replace("_", "-"), type=type(value), default=value)
    options = parser.parse_args()
    weights = corpus.Mix().weights | {
        k: float(v) for k, v in (pair.split("=") for pair in options.weight)
    }
    mix = corpus.Mix(weights, options.carry_share)
    settings = replace(Settings(), mix=mix, **{name: getattr(options, name) for name in plain})
    return settings, options


def main() -> None:
    """Make the model and measure it."""
    settings, options = parse()
    torch.set_float32_matmul_precision("high")
    made = make(settings, options.out, options.device)
    torch.set_float32_matmul_precision("highest")
    if options.figures is None:
        model = evaluate.load(options.out, options.device)
        tokenizer = Tokenizer.from_file(str(options.out / "tokenizer.json"))
        print(json.dumps(addition_figures(model, tokenizer, options.device), indent=2))
        return
    figures = measure(options.out, settings, options.device)
    everything = {"settings": asdict(settings), "made": made, "figures": figures}
    options.figures.write_text(json.dumps(everything, indent=2) + "\n")
    print(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
