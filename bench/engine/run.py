"""All subjects on identical work, one process each, and the ratios between them.

    python bench/engine/run.py                                  # a CPU: 135M-shaped, float32
    python bench/engine/run.py --shape 8b --device cuda         # a GPU: 8B-shaped, bfloat16
    python bench/engine/run.py --shape 0.6b --device cuda

Subjects: the machine's limits, tinkex as a whole stack (client, server, engine) and its engine
alone, transformers with peft, transformers' generate and, on a GPU, its continuous batching. One
that is not installed is left out, and said so.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).parent
ROWS = {"cpu": ["1", "8", "32"], "cuda": ["1", "64", "256"]}
TRAINING = {
    "cpu": ["--tokens", "4096", "--longest", "512"],
    "cuda": ["--tokens", "65536", "--longest", "2048"],
}


def subject(title: str, program: str, *options: str) -> list[str]:
    """Run one, show what it prints, and give its lines."""
    print(f"── {title}", flush=True)
    lines: list[str] = []
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(HERE.parents[1] / "src"), *_path()]),
    }
    with subprocess.Popen(
        [sys.executable, str(HERE / program), *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if ("/s" in line and "site-packages" not in line) or "whole stack" in line:
                print("  ", line.rstrip(), flush=True)
            lines.append(line)
    if process.returncode:
        print(
            "   left out:", lines[-1].strip() if lines else f"exit {process.returncode}", flush=True
        )
        return []
    return lines


def _path() -> list[str]:
    return [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]


def rate(lines: Sequence[str], pattern: str) -> float | None:
    """The tokens a second of the line that begins so."""
    for line in lines:
        if re.match(pattern, line.strip()) and (found := re.search(r"([\d.]+) tok/s", line)):
            return float(found[1])
    return None


def peak(lines: Sequence[str], pattern: str) -> float | None:
    """The peak memory of that line, in GB."""
    for line in lines:
        if re.match(pattern, line.strip()) and (found := re.search(r"peak +([\d.]+) GB", line)):
            return float(found[1])
    return None


def ratio(what: str, one: float | None, other: float | None) -> None:
    """Print a ratio, if both are known."""
    if one is not None and other:
        print(f"   {what:68} {one:10.1f} / {other:10.1f} = {one / other:.2f}")


def main() -> None:
    """Run them all."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="135m", choices=["135m", "0.6b", "8b"])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--rounds", default="3")
    given = parser.parse_args()
    where = ["--shape", given.shape, "--device", given.device]
    rows, work = ROWS[given.device], TRAINING[given.device]
    rounds = ["--rounds", given.rounds]
    limits = subject("limits of the machine", "limits.py", *where, "--rows", *rows)
    stack = subject("tinkex, whole stack", "stack.py", *where, *work, "--rows", *rows, *rounds)
    train = subject(
        "tinkex, engine alone: training", "train.py", *where, *work, "--adapters", "1", "8", *rounds
    )
    decode = subject(
        "tinkex, engine alone: decoding",
        "decode.py",
        *where,
        "--rows",
        *rows,
        "--only",
        "ours",
        *rounds,
    )
    # of eight long ones, the logits alone do not fit a GPU
    batch = "8" if given.device == "cpu" else "4"
    peft = subject(
        "transformers + peft", "train.py", *where, *work, "--peft", "--batch", batch, *rounds
    )
    generate = subject(
        "transformers generate", "decode.py", *where, "--rows", *rows, "--only", "theirs", *rounds
    )
    print("── ratios")
    whole = rate(stack, "whole stack")
    ratio("training, whole stack / peft", whole, rate(peft, "transformers"))
    ratio("training, whole stack / products alone", whole, rate(limits, "products of training"))
    ratio(
        "training, 8 adapters / one, engine alone",
        rate(train, "tinkex,  8"),
        rate(train, "tinkex,  1"),
    )
    ratio("peak memory, engine / peft (GB)", peak(train, "tinkex,  1"), peak(peft, "transformers"))
    for count in rows:
        ours = rate(decode, rf"ours, one job +{count} samples")
        ratio(
            f"decoding {count}, engine / generate",
            ours,
            rate(generate, rf"transformers generate +{count} "),
        )
        ratio(
            f"decoding {count}, engine / products",
            ours,
            rate(limits, rf"products of a decoding step, {count} "),
        )
        batched = rate(generate, rf"transformers continuous batching +{count} ")
        ratio(f"decoding {count}, engine / continuous batching", ours, batched)
        prompts = rate(stack, rf"{count} (samples|jobs)")
        ratio(f"decoding {count}, whole stack with prompts / engine", prompts, ours)


if __name__ == "__main__":
    main()
