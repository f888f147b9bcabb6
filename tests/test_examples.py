"""The examples: each is there, uses what everybody may use, runs as it stands, and fails when it
should."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import os
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TypeAlias

import pytest

import tinkex
from faulty import Answer, FaultyServer, faulty_server
from support import serving
from tinkex import metrics
from tinkex.engine.fake import FakeEngine

EXAMPLES = Path(__file__).parent.parent / "examples"
ROWS = (
    # sampling and tokenizing
    "sampling_basic",
    "kimi_k2_sampling_live",
    "live_capabilities_and_logprobs",
    "llama3_tokenizer_override_live",
    "async_client_creation",
    # training
    "training_loop",
    "custom_loss_training",
    "forward_inference",
    "adam_and_chunking_live",
    "structured_regularizers",
    "structured_regularizers_live",
    "save_weights_and_sample",
    "training_persistence_live",
    "multimodal_resume_and_cleanup",
    "model_info_and_unload",
    # sessions, checkpoints, weights
    "sessions_management",
    "checkpoints_management",
    "weights_inspection",
    "checkpoint_download",
    "checkpoint_multi_delete_live",
    "heartbeat_probe",
    # command line
    "cli_run_text",
    "cli_run_prompt_file",
    # telemetry, metrics, retry, queue
    "metrics_live",
    "telemetry_live",
    "telemetry_reporter_demo",
    "retry_and_capture",
    "queue_reasons_and_sampling_throttling",
    "queue_state_observer_demo",
    # recovery and files
    "recovery_simulated",
    "recovery_live_injected",
    "file_upload_multipart",
)
OPEN_MODULES = {
    "tinkex",
    "tinkex.cli",
    "tinkex.client.settings.config",
    "tinkex.client.http",
    "tinkex.client.http.limits",
    "tinkex.client.futures.queue_states",
    "tinkex.recovery",
    "tinkex.regularizers",
    "tinkex.client.http.retry",
    "tinkex.wire.json_values",
    "tinkex.types",
}
SKIPS = {"multimodal_resume_and_cleanup"}
KEY = "tml-abcdef-very-secret-123456"


def started(
    name: str, directory: Path, *, seconds: float = 60, **settings: str
) -> subprocess.CompletedProcess[str]:
    """Run an example in a process of its own, with nothing of ours in its environment but these
    settings."""
    kept = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("TINKER_", "TINKEX_"))
    }
    own = {"TINKEX_DATA_DIR": str(directory / "data"), "TMPDIR": str(directory)}
    return subprocess.run(
        [sys.executable, str(EXAMPLES / f"{name}.py")],
        capture_output=True,
        text=True,
        timeout=seconds,
        cwd=directory,
        env={**kept, **own, **settings},
        check=False,
    )


def module(name: str) -> ModuleType:
    """A module of the examples, which are no package."""
    spec = importlib.util.spec_from_file_location(f"examples_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = loaded
    spec.loader.exec_module(loaded)
    return loaded


# ── what they are ─────────────────────────────────────────────────────────────────────────────────


def imports_of(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """The module and the name of everything a script imports from tinkex."""
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.ImportFrom)
            and node.module
            and node.module.split(".")[0] == "tinkex"
        ):
            yield from ((node.module, alias.name) for alias in node.names)
        if isinstance(node, ast.Import):
            yield from (
                (alias.name, "") for alias in node.names if alias.name.split(".")[0] == "tinkex"
            )


def is_public(home: str, name: str) -> bool:
    if home not in OPEN_MODULES or name.startswith("_"):
        return False
    known = importlib.import_module(home)
    if not name or name in getattr(known, "__all__", ()):
        return True
    if home == "tinkex":  # a module that guides name
        return importlib.util.find_spec(f"tinkex.{name}") is not None
    return hasattr(known, name)


@pytest.mark.parametrize("name", [*ROWS, "common", "run_all"])
def test_examples_exist_explain_and_use_public_names(name: str) -> None:
    source = (EXAMPLES / f"{name}.py").read_text(encoding="utf-8")
    compile(source, name, "exec")
    tree = ast.parse(source)
    said = ast.get_docstring(tree) or ""
    assert len(said) > 60
    if name in ROWS:
        assert f"python examples/{name}.py" in said
        assert "proof(" in source
    for home, imported in imports_of(tree):
        assert is_public(home, imported), f"{home}.{imported} is not for everybody"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_"):
            own = isinstance(node.value, ast.Name) and node.value.id == "self"
            assert own or node.attr.endswith("__"), f"{node.attr} is private"


def test_all_examples_are_listed() -> None:
    found = {file.stem for file in EXAMPLES.glob("*.py")}
    assert found == {*ROWS, "common", "run_all"}
    order = module("run_all").ORDER
    assert sorted(order) == sorted(ROWS)
    assert order[0] == "sampling_basic"
    assert order[-1] == "model_info_and_unload"


def test_files_of_the_examples_exist() -> None:
    assert (EXAMPLES / "assets" / "sample_upload.bin").read_bytes() == b"hello\n"
    for name, side in (("pixel_1x1", 1), ("gradient_32x32", 32)):
        image = (EXAMPLES / "assets" / f"{name}.png").read_bytes()
        assert image.startswith(b"\x89PNG\r\n")
        assert [int.from_bytes(image[place : place + 4]) for place in (16, 20)] == [side, side]


# ── settings ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("said", "expected"), [("7", 7), (" 7 ", 7), ("many", 5), ("", 5), ("-1", 5), ("1.5", 5)]
)
def test_bad_whole_number_falls_back_to_the_default(
    said: str, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINKER_MAX_TOKENS", said)
    assert module("common").whole("TINKER_MAX_TOKENS", 5) == expected


@pytest.mark.parametrize(
    ("said", "expected"), [("0", 0), ("0.3", 0.3), ("hot", 0.7), ("nan", 0.7), ("-1", 0.7)]
)
def test_bad_number_falls_back_to_the_default(
    said: str, expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINKER_TEMPERATURE", said)
    assert module("common").number("TINKER_TEMPERATURE", 0.7) == expected


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, "local"),
        ({"TINKER_BASE_URL": "http://127.0.0.1:8000"}, "http://127.0.0.1:8000"),
        ({"TINKER_API_KEY": KEY}, None),  # the hosted service, which a client finds by itself
        ({"TINKER_BASE_URL": " ", "TINKER_API_KEY": ""}, "local"),
    ],
)
def test_examples_without_an_environment_stay_local(
    settings: dict[str, str], expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("TINKER_BASE_URL", "TINKER_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    assert expected == module("common").BASE_URL


# ── the runner ────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def runner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The runner over four small scripts of its own."""
    for name in ("TINKER_BASE_URL", "TINKER_API_KEY", "TINKER_TELEMETRY"):
        monkeypatch.delenv(name, raising=False)
    loaded = module("run_all")
    scripts = {
        "good": "print('well')",
        "bad": "import sys; sys.exit(3)",
        "multimodal_resume_and_cleanup": "print('[skipped] no eyes')",
        "lazy": "print('[skipped] no mood')",
    }
    for name, source in scripts.items():
        (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.setattr(loaded, "HERE", tmp_path)
    monkeypatch.setattr(loaded, "ORDER", tuple(scripts))
    return loaded


def ended(runner: ModuleType, monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["run_all.py", *words])
    status: int = runner.main()
    return status


def test_runner_stops_at_the_first_failure_with_its_status(
    runner: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ended(runner, monkeypatch) == 3
    shown = capsys.readouterr().out
    assert "well\n" in shown
    assert "<==" in shown
    assert "bad: status 3, 00:00" in shown
    assert "failed: bad, status 3" in shown
    assert "not run: 2" in shown
    assert "1 of 4 examples passed" in shown


def test_runner_continues_on_request(
    runner: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ended(runner, monkeypatch, "--keep-going") == 3
    shown = capsys.readouterr().out
    assert "3 of 4 examples passed" in shown
    assert "skipped in multimodal_resume_and_cleanup: no eyes" in shown


def test_known_skip_is_listed_and_unknown_skip_fails(
    runner: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ended(runner, monkeypatch, "good", "examples/multimodal_resume_and_cleanup.py") == 0
    assert "skipped in multimodal_resume_and_cleanup: no eyes" in capsys.readouterr().out
    assert ended(runner, monkeypatch, "--from", "multimodal_resume_and_cleanup") == 1
    assert "lazy should not have skipped anything" in capsys.readouterr().out


def test_runner_stops_hanging_examples_and_refuses_unknown_ones(
    runner: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (runner.HERE / "good.py").write_text("import time; time.sleep(60)")
    monkeypatch.setattr(runner, "MOST_SECONDS", 0.3)
    assert ended(runner, monkeypatch, "good") == runner.TIMED_OUT
    with pytest.raises(SystemExit):
        ended(runner, monkeypatch, "nothing")
    assert "there is no example 'nothing'" in capsys.readouterr().err


def test_runner_lists_the_examples(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ended(module("run_all"), monkeypatch, "--list") == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(ROWS)
    assert lines[0].split()[:4] == ["sampling_basic", "The", "first", "sample:"]


@pytest.mark.parametrize(("seconds", "said"), [(0.2, "00:00"), (65, "01:05"), (3_725, "01:02:05")])
def test_durations_are_written_as_a_clock_does(seconds: float, said: str) -> None:
    assert module("run_all").duration(seconds) == said


# ── they fail when what they show is not so ───────────────────────────────────────────────────────

TINY = {"supported_models": [{"model_name": "tinkex/tiny"}]}


@dataclass(frozen=True)
class Played:
    """Outcome of an example that was run in this process."""

    status: int
    shown: str
    said: str
    """What it ended with."""


Play: TypeAlias = Callable[..., Played]


@pytest.fixture
def play(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Play:
    """Runs an example in this process, which is quicker, with nothing of ours set but what is
    given."""

    def run(name: str, **settings: str) -> Played:
        for known in [known for known in os.environ if known.startswith(("TINKER_", "TINKEX_"))]:
            monkeypatch.delenv(known)
        for setting, value in settings.items():
            monkeypatch.setenv(setting, value)
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
        monkeypatch.syspath_prepend(str(EXAMPLES))
        metrics.configure()  # as in a program that has just begun
        capsys.readouterr()
        status, said = 0, ""
        try:
            runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
        except SystemExit as end:
            status, said = (1, end.code) if isinstance(end.code, str) else (int(end.code or 0), "")
        finally:
            sys.modules.pop("common", None)  # the next one reads its settings anew
        return Played(status, capsys.readouterr().out, said)

    return run


@pytest.fixture
def faulty() -> Iterator[FaultyServer]:
    """A server that offers the bundled model, and gives one sample of one token whatever is asked
    for."""
    with faulty_server() as server:
        server.script("get_server_capabilities", Answer(body=TINY))
        server.script("create_sampling_session", Answer(body={"sampling_session_id": "s:sample:0"}))
        server.script("asample", Answer(body={"request_id": "r"}))
        sample = {
            "type": "sample",
            "sequences": [{"stop_reason": "length", "tokens": [5], "logprobs": [-1.0]}],
        }
        server.script("retrieve_future", Answer(body=sample))
        yield server


def test_sampling_fails_when_samples_are_missing(faulty: FaultyServer, play: Play) -> None:
    assert play("sampling_basic", TINKER_BASE_URL=faulty.base_url).status == 0
    ended = play("sampling_basic", TINKER_BASE_URL=faulty.base_url, TINKER_NUM_SAMPLES="2")
    assert ended.status == 1
    assert ended.said == "[failed] this does not hold: as many samples as were asked for: 2"


def test_metrics_fail_when_a_request_did(faulty: FaultyServer, play: Play) -> None:
    # it knows no dynamic configuration
    ended = play("metrics_live", TINKER_BASE_URL=faulty.base_url)
    assert ended.status == 1
    assert ended.said == "[failed] this does not hold: all 7 requests succeeded"
    faulty.script("client/dynamic_config", Answer(body={}))
    assert play("metrics_live", TINKER_BASE_URL=faulty.base_url).status == 0


def test_server_error_gives_one_line_and_status_1(faulty: FaultyServer, play: Play) -> None:
    faulty.script("get_server_capabilities", Answer(401, {"detail": "who are you"}))
    ended = play("sampling_basic", TINKER_BASE_URL=faulty.base_url)
    assert ended.status == 1
    assert ended.said.startswith("[failed] [api_status (401)]")


def test_heartbeat_probe_fails_if_the_old_route_answers(faulty: FaultyServer, play: Play) -> None:
    assert play("heartbeat_probe", TINKER_BASE_URL=faulty.base_url).status == 0
    assert len(faulty.requests("heartbeat")) == 1  # a refusal is not tried again
    faulty.script("heartbeat", Answer(body={}))
    ended = play("heartbeat_probe", TINKER_BASE_URL=faulty.base_url)
    assert ended.status == 1
    assert "POST /api/v1/heartbeat         -> 200" in ended.shown


def test_unhealthy_server_is_no_proof(faulty: FaultyServer, play: Play) -> None:
    faulty.script("healthz", Answer(body={"status": "on fire"}))
    ended = play("live_capabilities_and_logprobs", TINKER_BASE_URL=faulty.base_url)
    assert ended.status == 1
    assert ended.said == "[failed] this does not hold: the server is healthy"


def test_server_that_cannot_unload_is_no_failure(faulty: FaultyServer, play: Play) -> None:
    faulty.script("retrieve_future", Answer(body={"model_id": "m"}))
    info = {"model_id": "m", "model_data": {"model_name": "tinkex/tiny", "arch": "small"}}
    faulty.script("get_info", Answer(body=info))
    ended = play("model_info_and_unload", TINKER_BASE_URL=faulty.base_url)
    assert ended.status == 0, ended
    assert "this server does not unload models: [api_status (404)]" in ended.shown
    faulty.script("unload_model", Answer(400, {"detail": "no"}))
    assert play("model_info_and_unload", TINKER_BASE_URL=faulty.base_url).status == 1


def test_form_is_sent_to_a_named_endpoint(faulty: FaultyServer, play: Play) -> None:
    where = {"TINKER_BASE_URL": faulty.base_url, "TINKER_UPLOAD_ENDPOINT": "/upload"}
    assert play("file_upload_multipart", **where).status == 1
    faulty.script("/upload", Answer(body={"took": "it"}))
    assert play("file_upload_multipart", **where).status == 0
    assert b'filename="sample_upload.bin"' in faulty.requests("/upload")[-1].body


def test_invalid_path_is_refused_with_an_explanation(faulty: FaultyServer, play: Play) -> None:
    ended = play(
        "checkpoint_download", TINKER_BASE_URL=faulty.base_url, TINKER_CHECKPOINT_PATH="models/mine"
    )
    assert ended.status == 1
    assert "TINKER_CHECKPOINT_PATH: 'models/mine' is not a checkpoint path" in ended.said


def test_samplers_of_checkpoints_must_all_come_about(faulty: FaultyServer, play: Play) -> None:
    paths = "tinker://r/sampler_weights/a, tinker://r/sampler_weights/b"
    where = {"TINKER_BASE_URL": faulty.base_url, "TINKER_CHECKPOINT_PATHS": paths}
    assert "2 of 2 succeeded" in play("async_client_creation", **where).shown
    created, refused = (
        Answer(body={"sampling_session_id": "s:sample:0"}),
        Answer(404, {"detail": "no such weights"}),
    )
    faulty.script("create_sampling_session", created, refused)
    ended = play("async_client_creation", **where)
    assert ended.status == 1
    assert "✗ tinker://r/sampler_weights/" in ended.shown


@pytest.mark.covers("Q-28")
def test_example_without_its_model_is_skipped(faulty: FaultyServer, play: Play) -> None:
    ended = play("kimi_k2_sampling_live", TINKER_BASE_URL=faulty.base_url)
    assert ended.status == 0
    assert (
        ended.shown.strip()
        == "[skipped] moonshotai/Kimi-K2-Thinking is not among the models of this server"
    )
    assert not faulty.requests("create_sampling_session")


@pytest.mark.covers("Q-28")
def test_example_without_its_tokenizer_stops(
    faulty: FaultyServer, play: Play, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # so it is given a try
    faulty.script("get_server_capabilities", Answer(500, headers={"x-should-retry": "false"}))
    monkeypatch.setenv("HF_ENDPOINT", faulty.base_url)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    ended = play("kimi_k2_sampling_live", TINKER_BASE_URL=faulty.base_url)
    assert ended.status == 0, ended
    assert "trying anyway" in ended.shown
    assert "[skipped] the tokenizer of moonshotai/Kimi-K2-Thinking cannot be had: " in ended.shown
    assert not faulty.requests("create_sampling_session")


@pytest.mark.covers("Q-23")
def test_key_is_passed_on_and_not_printed(faulty: FaultyServer, play: Play) -> None:
    faulty.script("create_sampling_session", Answer(400, {"detail": "no"}))
    ended = play("cli_run_text", TINKER_BASE_URL=faulty.base_url, TINKER_API_KEY=KEY)
    assert (ended.status, ended.said) == (1, "[failed] this does not hold: the command succeeded")
    assert KEY not in ended.shown
    assert "'--api-key' 'tml-ab...3456'" in ended.shown
    assert faulty.requests("create_sampling_session")[-1].headers["x-api-key"] == KEY


def test_command_line_takes_token_ids_from_a_file(faulty: FaultyServer, play: Play) -> None:
    ended = play("cli_run_prompt_file", TINKER_BASE_URL=faulty.base_url, TINKER_PROMPT_TOKENS="5,6")
    assert ended.status == 0, ended
    assert '"tokens": [5]' in ended.shown
    assert faulty.requests("asample")[-1].json["prompt"]["chunks"][0]["tokens"] == [5, 6]


@pytest.mark.covers("Q-29")
def test_checkpoint_that_was_deleted_since_is_looked_for_in_the_list(
    tmp_path: Path, play: Play
) -> None:
    remembered = tmp_path / "tinkex_checkpoints" / "default.path"
    remembered.parent.mkdir()
    with (
        serving(FakeEngine(), tmp_path / "server") as url,
        tinkex.ServiceClient(base_url=url) as service,
    ):
        client = service.create_lora_training_client("fake", rank=4).result()
        stale, there = (client.save_state(name).result(20).path for name in ("stale", "there"))
        with tinkex.RestClient(base_url=url) as rest:
            rest.delete_checkpoint_from_tinker_path(stale).result(20)
        remembered.write_text(stale)
        ended = play("multimodal_resume_and_cleanup", TINKER_BASE_URL=url)
    assert ended.status == 0, ended
    assert f"cannot resume from {stale}" in ended.shown
    assert f"resumed from {there}" in ended.shown
    assert remembered.read_text() == there


# ── all of them, as they stand ────────────────────────────────────────────────────────────────────

SHOWN = {
    "sampling_basic": "Sample 1: ",
    "kimi_k2_sampling_live": "round trip: 'Say hi'",
    "training_loop": "/sampler_weights/sampler-weights",
    "custom_loss_training": "custom_perplexity: ",
    "adam_and_chunking_live": "[1024, 1]",
    "structured_regularizers": "1.3016",
    "checkpoint_multi_delete_live": "deleted 2, failed 0",
    "model_info_and_unload": "tokenizer id tinkex/tiny",
    "retry_and_capture": "retry in 400 ms",
    "telemetry_reporter_demo": "drained: true",
    "recovery_simulated": "recovered from tinker://run-simulated/weights/0001",
    "file_upload_multipart": "the file keeps its name: sample_upload.bin",
}


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ROWS)
def test_every_example_runs_without_an_environment(name: str, tmp_path: Path) -> None:
    done = started(name, tmp_path, seconds=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "[proof] " in done.stdout
    assert "Traceback" not in done.stdout + done.stderr
    assert "Warning" not in done.stderr
    assert ("[skipped] " in done.stdout) == (name in SKIPS)
    assert SHOWN.get(name, "[proof] ") in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_example_samples_its_own_weights_on_request(tmp_path: Path) -> None:
    done = started(
        "training_loop",
        tmp_path,
        seconds=240,
        TINKER_SAMPLE_AFTER_TRAIN="1",
        TINKER_PROMPT="A story",
    )
    assert done.returncode == 0, done.stderr
    assert "Sample 1: " in done.stdout
