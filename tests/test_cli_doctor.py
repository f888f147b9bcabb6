"""Findings of the doctor, and their messages."""

from __future__ import annotations

import datetime as dt
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import pytest

import tinkex
from faulty import Answer, FaultyServer, faulty_server
from tinkex.cli import doctor, run
from tinkex.cli.doctor import Finding
from tinkex.server.files.data_dir import Lock


@pytest.fixture(autouse=True)
def no_torch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Loading torch takes seconds; what its process says is told here."""
    monkeypatch.setattr(
        doctor,
        "TORCH",
        'print(\'{"version": "9", "threads": 2, "device": "cpu", "memory": null, "native": null, '
        '"products": true}\')',
    )
    monkeypatch.setenv("HOME", str(tmp_path))


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyServer]:
    with faulty_server() as server:
        monkeypatch.setenv("TINKER_BASE_URL", server.base_url)
        yield server


@pytest.fixture
def port() -> str:
    """A free port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return str(listener.getsockname()[1])


def examine(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any]]:
    """The exit code, and the findings by name."""
    capsys.readouterr()
    result = run(["doctor", "--json", *words])
    found = json.loads(capsys.readouterr().out)
    assert found == result.data
    assert found["ok"] == (result.exit_code == 0)
    return result.exit_code, {item["name"]: item for item in found["checks"]}


def dated(**off: float) -> Answer:
    moment = dt.datetime.now(dt.UTC) + dt.timedelta(**off)
    return Answer(
        body={"supported_models": []}, headers={"Date": format_datetime(moment, usegmt=True)}
    )


def test_healthy_machine_passes(
    faulty: FaultyServer, port: str, capsys: pytest.CaptureFixture[str]
) -> None:
    faulty.script("get_server_capabilities", dated())
    code, found = examine(capsys, "--port", port)
    assert code == 0
    expected = [
        "python",
        "versions",
        "torch",
        "device",
        "cpu",
        "memory",
        "disk",
        "port",
        "key",
        "server",
        "clock",
    ]
    assert list(found) == expected
    assert {item["status"] for item in found.values()} == {"ok"}
    assert tinkex.__version__ in found["versions"]["detail"]
    assert found["torch"]["detail"] == "9, 2 threads"
    run(["doctor", "--port", port])
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["11 checks: all is well", "Status\tCheck\tFound\tFix"]
    assert len(lines) == 13


def test_dead_server_is_an_error_within_seconds(
    monkeypatch: pytest.MonkeyPatch, port: str, capsys: pytest.CaptureFixture[str]
) -> None:
    began = time.monotonic()
    code, found = examine(capsys, "--base-url", f"http://127.0.0.1:{port}")
    assert time.monotonic() - began < 5
    assert (code, found["server"]["status"]) == (1, "error")
    assert "whether the server runs" in found["server"]["fix"]


def test_mute_server_times_out(faulty: FaultyServer, capsys: pytest.CaptureFixture[str]) -> None:
    faulty.script("get_server_capabilities", Answer(body={"supported_models": []}, delay=20))
    began = time.monotonic()
    code, found = examine(capsys, "--timeout", "300")
    assert time.monotonic() - began < 5
    assert (code, found["server"]["status"]) == (1, "error")


def test_answer_that_makes_no_sense_is_an_error(
    faulty: FaultyServer, capsys: pytest.CaptureFixture[str]
) -> None:
    for body in (b"<html>", b"[]"):
        faulty.script("get_server_capabilities", Answer(body=body))
        code, found = examine(capsys)
        assert (code, found["server"]["status"]) == (1, "error")


def test_refused_key_differs_from_a_dead_server(
    faulty: FaultyServer, capsys: pytest.CaptureFixture[str]
) -> None:
    faulty.script("get_server_capabilities", Answer(401, {"detail": "who are you"}))
    code, found = examine(capsys, "--api-key", "tml-secret-of-mine")
    assert code == 1
    assert "refuses the key" in found["server"]["detail"]
    assert "tinkex auth login" in found["server"]["fix"]
    assert found["key"]["detail"].startswith("from --api-key")
    assert "secret-of" not in str(found)


def test_commands_without_key_and_address_compute_in_process(
    capsys: pytest.CaptureFixture[str],
) -> None:
    ended, found = examine(capsys)
    assert (ended, found["key"]["status"]) == (0, "ok")
    assert found["server"]["detail"] == "inside this process"
    assert found["python"]["status"] == "ok"


