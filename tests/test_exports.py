"""Weights that leave the server: signed addresses, files in pieces, archives, encryption; readable
by peft."""

from __future__ import annotations

import base64
import hashlib
import http.client
import io
import re
import tarfile
import time
from contextlib import closing
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, unquote, urlencode, urlsplit

import pytest

from support import MODEL, Heard, Keyed, Wire, assert_peft_agrees, make_data, serving, train
from tinkex import RestClient, types
from tinkex.client.futures.api_future import start
from tinkex.engine.fake import FakeEngine
from tinkex.server.access.keys import create_key, revoke_key
from tinkex.server.database.sqlite import SqliteDatabase

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tinkex import ServiceClient, TrainingClient


@pytest.fixture
def wire(tmp_path: Path) -> Iterator[Wire]:
    with serving(FakeEngine(), tmp_path) as url:
        yield Wire(url)


def fetch(url: str, method: str = "GET", **headers: str) -> Heard:
    """Return the answer of an address to a program without a key."""
    parts = urlsplit(url)
    with closing(http.client.HTTPConnection(parts.netloc, timeout=20)) as connection:
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, f"{parts.path}?{parts.query}", headers=sent)
        response = connection.getresponse()
        named = {name.lower(): value for name, value in response.getheaders()}
        return Heard(response.status, named, response.read())


def export(wire: Wire, **fields: Any) -> str:
    """The path of a new export of a new run."""
    saved = wire.run(
        "save_weights_external", {"model_id": wire.model(), "path": "e", "seq_id": 1, **fields}
    )
    assert saved["type"] == "save_weights_external"
    assert saved["size_bytes"] > 0
    return str(saved["path"])


def urls(wire: Wire, path: str) -> dict[str, str]:
    run, rest = path.removeprefix("tinker://").split("/", 1)
    answer = wire.get(f"training_runs/{run}/checkpoints/{rest}/external_weights_urls")
    named: dict[str, str] = answer["urls"]
    return named


def archive(wire: Wire, path: str) -> Heard:
    run, rest = path.removeprefix("tinker://").split("/", 1)
    return wire.send(f"training_runs/{run}/checkpoints/{rest}/archive", method="GET")


# ── signed addresses ──────────────────────────────────────────────────────────────────────────────


def test_export_is_fetched_without_a_key(tmp_path: Path) -> None:
    with serving(FakeEngine(), tmp_path, api_key="tml-secret") as url:

        class Keyed(Wire):
            def send(
                self, path: str, body: Any = None, *, method: str = "POST", headers: Any = None
            ) -> Heard:
                return super().send(
                    path, body, method=method, headers={"X-API-Key": "tml-secret"} | (headers or {})
                )

        wire = Keyed(url)
        path = export(wire)
        assert path.endswith("/external_weights/e")
        [(name, address)] = urls(wire, path).items()
        assert name == "fake.json"
        assert address.startswith(f"{url}/api/v1/")
        heard = fetch(address)
    assert heard.status == 200
    assert heard.json["rank"] == 4
    assert int(heard.headers["content-length"]) == len(heard.body)
    digest = hashlib.sha256(heard.body).digest()
    assert heard.headers["etag"] == f'"{digest.hex()}"'
    assert heard.headers["repr-digest"] == f"sha-256=:{base64.b64encode(digest).decode()}:"


def test_signed_address_expires_after_fifteen_minutes(
    wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = export(wire)
    run, rest = path.removeprefix("tinker://").split("/", 1)
    answer = wire.get(f"training_runs/{run}/checkpoints/{rest}/external_weights_urls")
    expires = types.ExternalWeightsUrlsResponse.model_validate(answer).expires.timestamp()
    assert 890 < expires - time.time() <= 900
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + 890)
    assert fetch(answer["urls"]["fake.json"]).status == 200
    monkeypatch.setattr(time, "time", lambda: now() + 901)
    heard = fetch(answer["urls"]["fake.json"])
    assert heard.status == 403
    assert "expired: ask for a new one" in heard.json["detail"]
    assert fetch(urls(wire, path)["fake.json"]).status == 200


