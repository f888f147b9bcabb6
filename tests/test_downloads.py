"""Checkpoints fetched to disk: in pieces, over lines that break, from archives that mean harm;
whole or not at all."""

from __future__ import annotations

import asyncio
import base64
import gzip
import hashlib
import io
import os
import tarfile
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import tinkex
from faulty import Answer, FaultyServer, Seen, faulty_server
from support import serving
from tinkex import DownloadError, RestClient, ServiceClient
from tinkex.engine.fake import FakeEngine
from tinkex.hub import downloads, fetches as fetches_module
from tinkex.hub.archives import ArchiveLimits, UnsafeArchiveError, extract

PATH = "tinker://run-123/weights/0001"
ARCHIVE = "training_runs/run-123/checkpoints/weights/0001/archive"
CONTENT = os.urandom(3_000_000)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyServer]:
    monkeypatch.setattr("tinkex.client.settings.delays.Delays.after", lambda *_, **__: 0.0)
    with faulty_server() as made:
        tinkex.configure(timeout=10)
        yield made
        tinkex.configure()


def rest_of(server: FaultyServer) -> RestClient:
    return RestClient(base_url=server.base_url)


def tar_of(
    files: dict[str, bytes],
    mode: Any = "w",
    members: list[tuple[tarfile.TarInfo, bytes]] | None = None,
) -> bytes:
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode=mode) as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
        for member, data in members or []:
            archive.addfile(member, io.BytesIO(data))
    return target.getvalue()


def offer(server: FaultyServer, data: bytes, *answers: Any, **headers: str) -> None:
    """Let an archive be fetched: first by these answers, then as it is, in parts too."""

    def whole(seen: Seen) -> Answer:
        tag = headers.get("ETag", '"v1"')
        given = {"ETag": tag, "Accept-Ranges": "bytes"} | headers
        wanted = seen.headers.get("range")
        if wanted and seen.headers.get("if-range", tag) == tag:
            begin = int(wanted.removeprefix("bytes=").removesuffix("-"))
            if begin >= len(data):
                return Answer(416, b"", given | {"Content-Range": f"bytes */{len(data)}"})
            return Answer(
                206,
                data[begin:],
                given | {"Content-Range": f"bytes {begin}-{len(data) - 1}/{len(data)}"},
            )
        return Answer(200, data, given)

    server.script(ARCHIVE, Answer(302, b"", {"Location": "/files/a.tar?signed=1"}))
    server.script(
        "/files/a.tar",
        *[answer(whole) if callable(answer) else answer for answer in answers],
        whole,
    )


def cut(at: int) -> Callable[[Any], Any]:
    """An answer that breaks off after so many bytes."""
    from dataclasses import replace

    return lambda whole: lambda seen: replace(whole(seen), cut=at)


def fetches(server: FaultyServer) -> list[Seen]:
    return [seen for seen in server.seen if seen.path.startswith("/files/")]


def left_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


# ── the steps ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.covers("1.14.2/2", "1.14.2/5", "1.14.2/6", "1.14.2/7", "1.14.3/2")
@pytest.mark.parametrize("mode", ["w", "w:gz", "w:bz2", "w:xz"])
def test_archive_is_fetched_and_unpacked(server: FaultyServer, tmp_path: Path, mode: str) -> None:
    offer(server, tar_of({"adapter_config.json": b"{}", "deep/er/x.bin": b"abc"}, mode))
    told: list[tuple[int, int]] = []
    done = tinkex.download(
        rest_of(server), PATH, tmp_path, progress=lambda have, total: told.append((have, total))
    )
    assert done == downloads.Downloaded(tmp_path / "run-123_weights_0001", PATH)
    assert (done.destination / "adapter_config.json").read_bytes() == b"{}"
    assert (done.destination / "deep/er/x.bin").read_bytes() == b"abc"
    assert left_in(tmp_path) == ["run-123_weights_0001"]
    assert told[-1][0] == told[-1][1] > 0
    [seen] = fetches(server)
    assert "x-api-key" not in seen.headers
    assert "authorization" not in seen.headers


