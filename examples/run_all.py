"""Run the examples one after the other, each in a process of its own.

    python examples/run_all.py                     all of them, each with its own backend
    python examples/run_all.py sampling_basic      only those named
    python examples/run_all.py --from metrics_live --keep-going
    python examples/run_all.py --list              list them

It stops at the first example that fails, with that example's status, unless told to continue. It
lists skipped parts at the end; an unexpected skip is a failure. With TINKER_BASE_URL and
TINKER_API_KEY the examples run on a server; without, their files go into a directory that is
removed afterwards.
"""

import argparse
import ast
import os
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
ORDER = (
    "sampling_basic",
    "training_loop",
    "custom_loss_training",
    "forward_inference",
    "adam_and_chunking_live",
    "structured_regularizers",
    "structured_regularizers_live",
    "save_weights_and_sample",
    "training_persistence_live",
    "async_client_creation",
    "kimi_k2_sampling_live",
    "llama3_tokenizer_override_live",
    "live_capabilities_and_logprobs",
    "sessions_management",
    "checkpoints_management",
    "weights_inspection",
    "checkpoint_download",
    "checkpoint_multi_delete_live",
    # after the one above: it must not mind that its checkpoint was deleted
    "multimodal_resume_and_cleanup",
    "cli_run_text",
    "cli_run_prompt_file",
    "metrics_live",
    "telemetry_live",
    "telemetry_reporter_demo",
    "retry_and_capture",
    "queue_reasons_and_sampling_throttling",
    "queue_state_observer_demo",
    "recovery_simulated",
    "recovery_live_injected",
    "file_upload_multipart",
    "heartbeat_probe",
    "model_info_and_unload",  # last: some servers cannot unload
)
MOST_SECONDS = 300
TIMED_OUT = 124


@dataclass
class Outcome:
    """How an example ended."""

    name: str
    status: int
    seconds: float
    skips: list[str] = field(default_factory=list)


def known_skips() -> set[str]:
    """Which examples may skip something: what the server at hand cannot have, or the environment
    has switched off.
    """
    skips = {"multimodal_resume_and_cleanup"}
    if (
        os.environ.get("TINKER_BASE_URL", "").strip()
        or os.environ.get("TINKER_API_KEY", "").strip()
    ):
        skips.add("kimi_k2_sampling_live")
    if os.environ.get("TINKER_TELEMETRY", "").strip().lower() in {"0", "false", "no", "off"}:
        skips.add("telemetry_live")
    return skips


def summary(name: str) -> str:
    """What an example shows: the first line of what it says about itself."""
    said = ast.get_docstring(ast.parse((HERE / f"{name}.py").read_text(encoding="utf-8"))) or ""
    return said.partition("\n")[0]


def duration(seconds: float) -> str:
    """A duration as MM:SS, or HH:MM:SS from an hour on."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02}:{minutes:02}:{rest:02}" if hours else f"{minutes:02}:{rest:02}"


def run_one(name: str, environment: dict[str, str]) -> Outcome:
    """Run an example, showing its output as it comes."""
    began, late = time.monotonic(), threading.Event()
    print(f"==> {time.strftime('%H:%M:%S')} {name}", flush=True)
    command = [sys.executable, "-u", str(HERE / f"{name}.py")]
    skips = []
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        encoding="utf-8",
        errors="replace",
        env={**environment, "PYTHONIOENCODING": "utf-8"},
    ) as process:

        def stop() -> None:
            late.set()
            process.kill()

        timer = threading.Timer(MOST_SECONDS, stop)
        timer.start()
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            if line.startswith("[skipped] "):
                skips.append(line.removeprefix("[skipped] ").strip())
        status = process.wait()
        timer.cancel()
    seconds = time.monotonic() - began
    if late.is_set():
        print(f"{name} was stopped after {MOST_SECONDS} s", flush=True)
        status = TIMED_OUT
    print(
        f"<== {time.strftime('%H:%M:%S')} {name}: status {status}, {duration(seconds)}\n",
        flush=True,
    )
    return Outcome(name, status, seconds, skips)


def run_all(names: list[str], keep_going: bool, environment: dict[str, str]) -> list[Outcome]:
    """Run examples in order, up to the first that fails unless told to keep going."""
    outcomes: list[Outcome] = []
    for name in names:
        outcomes.append(run_one(name, environment))
        if outcomes[-1].status and not keep_going:
            break
    return outcomes


def conclude(outcomes: list[Outcome], count: int) -> int:
    """Print the summary; the status to end with."""
    failed = [outcome for outcome in outcomes if outcome.status]
    skipped = [outcome for outcome in outcomes if outcome.skips]
    unexpected = [outcome.name for outcome in skipped if outcome.name not in known_skips()]
    for outcome in skipped:
        for reason in outcome.skips:
            print(f"skipped in {outcome.name}: {reason}")
    for name in unexpected:
        print(f"{name} should not have skipped anything")
    for outcome in failed:
        print(f"failed: {outcome.name}, status {outcome.status}")
    if len(outcomes) < count:
        print(f"not run: {count - len(outcomes)}")
    took = duration(sum(outcome.seconds for outcome in outcomes))
    print(f"{len(outcomes) - len(failed)} of {count} examples passed in {took}")
    if failed:
        return failed[0].status if failed[0].status > 0 else 1
    return 1 if unexpected else 0


def main() -> int:
    """Read the command line and run what it asks for."""
    parser = argparse.ArgumentParser(description="Run the examples, each in a process of its own.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="which examples; all by default")
    parser.add_argument(
        "--from", dest="first", choices=ORDER, metavar="NAME", help="begin with this one"
    )
    parser.add_argument(
        "--keep-going", action="store_true", help="go on after an example that failed"
    )
    parser.add_argument(
        "--list", action="store_true", help="say what there is, in order, and run nothing"
    )
    options = parser.parse_args()
    wanted = [name.removesuffix(".py").rpartition("/")[2] for name in options.names]
    if unknown := [name for name in wanted if name not in ORDER]:
        parser.error(f"there is no example {unknown[0]!r}; --list shows them all")
    names = list(ORDER[ORDER.index(options.first) if options.first else 0 :])
    names = [name for name in names if not wanted or name in wanted]
    if options.list:
        for name in names:
            print(f"{name:<40}{summary(name)}")
        return 0
    with tempfile.TemporaryDirectory(prefix="tinkex-examples-") as scratch:
        environment = {"TINKEX_DATA_DIR": scratch, **os.environ, "TMPDIR": scratch}
        return conclude(run_all(names, options.keep_going, environment), len(names))


if __name__ == "__main__":
    sys.exit(main())