def test_addresses_end_with_their_checkpoint(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    path = export(wire, ttl_seconds=3600)
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + 3500)
    address = urls(wire, path)["fake.json"]
    assert fetch(address).status == 200
    monkeypatch.setattr(time, "time", lambda: now() + 3601)
    assert fetch(address).status == 403


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (r"signature=\w{4}", "signature=0000"),
        (r"expires=\d+", "expires=99999999999"),
        (r"expires=\d+", "expires=x"),
        (r"saved=0x1\.\w{2}", "saved=0x1.0"),
        (r"reader=\w{4}", "reader=0000"),
        (r"key=\d+", "key=7"),
        (r"key=\d+", "key="),
        (r"\?.*", ""),
        (r"/fake\.json", "/other.json"),
        (r"/fake\.json", "/archive.tar"),
        (r"/external_weights/", "/weights/"),
        (r"/fake\.json", "/..%2F..%2Ftinkex.sqlite3"),
    ],
)
def test_address_that_was_changed_is_refused(wire: Wire, old: str, new: str) -> None:
    [address] = urls(wire, export(wire)).values()
    changed = re.sub(old, new, address)
    assert changed != address
    heard = fetch(changed)
    assert heard.status in (403, 404)
    assert b"SQLite" not in heard.body
    assert (
        "not signed by this server" in heard.json["detail"]
        or "there is no GET" in heard.json["detail"]
    )


def test_signature_does_not_lead_out_of_the_checkpoint(tmp_path: Path) -> None:
    from tinkex.server.access.accounts import Accounts
    from tinkex.server.routes.exports import DOWNLOAD

    with serving(FakeEngine(), tmp_path) as url, closing(SqliteDatabase(tmp_path)) as store:
        wire = Wire(url)
        path = export(wire)
        run, [known] = path.split("/")[2], urls(wire, path).values()
        # even for whoever has the secret
        for name in ("tinkex.sqlite3", "..", ".", "signing.key", "nothing"):
            parts = {"training_run_id": run, "kind": "external_weights", "name": "e", "file": name}
            terms = {"expires": str(int(time.time()) + 60), **_terms(known)}
            signature = DOWNLOAD.signature(Accounts(store), parts, terms)
            query = urlencode(terms | {"signature": signature})
            heard = wire.send(f"downloads/{'/'.join(parts.values())}?{query}", method="GET")
            assert heard.status == 404, name
        assert (tmp_path / "signing.key").stat().st_mode & 0o077 == 0


def _terms(address: str) -> dict[str, str]:
    """Return the checkpoint, the reader and the key that an address was made for."""
    named = parse_qs(urlsplit(address).query)
    return {term: named[term][0] for term in ("saved", "reader", "key")}


def test_address_ends_with_the_leave_to_read(tmp_path: Path) -> None:
    with serving(FakeEngine(), tmp_path) as url, closing(SqliteDatabase(tmp_path)) as store:
        wire, other = (Keyed(url, create_key(store, name, name)[1]) for name in ("ada", "bob"))
        path = export(wire)
        run = path.removeprefix("tinker://").replace("/", "/checkpoints/", 1)
        wire.send(f"training_runs/{run}/publish")
        mine, theirs = (fetch_ok(next(iter(urls(each, path).values()))) for each in (wire, other))
        assert wire.send(f"training_runs/{run}/publish", method="DELETE").status == 200
        assert fetch(theirs).status == 404
        fetch_ok(mine)
        key = store.connection.rows("SELECT id FROM keys WHERE name = 'ada'")[0]["id"]
        assert revoke_key(store, key)
        heard = fetch(mine)
    assert heard.status == 403
    assert heard.json["detail"] == "the API key that this address was made for has been revoked"