@pytest.mark.covers("1.14.2/2", "Q-15")
def test_output_directory_defaults_to_the_current_directory(
    server: FaultyServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    offer(server, tar_of({"a": b"1"}))
    assert (
        tinkex.download(rest_of(server), PATH, None).destination
        == tmp_path / "run-123_weights_0001"
    )


@pytest.mark.covers("1.14.2/1", "Q-13")
@pytest.mark.parametrize(
    "path",
    [
        "run/weights/a",
        "tinker://..",
        "tinker://../..",
        "tinker://../weights/..",
        "tinker://run/weights/..",
        "tinker://a/weights",
        "tinker://a/weights/b/c",
        "tinker://a/b/c",
        "tinker:///weights/c",
        "tinker://a\\..\\..\\x/weights/c",
        "tinker://a/weights/b\0",
        "",
        None,
    ],
)
def test_invalid_path_removes_nothing_and_sends_no_request(
    server: FaultyServer, tmp_path: Path, path: Any
) -> None:
    output = tmp_path / "out"
    output.mkdir()
    (tmp_path / "precious").write_text("x")
    (output / "precious").write_text("x")
    with pytest.raises(DownloadError) as caught:
        tinkex.download(rest_of(server), path, output, force=True)
    assert caught.value.reason == "invalid_path"
    assert server.seen == []
    assert left_in(tmp_path) == ["out", "precious"]
    assert left_in(output) == ["precious"]


@pytest.mark.covers("1.14.2/3")
def test_existing_download_stays_without_a_request(server: FaultyServer, tmp_path: Path) -> None:
    (tmp_path / "run-123_weights_0001").mkdir()
    with pytest.raises(DownloadError) as caught:
        tinkex.download(rest_of(server), PATH, tmp_path)
    assert caught.value.reason == "exists"
    assert caught.value.path == tmp_path / "run-123_weights_0001"  # type: ignore[attr-defined]
    assert server.seen == []


@pytest.mark.covers("1.14.2/3", "1.14.2/5", "1.14.2/6", "1.14.2/7", "Q-14")
def test_forced_download_replaces_at_the_end_and_cleans_up(
    server: FaultyServer, tmp_path: Path
) -> None:
    old = tmp_path / "run-123_weights_0001"
    old.mkdir()
    (old / "old").write_text("precious")
    offer(server, b"no tar at all")
    with pytest.raises(DownloadError) as caught:
        tinkex.download(rest_of(server), PATH, tmp_path, force=True)
    assert caught.value.reason == "extraction_failed"
    assert (old / "old").read_text() == "precious"
    server.script("/files/a.tar", Answer(404))
    with pytest.raises(DownloadError) as caught:
        tinkex.download(rest_of(server), PATH, tmp_path, force=True)
    assert (caught.value.reason, caught.value.status) == ("download_failed", 404)
    assert (old / "old").read_text() == "precious"
    assert left_in(tmp_path) == ["run-123_weights_0001"]
    offer(server, tar_of({"new": b"1"}))
    tinkex.download(rest_of(server), PATH, tmp_path, force=True)
    assert left_in(old) == ["new"]
    assert left_in(tmp_path) == ["run-123_weights_0001"]


@pytest.mark.covers("1.14.1/3", "1.14.2/4")
def test_server_error_about_a_checkpoint_passes_through(
    server: FaultyServer, tmp_path: Path
) -> None:
    server.script(ARCHIVE, Answer(404, {"detail": "never heard of it"}))
    with pytest.raises(tinkex.NotFoundError, match="never heard of it"):
        tinkex.download(rest_of(server), PATH, tmp_path)
    assert left_in(tmp_path) == []


@pytest.mark.covers("1.14.1/2", "4.1/7")
def test_unfinished_archive_is_requested_again(server: FaultyServer, tmp_path: Path) -> None:
    offer(server, tar_of({"a": b"1"}))
    server.script(ARCHIVE, Answer(503), Answer(503), Answer(302, b"", {"Location": "/files/a.tar"}))
    tinkex.download(rest_of(server), PATH, tmp_path, retry_delay=0.01)
    assert len(server.requests(ARCHIVE)) == 3
    server.script(ARCHIVE, Answer(503))
    with pytest.raises(tinkex.InternalServerError):
        tinkex.download(rest_of(server), PATH, tmp_path / "b", max_retries=2, retry_delay=0.01)
    assert len(server.requests(ARCHIVE)) == 5


# ── lines that break ──────────────────────────────────────────────────────────────────────────────


@pytest.mark.covers("1.14.2/5")
def test_broken_download_resumes_at_its_offset(server: FaultyServer, tmp_path: Path) -> None:
    data = tar_of({"big": CONTENT})
    digest = base64.b64encode(hashlib.sha256(data).digest()).decode()
    offer(server, data, cut(1_000_000), cut(700_000), **{"Repr-Digest": f"sha-256=:{digest}:"})
    done = tinkex.download(rest_of(server), PATH, tmp_path)
    assert (done.destination / "big").read_bytes() == CONTENT
    first, *later = [seen.headers.get("range") for seen in fetches(server)]
    assert first is None
    begun = [int(str(wanted).removeprefix("bytes=").removesuffix("-")) for wanted in later]
    assert len(begun) == 2
    assert 0 < begun[0] <= 1_000_000  # what was still on its way through the client may be lost
    assert begun[0] < begun[1] <= 1_700_000
    assert [seen.headers.get("if-range") for seen in fetches(server)] == [None, '"v1"', '"v1"']


def test_changed_archive_is_fetched_again_from_the_start(
    server: FaultyServer, tmp_path: Path
) -> None:
    old, new = tar_of({"big": CONTENT}), tar_of({"big": CONTENT[::-1]})
    offer(server, new, Answer(200, old, {"ETag": '"v0"'}, cut=1_500_000))
    done = tinkex.download(rest_of(server), PATH, tmp_path)
    assert (done.destination / "big").read_bytes() == CONTENT[::-1]


@pytest.mark.parametrize("tag", ['W/"v1"', ""], ids=["weak", "none"])
def test_download_without_a_strong_tag_restarts(
    server: FaultyServer, tmp_path: Path, tag: str
) -> None:
    offer(server, tar_of({"big": CONTENT}), cut(1_000_000), ETag=tag)
    tinkex.download(rest_of(server), PATH, tmp_path)
    assert [seen.headers.get("range") for seen in fetches(server)] == [None, None]


def test_server_that_answers_another_span_is_not_believed(
    server: FaultyServer, tmp_path: Path
) -> None:
    data = tar_of({"big": CONTENT})

    def wrong(whole: Any) -> Any:
        def shifted(seen: Seen) -> Answer:  # as many bytes as are missing, but others
            begin = int(seen.headers["range"].removeprefix("bytes=").removesuffix("-"))
            span = f"bytes {begin - 5}-{len(data) - 6}/{len(data)}"
            return Answer(206, data[begin - 5 : -5], {"Content-Range": span, "ETag": '"v1"'})

        return shifted

    offer(server, data, cut(1_000_000), wrong)
    done = tinkex.download(rest_of(server), PATH, tmp_path)
    assert (done.destination / "big").read_bytes() == CONTENT


@pytest.mark.covers("1.14.2/5")
def test_bytes_that_were_changed_on_the_way_are_noticed(
    server: FaultyServer, tmp_path: Path
) -> None:
    offer(
        server,
        tar_of({"a": b"1"}),
        **{"Repr-Digest": f"sha-256=:{base64.b64encode(bytes(32)).decode()}:"},
    )
    with pytest.raises(DownloadError, match="damaged") as caught:
        tinkex.download(rest_of(server), PATH, tmp_path)
    assert caught.value.reason == "download_failed"
    assert left_in(tmp_path) == []


@pytest.mark.covers("1.14.2/5", "1.14.2/7", "Q-14")
def test_download_that_always_breaks_fails(server: FaultyServer, tmp_path: Path) -> None:
    offer(server, tar_of({"a": b"1"}))
    server.script("/files/a.tar", Answer(drop=True))
    with pytest.raises(DownloadError, match="did not arrive") as caught:
        tinkex.download(rest_of(server), PATH, tmp_path)
    assert caught.value.reason == "download_failed"
    assert len(fetches(server)) >= fetches_module.ATTEMPTS
    assert left_in(tmp_path) == []


def test_expired_address_is_renewed(server: FaultyServer, tmp_path: Path) -> None:
    offer(server, tar_of({"a": b"1"}), Answer(403, {"detail": "expired"}))
    tinkex.download(rest_of(server), PATH, tmp_path)
    assert len(server.requests(ARCHIVE)) == 2
    server.script("/files/a.tar", Answer(403, {"detail": "no"}))
    with pytest.raises(DownloadError) as caught:
        tinkex.download(rest_of(server), PATH, tmp_path / "b")
    assert caught.value.status == 403


def test_resume_continues_a_failed_download(server: FaultyServer, tmp_path: Path) -> None:
    data = tar_of({"big": CONTENT})
    offer(server, data, cut(1_200_000), Answer(404))
    with pytest.raises(DownloadError):
        tinkex.download(rest_of(server), PATH, tmp_path, resume=True)
    assert left_in(tmp_path) == [".run-123_weights_0001.partial"]
    done = tinkex.download(rest_of(server), PATH, tmp_path, resume=True)
    assert (done.destination / "big").read_bytes() == CONTENT
    assert (
        0
        < int(fetches(server)[-1].headers["range"].removeprefix("bytes=").removesuffix("-"))
        <= 1_200_000
    )
    assert left_in(tmp_path) == ["run-123_weights_0001"]


def test_redirects_are_followed_a_few_steps(server: FaultyServer, tmp_path: Path) -> None:
    offer(
        server,
        tar_of({"a": b"1"}),
        Answer(307, b"", {"Location": f"{server.base_url}/files/b.tar"}),
    )
    server.script("/files/b.tar", Answer(200, tar_of({"b": b"2"})))
    assert left_in(tinkex.download(rest_of(server), PATH, tmp_path).destination) == ["b"]
    server.script("/files/b.tar", Answer(302, b"", {"Location": "/files/b.tar"}))
    server.script("/files/a.tar", Answer(302, b"", {"Location": "/files/b.tar"}))
    with pytest.raises(DownloadError, match="302"):
        tinkex.download(rest_of(server), PATH, tmp_path / "x")


@pytest.mark.covers("Q-4")
def test_archive_is_never_whole_in_memory(tmp_path: Path) -> None:
    size = 40 << 20
    with serving(FakeEngine(), tmp_path / "data") as url, ServiceClient(base_url=url) as service:
        client = service.create_lora_training_client("fake", rank=4).result()
        path = client.save_state("s").result(20).path
        [directory] = (tmp_path / "data" / "checkpoints").glob("*/weights/s")
        with (directory / "big").open("wb") as file:
            file.truncate(size)
        rest = RestClient(base_url=url)
        tracemalloc.start()
        try:
            done = tinkex.download(rest, path, tmp_path / "out")
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert (done.destination / "big").stat().st_size == size
    assert peak < size / 3


def test_progress_callback_that_fails_ends_the_download_without_a_trace(
    server: FaultyServer, tmp_path: Path
) -> None:
    def fail(have: int, total: int) -> None:
        raise KeyError("mine")

    offer(server, tar_of({"a": b"1"}))
    with pytest.raises(KeyError, match="mine"):
        tinkex.download(rest_of(server), PATH, tmp_path, progress=fail)
    assert left_in(tmp_path) == []


# ── our own server ────────────────────────────────────────────────────────────────────────────────


@pytest.mark.covers("1.14.2/7")
def test_checkpoint_of_our_server_comes_as_an_archive_and_an_export_as_files(
    tmp_path: Path,
) -> None:
    with serving(FakeEngine(), tmp_path / "data") as url, ServiceClient(base_url=url) as service:
        client = service.create_lora_training_client("fake", rank=4).result()
        state = client.save_state("s").result(20).path
        export = client.save_weights_external("e").result(20).path
        rest = RestClient(base_url=url)
        for path in (state, export):
            done = tinkex.download(rest, path, tmp_path / "out")
            source = (
                tmp_path
                / "data"
                / "checkpoints"
                / client.model_id.replace(":", "_")
                / "/".join(path.split("/")[3:])
            )
            assert (done.destination / "fake.json").read_bytes() == (
                source / "fake.json"
            ).read_bytes()
        assert left_in(tmp_path / "out") == sorted(
            p.removeprefix("tinker://").replace("/", "_") for p in (state, export)
        )


async def test_same_of_an_embedded_server_in_an_event_loop(tmp_path: Path) -> None:
    from tinkex import LocalBackend

    backend = LocalBackend(data_dir=tmp_path / "data", engine=FakeEngine())
    service = ServiceClient(base_url=backend.base_url)
    client = await service.create_lora_training_client("fake", rank=4)
    saved = await client.save_state("s")
    done = await tinkex.download_async(
        RestClient(base_url=backend.base_url), saved.path, tmp_path / "out"
    )
    assert left_in(done.destination) == ["fake.json"]
    await service.close()
    await asyncio.to_thread(backend.close)


def test_export_with_an_unsafe_name_is_refused(server: FaultyServer, tmp_path: Path) -> None:
    path = "tinker://run/external_weights/e"
    place = "training_runs/run/checkpoints/external_weights/e/external_weights_urls"
    answer = {"urls": {"../evil": f"{server.base_url}/files/x"}, "expires": "2100-01-01T00:00:00Z"}
    server.script(place, Answer(200, answer))
    with pytest.raises(DownloadError, match="unsafe name"):
        tinkex.download(rest_of(server), path, tmp_path)
    assert left_in(tmp_path) == []


# ── archives that mean harm ───────────────────────────────────────────────────────────────────────


def member(
    name: str, kind: bytes = tarfile.REGTYPE, link: str = "", size: int = 0
) -> tuple[tarfile.TarInfo, bytes]:
    made = tarfile.TarInfo(name)
    made.type, made.linkname, made.size = kind, link, size
    return made, bytes(size)


@pytest.mark.covers("1.14.3/1", "1.14.3/2")
@pytest.mark.parametrize(
    "evil",
    [
        member("/etc/passwd"),
        member("../out"),
        member("a/../../out"),
        member("..\\out"),
        member("C:/out"),
        member("link", tarfile.SYMTYPE, "/etc"),
        member("inner-link", tarfile.SYMTYPE, "good"),
        member("hard", tarfile.LNKTYPE, "good"),
        member("dev", tarfile.CHRTYPE),
        member("block", tarfile.BLKTYPE),
        member("pipe", tarfile.FIFOTYPE),
        member("good"),
        member("GOOD"),
    ],
    ids=lambda evil: f"{evil[0].name}-{evil[0].type!r}",
)
def test_evil_member_stops_all_unpacking(
    tmp_path: Path, evil: tuple[tarfile.TarInfo, bytes]
) -> None:
    archive = tmp_path / "a.tar"
    archive.write_bytes(tar_of({"good": b"1"}, members=[evil]))
    target = tmp_path / "target"
    target.mkdir()
    with pytest.raises(UnsafeArchiveError):
        extract(archive, target)
    assert left_in(target) == []
    assert left_in(tmp_path) == ["a.tar", "target"]


@pytest.mark.covers("1.14.3/2")
def test_archives_that_would_never_end_are_refused_before_they_are_unpacked(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    bomb = tmp_path / "bomb.tgz"
    with gzip.open(bomb, "wb", compresslevel=9) as file:
        header = tarfile.TarInfo("zeros")
        header.size = 64 << 20
        file.write(header.tobuf())
        for _ in range(64):
            file.write(bytes(1 << 20))
        file.write(bytes(1024))
    with pytest.raises(UnsafeArchiveError, match="holds more than"):
        extract(bomb, target)
    many = tmp_path / "many.tar"
    many.write_bytes(tar_of({f"f{number}": b"" for number in range(20)}))
    with pytest.raises(UnsafeArchiveError, match="more than 10 files"):
        extract(many, target, ArchiveLimits(files=10))
    big = tmp_path / "big.tar"
    big.write_bytes(tar_of({"a": b"123456"}))
    with pytest.raises(UnsafeArchiveError, match="holds more than 5 bytes"):
        extract(big, target, ArchiveLimits(bytes=5))
    assert left_in(target) == []
    assert len(extract(many, target)) == 20


@pytest.mark.covers("1.14.3/2")
def test_header_as_large_as_an_archive_is_not_read(tmp_path: Path) -> None:
    archive = tmp_path / "a.tgz"
    with gzip.open(archive, "wb") as file:
        header = tarfile.TarInfo("././@LongLink")
        header.type, header.size = tarfile.GNUTYPE_LONGNAME, 64 << 20
        file.write(header.tobuf())
        for _ in range(64):
            file.write(b"a" * (1 << 20))
    with pytest.raises(UnsafeArchiveError, match="a header of the archive"):
        extract(archive, tmp_path)


@pytest.mark.covers("1.14.2/6", "1.14.3/1")
def test_broken_archive_leaves_no_files(server: FaultyServer, tmp_path: Path) -> None:
    offer(server, tar_of({"a": bytes(5000)})[:3000])
    with pytest.raises(DownloadError) as caught:
        tinkex.download(rest_of(server), PATH, tmp_path)
    assert caught.value.reason == "extraction_failed"
    assert left_in(tmp_path) == []
    offer(server, tar_of({}, members=[member("../x")]))
    with pytest.raises(DownloadError, match="unsafe path"):
        tinkex.download(rest_of(server), PATH, tmp_path)
    assert left_in(tmp_path) == []


def test_extracted_files_are_plain_files(tmp_path: Path) -> None:
    wild = tarfile.TarInfo("wild")
    wild.mode, wild.uid, wild.size = 0o6777, 0, 2
    archive = tmp_path / "a.tar"
    archive.write_bytes(tar_of({}, members=[(wild, b"hi")]))
    [path] = extract(archive, tmp_path)
    assert path.stat().st_mode & 0o7111 == 0


def test_resumable_download_that_has_not_begun_leaves_no_file(
    server: FaultyServer, tmp_path: Path
) -> None:
    server.script(ARCHIVE, Answer(404, {"detail": "gone"}))
    with pytest.raises(tinkex.NotFoundError):
        tinkex.download(rest_of(server), PATH, tmp_path, resume=True)
    assert left_in(tmp_path) == []


def fetched_of(directory: Path) -> int:
    """Return the bytes of an archive that have arrived."""
    return sum(file.stat().st_size for file in directory.rglob("archive"))


async def test_cancelled_download_writes_no_more(server: FaultyServer, tmp_path: Path) -> None:
    data = tar_of({"big": CONTENT})
    server.script(ARCHIVE, Answer(302, b"", {"Location": "/files/a.tar"}))
    server.script("/files/a.tar", Answer(200, data, {"ETag": '"a"'}, pieces=8, pause=0.3))
    loop, begun = asyncio.get_running_loop(), asyncio.Event()

    def progress(done: int, total: int) -> None:
        loop.call_soon_threadsafe(begun.set)

    download = tinkex.download_async(
        rest_of(server), PATH, tmp_path, progress=progress, resume=True
    )
    task = asyncio.create_task(download)
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    size = fetched_of(tmp_path)
    await asyncio.sleep(0.3)
    assert 0 < fetched_of(tmp_path) == size < len(data)


async def test_cancelled_replacement_leaves_old_or_new_download(
    server: FaultyServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer(server, tar_of({"new": b"x"}))
    target = tmp_path / "run-123_weights_0001"
    target.mkdir()
    (target / "old").touch()
    between, go_on, replace = threading.Event(), threading.Event(), os.replace

    def slow(source: Any, to: Any) -> None:
        if Path(source).name == "files":
            between.set()
            assert go_on.wait(20)
        replace(source, to)

    monkeypatch.setattr(os, "replace", slow)
    fetching = asyncio.create_task(
        downloads.download_async(rest_of(server), PATH, tmp_path, force=True)
    )
    assert await asyncio.to_thread(between.wait, 20)
    fetching.cancel()
    await asyncio.sleep(0.1)  # for whoever would tidy up under its hands
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await fetching
    assert left_in(tmp_path) == [target.name]
    assert left_in(target) in (["new"], ["old"])


def test_kept_archive_does_not_block_later_downloads(tmp_path: Path) -> None:
    with serving(FakeEngine(), tmp_path / "data") as url, ServiceClient(base_url=url) as service:
        path = (
            service.create_lora_training_client("fake", rank=4)
            .result()
            .save_state("a")
            .result(20)
            .path
        )
        with RestClient(base_url=url) as rest:
            for _ in range(3):
                fetching = downloads.download_async(
                    rest, path, tmp_path / "out", force=True, resume=True, keep_archive=True
                )
                target = asyncio.run(fetching).destination
                assert list(target.iterdir())
                (scratch,) = [place for place in (tmp_path / "out").iterdir() if place != target]
                assert {place.name for place in scratch.iterdir()} == {
                    "archive",
                    f"archive{fetches_module.NOTE}",
                }
