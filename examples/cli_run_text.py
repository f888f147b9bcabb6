"""The command line from a program: `tinkex run` with a prompt.

Run it:  python examples/cli_run_text.py Settings: TINKER_PROMPT, TINKER_MAX_TOKENS (64),
TINKER_TEMPERATURE (0.7), TINKER_NUM_SAMPLES (1); where to go: see common.py. The key, if there is
one, is passed on and never printed in full.
"""

import common

from tinkex.cli import run

PROMPT = common.text("TINKER_PROMPT", "Hello from the CLI runner")
NUM_SAMPLES = common.whole("TINKER_NUM_SAMPLES", 1)


def main() -> None:
    """Run the command, and look at what it returns."""
    model = common.base_model()
    words = ["run", "--base-model", model, "--prompt", PROMPT]
    words += ["--max-tokens", str(common.whole("TINKER_MAX_TOKENS", 64))]
    words += ["--temperature", str(common.number("TINKER_TEMPERATURE", 0.7))]
    words += ["--num-samples", str(NUM_SAMPLES), *common.connection_options()]

    common.section("Arguments")
    print(" ".join(map(repr, common.masked(words))))
    common.section("What the command prints")
    result = run(words)
    common.section("What it returns")
    print(
        f"command {result.command!r}, exit code {result.exit_code}, response "
        f"{type(result.response).__name__}"
    )
    common.proof(result.ok, "the command succeeded")
    common.proof(
        len(result.response.sequences) == NUM_SAMPLES,
        f"{NUM_SAMPLES} sample(s), as an object to go on with",
    )


if __name__ == "__main__":
    common.run(main)