def fetch_ok(address: str) -> str:
    assert fetch(address).status == 200
    return address


def test_address_leads_to_no_other_checkpoint_of_its_name(wire: Wire) -> None:
    model = wire.model()
    save = {"model_id": model, "path": "e"}
    path = wire.run("save_weights_external", {**save, "seq_id": 1})["path"]
    files = fetch_ok(urls(wire, path)["fake.json"])
    whole = fetch_ok(archive(wire, path).headers["location"])
    run = path.removeprefix("tinker://").replace("/", "/checkpoints/", 1)
    assert wire.send(f"training_runs/{run}", method="DELETE").status == 200
    assert fetch(files).status == fetch(whole).status == 404
    assert wire.run("save_weights_external", {**save, "seq_id": 2})["path"] == path
    for address in (files, whole):
        heard = fetch(address)
        assert heard.status == 404
        assert "was saved again after this address was made" in heard.json["detail"]
    fetch_ok(urls(wire, path)["fake.json"])


def test_address_does_not_tell_its_reader(tmp_path: Path) -> None:
    with serving(FakeEngine(), tmp_path) as url, closing(SqliteDatabase(tmp_path)) as store:
        wire = Keyed(url, create_key(store, "key", "ada@example.org")[1])
        assert "ada@" not in unquote(urls(wire, export(wire))["fake.json"])


def test_addresses_stay_good_over_a_restart_and_are_useless_elsewhere(tmp_path: Path) -> None:
    with serving(FakeEngine(), tmp_path / "one") as url:
        [address] = urls(Wire(url), export(Wire(url))).values()
    with serving(FakeEngine(), tmp_path / "one") as url:
        assert fetch(_moved(address, url)).status == 200
    with serving(FakeEngine(), tmp_path / "two") as url:
        export(Wire(url))
        assert fetch(_moved(address, url)).status == 403


def _moved(address: str, url: str) -> str:
    parts = urlsplit(address)
    return f"{url}{parts.path}?{parts.query}"


def test_addresses_use_the_host_of_the_request(wire: Wire) -> None:
    path = export(wire)
    run = path.split("/")[2]
    place = f"training_runs/{run}/checkpoints/external_weights/e"
    port = urlsplit(wire.url).port
    heard = wire.send(
        f"{place}/external_weights_urls", method="GET", headers={"Host": f"localhost:{port}"}
    )
    assert heard.json["urls"]["fake.json"].startswith(f"http://localhost:{port}/api/v1/")
    assert fetch(heard.json["urls"]["fake.json"]).status == 200


def test_address_of_deleted_export_stops_working(wire: Wire) -> None:
    path = export(wire)
    [address] = urls(wire, path).values()
    run = path.split("/")[2]
    assert (
        wire.send(f"training_runs/{run}/checkpoints/external_weights/e", method="DELETE").status
        == 200
    )
    assert fetch(address).status == 404


def test_only_exports_have_addresses(wire: Wire) -> None:
    model = wire.model()
    wire.run("save_weights", {"model_id": model, "path": "a", "seq_id": 1})
    heard = wire.send(
        f"training_runs/{model}/checkpoints/weights/a/external_weights_urls", method="GET"
    )
    assert heard.status == 400
    assert "save_weights_external" in heard.json["detail"]


# ── files in pieces ───────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("asked", "first", "last"),
    [
        ("bytes=0-0", 0, 1),
        ("bytes=5-", 5, None),
        ("bytes=3-9", 3, 10),
        ("bytes=-7", -7, None),
        ("bytes=2-99999", 2, None),
    ],
)
def test_part_of_a_file_can_be_fetched(
    wire: Wire, asked: str, first: int, last: int | None
) -> None:
    [address] = urls(wire, export(wire)).values()
    whole = fetch(address)
    assert whole.headers["accept-ranges"] == "bytes"
    part = fetch(address, Range=asked)
    assert part.status == 206
    assert part.body == whole.body[first:last]
    assert int(part.headers["content-length"]) == len(part.body)
    start = first % len(whole.body)
    span = f"bytes {start}-{start + len(part.body) - 1}/{len(whole.body)}"
    assert part.headers["content-range"] == span
    assert part.headers["etag"] == whole.headers["etag"]


