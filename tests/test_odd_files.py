"""Files and addresses that are not as they should be: refused by name, without a traceback."""

from __future__ import annotations

import errno
import json
import os
import sqlite3
import struct
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from support import Wire, serving
from tinkex.cli.diff import _read_config, _read_header
from tinkex.cli.output import CommandError
from tinkex.engine.api import EngineError
from tinkex.engine.fake import FakeEngine
from tinkex.engine.families.family import read_config
from tinkex.engine.families.model_config import TensorNames
from tinkex.engine.file_formats import read_lora_config
from tinkex.server.database.sqlite import DATABASE, SqliteDatabase
from tinkex.server.files.imports import _header, read_source

DEEP = '{"a": ' * 100_000
LORA = {
    "r": 4,
    "lora_alpha": 32,
    "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
}
LONG = "9" * 5000
ODD: dict[str, str | bytes] = {
    "nested too deeply": DEEP,
    "a number of 5,000 digits": '{"r": ' + LONG + "}",
    "no object": "[]",
    "not UTF-8": b'{"r": "\xff"}',
    "a rank of 4,000 digits": json.dumps(LORA).replace('"r": 4', '"r": ' + LONG[:4000]),
    "a rank that is none": json.dumps(LORA | {"r": "x"}),
    "modules that are none": json.dumps(LORA | {"target_modules": [{"a": 1}]}),
    "an alpha of 4,000 digits": json.dumps(LORA).replace("32", LONG[:4000]),
}


def put(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path.parent


@pytest.mark.parametrize("content", ODD.values(), ids=ODD.keys())
def test_odd_adapter_is_refused(tmp_path: Path, content: str | bytes) -> None:
    directory = put(tmp_path / "adapter_config.json", content)
    with pytest.raises(EngineError, match=r"adapter_config\.json") as caught:
        read_lora_config(directory, TensorNames().groups)
    assert len(str(caught.value)) < 500 + len(str(tmp_path))


@pytest.mark.parametrize(
    "name", ["nested too deeply", "a number of 5,000 digits", "an alpha of 4,000 digits"]
)
def test_odd_adapter_is_not_imported(tmp_path: Path, name: str) -> None:
    with pytest.raises(EngineError, match=r"adapter_config\.json"):
        read_source(put(tmp_path / "adapter_config.json", ODD[name]))


@pytest.mark.parametrize(
    "name", ["nested too deeply", "a number of 5,000 digits", "no object", "not UTF-8"]
)
def test_odd_model_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(EngineError, match=r"config\.json"):
        read_config(put(tmp_path / "config.json", ODD[name]))


def test_deeply_nested_header_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    put(path, struct.pack("<Q", len(DEEP)) + DEEP.encode())
    with pytest.raises(
        EngineError, match=r"model\.safetensors is not valid JSON: it is nested too deeply"
    ):
        _header(path)
    with pytest.raises(CommandError):
        list(_read_header(path))
    with pytest.raises(CommandError):
        _read_config(put(tmp_path / "adapter_config.json", DEEP))


@pytest.mark.parametrize(
    "command", [["key", "list"], ["key", "create", "x"], ["serve", "--port", "0"]]
)
def test_newer_data_directory_gives_one_error_line(tmp_path: Path, command: list[str]) -> None:
    SqliteDatabase(tmp_path).close()
    with closing(sqlite3.connect(tmp_path / DATABASE)) as database:
        database.execute("PRAGMA user_version=999")
        database.commit()
    line = [sys.executable, "-m", "tinkex", *command, "--data-dir", str(tmp_path)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "a newer version of tinkex wrote it (format 999" in done.stderr
    assert "Traceback" not in done.stderr


FULL = [
    OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
    ValueError("I/O error: No space left (os error 28)"),
]


@pytest.mark.parametrize("error", FULL, ids=["system", "safetensors"])
def test_load_on_a_full_disk_is_a_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    with serving(FakeEngine(), tmp_path) as url:
        wire = Wire(url)
        session = wire.session()
        model = wire.model(session)
        path = wire.run("save_weights", {"model_id": model, "path": "a", "seq_id": 1})["path"]

        def full(write: Any, scratch: Path) -> None:
            raise error

        monkeypatch.setattr("tinkex.server.runs.snapshot.write_whole", full)
        created = {"session_id": session, "model_seq_id": 1, "path": path, "optimizer": False}
        for body in ({"model_id": model, "path": path, "optimizer": False, "seq_id": 2}, created):
            failed = wire.run("load_weights", body)
            assert failed["category"] == "server"
            assert failed["error"].startswith(
                "the server's disk is full: what was loaded cannot be kept"
            )


@pytest.mark.parametrize("name", ["host", "origin"])
@pytest.mark.parametrize(
    "place", ["evil@127.0.0.1", "http://evil@127.0.0.1", "evil:pw@localhost:80"]
)
def test_open_server_refuses_an_address_with_a_user(tmp_path: Path, name: str, place: str) -> None:
    with serving(FakeEngine(), tmp_path) as url:
        heard = Wire(url).send("healthz", method="GET", headers={name: place})
    assert heard.status == 403
    assert name in heard.json["detail"]


def test_open_server_refuses_two_hosts(tmp_path: Path) -> None:
    import socket

    with serving(FakeEngine(), tmp_path) as url:
        host, port = url.removeprefix("http://").split(":")
        for hosts in (
            ("127.0.0.1", "evil.example"),
            ("evil.example", "127.0.0.1"),
            ("127.0.0.1", "127.0.0.1"),
        ):
            lines = "".join(f"Host: {each}\r\n" for each in hosts)
            with closing(socket.create_connection((host, int(port)))) as sock:
                sock.sendall(
                    f"GET /api/v1/healthz HTTP/1.1\r\n{lines}Connection: close\r\n\r\n".encode()
                )
                answer = b""
                while part := sock.recv(65536):
                    answer += part
            assert answer.partition(b"\r\n")[0].split()[1] in (b"403", b"400"), answer