@pytest.mark.parametrize(
    ("seconds", "status", "code"),
    [(5, "ok", 0), (-5, "ok", 0), (90, "warning", 0), (-4000, "error", 1)],
)
def test_clock_skew_is_reported(
    faulty: FaultyServer, capsys: pytest.CaptureFixture[str], seconds: float, status: str, code: int
) -> None:
    faulty.script("get_server_capabilities", dated(seconds=seconds))
    ended, found = examine(capsys)
    assert (ended, found["clock"]["status"]) == (code, status)


def test_busy_port_is_a_warning(faulty: FaultyServer, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        code, found = examine(capsys, "--port", str(taken.getsockname()[1]))
    assert (code, found["port"]["status"]) == (0, "warning")
    assert "--port 0" in found["port"]["fix"]


def test_torch_is_needed_only_for_local_models(
    monkeypatch: pytest.MonkeyPatch, faulty: FaultyServer, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "TORCH", "raise ImportError('libsomething.so is missing')")
    code, found = examine(capsys)
    assert (code, found["torch"]["status"]) == (0, "warning")
    assert "libsomething.so" in found["torch"]["detail"]
    code, found = examine(capsys, "--base-url", "local")
    assert (code, found["torch"]["status"]) == (1, "error")
    assert found["server"]["detail"] == "inside this process"
    monkeypatch.setattr(doctor, "TORCH", "import time; time.sleep(20)")
    monkeypatch.setattr(doctor, "TORCH_SECONDS", 0.3)
    code, found = examine(capsys)
    assert "0.3 s" in found["torch"]["detail"]
    monkeypatch.setattr("tinkex.engine.torch.kind.LOCAL_PACKAGES", ("a_package_that_is_not_there",))
    code, found = examine(capsys)
    assert "pip install 'tinkex[local]'" in found["torch"]["fix"]


def test_little_memory_and_little_room_are_warnings(
    monkeypatch: pytest.MonkeyPatch, faulty: FaultyServer, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "LITTLE_MEMORY", 1 << 60)
    monkeypatch.setattr(doctor, "LITTLE_DISK", 1 << 60)
    code, found = examine(capsys)
    assert code == 0
    assert found["memory"]["status"] == found["disk"]["status"] == "warning"


@pytest.mark.parametrize("local", [True, False])
@pytest.mark.parametrize("obstacle", ["file", "file-above", "lock"])
def test_unusable_data_directory_is_reported(
    obstacle: str,
    local: bool,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    faulty: FaultyServer,
    capsys: pytest.CaptureFixture[str],
) -> None:
    place, lock = tmp_path / "data", None
    if obstacle == "lock":
        place.mkdir()
        lock = Lock(place, shared=False)
    else:
        place.write_text("not a directory")
    monkeypatch.setenv(
        "TINKEX_DATA_DIR", str(place / "below" if obstacle == "file-above" else place)
    )
    _, found = examine(capsys, *(["--base-url", "local"] if local else []))
    assert found["disk"]["status"] == ("error" if local else "warning")
    assert str(place) in found["disk"]["detail"]
    assert ("in use by a tinkex server" if lock else "cannot be written") in found["disk"]["detail"]
    assert "TINKEX_DATA_DIR" in found["disk"]["fix"]
    if lock:
        lock.close()
        assert examine(capsys)[1]["disk"]["status"] == "ok"
        assert [path.name for path in place.iterdir()] == ["lock"]


def test_data_directory_is_tried_without_a_trace(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    faulty: FaultyServer,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("TINKEX_DATA_DIR", str(tmp_path / "a" / "b"))
    assert examine(capsys)[1]["disk"]["status"] == "ok"
    assert list(tmp_path.iterdir()) == []


def test_old_python_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "OLDEST_PYTHON", (99, 0))
    [found] = doctor.check_python()
    assert isinstance(found, Finding)
    assert found.status == "error"


@pytest.mark.parametrize(
    ("safe", "told"),
    [("true", "and is slower: rows differ"), ("false", "change each other's last")],
)
def test_cpu_without_the_c_step_is_reported(
    safe: str,
    told: str,
    port: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    script = doctor.TORCH.replace('"native": null', '"native": "rows differ"').replace("true", safe)
    monkeypatch.setattr(doctor, "TORCH", script)
    _, found = examine(capsys, "--port", port)
    assert found["cpu"]["status"] == "warning"
    assert told in found["cpu"]["detail"]
    assert "C compiler" in found["cpu"]["fix"]


@pytest.mark.slow
def test_torch_facts_come_from_a_subprocess(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    shown = subprocess.run(
        [sys.executable, "-c", doctor.TORCH], capture_output=True, text=True, check=True
    )
    found = json.loads(shown.stdout)
    assert "import" not in str(found["native"])
    assert "module" not in str(found["native"])
    assert found.keys() == {
        "version",
        "threads",
        "device",
        "memory",
        "native",
        "products",
    }
