"""Checkpoints as files: fetched, exported for other libraries, compared, and pushed."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import threading
import time
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tinkex
from faulty import Answer, FaultyServer, Seen, faulty_server
from hub import TOKEN, Hub, hub_server
from support import assert_peft_agrees
from tinkex.cli import run
from tinkex.cli.diff import compare, read_tensors
from tinkex.cli.output import CommandError, Result

PATH, OTHER = "tinker://r/weights/one", "tinker://r/weights/two"
CONFIG = {"r": 4, "peft_type": "LORA", "base_model_name_or_path": None}


def safetensors(tensors: Mapping[str, tuple[str, Any]]) -> bytes:
    """Tensors as a file has them, each given by its type's name and an array."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, (dtype, array) in tensors.items():
        raw = array.tobytes()
        header[name] = {
            "dtype": dtype,
            "shape": list(array.shape),
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


A = np.arange(6, dtype=np.float32).reshape(2, 3)
B = np.ones(4, np.float32)
FIRST = {
    "adapter_config.json": json.dumps(CONFIG).encode(),
    "adapter_model.safetensors": safetensors(
        {"a": ("F32", A), "b": ("F32", B), "gone": ("F32", B)}
    ),
    "optimizer.safetensors": safetensors({"exp_avg.a": ("F32", A)}),
    "checkpoint_complete": b"",
}
SECOND = {
    "adapter_config.json": json.dumps({**CONFIG, "r": 8}).encode(),
    "adapter_model.safetensors": safetensors(
        {"a": ("F32", A + 0.5), "b": ("F32", B), "new": ("F32", B)}
    ),
    "optimizer.safetensors": safetensors({"exp_avg.a": ("F32", A * 2)}),
}


def packed(files: Mapping[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, data in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    return buffer.getvalue()


def offer(server: FaultyServer, path: str, data: bytes, **how: Any) -> str:
    """Let a server have a checkpoint; where its archive is fetched from."""
    name = path.rpartition("/")[2]
    server.script(
        f"training_runs/r/checkpoints/weights/{name}/archive",
        Answer(302, b"", {"Location": f"/f/{name}"}),
    )

    def whole(seen: Seen) -> Answer:
        given = {"ETag": '"tag"'}
        if "range" in seen.headers:
            begin = int(seen.headers["range"].removeprefix("bytes=").removesuffix("-"))
            given["Content-Range"] = f"bytes {begin}-{len(data) - 1}/{len(data)}"
            return Answer(206, data[begin:], given)
        return Answer(200, data, given, **how)

    server.script(f"/f/{name}", whole)
    return f"/f/{name}"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyServer]:
    """A server with two checkpoints."""
    with faulty_server() as made:
        monkeypatch.setenv("TINKER_BASE_URL", made.base_url)
        offer(made, PATH, packed(FIRST))
        offer(made, OTHER, packed(SECOND))
        made.script(
            "weights_info", Answer(body={"base_model": "org/base", "is_lora": True, "lora_rank": 4})
        )
        yield made


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "out"


def left_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def interrupted(place: Path, *words: str) -> Result:
    """A command that is stopped by Ctrl-C once a part of its download lies on disk."""
    ended = threading.Event()

    def interrupt() -> None:
        while not ended.wait(0.01):
            if any(file.stat().st_size for file in place.rglob("archive")):
                os.kill(os.getpid(), signal.SIGINT)
                return

    watching = threading.Thread(target=interrupt)
    watching.start()
    try:
        return run(words)
    finally:
        ended.set()
        watching.join()


# ── download ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.covers("1.16.2", "1.16.5", "Q-15")
def test_checkpoint_is_downloaded_here_or_elsewhere(
    server: FaultyServer,
    tmp_path: Path,
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["checkpoint", "download", PATH]).exit_code == 0
    assert capsys.readouterr().out == f"Downloaded to {tmp_path / 'r_weights_one'}\n"
    assert left_in(tmp_path / "r_weights_one") == sorted(FIRST)
    assert run(["checkpoint", "download", PATH, "--output", str(place), "--json"]).exit_code == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown == {"path": PATH, "destination": str(place / "r_weights_one")}


@pytest.mark.covers("1.16.2")
def test_existing_file_is_replaced_only_by_force(
    server: FaultyServer, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["checkpoint", "download", PATH, "-o", str(place)]
    (place / "r_weights_one").mkdir(parents=True)
    assert run(words).exit_code == 1
    assert "--force replaces it" in capsys.readouterr().err
    assert server.seen == []
    assert run([*words, "--force"]).exit_code == 0
    assert left_in(place / "r_weights_one") == sorted(FIRST)


@pytest.mark.parametrize("command", ["download", "export"])
def test_interrupted_download_is_continued(
    server: FaultyServer, place: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    data = packed({**FIRST, "more": os.urandom(8_000_000)})
    fetched = offer(server, PATH, data, pieces=8, pause=0.2)
    words = ("checkpoint", command, PATH, "-o", str(place / "it"))
    assert interrupted(place, *words).exit_code == 130
    assert "stopped" in capsys.readouterr().err
    assert run(words).exit_code == 0
    assert (
        int(server.requests(fetched)[-1].headers["range"].removeprefix("bytes=").removesuffix("-"))
        > 0
    )
    assert left_in(place) == ["it"]


def test_download_to_unwritable_place_gives_one_error_line(
    server: FaultyServer, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place.mkdir(exist_ok=True)
    file = place / "a file"
    file.touch()
    assert run(["checkpoint", "download", PATH, "--output", str(file / "below")]).exit_code == 1
    told = capsys.readouterr().err.splitlines()[-1]
    assert told.startswith(f"Error: {file / 'below'}")
    assert told.endswith(": Not a directory")


# ── export ────────────────────────────────────────────────────────────────────────────────────────

PEFT = ["adapter_config.json", "adapter_model.safetensors"]


def test_export_leaves_out_training_state(
    server: FaultyServer, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = run(["checkpoint", "export", PATH, "--output", str(place / "it"), "--json"])
    assert result.exit_code == 0
    assert left_in(place) == ["it"]
    assert left_in(place / "it") == PEFT == result.data["files"]
    assert json.loads((place / "it" / PEFT[0]).read_text())["base_model_name_or_path"] == "org/base"
    assert (place / "it" / PEFT[1]).read_bytes() == FIRST[PEFT[1]]
    assert json.loads(capsys.readouterr().out) == result.data
    assert result.data["size_bytes"] == sum(
        file.stat().st_size for file in (place / "it").iterdir()
    )


@pytest.mark.parametrize("name", ["a.tar", "a.tar.gz", "a.TGZ", "a.zip"])
def test_export_may_be_an_archive(server: FaultyServer, place: Path, name: str) -> None:
    words = ["checkpoint", "export", PATH, "-o", str(place / name), "--base-model", "here/it"]
    assert run(words).exit_code == 0
    assert left_in(place) == [name]
    if name.endswith("zip"):
        with zipfile.ZipFile(place / name) as archive:
            files = {member: archive.read(member) for member in archive.namelist()}
    else:
        with tarfile.open(place / name) as tar:
            files = {
                member.name: (tar.extractfile(member) or io.BytesIO()).read() for member in tar
            }
    assert sorted(files) == PEFT
    assert json.loads(files[PEFT[0]])["base_model_name_or_path"] == "here/it"
    before = (place / name).read_bytes()
    assert run(words).exit_code == 1
    assert (place / name).read_bytes() == before
    assert run([*words, "--force"]).exit_code == 0


def test_export_that_is_interrupted_while_it_packs_does_not_fetch_again(
    server: FaultyServer, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*arguments: Any) -> None:
        raise KeyboardInterrupt

    words = ["checkpoint", "export", PATH, "-o", str(place / "it.tar")]
    with monkeypatch.context() as patched:
        patched.setattr(tarfile.TarFile, "addfile", interrupt)
        assert run(words).exit_code == 130
    (kept,) = (place / ".it.tar.export").iterdir()
    assert kept.name.endswith(".partial")
    assert run(words).exit_code == 0
    assert server.requests("/f/one")[-1].headers["range"] == f"bytes={len(packed(FIRST))}-"
    assert left_in(place) == ["it.tar"]


def test_failed_export_keeps_the_old_files(
    server: FaultyServer, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (place / "it").mkdir(parents=True)
    (place / "it" / "mine").touch()
    offer(server, PATH, packed({"weights.bin": b"x"}))
    assert run(["checkpoint", "export", PATH, "-o", str(place / "it"), "--force"]).exit_code == 1
    assert "holds no PEFT adapter" in capsys.readouterr().err
    server.script(
        "training_runs/r/checkpoints/weights/one/archive", Answer(404, {"detail": "gone"})
    )
    assert run(["checkpoint", "export", PATH, "-o", str(place / "it"), "--force"]).exit_code == 1
    assert "gone" in capsys.readouterr().err
    assert left_in(place) == ["it"]
    assert left_in(place / "it") == ["mine"]


@pytest.mark.parametrize("fault", [KeyboardInterrupt(), OSError("no more")])
def test_interrupted_export_keeps_the_old_files(
    server: FaultyServer, place: Path, monkeypatch: pytest.MonkeyPatch, fault: BaseException
) -> None:
    (place / "it").mkdir(parents=True)
    (place / "it" / "mine").touch()
    replace = os.replace

    def fail(source: Any, target: Any) -> None:
        if Path(source).name == "made":
            raise fault
        replace(source, target)

    monkeypatch.setattr(os, "replace", fail)
    assert run(["checkpoint", "export", PATH, "-o", str(place / "it"), "--force"]).exit_code != 0
    assert left_in(place / "it") == ["mine"]


@pytest.mark.slow
def test_peft_reads_an_export_and_computes_the_same(
    server_url: str, model_dir: Path, place: Path
) -> None:
    from support import MODEL, make_data, train

    with tinkex.ServiceClient(base_url=server_url) as service:
        client = service.create_lora_training_client(
            MODEL, rank=4, seed=1, train_unembed=False
        ).result()
        train(client, tinkex.types, make_data(tinkex.types), 2)
        path = client.save_state("exported").result().path
        words = ["checkpoint", "export", path, "-o", str(place), "--base-model", str(model_dir)]
        assert run([*words, "--base-url", server_url]).exit_code == 0
        assert_peft_agrees(client, tinkex.types, model_dir, place)


# ── diff ──────────────────────────────────────────────────────────────────────────────────────────


def on_disk(directory: Path, files: Mapping[str, bytes]) -> Path:
    directory.mkdir()
    for name, data in files.items():
        (directory / name).write_bytes(data)
    return directory


def test_two_checkpoints_are_compared(
    server: FaultyServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    local = on_disk(tmp_path / "second", SECOND)
    for second in (OTHER, str(local)):
        result = run(["checkpoint", "diff", PATH, second, "--json"])
        assert result.exit_code == 0
        data = json.loads(capsys.readouterr().out)
        assert data["config"] == {"r": [4, 8]}
        assert (data["only_in_first"], data["only_in_second"]) == (["gone"], ["new"])
        assert [entry["name"] for entry in data["tensors"]] == ["a", "b"]
        [first, second_tensor] = data["tensors"]
        norm = np.linalg.norm(np.full(6, 0.5))
        assert first["max"] == 0.5
        assert first["norm"] == pytest.approx(norm)
        assert first["relative"] == pytest.approx(norm / np.linalg.norm(A))
        assert second_tensor["max"] == 0
        assert data["summary"]["compared"] == 2
        assert data["summary"]["different"] == 1
        assert data["summary"]["norm"] == pytest.approx(norm)
        assert data["summary"]["relative"] == pytest.approx(
            norm / np.sqrt(np.sum(A**2) + np.sum(B**2))
        )
        assert data["same"] is False
    run(["checkpoint", "diff", PATH, str(local)])
    text = capsys.readouterr().out
    assert "Config r: 4 -> 8\nOnly in the first: gone\nOnly in the second: new\n" in text
    assert (
        "Tensors that differ (1/1)\nTensor\tShape\tMax difference\tRelative\na\t2x3\t5.000e-01\t"
        in text
    )
    assert run(["checkpoint", "diff", PATH, str(local), "--exit-code"]).exit_code == 1


def test_same_checkpoint_has_no_difference(
    server: FaultyServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    local = str(on_disk(tmp_path / "first", FIRST))
    result = run(["checkpoint", "diff", local, PATH, "--exit-code"])
    assert (result.exit_code, result.data["same"]) == (0, True)
    assert capsys.readouterr().out == "No difference: 3 tensors are equal.\n"
    with_optimizer = run(["checkpoint", "diff", local, PATH, "--optimizer"])
    assert with_optimizer.data["summary"]["compared"] == 4


def test_any_kind_of_number_can_be_compared(tmp_path: Path) -> None:
    values = np.array([0.5, -2.0, 0.0, np.inf], np.float32)
    halves = {
        "f16": ("F16", values.astype(np.float16)),
        "bf16": ("BF16", (values.view(np.uint32) >> 16).astype(np.uint16)),
        "f64": ("F64", values.astype(np.float64)),
        "i64": ("I64", np.array([3, -4])),
        "empty": ("F32", np.zeros((0, 2), np.float32)),
        "shaped": ("F32", np.zeros(2, np.float32)),
        "zero": ("F32", np.zeros(2, np.float32)),
    }
    whole = dict.fromkeys(("f16", "bf16", "f64"), ("F32", values)) | {
        "i64": ("F32", np.array([3, -4.0], np.float32)),
        "empty": ("F32", np.zeros((0, 2), np.float32)),
        "shaped": ("F32", np.zeros((1, 2), np.float32)),
        "zero": ("F32", np.ones(2, np.float32)),
    }
    first = on_disk(tmp_path / "a", {"m.safetensors": safetensors(halves)})
    second = on_disk(tmp_path / "b", {"m.safetensors": safetensors(whole)})
    found = compare(first, second)
    assert {entry["name"]: entry["max"] for entry in found["tensors"]} == {
        **dict.fromkeys(("f16", "bf16", "f64", "i64", "empty"), 0.0),
        "zero": 1.0,
    }
    assert found["tensors"][0]["name"] == "zero"  # how much it differs cannot be said in proportion
    assert found["tensors"][0]["relative"] is None
    assert found["shapes"] == {"shaped": [[2], [1, 2]]}


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff" * 8 + b"{}",
        safetensors({"x": ("F8_E4M3", np.zeros(2, np.int8))}),
        safetensors({"x": ("F32", B)})[:-4],
        (4).to_bytes(8, "little") + b"nope",
    ],
)
def test_broken_file_gives_one_error_line(tmp_path: Path, data: bytes) -> None:
    directory = on_disk(tmp_path / "a", {"m.safetensors": data})
    with pytest.raises(CommandError, match=r"m\.safetensors cannot be read"):
        read_tensors(directory)


def test_invalid_checkpoint_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["checkpoint", "diff", str(tmp_path / "none"), str(tmp_path)]).exit_code == 1
    assert "neither a tinker:// path nor a directory" in capsys.readouterr().err
    assert run(["checkpoint", "diff", str(tmp_path), str(tmp_path)]).exit_code == 1
    assert "holds no .safetensors files" in capsys.readouterr().err


# ── the hub ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.covers("1.16.2", "1.16.5")
# of httpx, about how huggingface_hub calls it
@pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")
def test_adapter_is_pushed(
    server: FaultyServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    with hub_server() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        words = [
            "checkpoint",
            "push-hf",
            PATH,
            "--repo",
            "me/it",
            "--revision",
            "v2",
            "--hf-token",
            TOKEN,
        ]
        more = [
            "--public",
            "--no-model-card",
            "--ignore-pattern",
            "optimizer*",
            "--commit-message",
            "hello",
        ]
        result = run([*words, *more, "--json"])
        assert result.exit_code == 0, capsys.readouterr().err
        shown = capsys.readouterr()
        assert json.loads(shown.out) == {
            "command": "checkpoint push-hf",
            "action": "push_hf",
            "checkpoint_path": PATH,
            "repo_id": "me/it",
            "revision": "v2",
            "public": True,
        }
        assert TOKEN not in shown.out + shown.err
        assert {"adapter_config.json", "adapter_model.safetensors"} <= hub.repos["me/it"][
            "v2"
        ].keys()
        assert not {"README.md", "optimizer.safetensors"} & hub.repos["me/it"]["v2"].keys()
        assert hub.commits[-1]["summary"] == "hello"
        assert run([*words[:-2], "--hf-token", TOKEN, "--allow-pattern", "*.json"]).exit_code == 0
        assert capsys.readouterr().out == f"Uploaded {PATH} to me/it\nRevision: v2\nPublic: No\n"


@pytest.fixture
def pushing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """A hub to push to, and a cache of our own."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with hub_server() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        yield hub


PUSH = ("checkpoint", "push-hf", PATH, "--repo", "me/it", "--hf-token", TOKEN)


@pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")
def test_interrupted_push_resumes_its_download(
    server: FaultyServer, pushing: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = packed({**FIRST, "more": os.urandom(8_000_000)})
    fetched = offer(server, PATH, data, pieces=8, pause=0.2)
    cache = tmp_path / "cache"
    assert interrupted(cache, *PUSH).exit_code == 130
    assert "stopped" in capsys.readouterr().err
    assert [file.name for file in cache.rglob("*") if file.is_file()] != []
    assert run(PUSH).exit_code == 0, capsys.readouterr().err
    assert (
        int(server.requests(fetched)[-1].headers["range"].removeprefix("bytes=").removesuffix("-"))
        > 0
    )
    assert (
        pushing.repos["me/it"]["main"]["more"] == data[data.index(b"more") :][512 : 512 + 8_000_000]
    )
    assert left_in(cache / "tinkex" / "push") == []
    assert f"Uploading {PATH}" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")
def test_refused_push_keeps_its_download(
    server: FaultyServer, pushing: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pushing.refuse = {"/commit/": 500}
    assert run(PUSH).exit_code == 1
    (kept,) = (tmp_path / "cache" / "tinkex" / "push").iterdir()
    assert all(place.name.endswith(".partial") for place in kept.iterdir())
    pushing.refuse = {}
    data = packed(FIRST)
    server.script(
        "/f/one", Answer(416, b"", {"ETag": '"tag"', "Content-Range": f"bytes */{len(data)}"})
    )
    assert run(PUSH).exit_code == 0, capsys.readouterr().err
    asked = server.requests("/f/one")
    assert (asked[-1].headers["range"], asked[-1].headers["if-range"]) == (
        f"bytes={len(data)}-",
        '"tag"',
    )
    assert "adapter_model.safetensors" in pushing.repos["me/it"]["main"]
    assert left_in(tmp_path / "cache" / "tinkex" / "push") == []


@pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")
def test_checkpoint_replaced_during_download_is_fetched_whole(
    server: FaultyServer, pushing: Hub, capsys: pytest.CaptureFixture[str]
) -> None:
    pushing.refuse = {"/commit/": 500}
    assert run(PUSH).exit_code == 1
    pushing.refuse = {}
    server.script("/f/one", Answer(200, packed(SECOND), {"ETag": '"another"'}))
    assert run(PUSH).exit_code == 0, capsys.readouterr().err
    assert (
        pushing.repos["me/it"]["main"]["adapter_model.safetensors"]
        == SECOND["adapter_model.safetensors"]
    )


def test_ctrl_c_stops_an_upload_and_keeps_the_download(
    server: FaultyServer, pushing: Hub, tmp_path: Path
) -> None:
    pushing.lfs_from, pushing.stall = 10, {"/lfs/": 90.0}
    given = {
        **os.environ,
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_OFFLINE": "0",
        "TINKER_API_KEY": "tml-x",
    }
    program = (
        "import atexit, tinkex.cli.main as command; atexit.register(print, 'the last word'); "
        "command.main()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, *PUSH],
        env=given,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        while process.poll() is None and not any("/lfs/" in path for _, path in pushing.seen):
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        heard, told = process.communicate(timeout=50)
    finally:
        process.kill()
    assert process.returncode == 130, told
    assert "stopped" in told
    assert heard == "the last word\n"  # what others do at the end of a program is done
    assert [file.name for file in (tmp_path / "cache").rglob("archive")] == ["archive"]


def test_push_without_a_token_sends_no_request(
    server: FaultyServer,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    assert run(["checkpoint", "push-hf", PATH]).exit_code == 1
    assert "no Hugging Face token" in capsys.readouterr().err
    assert server.seen == []


def test_checkpoints_of_different_ranks_differ(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    from tinkex.cli.diff import compare

    for name, rank in (("one", 2), ("two", 4)):
        (tmp_path / name).mkdir()
        save_file(
            {"x.lora_A.weight": np.ones((rank, 3), np.float32)},
            tmp_path / name / "adapter_model.safetensors",
        )
    found = compare(tmp_path / "one", tmp_path / "two")
    assert found["summary"]["compared"] == 0
    assert found["summary"]["relative"] is None
    assert not found["same"]


@pytest.mark.parametrize("kind", ["", "embedding_"])
def test_adapters_of_different_ranks_are_compared_by_their_products(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from safetensors.numpy import save_file

    from tinkex.cli import diff

    monkeypatch.setattr(diff, "BLOCK", 7)  # several blocks of rows
    generator = np.random.default_rng(0)
    end = "" if kind else ".weight"
    products = []
    for name, rank, use_rslora in (("one", 2, False), ("two", 4, True)):
        a = generator.standard_normal((rank, 3)).astype(np.float32)
        b = generator.standard_normal((5, rank)).astype(np.float32)
        (tmp_path / name).mkdir()
        factors = {f"x.lora_{kind}A{end}": a, f"x.lora_{kind}B{end}": b}
        save_file(factors, tmp_path / name / "adapter_model.safetensors")
        config = {"r": rank, "lora_alpha": 8, "use_rslora": use_rslora}
        (tmp_path / name / "adapter_config.json").write_text(json.dumps(config))
        products.append(b.astype(np.float64) @ a * (8 / (np.sqrt(rank) if use_rslora else rank)))
    found = compare(tmp_path / "one", tmp_path / "two")
    difference = products[0] - products[1]
    assert found["products"] == ["x"]
    assert found["summary"]["compared"] == 1
    assert found["summary"]["max"] == pytest.approx(np.abs(difference).max())
    assert found["summary"]["relative"] == pytest.approx(
        np.linalg.norm(difference) / np.linalg.norm(products[0])
    )
    assert not found["same"]
    assert run(["checkpoint", "diff", str(tmp_path / "one"), str(tmp_path / "two")]).exit_code == 0
    text = capsys.readouterr().out
    assert "compared by their products B·A: 1 modules" in text
    assert "x (B·A)\t5x3\t" in text
    assert "Shape of" not in text
    assert f"Relative: {found['summary']['relative']:.3%}" in text


# of httpx, about how huggingface_hub calls it
@pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")
def test_push_warns_of_an_output_layer(
    server: FaultyServer, pushing: Hub, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "warning" not in run([*PUSH]).data
    assert "--no-train-unembed" not in capsys.readouterr().err
    config = {
        **CONFIG,
        "target_modules": ["q_proj", "lm_head"],
        "base_model_name_or_path": "tinkex/tiny",
    }
    offer(server, PATH, packed({**FIRST, "adapter_config.json": json.dumps(config).encode()}))
    result = run([*PUSH])
    assert "tinkex/tiny ties to its embeddings" in result.data["warning"]
    assert "--no-train-unembed" in capsys.readouterr().err
