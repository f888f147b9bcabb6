"""How long the command line takes for what should be instant: help, completion, lists. CPU seconds,
medians.

Run `python bench/cli.py [REPEATS]`. Every measurement is a fresh process with the bytecode cached.
"""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
import tempfile

DATA = tempfile.TemporaryDirectory(prefix="tinkex-bench-")
START = "from tinkex.cli.main import main; main()"
CASES: dict[str, tuple[list[str], dict[str, str]]] = {
    "python alone": ([], {}),
    "--help": (["--help"], {}),
    "run --help": (["run", "--help"], {}),
    "checkpoint --help": (["checkpoint", "--help"], {}),
    "serve --help": (["serve", "--help"], {}),
    "train --help": (["train", "--help"], {}),
    "version --json": (["version", "--json"], {}),
    "model list, here": (["model", "list", "--base-url", "local"], {}),
    "checkpoint list, here": (["checkpoint", "list", "--base-url", "local"], {}),
    "completion bash": (["completion", "bash"], {}),
    "complete `tinkex `": ([], {"COMP_WORDS": "tinkex ", "COMP_CWORD": "1"}),
    "complete `tinkex checkpoint `": ([], {"COMP_WORDS": "tinkex checkpoint ", "COMP_CWORD": "2"}),
    "complete `tinkex run --`": ([], {"COMP_WORDS": "tinkex run --", "COMP_CWORD": "2"}),
}


def cpu_seconds(words: list[str], environment: dict[str, str], *, bare: bool) -> float:
    """The CPU time of one process."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    given = dict(os.environ) | environment
    given["TINKEX_DATA_DIR"] = DATA.name
    if environment:
        given["_TINKEX_COMPLETE"] = "bash_complete"
    code = "pass" if bare else START
    subprocess.run([sys.executable, "-c", code, *words], env=given, capture_output=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    """Print a table."""
    repeats = int(sys.argv[1]) if len(sys.argv) > 1 else 15
    print(f"{'':32}{'median s':>10}{'worst s':>10}")
    for name, (words, environment) in CASES.items():
        bare = name == "python alone"
        times = [cpu_seconds(words, environment, bare=bare) for _ in range(repeats)]
        print(f"{name:32}{statistics.median(times):>10.3f}{max(times):>10.3f}")


if __name__ == "__main__":
    main()
