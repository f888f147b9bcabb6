"""Files of the hub, the token for it, and adapters pushed to a hub on loopback by huggingface_hub
itself."""

from __future__ import annotations

import inspect
import json
import logging
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tinkex
from faulty import Answer, FaultyServer, faulty_server
from hub import TOKEN, Hub, hub_server
from support import serving
from tinkex import RestClient, ServiceClient
from tinkex.engine.fake import FakeEngine
from tinkex.hub import pushes
from tinkex.hub.hub_files import (
    HubError,
    build_hf_url,
    default_cache_dir,
    resolve_file,
    resolve_token,
    sanitize_repo_id,
)
from tinkex.hub.pushes import Pushed, clean_name, matches, push_checkpoint_adapter

# Of httpx, about how huggingface_hub calls it.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")


@pytest.fixture(autouse=True)
def no_token(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_TOKEN_PATH", "HF_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf-home"))


@pytest.fixture
def server() -> Iterator[FaultyServer]:
    with faulty_server() as made:
        yield made


# ── files ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.covers("1.2.1/1", "1.2.1/2")
def test_file_is_fetched_once_and_kept(server: FaultyServer, tmp_path: Path) -> None:
    server.script("/org/model/resolve/main/a/b.json", Answer(200, b"{}"))
    for _ in range(2):
        path = resolve_file(
            "org/model", "main", "a/b.json", cache_dir=tmp_path, endpoint=server.base_url
        )
        assert path == tmp_path / "hf" / "org__model" / "main" / "a" / "b.json"
        assert path.read_bytes() == b"{}"
    assert len(server.seen) == 1
    assert "authorization" not in server.seen[0].headers
    assert [p.name for p in path.parent.iterdir()] == ["b.json"]


@pytest.mark.covers("1.2.1/4", "4.1/8")
def test_helpers_names_are_public() -> None:
    assert (
        build_hf_url("o/m", "main", "x y.json")
        == "https://huggingface.co/o/m/resolve/main/x%20y.json"
    )
    assert sanitize_repo_id("org/model") == "org__model"
    assert ".." not in sanitize_repo_id("a/../b")
    assert default_cache_dir().name == "tinkex"
    assert pushes.resolve_file is resolve_file


@pytest.mark.covers("1.2.1/3")
def test_refusals_are_quoted(server: FaultyServer, tmp_path: Path) -> None:
    server.script("/m/resolve/main/gone", Answer(404, b"x"))
    server.script("/m/resolve/main/shut", Answer(403, b"y" * 2000))
    with pytest.raises(HubError, match="not found on HuggingFace") as caught:
        resolve_file("m", "main", "gone", cache_dir=tmp_path, endpoint=server.base_url)
    assert caught.value.status == 404
    with pytest.raises(HubError, match="403") as caught:
        resolve_file("m", "main", "shut", cache_dir=tmp_path, endpoint=server.base_url)
    assert caught.value.data == {"status": 403, "body": "y" * 500}
    assert caught.value.type == "validation"
    with pytest.raises(tinkex.APIConnectionError):
        resolve_file("m", "main", "x", cache_dir=tmp_path, endpoint="http://127.0.0.1:1")


@pytest.mark.covers("1.2.1/2", "Q-1")
def test_token_goes_to_the_hub_and_nowhere_else(
    server: FaultyServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_mine")
    with faulty_server() as elsewhere:
        elsewhere.script("/cdn/file", Answer(200, b"data"))
        server.script(
            "/m/resolve/main/f", Answer(302, b"", {"Location": f"{elsewhere.base_url}/cdn/file"})
        )
        assert (
            resolve_file(
                "m", "main", "f", cache_dir=tmp_path, endpoint=server.base_url
            ).read_bytes()
            == b"data"
        )
        assert server.seen[0].headers["authorization"] == "Bearer hf_mine"
        assert "authorization" not in elsewhere.seen[0].headers


@pytest.mark.covers("Q-1")
def test_half_a_file_is_no_file(server: FaultyServer, tmp_path: Path) -> None:
    server.script("/m/resolve/main/f", Answer(200, b"x" * 1000, cut=500), Answer(200, b"x" * 1000))
    with pytest.raises(tinkex.APIConnectionError):
        resolve_file("m", "main", "f", cache_dir=tmp_path, endpoint=server.base_url)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    assert (
        len(
            resolve_file(
                "m", "main", "f", cache_dir=tmp_path, endpoint=server.base_url
            ).read_bytes()
        )
        == 1000
    )


@pytest.mark.covers("Q-1")
@pytest.mark.parametrize(
    ("revision", "filename"),
    [
        ("..", "f"),
        ("main", "../f"),
        ("main", "a/../../f"),
        ("main", "..\\f"),
        ("main", "/etc/f"),
        ("", "f"),
        ("a", ""),
    ],
)
def test_no_name_leads_out_of_the_cache(tmp_path: Path, revision: str, filename: str) -> None:
    with pytest.raises(HubError, match=r"would leave|not empty"):
        resolve_file("m", revision, filename, cache_dir=tmp_path, endpoint="http://127.0.0.1:1")


@pytest.mark.covers("1.1.3/3")
def test_silent_hub_times_out(server: FaultyServer, tmp_path: Path) -> None:
    assert inspect.signature(resolve_file).parameters["http_timeout_ms"].default == 120_000
    server.script("/m/resolve/main/f", Answer(200, b"late", delay=60))
    began = time.monotonic()
    with pytest.raises(tinkex.APITimeoutError, match="did not answer in time"):
        resolve_file(
            "m", "main", "f", cache_dir=tmp_path, endpoint=server.base_url, http_timeout_ms=100
        )
    assert time.monotonic() - began < 20
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


# ── the token ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.covers("1.2.2/1", "1.2.2/2", "1.2.2/3", "1.9/5")
def test_token_is_the_first_of_several_places(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(HubError, match="HF_TOKEN, HUGGING_FACE_HUB_TOKEN and the file"):
        resolve_token()
    home = tmp_path / "hf-home"
    home.mkdir()
    (home / "token").write_text(" from-home \n")
    assert resolve_token() == "from-home"
    (tmp_path / "named").write_text("from-named")
    monkeypatch.setenv("HF_TOKEN_PATH", str(tmp_path / "named"))
    assert resolve_token() == "from-named"
    (tmp_path / "given").write_text("from-given")
    assert resolve_token(token_path=tmp_path / "given") == "from-given"
    monkeypatch.setenv("HUGGING_FACE_HUB_TOKEN", "from-old")
    assert resolve_token(token_path=tmp_path / "given") == "from-old"
    monkeypatch.setenv("HF_TOKEN", "from-new")
    assert resolve_token() == "from-new"
    assert resolve_token(token=" t ") == "t"
    assert resolve_token(hf_token="h", token="t") == "h"
    assert resolve_token(hf_token="  ", token="t") == "t"


@pytest.mark.covers("1.2.2/2", "1.2.2/3", "1.9/5")
def test_user_cache_is_used_without_hf_home(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("HF_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "huggingface").mkdir()
    (tmp_path / "huggingface" / "token").write_text("xdg")
    assert resolve_token() == "xdg"
    (tmp_path / "huggingface" / "token").write_bytes(b"\xff\xfe")  # unreadable is absent
    with pytest.raises(HubError):
        resolve_token()


# ── pushing ───────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    # this hub stores large files the older way
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    with hub_server() as made:
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.setenv("HF_ENDPOINT", made.url)
        yield made


class Source:
    """A server with a checkpoint whose files can be changed."""

    def __init__(self, url: str, data_dir: Path, service: ServiceClient) -> None:
        self.rest = RestClient(base_url=url)
        client = service.create_lora_training_client("fake", rank=4).result()
        self.path = client.save_weights_for_sampler("final").result(20).path
        self.run = client.model_id
        [self.directory] = (data_dir / "checkpoints").glob("*/sampler_weights/final")
        (self.directory / "adapter_config.json").write_text('{"r": 4}')
        (self.directory / "adapter_model.safetensors").write_bytes(b"w" * 5000)
        (self.directory / "checkpoint_complete").write_bytes(b"")

    def push(self, **options: Any) -> Pushed:
        return push_checkpoint_adapter(self.rest, self.path, **options)


@pytest.fixture
def source(tmp_path: Path) -> Iterator[Source]:
    with serving(FakeEngine(), tmp_path / "data") as url, ServiceClient(base_url=url) as service:
        yield Source(url, tmp_path / "data", service)


@pytest.mark.covers(
    "1.2.3/3",
    "1.2.3/6",
    "1.2.3/8",
    "1.2.3/12",
    "1.2.3/13",
    "1.2.3/15",
    "1.2.3/18",
    "1.2.3/19",
    "Q-4",
)
def test_adapter_is_pushed_with_a_card_and_its_base_model(
    hub: Hub, source: Source, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    assert source.push(repo_id="team/adapter") == Pushed("team/adapter", "main", False)
    files = hub.repos["team/adapter"]["main"]
    assert sorted(files) == [
        "README.md",
        "adapter_config.json",
        "adapter_model.safetensors",
        "fake.json",
    ]
    assert files["adapter_model.safetensors"] == b"w" * 5000
    # large files go by themselves, not inside the commit
    assert list(hub.lfs.values()) == [b"w" * 5000]
    assert json.loads(files["adapter_config.json"]) == {"r": 4, "base_model_name_or_path": "fake"}
    assert files["adapter_config.json"].endswith(b"}\n")
    card = files["README.md"].decode()
    for part in (
        "base_model: fake",
        "library_name: peft",
        "- base_model:adapter:fake",
        source.path,
        "LoRA rank: 4",
    ):
        assert part in card
    assert "Trained modules: attn, mlp, unembed" in card
    assert 'PeftModel.from_pretrained(base, "team/adapter")' in card
    assert hub.private["team/adapter"]
    [commit] = hub.commits
    assert source.path in commit["summary"]
    assert TOKEN not in caplog.text
    sent = sum(method == "PUT" for method, _ in hub.seen)
    source.push(repo_id="team/adapter")
    # the hub has it: it is not sent again
    assert sum(method == "PUT" for method, _ in hub.seen) == sent == 1


@pytest.mark.covers("1.2.3/7", "1.2.3/9", "1.2.3/18", "Q-2", "Q-3")
def test_push_without_a_repository_names_one_and_makes_its_branch(hub: Hub, source: Source) -> None:
    repo = f"me/tinker-fake-{clean_name(source.run)}"
    assert source.push(public=True) == Pushed(repo, "final", True)
    assert not hub.private[repo]
    assert "adapter_config.json" in hub.repos[repo]["final"]
    assert hub.repos[repo]["main"] == {}
    # a revision without a repository
    assert source.push(revision="v2") == Pushed(repo, "v2", False)
    assert "adapter_config.json" in hub.repos[repo]["v2"]


@pytest.mark.covers("1.2.3/9", "1.2.3/10", "1.2.3/15")
def test_repository_of_another_checkpoint_is_left_alone(hub: Hub, source: Source) -> None:
    hub.put("me/a", "README.md", b"from `tinker://other/weights/x`")
    with pytest.raises(HubError, match="another checkpoint: tinker://other/weights/x") as caught:
        source.push(repo_id="a")
    assert caught.value.data == {"found": "tinker://other/weights/x", "expected": source.path}
    assert hub.commits == []
    hub.put("me/a", "README.md", b"nothing special")
    source.push(repo_id="a")
    source.push(repo_id="me/a", commit_message="again")  # its own, from before
    assert [commit["summary"] for commit in hub.commits][1:] == ["again"]


@pytest.mark.covers("1.2.3/8", "1.2.3/11")
def test_files_are_chosen_by_patterns(hub: Hub, source: Source) -> None:
    source.push(
        repo_id="a", allow_patterns=["*.json", "checkpoint_complete"], ignore_patterns=["fake*"]
    )
    assert sorted(hub.repos["me/a"]["main"]) == ["adapter_config.json", "checkpoint_complete"]
    with pytest.raises(HubError, match="no file is left"):
        source.push(repo_id="b", ignore_patterns=["**"])
    source.push(repo_id="c", add_model_card=False)
    assert "README.md" not in hub.repos["me/c"]["main"]


@pytest.mark.covers("1.2.3/11")
@pytest.mark.parametrize(
    ("name", "pattern", "fits"),
    [
        ("a.json", "*.json", True),
        ("d/a.json", "*.json", True),
        ("d/a.json", "d/*.json", True),
        ("d/e/a.json", "d/*.json", False),
        ("d/e/a.json", "d/**", True),
        ("a.jsonl", "*.json", False),
        ("a+b", "a+b", True),
        (".hidden", "*", True),
    ],
)
def test_patterns(name: str, pattern: str, fits: bool) -> None:
    assert matches(name, pattern) is fits


@pytest.mark.covers("1.2.3/5")
@pytest.mark.parametrize(
    ("lacking", "message"),
    [
        ("adapter_config.json", "has no adapter_config"),
        ("adapter_model.safetensors", "neither adapter_model"),
    ],
)
def test_incomplete_adapter_is_not_pushed(
    hub: Hub, source: Source, lacking: str, message: str
) -> None:
    (source.directory / lacking).unlink()
    with pytest.raises(HubError, match=message):
        source.push(repo_id="a")
    assert hub.repos == {}


@pytest.mark.covers("1.2.3/5", "1.2.3/6")
def test_base_model_that_the_adapter_names_stays(hub: Hub, source: Source) -> None:
    (source.directory / "adapter_config.json").write_text('{"base_model_name_or_path": "Qwen/x"}')
    (source.directory / "adapter_model.safetensors").rename(source.directory / "adapter_model.bin")
    source.push(repo_id="a")
    assert (
        hub.repos["me/a"]["main"]["adapter_config.json"] == b'{"base_model_name_or_path": "Qwen/x"}'
    )


@pytest.mark.covers("1.2.3/14")
def test_large_files_are_sent_in_parts_if_the_hub_asks(hub: Hub, source: Source) -> None:
    hub.chunk_size = 2000
    source.push(repo_id="a")
    assert hub.repos["me/a"]["main"]["adapter_model.safetensors"] == b"w" * 5000
    assert sum(method == "PUT" for method, _ in hub.seen) == 3


@pytest.mark.covers("1.2.3/16")
def test_push_can_be_a_proposal(hub: Hub, source: Source) -> None:
    source.push(repo_id="a", create_pr=True)
    [commit] = hub.commits
    assert commit["query"] == "create_pr=1"


@pytest.mark.covers("1.2.3/1", "1.2.3/2", "1.2.3/9", "1.2.3/17")
def test_refusal_of_the_hub_is_reported(
    hub: Hub, source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(HubError, match="does not know this token"):
        source.push(repo_id="a", hf_token="hf_wrong")
    hub.refuse = {"/commit/": 400}
    with pytest.raises(tinkex.RequestFailedError, match="the hub refused") as caught:
        source.push(repo_id="a")
    assert caught.value.status == 400
    hub.refuse, hub.user = {}, {"type": "user", "name": ""}
    with pytest.raises(HubError, match="user of the token"):
        source.push(repo_id="a")
    with pytest.raises(HubError, match="not a checkpoint path"):
        push_checkpoint_adapter(source.rest, "run/weights/x", repo_id="a")


@pytest.mark.covers("1.2.3/20", "1.2.3/18")
@pytest.mark.parametrize("part", ["/api/whoami-v2", "/preupload/", "/lfs/"])
def test_silent_hub_during_a_push_times_out(
    hub: Hub, source: Source, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # the library tries again by itself, and waits
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    hub.stall = {part: 1.0}
    before = list(huggingface_session().event_hooks["request"])
    with pytest.raises(tinkex.APITimeoutError, match="was silent for 100 ms"):
        source.push(repo_id="a", http_timeout_ms=100)
    # the process's session is as it was
    assert huggingface_session().event_hooks["request"] == before
    defaults = inspect.signature(pushes.push_checkpoint_adapter_async).parameters
    assert defaults["http_timeout_ms"].default == 120_000
    for wrong in (0, -1, True, 1.5):
        with pytest.raises(HubError, match="http_timeout_ms must be"):
            source.push(repo_id="a", http_timeout_ms=wrong)


def huggingface_session() -> Any:
    from huggingface_hub import get_session

    return get_session()


@pytest.mark.covers("1.2.3/4")
def test_push_cleans_up_after_success_and_failure(
    hub: Hub, source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    seen: list[list[str]] = []
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    hub.on_request = lambda path: seen.append([place.name for place in scratch.iterdir()])
    source.push(repo_id="a")
    assert any(name.startswith("tinkex-push-") for names in seen for name in names)
    assert list(scratch.iterdir()) == []
    hub.refuse = {"/commit/": 500}
    with pytest.raises(tinkex.RequestFailedError):
        source.push(repo_id="a")
    (source.directory / "adapter_config.json").unlink()
    with pytest.raises(HubError):
        source.push(repo_id="a")
    assert list(scratch.iterdir()) == []


def test_only_leftovers_of_pushes_are_removed_from_a_cache(
    hub: Hub, source: Source, tmp_path: Path
) -> None:
    cache, long_ago = tmp_path / "cache", time.time() - 1.1 * pushes.KEPT_SECONDS
    hub.refuse = {"/commit/": 500}
    with pytest.raises(tinkex.RequestFailedError):
        source.push(repo_id="a", cache_dir=cache)
    [left] = cache.iterdir()
    foreign = cache / "thesis"
    foreign.mkdir()
    (foreign / "chapter").write_text("years of work")
    for place in (left, foreign):
        os.utime(place, (long_ago, long_ago))
    hub.refuse = {}
    source.push(repo_id="a", cache_dir=cache)
    assert [place.name for place in cache.iterdir()] == ["thesis"]
    assert (foreign / "chapter").read_text() == "years of work"


@pytest.mark.skipif(os.name != "posix", reason="permissions are another matter there")
def test_working_files_of_a_push_are_private(hub: Hub, source: Source, tmp_path: Path) -> None:
    seen: list[int] = []
    hub.on_request = lambda path: seen.extend(
        place.stat().st_mode & 0o77 for place in (tmp_path / "c").glob("*")
    )
    hub.refuse = {"/commit/": 500}
    with pytest.raises(tinkex.RequestFailedError):
        source.push(repo_id="a", cache_dir=tmp_path / "c")
    [left] = (tmp_path / "c").iterdir()
    assert {*seen, left.stat().st_mode & 0o77} == {0}


@pytest.mark.covers("1.2.3/17")
def test_unreachable_hub_is_reported(hub: Hub, source: Source) -> None:
    with pytest.raises(tinkex.APIConnectionError, match="cannot be reached"):
        source.push(repo_id="a", endpoint="http://127.0.0.1:1")