def test_invalid_ranges_and_ranges_of_another_version(wire: Wire) -> None:
    [address] = urls(wire, export(wire)).values()
    whole = fetch(address)
    size = len(whole.body)
    beyond = fetch(address, Range=f"bytes={size}-")
    assert (beyond.status, beyond.headers["content-range"], beyond.body) == (
        416,
        f"bytes */{size}",
        b"",
    )
    for asked in ("bytes=5-2", "lines=1-2", "bytes=-", "bytes=0-1,4-5", "nonsense"):
        assert fetch(address, Range=asked).body == whole.body
    changed = fetch(address, Range="bytes=0-3", If_Range='"another"')
    assert (changed.status, changed.body) == (200, whole.body)
    assert fetch(address, Range="bytes=0-3", If_Range=whole.headers["etag"]).status == 206


def test_head_tells_all_but_the_bytes(wire: Wire) -> None:
    [address] = urls(wire, export(wire)).values()
    whole, head = fetch(address), fetch(address, "HEAD")
    assert (head.status, head.body) == (200, b"")
    for name in ("content-length", "etag", "repr-digest", "accept-ranges"):
        assert head.headers[name] == whole.headers[name]


# ── archives ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.covers("S40")
def test_archive_is_a_redirect_to_a_tar_that_needs_no_key(wire: Wire) -> None:
    model = wire.model()
    for number, operation in enumerate(
        ("save_weights", "save_weights_for_sampler", "save_weights_external"), 1
    ):
        path = wire.run(operation, {"model_id": model, "path": "a", "seq_id": number})["path"]
        heard = archive(wire, path)
        assert heard.status == 302
        location = heard.headers["location"]
        assert urlsplit(location).path.endswith("/archive.tar")
        left = parsedate_to_datetime(heard.headers["expires"]).timestamp() - time.time()
        assert 890 < left <= 900
        tar = fetch(location)
        assert tar.status == 200
        assert "content-disposition" not in tar.headers
        assert int(tar.headers["content-length"]) == len(tar.body)
        assert hashlib.sha256(tar.body).hexdigest() == tar.headers["etag"].strip('"')
        with tarfile.open(fileobj=io.BytesIO(tar.body), mode="r:") as opened:
            assert opened.getnames() == ["fake.json"]
            member = opened.extractfile("fake.json")
            assert member is not None
            assert b'"rank": 4' in member.read()


@pytest.mark.covers("S40")
def test_archives_are_the_same_bytes_each_time_and_come_in_parts(wire: Wire) -> None:
    path = export(wire)
    tar = fetch(archive(wire, path).headers["location"])
    address = archive(wire, path).headers["location"]
    assert fetch(address).body == tar.body
    middle = len(tar.body) // 3
    parts = [
        fetch(address, Range=span).body for span in (f"bytes=0-{middle}", f"bytes={middle + 1}-")
    ]
    assert b"".join(parts) == tar.body
    assert fetch(address, Range="bytes=100-600").body == tar.body[100:601]


def test_our_client_gets_the_archives_address(
    server_url: str, service: ServiceClient, base_url: str
) -> None:
    client = service.create_lora_training_client(MODEL, rank=4).result()
    saved = client.save_weights_for_sampler("packed").result(60).path
    rest = RestClient(base_url=base_url)
    answer = rest.get_checkpoint_archive_url_from_tinker_path(saved).result(20)
    assert answer.url.startswith("http://local/" if base_url != server_url else base_url)
    assert 890 < answer.expires.timestamp() - time.time() <= 901


