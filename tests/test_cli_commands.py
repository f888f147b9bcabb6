"""Each command on a real server over the fake engine, and on one that fails."""

from __future__ import annotations

import csv
import errno
import io
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import tinkex
from faulty import Answer, FaultyServer, Seen, faulty_server
from support import Wire, serving
from tinkex.cli import run
from tinkex.cli.commands import COMMANDS
from tinkex.cli.main import cli, main
from tinkex.cli.options import Connection
from tinkex.cli.output import Result, size
from tinkex.client.settings.config import HOSTED_URL
from tinkex.engine.api import BaseModel
from tinkex.engine.fake import FakeEngine

MODEL = "tinkex/tiny"  # its tokenizer is bundled, so that text can be sampled without its weights


@dataclass
class Shown:
    """Output and exit status of a command."""

    result: Result
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def code(self) -> int:
        return self.result.exit_code


Command = Callable[..., Shown]


@pytest.fixture
def command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Command:
    """Runs a command in this process."""
    monkeypatch.setenv("HOME", str(tmp_path))

    def call(*words: str) -> Shown:
        capsys.readouterr()
        result = run(words)
        shown = capsys.readouterr()
        return Shown(result, shown.out, shown.err)

    return call


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server over the fake engine."""
    models = (BaseModel(MODEL, 64, 1024, "fake"), BaseModel("other/Model", 64, 256, "fake"))
    with serving(FakeEngine(models), tmp_path_factory.mktemp("data")) as address:
        yield address


@pytest.fixture
def here(url: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Put that server into the environment."""
    monkeypatch.setenv("TINKER_BASE_URL", url)
    return url


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyServer]:
    """A server that fails as told, in the environment."""
    with faulty_server() as server:
        monkeypatch.setenv("TINKER_BASE_URL", server.base_url)
        yield server


@pytest.fixture(scope="module")
def run_id(url: str) -> str:
    """A run with two training checkpoints and one to sample from."""
    with tinkex.ServiceClient(base_url=url) as service:
        client = service.create_lora_training_client(
            MODEL, rank=4, user_metadata={"who": "ada"}
        ).result()
        for name in ("one", "two"):
            client.save_state(name).result()
        client.save_weights_for_sampler("three").result()
        return client.model_id


# ── in general ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.covers("1.16.1")
@pytest.mark.parametrize("words", [(), ("-h",), ("--help",)])
def test_help_is_shown_on_request_and_without_a_command(
    command: Command, words: tuple[str, ...]
) -> None:
    shown = command(*words)
    assert (shown.code, shown.err) == (0, "")
    assert shown.out.startswith("Usage: tinkex ")
    for name in COMMANDS:
        assert f"  {name} " in shown.out


