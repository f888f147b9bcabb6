"""The command line from a program: a prompt from a file, samples into a file, as JSON.

Run it:  python examples/cli_run_prompt_file.py Settings: TINKER_PROMPT, or TINKER_PROMPT_TOKENS
(token ids, comma-separated) in its place; where to go: see common.py.
"""

import json
import tempfile
from pathlib import Path

import common

from tinkex.cli import run

PROMPT = common.text("TINKER_PROMPT", "Hello from a prompt file")


def prompt_text() -> str:
    """What goes into the prompt file: text, or a JSON list of token ids."""
    parts = [part.strip() for part in common.text("TINKER_PROMPT_TOKENS").split(",")]
    return (
        json.dumps([int(part) for part in parts])
        if all(part.isdecimal() for part in parts)
        else PROMPT
    )


def main() -> None:
    """Write a prompt, sample, and read the samples."""
    model = common.base_model()
    with tempfile.TemporaryDirectory(prefix="tinkex-") as directory:
        prompt, output = Path(directory, "prompt.txt"), Path(directory, "samples.json")
        prompt.write_text(prompt_text(), encoding="utf-8")
        print(f"prompt file {prompt}: {prompt.read_text()!r}")
        words = ["run", "--base-model", model, "--prompt-file", str(prompt), "--max-tokens", "32"]
        words += ["--json", "--output", str(output), *common.connection_options()]
        result = run(words)
        common.proof(result.ok, "the command succeeded")
        written = output.read_text(encoding="utf-8")
    print(f"output file {output}:\n{written}")
    samples = json.loads(written)
    common.proof(
        samples["sequences"] and samples["sequences"][0]["tokens"],
        "the file is JSON, and has sequences",
    )
    common.proof(samples == result.data, "the program gets the same data back")


if __name__ == "__main__":
    common.run(main)