# ── what is in the files ──────────────────────────────────────────────────────────────────────────


def fetch_anywhere(service: ServiceClient, url: str) -> bytes:
    """Return the answer of an address, on a socket or in the process."""
    transport = service.holder.transport

    async def fetch() -> bytes:
        async with transport.fetch(url, {}, 20) as reply:
            assert reply.status == 200
            return b"".join([chunk async for chunk in reply.chunks])

    return start(fetch()).result(20)


def trained(service: ServiceClient) -> TrainingClient:
    client = service.create_lora_training_client(MODEL, rank=4, seed=5).result()
    train(client, types, make_data(types), 3)
    return client


@pytest.mark.filterwarnings("ignore:Model has .tie_word_embeddings")
@pytest.mark.covers("S41")
def test_peft_loads_an_export_unchanged(
    service: ServiceClient, base_url: str, model_dir: Path, tmp_path: Path
) -> None:
    client = trained(service)
    path = client.save_weights_external("for-peft").result(60).path
    answer = RestClient(base_url=base_url).get_external_weights_urls(path).result(20)
    assert sorted(answer.urls) == ["adapter_config.json", "adapter_model.safetensors"]
    for name, url in answer.urls.items():
        (tmp_path / name).write_bytes(fetch_anywhere(service, url))
    assert_peft_agrees(client, types, model_dir, tmp_path)


@pytest.mark.filterwarnings("ignore:Model has .tie_word_embeddings")
@pytest.mark.covers("S40", "S41")
def test_peft_loads_an_archive_unchanged(
    service: ServiceClient, base_url: str, model_dir: Path, tmp_path: Path
) -> None:
    client = trained(service)
    path = client.save_state("for-peft").result(60).path
    url = (
        RestClient(base_url=base_url)
        .get_checkpoint_archive_url_from_tinker_path(path)
        .result(20)
        .url
    )
    with tarfile.open(fileobj=io.BytesIO(fetch_anywhere(service, url)), mode="r:") as tar:
        assert tar.getnames() == [
            "adapter_config.json",
            "adapter_model.safetensors",
            "optimizer.safetensors",
        ]
        tar.extractall(tmp_path, filter="data")
    assert_peft_agrees(client, types, model_dir, tmp_path)


# ── encryption ────────────────────────────────────────────────────────────────────────────────────

RECIPIENT = "age1l0hudh7h0lgh7pnfaex89akkwny4yhak3th8r76qzw8rgse0z5ks8tdzd0"


def encrypted(wire: Wire, *recipients: str) -> Any:
    fields = {"path": "e", "seq_id": 1, "age_encryption_recipients": list(recipients)}
    return wire.run("save_weights_external", {"model_id": wire.model(), **fields})


def test_export_without_encryption_support_fails(
    wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "pyrage", None)
    outcome = encrypted(wire, RECIPIENT)
    assert outcome["category"] == "user"
    assert "pip install pyrage" in outcome["error"]
    assert wire.get("checkpoints")["checkpoints"] == []


def test_exports_have_at_most_ten_recipients(wire: Wire) -> None:
    assert "at most 10 are possible, got 11" in encrypted(wire, *[RECIPIENT] * 11)["error"]


def test_only_recipients_can_decrypt(wire: Wire) -> None:
    pyrage = pytest.importorskip("pyrage")
    ours, theirs = pyrage.x25519.Identity.generate(), pyrage.x25519.Identity.generate()
    assert "'bob' is no public key" in encrypted(wire, "bob")["error"]
    path = encrypted(wire, str(ours.to_public()))["path"]
    [(name, url)] = urls(wire, path).items()
    assert name == "fake.json.age"
    body = fetch(url).body
    assert b'"rank": 4' in pyrage.decrypt(body, [ours])
    with pytest.raises(pyrage.DecryptError):
        pyrage.decrypt(body, [theirs])
