"""Writes the model card of the bundled model from the figures of `train.py` and the results of
`teach.py`.

Run ``PYTHONPATH=src python -m tools.tiny.card --figures figures.json --taught taught.json --out
README.md``.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from tinkex.models import addition

_HEAD = """\
---
license: apache-2.0
language: en
library_name: transformers
pipeline_tag: text-generation
---

# tinkex/tiny

A small language model that ships with tinkex, so that training, sampling and reinforcement learning
can be tried and tested without a download. It tells short stories of a made-up world, answers easy
questions about them, and does some arithmetic. It knows nothing of the real world beyond a few
plain facts and is of no use as an assistant.

- Architecture: Llama (RMSNorm, rotary positions, SwiGLU, grouped-query attention, tied embeddings)
- Parameters: {parameters:,}, stored as bfloat16
- {layers} layers, hidden size {hidden}, {heads} heads ({kv_heads} key-value heads), feed-forward
  size {mlp}
- Context: {context} tokens
- Tokenizer: byte-level BPE, {vocabulary:,} tokens; every digit and every line break is a token of
  its own
- Licence: Apache-2.0, the text included
- Made: {date}

## Text

All text is written by `tools/tiny/corpus.py`, from word lists, plots and facts that are part of
this repository; no other text was used. It has short stories, questions and answers about stories
and about the facts of a made-up valley, chats in the model's chat format, and arithmetic of small
numbers: sums in words, worked step by step, told as stories, and in bare notation.

| Text | Documents | Bytes | Tokens |
| --- | ---: | ---: | ---: |
| training | {training_documents:,} | {training_bytes:,} | {training_tokens:,} |
| held out | {held_out_documents:,} | {held_out_bytes:,} | {held_out_tokens:,} |

Shares of the documents: {shares}.

The held-out text uses combinations of templates and entities that the training text never has,
chosen by a hash of the combination. Documents of the held-out text that the training text also has:
{held_out_documents_in_training}.

### Arithmetic

`tinkex.models.addition` defines the task of adding two two-digit numbers and its held-out split: a
hash of the unordered pair holds out {held_problems} of the 8,100 ordered problems. The training
text only adds, subtracts or compares the numbers of the other pairs, in any wording; a search for
neighbouring numbers of a held-out pair that their sum follows finds {training_leaks} documents. In
words, worked and told as stories, the training text has sums of every kind. In the task's own
notation, `37+45=`, {bare}. The ability is thus there, but the model does not show it when it is
asked in that notation, which is what makes it a good pupil for the demo.

## Training

```sh
PYTHONPATH=src python -m tools.tiny.train --out src/tinkex/models/tiny --figures figures.json
PYTHONPATH=src python -m tools.tiny.teach --model src/tinkex/models/tiny --seeds 3 --log taught.json
PYTHONPATH=src python -m tools.tiny.card --figures figures.json --taught taught.json
```

Seed {seed} for text, weights and order; {steps:,} steps of {batch} rows of {context} tokens, AdamW
(0.9, 0.95, weight decay {weight_decay}), peak learning rate {learning_rate}, cosine schedule,
bfloat16 autocast; {seconds:.0f} s on {device} with torch {torch}.

Training loss (nats per token, mean since the step before):

| Step | Loss |
| ---: | ---: |
{losses}

## Figures

Bits per byte on the held-out text (special tokens counted as one byte, end tokens included), of the
stored bfloat16 weights and of n-gram models with modified Kneser-Ney smoothing, counted on the same
training text:

| Model | Bits per byte |
| --- | ---: |
{bits}

Greedy accuracy on the {held_problems} held-out addition problems:

| Form | Accuracy |
| --- | ---: |
{addition}

## Teaching

A rehearsal in plain PyTorch on two CPU cores (`tools/tiny/teach.py`): LoRA of rank {teach_rank} and
scale 1 on all linear layers of the blocks; {teach_steps} supervised steps of {teach_batch} problems
at a learning rate of {teach_learning_rate}; then {teach_rl_steps} steps of reinforcement learning
({teach_rl_prompts} problems with {teach_rl_group} samples each, temperature {teach_rl_temperature},
learning rate {teach_rl_learning_rate}, reward 1 for a right answer less the mean of its group),
with training problems only. Greedy accuracy on the held-out problems:

| Seed | Base | After supervised | After reinforcement |
| ---: | ---: | ---: | ---: |
{taught}

## Samples

Drawn at temperature 0.7 from the stored weights, one for each prompt, not picked. `{{begin}}` is
the begin token alone. Samples longer than 200 characters that are part of a training document:
{samples_in_training}.
"""


def _rows(pairs: list[tuple[str, str]]) -> str:
    return "\n".join(f"| {left} | {right} |" for left, right in pairs)


def _samples(figures: dict[str, Any]) -> str:
    parts = []
    triples = zip(
        figures["samples"], figures["sample_tokens"], figures["longest_copies"], strict=True
    )
    for sample, size, copied in triples:
        prompt = sample["prompt"] or "{begin}"
        parts.append(
            f"Prompt:\n\n```text\n{prompt}\n```\n\nText ({size} tokens; longest run shared with "
            "the training text: at "
            f"least {copied} tokens):\n\n```text\n{sample['text'].strip()}\n```\n"
        )
    return "\n".join(parts)


def write(everything: dict[str, Any], taught: dict[str, Any], date: str) -> str:
    """Write the card.

    Args:
        everything: The figures file of `train.py`.
        taught: The log file of `teach.py`.
        date: Year and month to name.

    Returns:
        The card as Markdown.
    """
    settings, made, figures = everything["settings"], everything["made"], everything["figures"]
    weights, carry = settings["mix"]["weights"], settings["mix"]["carry_share"]
    total = sum(weights.values())
    bare = (
        "it has only sums without a carry"
        if carry == 0
        else f"all but {carry:.0%} are sums without a carry"
    )
    values = (
        settings
        | made
        | figures
        | {f"teach_{name}": value for name, value in taught["recipe"].items()}
    )
    values |= {
        "shares": ", ".join(
            f"{kind.replace('_', ' ')} {share / total:.1%}" for kind, share in weights.items()
        ),
        "bare": bare,
        "date": date,
        "held_problems": len(addition.held_out_problems()),
        "losses": _rows([(f"{step:,}", f"{loss:.3f}") for step, loss in made["losses"]]),
        "bits": _rows([(name, f"{value:.3f}") for name, value in figures["bits_per_byte"].items()]),
        "addition": _rows([(name, f"{value:.1%}") for name, value in figures["addition"].items()]),
        "taught": "\n".join(
            f"| {t['seed']} | {t['base']:.1%} | {t['supervised']:.1%} | {t['reinforced']:.1%} |"
            for t in taught["results"]
        ),
    }
    return _HEAD.format(**values) + "\n" + _samples(figures)


def main() -> None:
    """Read the files and write the card."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--figures", type=Path, required=True)
    parser.add_argument("--taught", type=Path, required=True)
    parser.add_argument("--date", default="2026-11")
    parser.add_argument("--out", type=Path, default=Path("src/tinkex/models/tiny/README.md"))
    options = parser.parse_args()
    everything, taught = (
        json.loads(path.read_text()) for path in (options.figures, options.taught)
    )
    options.out.write_text(write(everything, taught, options.date))


if __name__ == "__main__":
    main()