def paths(group: Any, prefix: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Every command there is."""
    context = cli.make_context("tinkex", ["version"], resilient_parsing=True)
    for name in group.list_commands(context):
        found = group.get_command(context, name)
        yield (*prefix, name)
        if hasattr(found, "list_commands"):
            yield from paths(found, (*prefix, name))


@pytest.mark.covers("1.16.1")
def test_every_command_has_help(command: Command) -> None:
    found = list(paths(cli))
    assert ("checkpoint", "set-ttl") in found
    assert len(found) > 35
    for words in found:
        for form in ("-h", "--help"):
            shown = command(*words, form)
            assert shown.code == 0
            assert shown.out.startswith(f"Usage: tinkex {' '.join(words)}")


@pytest.mark.covers("1.16.1")
@pytest.mark.parametrize(
    ("words", "usage", "error"),
    [
        (("nothing",), "tinkex", "No such command 'nothing'"),
        (("run", "nothing"), "tinkex run", "No such command 'nothing'"),
        (
            ("chekpoint", "list"),
            "tinkex",
            "No such command 'chekpoint'. Did you mean 'checkpoint'?",
        ),
        (("checkpoint", "lst"), "tinkex checkpoint", "Did you mean 'list'?"),
        (("run", "list", "--nothing"), "tinkex run list", "--nothing"),
        (("run", "list", "--limit", "many"), "tinkex run list", "'many' is not a valid integer"),
        (("run", "list", "one", "two"), "tinkex run list", "(one two)"),
        (
            ("run", "list", "--format", "xml"),
            "tinkex run list",
            "'xml' is not one of 'table', 'json'",
        ),
        (("run", "list", "--access-scope", "all"), "tinkex run list", "'all' is not one of"),
        (("checkpoint", "info"), "tinkex checkpoint info", "Missing argument 'PATH'"),
        (("run", "info"), "tinkex run info", "Missing argument 'RUN_ID'"),
        (
            ("checkpoint", "--output", "x", "list"),
            "tinkex checkpoint",
            "--output has no effect in front of",
        ),
        (("-f", "json", "serve"), "tinkex", "--format has no effect on `serve`"),
        (
            ("-f", "json", "train", "x"),
            "tinkex",
            "give --format after the command: `tinkex train --format",
        ),
        (("run", "--seed", "x"), "tinkex run", "'x' is not a valid integer."),
        (("run", "--num-samples", "x"), "tinkex run", "'x' is not a whole number."),
        (("run", "--top-p", "x"), "tinkex run", "'x' is not a number."),
        (
            ("run", "--base-model", "x", "--prompt", "x", "--min-p", "2"),
            "tinkex run",
            "min_p must be in",
        ),
        (
            ("run", "--base-model", "x", "--prompt", "x", "--logit-bias", "x"),
            "tinkex run",
            "takes ID=BIAS",
        ),
        (("run", "--top-p", "0"), "tinkex run", "0.0 is not in the range 0<x<=1"),
    ],
)
def test_usage_error_points_to_the_help(
    command: Command, faulty: FaultyServer, words: tuple[str, ...], usage: str, error: str
) -> None:
    shown = command(*words)
    assert (shown.code, shown.out) == (1, "")
    told, pointer = shown.err.splitlines()
    assert told.startswith("Error: ")
    assert error in told
    assert pointer == f"Try `{usage} --help`."
    assert faulty.seen == []


@pytest.mark.covers("1.16.1", "1.16.5")
def test_format_may_stand_anywhere_in_any_case(command: Command, here: str, run_id: str) -> None:
    expected = command("run", "list", "--json").json
    for words in (
        ["-f", "json", "run", "list"],
        ["run", "list", "-f", "JSON"],
        ["run", "list", "--format=json"],
    ):
        found = command(*words).json
        assert [item["training_run_id"] for item in found["runs"]] == [
            item["training_run_id"] for item in expected["runs"]
        ]


@pytest.mark.covers("1.16.1")
def test_switches_have_a_no_form(command: Command, here: str, run_id: str) -> None:
    shown = command("run", "list", "--json", "--no-json")
    assert shown.out.startswith("Training runs (")


@pytest.mark.covers("Q-17")
def test_later_value_of_a_repeated_option_wins(command: Command, here: str, run_id: str) -> None:
    shown = command("checkpoint", "list", "--limit", "1", "--limit=2", "--json", "--json")
    assert shown.json["shown"] == 2


@pytest.mark.covers("1.16.1")
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("run", "list"), "Training runs ("),
        (("checkpoint", "list"), "Checkpoints ("),
        (("checkpoint", "info", "tinker://a/weights/b"), "at local: 404"),
        (("checkpoint", "delete", "tinker://a/weights/b", "--yes"), "at local: 404"),
        (("model", "list"), "tinkex/tiny"),
        (("session", "list"), "Sessions ("),
        (("run", "--base-model", "x", "--prompt", "y"), "at local: 400"),
        (("checkpoint", "--base-model", "x", "--output", "y"), "at local: 400"),
        (("billing", "checkpoint-storage"), "storage"),
    ],
)
def test_commands_without_settings_compute_in_process(
    command: Command, words: tuple[str, ...], said: str
) -> None:
    shown = command(*words)
    assert said in shown.out + shown.err


@pytest.mark.covers("Q-16", "1.16.1")
@pytest.mark.parametrize("words", [("auth", "whoami"), ("model", "list", "--base-url", HOSTED_URL)])
def test_missing_key_is_reported_if_needed(command: Command, words: tuple[str, ...]) -> None:
    shown = command(*words)
    assert shown.code == 1
    assert "api_key is required" in shown.err
    assert "--api-key" in shown.err
    assert isinstance(shown.result.error, tinkex.ConfigurationError)


@pytest.mark.parametrize(
    ("variable", "value"),
    [("TINKER_API_KEY", "tml-x"), ("TINKER_BASE_URL", "http://127.0.0.1:9"), (None, None)],
)
def test_commands_share_one_rule_for_the_server(
    monkeypatch: pytest.MonkeyPatch, variable: str | None, value: str | None
) -> None:
    if variable is not None:
        assert value is not None
        monkeypatch.setenv(variable, value)
    found = {
        Connection(None, None).config().base_url,
        Connection(None, None, 3.0).config().base_url,
    }
    assert found == {HOSTED_URL if variable == "TINKER_API_KEY" else value or "local"}
    assert Connection("tml-y", None).config().base_url in (HOSTED_URL, value)
    assert Connection(None, "http://127.0.0.1:8").config().base_url == "http://127.0.0.1:8"


@pytest.mark.covers("1.16.1")
def test_options_win_over_the_environment(
    command: Command, faulty: FaultyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = faulty.base_url
    monkeypatch.setenv("TINKER_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("TINKER_API_KEY", "tml-environment")
    faulty.script("sessions", Answer(body={"sessions": ["s"]}))
    shown = command("session", "list", "--base-url", address, "--api-key", "tml-option")
    assert shown.code == 0
    assert faulty.seen[-1].headers["x-api-key"] == "tml-option"


@pytest.mark.covers("1.16.1")
def test_server_that_does_not_answer_in_time_is_an_error(
    command: Command, faulty: FaultyServer
) -> None:
    faulty.script("sessions", Answer(body={"sessions": []}, delay=5))
    began = time.monotonic()
    shown = command("session", "list", "--timeout", "300")
    assert time.monotonic() - began < 3
    assert shown.code == 1
    assert "0.3 s" in shown.err
    assert isinstance(shown.result.error, tinkex.APITimeoutError)


def test_unexpected_error_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tinkex.cli.versions.commit", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run(["version"])


def test_reader_that_stops_early_causes_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        result = run(["version", "--json"])
        assert (result.exit_code, type(result.error)) == (1, BrokenPipeError)


def test_program_without_streams_does_its_work_in_silence(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(["key", "create", "ada", "--data-dir", str(tmp_path)]).exit_code == 0
    capfd.readouterr()
    monkeypatch.setattr(sys, "argv", ["tinkex", "key", "list", "--data-dir", str(tmp_path)])
    for name in ("stdin", "stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    with pytest.raises(SystemExit) as ended:
        main()
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        stream.close()
    monkeypatch.undo()
    assert (ended.value.code, *capfd.readouterr()) == (0, "", "")


def test_full_disk_behind_standard_output_gives_one_error_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Full(io.StringIO):
        def write(self, text: str, /) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(sys, "stdout", Full())
    assert run(["version", "--json"]).exit_code == 1
    assert capsys.readouterr().err == f"Error: cannot write: {os.strerror(errno.ENOSPC)}\n"


@pytest.mark.covers("1.16.1")
def test_interrupted_command_ends_with_130(command: Command, faulty: FaultyServer) -> None:
    def interrupt(_: Seen) -> Answer:
        os.kill(os.getpid(), signal.SIGINT)
        return Answer(body={"sessions": []}, delay=5)

    faulty.script("sessions", interrupt)
    shown = command("session", "list")
    assert shown.code == 130
    assert shown.err.endswith("stopped\n")


# ── version ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.covers("1.16.2", "1.16.5")
def test_version_and_its_commit(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tinkex.cli.versions.commit", lambda: "abc1234")
    assert (
        command("version").out
        == command("--version").out
        == f"tinkex {tinkex.__version__} (abc1234)\n"
    )
    assert command("version", "--json").json == {"version": tinkex.__version__, "commit": "abc1234"}
    monkeypatch.setattr("tinkex.cli.versions.commit", lambda: None)
    assert command("version").out == f"tinkex {tinkex.__version__}\n"
    assert command("version", "--json").json["commit"] is None


@pytest.mark.covers("1.16.2")
def test_packages_it_works_with_are_listed(command: Command) -> None:
    found = command("version", "--deps", "--json").json["dependencies"]
    assert found["click"]
    assert "ruff" not in found
    assert "\nclick\t" in command("version", "--deps").out


# ── sampling ──────────────────────────────────────────────────────────────────────────────────────

SAMPLE = ("run", "--base-model", MODEL, "--max-tokens", "3", "--seed", "1")


@pytest.mark.covers("1.16.2", "1.16.4")
def test_samples_are_printed_with_their_facts(command: Command, here: str) -> None:
    shown = command(*SAMPLE, "--prompt", "Once upon", "--num-samples", "2")
    lines = shown.out.split("\n")
    assert lines[0] == "Starting sampling..."
    assert lines[1] == "Sample 1:"
    assert lines[-2:] == ["Sampling complete (2 sequences)", ""]
    assert shown.out.count("\n\nSample 2:\n") == 1
    facts = [line for line in lines if line.startswith("stop_reason=")]
    response = shown.result.response
    assert isinstance(response, tinkex.types.SampleResponse)
    for line, sequence in zip(facts, response.sequences, strict=True):
        assert sequence.logprobs is not None
        mean = sum(sequence.logprobs) / len(sequence.logprobs)
        assert line == f"stop_reason=length | avg_logprob={mean:.3f}"
    assert shown.result.command == "run"
    assert shown.result.ok


def test_changes_of_logits_are_options_of_run(
    command: Command, faulty: FaultyServer, tmp_path: Path
) -> None:
    (tmp_path / "prompt").write_text("[5, 6, 7]")
    faulty.script("create_sampling_session", Answer(body={"sampling_session_id": "s:sample:0"}))
    faulty.script("asample", Answer(400, {"detail": "enough"}))
    options = [
        "--min-p",
        "0.1",
        "--repetition-penalty",
        "1.5",
        "--presence-penalty",
        "1",
        "--frequency-penalty",
        "-1",
    ]
    changes = [
        "--logit-bias",
        "5=2.5",
        "--logit-bias",
        "7=-100",
        "--bad-word",
        "no",
        "--bad-word",
        "never",
    ]
    command(
        "run", "--base-model", "x", "--prompt-file", str(tmp_path / "prompt"), *options, *changes
    )
    sent = faulty.requests("asample")[0].json["sampling_params"]
    assert (sent["min_p"], sent["repetition_penalty"]) == (0.1, 1.5)
    assert (sent["presence_penalty"], sent["frequency_penalty"]) == (1.0, -1.0)
    assert sent["logit_bias"] == {"5": 2.5, "7": -100.0}
    assert sent["bad_words"] == ["no", "never"]


@pytest.mark.covers("1.16.4", "Q-18")
def test_json_has_stdout_for_itself(command: Command, here: str) -> None:
    shown = command(*SAMPLE, "--prompt", "Once upon", "--json")
    assert shown.out.count("\n") == 1
    assert shown.json == shown.result.data
    assert shown.json.keys() == {"sequences", "prompt_logprobs", "topk_prompt_logprobs", "type"}
    assert shown.json["sequences"][0].keys() == {"tokens", "logprobs", "stop_reason"}
    assert shown.json["type"] == "sample"
    assert shown.err == "Starting sampling...\nSampling complete (1 sequences)\n"
    assert command("--format", "json", *SAMPLE, "--prompt", "Once upon").json == shown.json


@pytest.mark.covers("1.16.4")
@pytest.mark.parametrize("text", ["[5, 6, 7]", '{"tokens": [5, 6, 7]}'])
def test_prompt_file_may_hold_token_ids(
    command: Command, faulty: FaultyServer, tmp_path: Path, text: str
) -> None:
    (tmp_path / "prompt").write_text(text)
    faulty.script("create_sampling_session", Answer(body={"sampling_session_id": "s:sample:0"}))
    faulty.script("asample", Answer(400, {"detail": "enough"}))
    command(
        "run",
        "--base-model",
        "x",
        "--prompt-file",
        str(tmp_path / "prompt"),
        "--json",
        "--top-k",
        "-1",
    )
    sent = faulty.requests("asample")[0].json
    assert sent["prompt"]["chunks"][0]["tokens"] == [5, 6, 7]
    assert sent["num_samples"] == 1
    assert not sent.get("prompt_logprobs")
    assert not sent.get("topk_prompt_logprobs")
    params = sent["sampling_params"]
    assert (params["temperature"], params["top_k"], params["top_p"]) == (1.0, -1, 1.0)


@pytest.mark.covers("1.16.4")
@pytest.mark.parametrize("text", ["Once upon", "[1, 2", '{"tokens": ["a"]}', "[true]", "[1.5]"])
def test_any_other_prompt_file_is_text(
    command: Command, here: str, tmp_path: Path, text: str
) -> None:
    (tmp_path / "prompt").write_text(text)
    from_file = command(*SAMPLE, "--prompt-file", str(tmp_path / "prompt"), "--json")
    assert from_file.json == command(*SAMPLE, "--prompt", text, "--json").json


@pytest.mark.covers("1.16.4")
def test_samples_may_go_to_a_file(command: Command, here: str, tmp_path: Path) -> None:
    place = tmp_path / "a" / "b.json"
    shown = command(*SAMPLE, "--prompt", "x", "--json", "--output", str(place))
    assert shown.out == ""
    text = place.read_text()
    assert text.endswith("}\n")
    assert json.loads(text) == shown.result.data
    plain = command(*SAMPLE, "--prompt", "x", "--output", str(tmp_path / "c"))
    assert plain.out == "Starting sampling...\nSampling complete (1 sequences)\n"
    assert (tmp_path / "c").read_text().startswith("Sample 1:\n")


@pytest.mark.covers("1.16.4")
@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("--base-model", MODEL), "give --prompt or --prompt-file"),
        (("--base-model", MODEL, "--prompt", "a", "--prompt-file", "b"), "not both"),
        (("--base-model", MODEL, "--prompt-file", "/nowhere"), "/nowhere cannot be read"),
        (("--prompt", "a"), "--base-model or --model-path"),
        (("--prompt", "a", "--model-path", "nothing"), "'nothing' is not a checkpoint path"),
    ],
)
def test_wrong_inputs_are_errors_before_sending(
    command: Command, faulty: FaultyServer, words: tuple[str, ...], error: str
) -> None:
    shown = command("run", *words)
    assert (shown.code, shown.out) == (1, "")
    assert error in shown.err
    assert faulty.seen == []


@pytest.mark.covers("1.16.4")
def test_failure_names_its_category(command: Command, faulty: FaultyServer) -> None:
    words = ("run", "--base-model", "x", "--prompt", "y")
    faulty.script("create_sampling_session", Answer(400, {"detail": "no such model"}))
    shown = command(*words)
    assert shown.code == 1
    assert "sampling failed (please check your inputs): " in shown.err
    assert isinstance(shown.result.error, tinkex.BadRequestError)
    faulty.script("create_sampling_session", Answer(501, {"detail": "broken"}))
    shown = command(*words)
    assert shown.code == 1
    assert "sampling failed (the server or the network; try again): " in shown.err


def test_error_uses_the_callers_terms(
    command: Command, faulty: FaultyServer, tmp_path: Path
) -> None:
    (tmp_path / "prompt").write_text("[1]")
    words = ("run", "--base-model", "x", "--prompt-file", str(tmp_path / "prompt"))
    faulty.script("create_sampling_session", Answer(body={"sampling_session_id": "s:sample:0"}))
    faulty.script("asample", Answer(body={"request_id": "r"}))
    faulty.script("retrieve_future", Answer(body={"error": "it is too hot", "category": "user"}))
    shown = command(*words)
    assert shown.code == 1
    assert shown.err == "Error: sampling failed (please check your inputs): it is too hot\n"
    faulty.script("asample", Answer(422, {"detail": "no"}))
    refused = command(*words)
    assert "sampling at 127.0.0.1:" in refused.err
    assert "asample" not in shown.err + refused.err


@pytest.mark.covers("1.16.4")
def test_slow_sample_times_out(command: Command, faulty: FaultyServer, tmp_path: Path) -> None:
    (tmp_path / "prompt").write_text("[1]")
    faulty.script("create_sampling_session", Answer(body={"sampling_session_id": "s:sample:0"}))
    faulty.script("asample", Answer(body={"request_id": "r"}))
    faulty.script(
        "retrieve_future",
        Answer(408, {"type": "try_again", "request_id": "r", "queue_state": "active"}),
    )
    shown = command(
        "run", "--base-model", "x", "--prompt-file", str(tmp_path / "prompt"), "--timeout", "500"
    )
    assert shown.code == 1
    assert "no result within 0.5 s" in shown.err
    assert isinstance(shown.result.error, tinkex.APITimeoutError)


@pytest.mark.covers("1.16.4")
def test_undecodable_tokens_are_noted_in_brackets(
    command: Command, here: str, tmp_path: Path
) -> None:
    (tmp_path / "prompt").write_text("[1, 2]")
    words = (
        "run",
        "--base-model",
        "other/Model",
        "--prompt-file",
        str(tmp_path / "prompt"),
        "--max-tokens",
        "2",
    )
    shown = command(*words)
    assert shown.code == 0
    assert "\n[could not be decoded: " in shown.out


def test_pool_of_sampling_has_the_size_that_was_asked_for(
    command: Command, here: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    resolve = tinkex.Config.resolve

    def note(**settings: Any) -> tinkex.Config:
        seen.append(settings.get("pool_sizes"))
        return resolve(**settings)

    monkeypatch.setattr(tinkex.Config, "resolve", note)
    assert command(*SAMPLE, "--prompt", "x", "--http-pool", "3").code == 0
    assert {"sample": 3} in seen


# ── saving ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.covers("1.16.2", "1.16.3")
@pytest.mark.parametrize("words", [("checkpoint",), ("checkpoint", "save")])
def test_checkpoint_is_saved_and_written_down(
    command: Command, here: str, tmp_path: Path, words: tuple[str, ...]
) -> None:
    place = tmp_path / "deep" / "saved.json"
    shown = command(*words, "--base-model", MODEL, "--rank", "4", "--output", str(place))
    assert shown.out == f"Checkpoint saved to {place}\n"
    text = place.read_text()
    assert text.count("\n") == 1
    saved = json.loads(text)
    assert saved == shown.result.data
    assert saved.keys() == {"base_model", "model_id", "weights_path", "saved_at", "response"}
    assert saved["base_model"] == MODEL
    assert (
        saved["weights_path"]
        == f"tinker://{saved['model_id']}/sampler_weights/checkpoint-tinkex-tiny"
    )
    assert saved["response"]["path"] == saved["weights_path"]
    assert len(saved["saved_at"]) == len("2026-01-01T00:00:00Z")
    info = command("checkpoint", "info", saved["weights_path"], "--json").json
    assert info["lora_rank"] == 4


@pytest.mark.covers("1.16.3")
def test_training_checkpoint_can_be_the_beginning(
    command: Command, here: str, run_id: str, tmp_path: Path
) -> None:
    words = (
        "--model-path",
        f"tinker://{run_id}/weights/one",
        "--name",
        "again",
        "--output",
        str(tmp_path / "x"),
    )
    saved = command("checkpoint", *words).result.data
    assert saved["weights_path"].endswith("/sampler_weights/again")
    assert saved["model_id"] != run_id


@pytest.mark.covers("1.16.3")
def test_failed_save_writes_no_files(
    command: Command, faulty: FaultyServer, tmp_path: Path
) -> None:
    assert "give --output" in command("checkpoint", "--base-model", "x").err
    place = tmp_path / "saved.json"
    assert "--base-model or --model-path" in command("checkpoint", "--output", str(place)).err
    assert faulty.seen == []
    faulty.script("create_model", Answer(400, {"detail": "no such model"}))
    shown = command("checkpoint", "--base-model", "x", "--output", str(place))
    assert (shown.code, shown.out) == (1, "")
    assert "saving failed (please check your inputs): " in shown.err
    assert not place.exists()


# ── lists and looks ───────────────────────────────────────────────────────────────────────────────


@pytest.mark.covers("1.16.2", "1.16.5")
def test_checkpoints_are_listed(command: Command, here: str, run_id: str) -> None:
    shown = command("checkpoint", "list", "--run-id", run_id)
    lines = shown.out.splitlines()
    assert lines[0] == f"Checkpoints for {run_id} (3/3)"
    assert lines[1] == "ID\tType\tSize\tPublic\tCreated\tExpires\tPath"
    assert {line.split("\t")[0] for line in lines[2:]} == {
        "weights/one",
        "weights/two",
        "sampler_weights/three",
    }
    row = next(line.split("\t") for line in lines if line.startswith("weights/one\t"))
    assert (row[1], row[3], row[4], row[5]) == ("training", "No", "just now", "Never")
    assert row[6] == f"tinker://{run_id}/weights/one"
    data = command("checkpoint", "list", "--run-id", run_id, "--json").json
    assert data.keys() == {"checkpoints", "total", "shown", "run_id"}
    assert (data["total"], data["shown"], data["run_id"]) == (3, 3, run_id)
    everything = command("checkpoint", "list", "--limit", "2", "--json").json
    assert everything.keys() == {"checkpoints", "total", "shown"}
    assert everything["shown"] == 2
    assert everything["total"] >= 3
    assert everything["checkpoints"][0].keys() == {
        "checkpoint_id",
        "checkpoint_type",
        "tinker_path",
        "training_run_id",
        "size_bytes",
        "public",
        "time",
        "expires_at",
    }


@pytest.mark.covers("1.16.5")
def test_lists_ask_for_the_pages_that_the_protocol_has(
    command: Command, faulty: FaultyServer
) -> None:
    cursor = {"offset": 0, "limit": 0, "total_count": 0}
    faulty.script("checkpoints", Answer(body={"checkpoints": [], "cursor": cursor}))
    faulty.script("training_runs", Answer(body={"training_runs": [], "cursor": cursor}))
    command("checkpoint", "list", "--limit", "0", "--offset", "7")
    command("run", "list", "--limit", "0", "--access-scope", "accessible")
    command("run", "list")
    assert [seen.path for seen in faulty.seen] == [
        "checkpoints?limit=1000&offset=7",
        "training_runs?limit=100&offset=0&access_scope=accessible",
        "training_runs?limit=20&offset=0&access_scope=owned",
    ]


@pytest.mark.covers("1.16.2", "1.16.5")
def test_checkpoint_is_looked_up(command: Command, here: str, run_id: str) -> None:
    path = f"tinker://{run_id}/weights/one"
    lines = dict(
        line.split(": ", 1) for line in command("checkpoint", "info", path).out.splitlines()
    )
    assert list(lines)[:12] == [
        *(
            "ID",
            "Run ID",
            "Type",
            "Path",
            "Size",
            "Public",
            "Created",
            "Expires",
            "Base model",
            "LoRA",
            "Rank",
        ),
        "Trains unembed",
    ]
    assert (lines["ID"], lines["Run ID"], lines["Rank"], lines["LoRA"]) == (
        "weights/one",
        run_id,
        "4",
        "Yes",
    )
    data = command("checkpoint", "info", path, "--json").json
    assert data["tinker_path"] == path
    assert (data["base_model"], data["is_lora"], data["lora_rank"]) == (MODEL, True, 4)
    missing = command("checkpoint", "info", f"tinker://{run_id}/weights/none")
    assert missing.code == 1
    assert f"there is no checkpoint tinker://{run_id}/weights/none" in missing.err


@pytest.mark.covers("1.16.2", "1.16.5")
def test_runs_are_listed_and_looked_up(command: Command, here: str, run_id: str) -> None:
    lines = command("run", "list", "--limit", "0").out.splitlines()
    assert lines[0].startswith("Training runs (")
    assert lines[1] == "ID\tBase Model\tOwner\tLoRA\tStatus\tLast Update"
    row = next(line.split("\t") for line in lines if line.startswith(run_id))
    assert row[1:] == [MODEL, "local", "Yes (rank 4)", "Finished", "just now"]
    chosen = command("run", "list", "--limit", "0", "-c", "id,checkpoint").out.splitlines()
    assert chosen[1] == "ID\tLast Checkpoint"
    assert f"{run_id}\tweights/two" in chosen
    assert "there is no 'size'" in command("run", "list", "-c", "size").err
    data = command("run", "list", "--limit", "0", "--json").json
    assert data.keys() == {"runs", "total", "shown"}
    known = next(item for item in data["runs"] if item["training_run_id"] == run_id)
    assert known == command("run", "info", run_id, "--json").json
    assert known.keys() == {
        "training_run_id",
        "base_model",
        "model_owner",
        "is_lora",
        "lora_rank",
        "corrupted",
        "loaded",
        "last_request_time",
        "last_checkpoint",
        "last_sampler_checkpoint",
        "user_metadata",
    }
    assert known["last_checkpoint"]["tinker_path"] == f"tinker://{run_id}/weights/two"
    text = command("run", "info", run_id).out
    assert text.startswith(
        f"{run_id} ({MODEL})\nOwner: local\nLoRA: Yes\nRank: 4\nStatus: Finished\n"
    )
    assert "Last training checkpoint: weights/two\n" in text
    assert (
        f"  Path: tinker://{run_id}/weights/two\nLast sampler checkpoint: sampler_weights/three\n"
        in text
    )
    assert f"  Path: tinker://{run_id}/sampler_weights/three\nMetadata" in text
    assert text.endswith("Metadata: who=ada\n")
    assert command("run", "info", "nothing").code == 1


def test_models_are_listed_by_a_part_of_their_names(command: Command, here: str) -> None:
    assert command("model", "list").out.splitlines()[0] == "Models (2/2)"
    found = command("model", "list", "MODEL", "--json").json
    assert found == {
        "models": [
            {
                "model_name": "other/Model",
                "max_context_length": 64,
                "trainable": True,
                "sampleable": True,
            },
        ]
    }


@pytest.mark.covers("U38")
def test_listing_models_makes_no_session(command: Command, faulty: FaultyServer) -> None:
    faulty.script(
        "get_server_capabilities", Answer(body={"supported_models": [{"model_name": "m"}]})
    )
    assert command("model", "list").out.startswith("Models (1/1)\n")
    assert [seen.path for seen in faulty.seen] == ["get_server_capabilities"]


def test_sessions_are_listed_looked_up_and_finished(command: Command, here: str) -> None:
    session = Wire(here).session()
    assert session in command("session", "list", "--limit", "0", "--json").json["sessions"]
    assert session in command("session", "list").out.splitlines()
    data = command("session", "info", session, "--json").json
    assert (data["session_id"], data["training_run_ids"]) == (session, [])
    assert command("session", "info", session).out.startswith(
        f"ID: {session}\nTraining runs: none\n"
    )
    shown = command(
        "session", "finish", session, "--reason", "errored", "--detail", "it broke", "--json"
    )
    assert shown.json == {
        "command": "session finish",
        "action": "finish",
        "session_id": session,
        "reason": "errored",
    }
    assert command("session", "finish", "nothing").code == 1
    assert "session_id must be an id" in command("session", "finish", "..").err


def test_trace_is_fetched_or_its_address_shown(
    command: Command, faulty: FaultyServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    place = f"{faulty.base_url}/trace"
    faulty.script("sessions/s/trace_export", Answer(body={"status": "ready", "url": place}))
    faulty.script("/trace", Answer(body=b"perfetto"))
    assert command("session", "export-trace", "s", "--url-only").out == f"{place}\n"
    shown = command("session", "export-trace", "s", "--json")
    assert shown.json == {"session_id": "s", "destination": "s.pftrace", "file_size_bytes": 8}
    assert (tmp_path / "s.pftrace").read_bytes() == b"perfetto"
    assert command("session", "export-trace", "s", "--url-only", "-o", "x").code == 1


def test_trace_of_a_backend_inside_this_process_is_copied(command: Command, tmp_path: Path) -> None:
    target = tmp_path / "made" / "it.json"
    with tinkex.LocalBackend(engine=FakeEngine(), data_dir=tmp_path / "data") as backend:
        with tinkex.ServiceClient(base_url=backend.base_url) as service:
            session = service.create_lora_training_client("fake", rank=4).result().holder.session_id
        shown = command(
            "session", "export-trace", session, "-o", str(target), "--base-url", backend.base_url
        )
    assert (shown.code, shown.out) == (0, f"Wrote {target} ({size(target.stat().st_size)})\n")
    assert "create_model" in target.read_text()
    assert os.listdir(target.parent) == ["it.json"]


@pytest.mark.parametrize(
    "words",
    [("run", "--base-model", "x", "--prompt", "y"), ("checkpoint", "save", "--base-model", "x")],
)
def test_unwritable_place_is_refused_before_any_request(
    command: Command, faulty: FaultyServer, tmp_path: Path, words: tuple[str, ...]
) -> None:
    (tmp_path / "file").touch()
    for place, reason in (
        (tmp_path, "Is a directory"),
        (tmp_path / "file" / "below" / "it", "Not a directory"),
    ):
        shown = command(*words, "--output", str(place))
        assert (shown.code, shown.out, shown.err) == (
            1,
            "",
            f"Error: {place} cannot be written: {reason}\n",
        )
    assert faulty.seen == []


# ── changes ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.covers("1.16.2", "1.16.5")
def test_checkpoints_are_published_and_kept_back(command: Command, here: str, run_id: str) -> None:
    path = f"tinker://{run_id}/weights/one"
    assert command("checkpoint", "publish", path).out == f"Published {path}\n"
    assert command("checkpoint", "info", path, "--json").json["public"] is True
    shown = command("checkpoint", "unpublish", path, "--json")
    assert shown.json == shown.result.data == {"action": "unpublish", "path": path}
    assert command("checkpoint", "info", path, "--json").json["public"] is False
    assert command("checkpoint", "publish", path, "--json").json == {
        "action": "publish",
        "path": path,
    }
    assert command("checkpoint", "unpublish", path).out == f"Unpublished {path}\n"


@pytest.mark.covers("1.16.2", "1.16.5")
def test_lifetime_is_set_and_removed(command: Command, here: str, run_id: str) -> None:
    path = f"tinker://{run_id}/weights/two"
    shown = command("checkpoint", "set-ttl", path, "--ttl", "7200", "--json")
    assert shown.json == {
        "command": "checkpoint set-ttl",
        "action": "set_ttl",
        "path": path,
        "ttl_seconds": 7200,
        "remove": False,
    }
    assert command("checkpoint", "info", path, "--json").json["expires_at"] is not None
    assert path in command("checkpoint", "set-ttl", path, "--remove").out
    assert command("checkpoint", "info", path, "--json").json["expires_at"] is None
    for wrong in (
        (),
        ("--ttl", "5", "--remove"),
        ("--ttl", "0"),
        ("--ttl", "1.5"),
        ("--ttl", "-3"),
    ):
        assert command("checkpoint", "set-ttl", path, *wrong).code == 1


@pytest.mark.parametrize("name", ["info", "publish", "unpublish", "download", "delete"])
@pytest.mark.covers("1.16.2")
@pytest.mark.parametrize(
    ("path", "error"),
    [
        ("other://a/weights/b", "does not begin with tinker://"),
        ("tinker://a/b", "expected tinker://<run>/<kind>/<name>"),
        ("tinker://a/nothing/b", "has kind 'nothing'"),
    ],
)
def test_paths_are_checked_before_anything_is_sent(
    command: Command, faulty: FaultyServer, name: str, path: str, error: str
) -> None:
    shown = command("checkpoint", name, path)
    assert (shown.code, shown.out) == (1, "")
    assert error in shown.err
    assert faulty.seen == []


# ── deleting ──────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def doomed(url: str) -> list[str]:
    """Three checkpoints to delete."""
    with tinkex.ServiceClient(base_url=url) as service:
        client = service.create_lora_training_client(MODEL, rank=4).result()
        return [client.save_state(f"d{number}").result().path for number in range(3)]


@pytest.mark.covers("1.16.2", "1.16.5", "1.16.6")
def test_checkpoints_are_deleted_one_after_the_other(
    command: Command, here: str, doomed: list[str]
) -> None:
    shown = command("checkpoint", "delete", *doomed[:2], "--yes")
    assert shown.out == "".join(
        f"Deleting {number}/2: {path}\nDeleted {path}\n"
        for number, path in enumerate(doomed[:2], 1)
    )
    assert shown.result.data == {
        "command": "checkpoint delete",
        "action": "delete",
        "paths": doomed[:2],
        "deleted": 2,
        "failed": 0,
        "failures": [],
    }
    assert command("checkpoint", "info", doomed[0]).code == 1
    assert command("checkpoint", "info", doomed[2]).code == 0


@pytest.mark.covers("1.16.6", "Q-18")
def test_failure_does_not_stop_the_rest(command: Command, here: str, doomed: list[str]) -> None:
    missing = doomed[0].replace("/d0", "/none")
    shown = command("checkpoint", "delete", doomed[0], missing, doomed[1], "-y", "--json")
    assert shown.code == 1
    assert shown.json["deleted"] == 2
    assert shown.json["failed"] == 1
    assert [failure["path"] for failure in shown.json["failures"]] == [missing]
    assert "404" in shown.json["failures"][0]["error"]
    assert f"Error: {missing} was not deleted: " in shown.err
    assert "Deleting 1/3" in shown.err


@pytest.mark.covers("1.16.6")
@pytest.mark.parametrize(
    ("answer", "deleted"),
    [("y\n", True), ("YES\n", True), ("n\n", False), ("\n", False), ("", False), ("yep\n", False)],
)
def test_question_comes_first(
    command: Command,
    here: str,
    doomed: list[str],
    monkeypatch: pytest.MonkeyPatch,
    answer: str,
    deleted: bool,
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(answer))
    shown = command("checkpoint", "delete", *doomed)
    assert shown.code == 0
    assert "3 checkpoints will be deleted" in shown.err
    assert all(path in shown.err for path in doomed)
    assert "[y/N]" in shown.err
    assert shown.result.data["action"] == ("delete" if deleted else "cancelled")
    assert ("Deleted" in shown.out) == deleted
    assert (command("checkpoint", "info", doomed[0]).code == 1) == deleted


@pytest.mark.covers("1.16.6")
def test_wrong_path_deletes_no_file(command: Command, here: str, doomed: list[str]) -> None:
    assert command("checkpoint", "delete", *doomed, "tinker://wrong", "--yes").code == 1
    assert all(command("checkpoint", "info", path).code == 0 for path in doomed)
    assert command("checkpoint", "delete", "--yes").code == 1


def test_checkpoints_of_a_run_are_chosen_by_type_and_time(
    command: Command, here: str, doomed: list[str]
) -> None:
    chosen = doomed[0].split("/")[2]
    words = ("checkpoint", "delete", "--run-id", chosen, "--yes", "--json")
    assert command(*words, "--type", "sampler").json["paths"] == []
    assert command(*words, "--before", "2020-01-01").json["paths"] == []
    assert (
        sorted(command(*words, "--after", "2020-01-01", "--type", "training").json["paths"])
        == doomed
    )
    assert command("checkpoint", "delete", doomed[0], "--type", "sampler").code == 1


# ── accounts ──────────────────────────────────────────────────────────────────────────────────────


def test_login_is_kept_for_its_owner_alone_and_forgotten(
    command: Command, faulty: FaultyServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    known = {"key_id": 5, "name": "k", "note": "", "details": {"user_details": {"email": "a@b.c"}}}
    faulty.script("auth/apikey/me", Answer(body=known))
    monkeypatch.setattr(sys, "stdin", io.StringIO("tml-secret\n"))
    shown = command("auth", "login")
    assert shown.code == 0
    assert "Logged in as a@b.c" in shown.out
    assert "secret" not in shown.out + shown.err
    assert faulty.seen[0].headers["x-api-key"] == "tml-secret"
    file = tmp_path / ".tinker" / "credentials.json"
    book = json.loads(file.read_text())
    assert (book["version"], book["default"]) == (1, "5")
    kept = {"type": "manual", "key": "tml-secret", "base_url": faulty.base_url}
    assert book["keys"]["5"] == kept | {name: known[name] for name in known if name != "key_id"}
    assert file.stat().st_mode & 0o777 == 0o600
    assert file.parent.stat().st_mode & 0o777 == 0o700
    status = command("auth", "status", "--json").json
    assert (status["credentials"], status["source"], status["accessible"]) == (
        True,
        str(file),
        True,
    )
    assert faulty.seen[-1].headers["x-api-key"] == "tml-secret"
    assert command("auth", "status", "--base-url", "local", "--json").json["credentials"] is False
    assert command("auth", "logout").out.startswith(f"Removed the key from {file}")
    assert not file.exists()
    assert command("auth", "logout").result.data["removed"] is False


def test_key_that_is_refused_is_not_kept(
    command: Command, faulty: FaultyServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    faulty.script("auth/apikey/me", Answer(401, {"detail": "who are you"}))
    shown = command("auth", "login", "--api-key", "tml-wrong")
    assert shown.code == 1
    assert "who are you" in shown.err
    assert not (tmp_path / ".tinker").exists()
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert "there is no key" in command("auth", "login").err


def test_other_logins_stay_and_a_made_key_is_deleted_on_the_server(
    command: Command, faulty: FaultyServer, tmp_path: Path
) -> None:
    file = tmp_path / ".tinker" / "credentials.json"
    file.parent.mkdir()
    keys = {
        "1": {"type": "generated", "key": "tml-made"},
        "2": {"type": "manual", "key": "tml-other"},
    }
    file.write_text(json.dumps({"version": 1, "default": "1", "keys": keys}))
    faulty.script("auth/apikey/me", Answer(body={}))
    assert command("auth", "logout").code == 0
    assert [(seen.method, seen.headers["x-api-key"]) for seen in faulty.seen] == [
        ("DELETE", "tml-made")
    ]
    assert json.loads(file.read_text()) == {"version": 1, "keys": {"2": keys["2"]}}
    file.write_text("{")
    assert "cannot be read" in command("auth", "login", "--api-key", "tml-x").err


def test_status_of_an_unreachable_server_exits_with_one(
    command: Command, faulty: FaultyServer
) -> None:
    faulty.script("get_server_capabilities", Answer(401, {"detail": "no key"}))
    shown = command("auth", "status")
    assert (shown.code, shown.out) == (1, "Credentials: No\nServer accessible: No\n")
    assert "no key" in shown.err
    assert "source" in command("auth", "status", "--json").json


def test_whoami_shows_the_owner_if_the_server_tells(command: Command, here: str) -> None:
    shown = command("auth", "whoami")
    assert shown.code == 1
    assert "whoami needs a token" in shown.err


@pytest.mark.covers("U38")
def test_usage_tells_free_storage_from_paid(command: Command, faulty: FaultyServer) -> None:
    def event(**info: Any) -> dict[str, Any]:
        hours = {"bucket_start": "2026-07-13T00:00:00Z", "bucket_end": "2026-07-13T01:00:00Z"}
        return {
            **hours,
            "user_id": "u",
            "user_name": "ada",
            "event_info": {"type": "storage", **info},
        }

    events = [
        event(gigabyte_hours=1.5),
        event(gigabyte_hours=10.0, free=True),
        event(gigabyte_hours=2.5, free=False),
    ]
    faulty.script("billing/usage/events", Answer(body={"data": events, "sessions": {}}))
    words = ("billing", "usage", "2026-07-13", "2026-07-14")
    rows = list(csv.DictReader(io.StringIO(command(*words, "--csv", "-").out)))
    assert [(row["gigabyte_hours"], row["free"]) for row in rows] == [
        ("1.5", "False"),
        ("10.0", "True"),
        ("2.5", "False"),
    ]
    shown = command(*words, "--json").json["data"]
    assert [item["event_info"]["free"] for item in shown] == [False, True, False]
    assert "free" in command(*words).out


def test_usage_is_shown_flat_and_as_csv(
    command: Command, here: str, run_id: str, tmp_path: Path
) -> None:
    words = ("billing", "usage", "2020-01-01", "2020-01-03")
    assert command(*words).out.startswith("Usage (0 rows)\n")
    day = time.strftime("%Y-%m-%dT00:00:00Z", time.gmtime())
    later = time.strftime("%Y-%m-%dT00:00:00Z", time.gmtime(time.time() + 86_400))
    shown = command("billing", "usage", day, later, "--csv", str(tmp_path / "u.csv"), "--json")
    assert shown.json.keys() >= {"data", "sessions", "cost_data_through"}
    rows = list(csv.DictReader(io.StringIO((tmp_path / "u.csv").read_text())))
    assert len(rows) == len(shown.json["data"]) > 0
    assert {row["type"] for row in rows} >= {"checkpoint"}
    assert shown.json["data"][0]["bucket_start"].endswith("Z")
    sessions = command("billing", "usage", day, later, "--sessions-csv", "-").out
    assert sessions.startswith("session_id,user_metadata\n")
    assert command("billing", "usage", "never", "ever").code == 1
    storage = command("billing", "checkpoint-storage", "--json").json
    assert storage["data"][0]["checkpoint_count"] >= 3
    assert command("billing", "checkpoint-storage").out.startswith("Checkpoint storage (1 row)\n")
    assert command("billing", "checkpoint-storage", "--csv", "-").out.startswith("project_id,")


# ── inside this process ───────────────────────────────────────────────────────────────────────────


@pytest.mark.covers("1.16.1")
def test_backend_of_this_process_is_a_server_like_any_other(
    command: Command, tmp_path: Path
) -> None:
    engine = FakeEngine((BaseModel(MODEL, 64, 1024, "fake"),))
    with tinkex.LocalBackend(data_dir=tmp_path / "data", engine=engine) as backend:
        shown = command(*SAMPLE, "--prompt", "x", "--json", "--base-url", backend.base_url)
        assert len(shown.json["sequences"][0]["tokens"]) == 3
        assert command("run", "list", "--base-url", backend.base_url).out.startswith(
            "Training runs (0/0)\n"
        )


@pytest.mark.slow
@pytest.mark.covers("1.16.1", "1.16.4")
def test_bundled_model_is_sampled_inside_this_process(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINKEX_DATA_DIR", str(tmp_path / "data"))
    words = ("--base-url", "local", "--prompt", "Once upon a time", "--temperature", "0")
    shown = command("run", "--base-model", MODEL, "--max-tokens", "8", *words)
    assert shown.code == 0, shown.err
    assert "She liked to play" in shown.out
