"""The command line, as a shell sees it."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import click
import pytest
import torch
from click.testing import CliRunner

import tinkex
from support import MODEL, Keyed, Wire, listening, sample_json, wait_until
from tinkex.cli import run
from tinkex.cli.main import cli, main
from tinkex.server.database.interface import LOCAL_OWNER
from tinkex.server.server_limits import Limits


def command() -> list[str]:
    """The installed command."""
    installed = Path(sys.executable).with_name("tinkex")
    assert installed.exists()
    return [str(installed)]


def tool(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*command(), *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )


Serve = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def serve(tmp_path: Path, model_dir: Path) -> Iterator[Serve]:
    """Starts `tinkex serve` on a free port with the small model; what is left is stopped."""
    started: list[subprocess.Popen[str]] = []

    def begin(*arguments: str, **environment: str) -> subprocess.Popen[str]:
        given = [
            "serve",
            "--port",
            "0",
            "--data-dir",
            str(tmp_path / "data"),
            "--model",
            f"{MODEL}={model_dir}",
        ]
        process = subprocess.Popen(
            [*command(), *given, *arguments],
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield begin
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate(timeout=20)


def ready(process: subprocess.Popen[str]) -> tuple[str, str]:
    """The line that says the server is ready, and its URL."""
    assert process.stdout is not None
    line = process.stdout.readline()
    found = re.search(r"http://\S+", line)
    assert found, (line, process.communicate(timeout=20))
    return line, found.group()


def test_help_is_quick_and_lists_the_commands() -> None:
    shown = tool("--help")
    assert shown.returncode == 0
    for word in ("serve", "demo", "--version"):
        assert word in shown.stdout


def test_version() -> None:
    shown = tool("--version")
    assert shown.returncode == 0
    assert re.fullmatch(rf"tinkex {re.escape(tinkex.__version__)}( \([0-9a-f]+\))?\n", shown.stdout)


def test_package_can_be_run_as_a_module() -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "tinkex", "version", "--json"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert json.loads(shown.stdout)["version"] == tinkex.__version__


HEAVY = {
    "aiohttp",
    "asyncio",
    "msgspec",
    "numpy",
    "rich",
    "sqlite3",
    "starlette",
    "tinkex.client.settings.config",
    "torch",
}
LOADED = """
import atexit, sys
from tinkex.cli.main import main
atexit.register(lambda: print(*sys.modules))
main()
"""


def loaded(*words: str, **environment: str) -> set[str]:
    """The modules that a command has imported when it ends."""
    shown = subprocess.run(
        [sys.executable, "-c", LOADED, *words],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return set(shown.stdout.splitlines()[-1].split())


@pytest.mark.parametrize(
    ("words", "environment"),
    [
        (("--help",), {}),
        (("run", "--help"), {}),
        (("checkpoint", "--help"), {}),
        (("completion", "zsh"), {}),
        ((), {"_TINKEX_COMPLETE": "bash_complete", "COMP_WORDS": "tinkex ", "COMP_CWORD": "1"}),
        (
            (),
            {
                "_TINKEX_COMPLETE": "bash_complete",
                "COMP_WORDS": "tinkex checkpoint ",
                "COMP_CWORD": "2",
            },
        ),
    ],
)
def test_help_and_completion_import_no_heavy_module(
    words: tuple[str, ...], environment: dict[str, str]
) -> None:
    modules = loaded(*words, **environment)
    assert "tinkex.cli.main" in modules
    assert not modules & HEAVY


@pytest.mark.parametrize("words", ["model list", "checkpoint list", "session list"])
def test_model_list_does_not_wait_for_torch(words: str, tmp_path: Path) -> None:
    modules = loaded(*words.split(), "--base-url", "local", "--json", TINKEX_DATA_DIR=str(tmp_path))
    assert "tinkex.server.app" in modules
    assert "torch" not in modules


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_script_is_printed(shell: str) -> None:
    script = run(["completion", shell]).data
    assert "_TINKEX_COMPLETE=" in script
    assert "tinkex" in script
    assert run(["completion", "tcsh"]).exit_code == 1


def test_commands_and_options_are_completed() -> None:
    words = {"_TINKEX_COMPLETE": "bash_complete", "COMP_WORDS": "tinkex ch", "COMP_CWORD": "1"}
    assert tool(**words).stdout.splitlines() == ["plain,chat", "plain,checkpoint"]
    words |= {"COMP_WORDS": "tinkex checkpoint set", "COMP_CWORD": "2"}
    assert tool(**words).stdout.splitlines() == ["plain,set-ttl"]
    words |= {"COMP_WORDS": "tinkex run list --acc", "COMP_CWORD": "3"}
    assert tool(**words).stdout.splitlines() == ["plain,--access-scope"]


def shell(name: str, script: str, *arguments: str) -> str:
    """Return the output of a shell with our command first on its path."""
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed")
    path = f"{Path(command()[0]).parent}{os.pathsep}{os.environ['PATH']}"
    given = {**os.environ, "PATH": path, "TERM": "xterm", "COLUMNS": "120"}
    ran = subprocess.run(
        [found, *arguments, "-c", script],
        env=given,
        capture_output=True,
        text=True,
        timeout=50,
        stdin=subprocess.DEVNULL,
    )
    assert ran.returncode == 0, (ran.stdout, ran.stderr)
    return ran.stdout


def test_bash_completes() -> None:
    assert shutil.which("bash"), "bash is everywhere"
    script = """
    eval "$(tinkex completion bash)"
    complete -p tinkex
    for line in "tinkex ch" "tinkex checkpoint set" "tinkex run list --access-scope "; do
        IFS=' ' read -r -a COMP_WORDS <<< "$line"
        [[ $line == *' ' ]] && COMP_WORDS+=("")
        COMP_CWORD=$((${#COMP_WORDS[@]} - 1)) COMPREPLY=()
        _tinkex_completion tinkex
        echo "${COMPREPLY[@]}"
    done
    """
    assert shell("bash", script, "--norc").splitlines() == [
        "complete -o nosort -F _tinkex_completion tinkex",
        "chat checkpoint",
        "set-ttl",
        "owned accessible",
    ]


def test_fish_completes_with_whole_summaries(tmp_path: Path) -> None:
    (tmp_path / "examples.jsonl").touch()
    script = f"""
    tinkex completion fish | source
    complete -C "tinkex ch"
    complete -C "tinkex checkpoint set"
    complete -C "tinkex run list --access-scope "
    cd {tmp_path}
    complete -C "tinkex train ex"
    """
    assert shell("fish", script, "--no-config").splitlines() == [
        "chat\tTalk to a model or a checkpoint.",
        "checkpoint\tSave, list, share, fetch and compare checkpoints.",
        "set-ttl\tSay when a checkpoint expires.",
        "accessible",
        "owned",
        "examples.jsonl",
    ]


def test_zsh_completes_with_whole_summaries() -> None:
    script = r"""
    zmodload zsh/zpty || exit 3
    zpty z "zsh -f -i"
    zpty -w z 'PS1="> "; autoload -Uz compinit; compinit -u -D'
    zpty -w z 'eval "$(tinkex completion zsh)"; print REA""DY'
    zpty -r z out '*READY*'
    zpty -w -n z $'tinkex ch\t\t'
    zpty -r z out '*chat*Talk to a model*checkpoint*Save, list, share, fetch and compare *.*'
    zpty -w -n z $'\x15tinkex checkpoint set\t'
    zpty -r z out '*set-ttl*'
    zpty -w -n z $'\x15tinkex run list --access-scope acc\t'
    zpty -r z out '*accessible*'
    zpty -d z
    print done
    """
    assert shell("zsh", script, "-f") == "done\n"


def groups(group: click.Group, *path: str) -> Iterator[tuple[str, ...]]:
    """The words that lead to every group of commands."""
    yield path
    context = click.Context(group)
    for name in group.list_commands(context):
        found = group.get_command(context, name)
        if isinstance(found, click.Group):
            yield from groups(found, *path, name)


def test_no_summary_of_a_command_is_cut() -> None:
    cut = []
    for path in groups(cli):
        shown = CliRunner().invoke(cli, [*path, "--help"], terminal_width=80)
        listed = shown.output.partition("\nCommands:\n")[2].splitlines()
        assert listed, path
        cut += [(path, line) for line in listed if line.endswith("...") or len(line) > 80]
    assert cut == []


@pytest.mark.parametrize(
    "words", [("train", "examples.jsonl", "--base-model", "x"), ("chat", "x"), ("demo",)]
)
def test_train_and_chat_honour_their_timeout(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("examples.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    with listening() as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        result = run([*words, "--base-url", url, "--api-key", "tml-x", "--timeout", "120"])
    assert result.exit_code == 1  # without the option it would be a minute
    assert isinstance(result.error, tinkex.APIConnectionError)


def test_help_of_serve() -> None:
    shown = tool("serve", "--help")
    assert shown.returncode == 0
    for word in (
        "--host",
        "--port",
        "--data-dir",
        "--model",
        "NAME[=DIR]",
        "--engine",
        "[fake|torch]",
        "--device",
        "--dtype",
        "--tokens",
        "--log-format",
    ):
        assert word in shown.stdout
    for limit in dataclasses.fields(Limits):
        assert f"--{limit.name.replace('_', '-')} " in shown.stdout


@pytest.mark.parametrize(
    "arguments", [("nothing",), ("serve", "--nothing"), ("serve", "--port", "many")]
)
def test_wrong_usage_gives_one_error_line(
    arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments).exit_code == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "Error: " in shown.err


def stopped(process: subprocess.Popen[str], number: signal.Signals) -> None:
    """A signal must end the server soon, without an error and without another word on stdout."""
    process.send_signal(number)
    rest, errors = process.communicate(timeout=20)
    assert process.returncode in (0, 130)
    assert rest == ""
    assert "Traceback" not in errors


def test_server_announces_readiness_serves_and_stops(serve: Serve, tmp_path: Path) -> None:
    process = serve("--device", "cpu")
    line, url = ready(process)
    assert MODEL in line
    assert "device: cpu" in line
    assert "open, no key needed" in line
    assert str(tmp_path / "data") in line
    wire = Wire(url)
    assert wire.get("healthz") == {"status": "ok"}
    assert wire.get("get_server_capabilities")["supported_models"][0]["model_name"] == MODEL
    with tinkex.ServiceClient(base_url=url) as service:
        sampler = service.create_sampling_client(base_model=MODEL).result()
        prompt = tinkex.ModelInput.from_ints([5, 6])
        assert (
            len(sampler.sample(prompt, 1, tinkex.SamplingParams(max_tokens=2)).result(30).sequences)
            == 1
        )
    stopped(process, signal.SIGINT)


@pytest.mark.slow  # as with a key on record, which is tried always
def test_key_closes_the_server_and_a_signal_ends_it(serve: Serve) -> None:
    process = serve("--host", "0.0.0.0", TINKEX_SERVER_API_KEY="tml-secret")
    line, url = ready(process)
    assert "secret" not in line
    wire = Wire(url.replace("0.0.0.0", "127.0.0.1"))
    assert wire.send("get_server_capabilities", method="GET").status == 401
    assert (
        wire.send(
            "get_server_capabilities", method="GET", headers={"X-API-Key": "tml-secret"}
        ).status
        == 200
    )
    assert wire.get("healthz") == {"status": "ok"}
    stopped(process, signal.SIGTERM)


def test_stopping_server_finishes_its_work(serve: Serve) -> None:
    process = serve("--poll-seconds", "20")
    wire = Wire(ready(process)[1])
    session = wire.session()
    body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": MODEL}
    sampler = wire.post("create_sampling_session", body)["sampling_session_id"]
    params = {"max_tokens": 120, "stop": []}
    requests = [
        wire.post("asample", sample_json(sampler, number, num_samples=128, sampling_params=params))[
            "request_id"
        ]
        for number in range(3)
    ]
    with ThreadPoolExecutor() as pool:
        waiting = [pool.submit(wire.result, request) for request in requests]
        time.sleep(0.3)
        assert not waiting[-1].done()
        process.send_signal(signal.SIGTERM)
        late = itertools.count(9)
        wait_until(lambda: wire.send("asample", sample_json(sampler, next(late))).status == 503)
        assert [len(done.result(20)["sequences"]) for done in waiting] == [128] * 3
    assert process.wait(20) in (0, 130)


@pytest.mark.slow
def test_second_signal_stops_the_server_at_once(serve: Serve) -> None:
    process = serve("--drain-seconds", "60")
    wire = Wire(ready(process)[1])
    body = {"session_id": wire.session(), "sampling_session_seq_id": 0, "base_model": MODEL}
    sampler = wire.post("create_sampling_session", body)["sampling_session_id"]
    params = {"max_tokens": 120, "stop": []}
    for number in range(20):
        wire.post("asample", sample_json(sampler, number, num_samples=128, sampling_params=params))
    process.send_signal(signal.SIGINT)
    late = itertools.count(20)
    wait_until(lambda: wire.send("asample", sample_json(sampler, next(late))).status == 503)
    assert process.poll() is None, "it finishes what it has begun"
    process.send_signal(signal.SIGINT)
    assert process.wait(20) == 130


def test_keys_are_made_listed_and_revoked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = ("--data-dir", str(tmp_path / "data"))

    def key(*words: str) -> tuple[int, str, str]:
        code = run(["key", *words, *place]).exit_code
        shown = capsys.readouterr()
        return code, shown.out, shown.err

    assert "there is no data" in key("list")[2]
    _, made, told = key("create", "laptop", "--owner", "ada")
    assert re.fullmatch(r"tml-[A-Za-z0-9_-]{43}\n", made)
    assert "key 1 (laptop) of ada" in told
    _, shown, _ = key("list")
    assert shown.startswith("Keys (1)\nID\tOwner\tName\tMade\tLast Used\tStatus\n1\tada\tlaptop\t")
    assert shown.endswith("\tnever\tvalid\n")
    assert made.strip() not in shown
    known = json.loads(key("list", "--json")[1])["keys"][0]
    assert (known["id"], known["owner"], known["name"], known["last_used"]) == (
        1,
        "ada",
        "laptop",
        None,
    )
    assert key("revoke", "1")[:2] == (0, "key 1 is revoked\n")
    assert "\trevoked " in key("list")[1]
    code, _, told = key("revoke", "1")
    assert code == 1
    assert "no valid key 1" in told
    assert key("create", "x", "--owner", " ")[0] == 1
    assert json.loads(key("create", "x", "--json")[1])["owner"] == LOCAL_OWNER


def test_key_on_record_closes_the_server_and_lets_it_listen_anywhere(
    serve: Serve, tmp_path: Path
) -> None:
    key = tool("key", "create", "k", "--data-dir", str(tmp_path / "data")).stdout.strip()
    process = serve("--host", "0.0.0.0", "--log-format", "json", "--samples", "3")
    line, url = ready(process)
    assert "key required" in line
    wire = Keyed(url.replace("0.0.0.0", "127.0.0.1"), key)
    assert Wire(wire.url).send("get_server_capabilities", method="GET").status == 401
    assert Wire(wire.url).get("healthz") == {"status": "ok"}
    many = wire.send("asample", {"num_samples": 4, "prompt": {"chunks": []}, "sampling_params": {}})
    assert "3" in many.json["detail"]
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=20)
    lines = [json.loads(text) for text in errors.splitlines()]
    assert [entry["status"] for entry in lines if entry["logger"] == "tinkex.server.access"] == [
        401,
        200,
        400,
    ]
    assert key not in errors


def test_busy_port_gives_one_error_line(serve: Serve) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        process = serve("--port", str(port))
        shown, errors = process.communicate(timeout=30)
    assert process.returncode == 1
    assert shown == ""
    assert len(errors.strip().splitlines()) == 1
    assert f"127.0.0.1:{port}" in errors
    assert "in use" in errors


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.1"])
def test_other_machines_are_not_let_in_without_a_key(serve: Serve, host: str) -> None:
    process = serve("--host", host)
    shown, errors = process.communicate(timeout=30)
    assert process.returncode == 1
    assert shown == ""
    assert "TINKEX_SERVER_API_KEY" in errors
    assert "Traceback" not in errors


@pytest.fixture
def inside(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Callable[..., str]]:
    """Runs a command that must fail, in this process; returns its one error."""
    handler = signal.getsignal(signal.SIGTERM)

    def fail(*arguments: str) -> str:
        monkeypatch.setenv("TINKEX_HUB_CACHE", "0")
        monkeypatch.setattr(sys, "argv", ["tinkex", *arguments])
        with pytest.raises(SystemExit) as caught:
            main()
        assert caught.value.code == 1
        shown = capsys.readouterr()
        assert shown.out == ""
        assert "Traceback" not in shown.err
        assert "Error: " in shown.err
        return shown.err

    yield fail
    signal.signal(signal.SIGTERM, handler)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("x=/nowhere/at/all", "/nowhere/at/all"),
        ("=dir", "NAME"),
        ("some/unknown-model", "some/unknown-model"),
    ],
)
def test_wrong_model_gives_one_error_line(
    inside: Callable[..., str], tmp_path: Path, model: str, words: str
) -> None:
    assert words in inside(
        "serve", "--port", "0", "--data-dir", str(tmp_path / "data"), "--model", model
    )


def test_directory_without_a_model_gives_one_error_line(
    inside: Callable[..., str], tmp_path: Path
) -> None:
    error = inside(
        "serve", "--port", "0", "--data-dir", str(tmp_path / "data"), "--model", f"x={tmp_path}"
    )
    assert str(tmp_path) in error


def test_unusable_data_directory_gives_one_error_line(
    inside: Callable[..., str], tmp_path: Path, model_dir: Path
) -> None:
    (tmp_path / "file").touch()
    given = ["--data-dir", str(tmp_path / "file"), "--model", f"{MODEL}={model_dir}"]
    assert str(tmp_path / "file") in inside("serve", "--port", "0", *given)


def test_missing_gpu_gives_one_error_line(
    inside: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    error = inside("serve", "--port", "0", "--device", "cuda")
    assert "there is no GPU here that PyTorch can use" in error
    assert "hint: see what `tinkex doctor` finds" in error


@pytest.mark.parametrize(
    ("has_gpu", "arguments", "made"),
    [
        (False, (), ("cpu", None)),
        (True, (), ("cuda", None)),
        (True, ("--device", "cpu"), ("cpu", None)),
        (True, ("--device", "cuda", "--dtype", "float32"), ("cuda", torch.float32)),
        (False, ("--device", "cpu", "--dtype", "bfloat16"), ("cpu", torch.bfloat16)),
    ],
)
def test_engine_uses_the_device_of_the_options(
    inside: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
    has_gpu: bool,
    arguments: tuple[str, ...],
    made: tuple[str, torch.dtype | None],
) -> None:
    def note(models: object, *, device: str, dtype: torch.dtype | None) -> None:
        raise tinkex.ConfigurationError(f"asked for {(device, dtype)}")

    monkeypatch.setattr("torch.cuda.is_available", lambda: has_gpu)
    monkeypatch.setattr("tinkex.engine.torch.engine.TorchEngine", note)
    assert f"asked for {made}" in inside("serve", "--port", "0", *arguments)


def test_errors_of_ours_come_with_their_hint(
    inside: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise tinkex.ConfigurationError("something is missing", hint="install it")

    monkeypatch.setattr("tinkex.cli.serve.make_engine", refuse)
    assert "something is missing\nhint: install it" in inside("serve", "--port", "0")
