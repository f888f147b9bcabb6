"""Keys, tokens and owners: who is let in, and what they can see."""

from __future__ import annotations

import base64
import http.client
import json
import os
import re
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

import tinkex
from operation_examples import foreign
from support import Heard, Keyed, Wire, sample_json, serving, step_json
from tinkex.client.rest import RestClient
from tinkex.engine.fake import FakeEngine
from tinkex.server.access import accounts
from tinkex.server.access.accounts import Accounts
from tinkex.server.access.keys import create_key, has_keys, revoke_key
from tinkex.server.database.sqlite import DATABASE, SqliteDatabase
from tinkex.server.files.data_dir import KEYED_FILE, SECRET_FILE, DataDirError
from tinkex.server.server_limits import Limits
from tinkex.wire import protocol
from tinkex.wire.protocol import OPERATIONS, Operation


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SqliteDatabase]:
    """The facts of the test's data directory, as the command line sees them."""
    with closing(SqliteDatabase(tmp_path)) as opened:
        yield opened


Serve = Callable[..., str]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    """Starts a server on the test's data directory."""
    with ExitStack() as stack:
        yield lambda **options: stack.enter_context(serving(FakeEngine(), tmp_path, **options))


def ask(url: str, key: str | None) -> Heard:
    return Wire(url).send(
        "get_server_capabilities", method="GET", headers={} if key is None else {"X-API-Key": key}
    )


# ── keys ──────────────────────────────────────────────────────────────────────────────────────────


def test_key_is_kept_as_a_hash_only(store: SqliteDatabase, tmp_path: Path) -> None:
    number, key = create_key(store, "laptop", "ada")
    assert re.fullmatch(r"tml-[A-Za-z0-9_-]{43}", key)
    assert create_key(store, "laptop", "ada")[1] != key
    store.connection.rows("PRAGMA wal_checkpoint(TRUNCATE)")
    assert key.encode() not in (tmp_path / DATABASE).read_bytes()
    first = store.keys.all()[0]
    assert (first.id, first.owner, first.name, first.last_used, first.revoked) == (
        number,
        "ada",
        "laptop",
        None,
        None,
    )


@pytest.mark.covers("U45")
def test_first_key_closes_a_running_server(serve: Serve, store: SqliteDatabase) -> None:
    url = serve()
    assert ask(url, None).status == 200
    _, key = create_key(store, "first")
    deadline = time.monotonic() + 20
    while ask(url, None).status == 200:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert ask(url, None).status == 401
    wrong = ask(url, "tml-other")
    assert wrong.status == 401
    assert "www-authenticate" not in wrong.headers  # a new token would be no remedy
    assert ask(url, key).status == 200
    _, second = create_key(store, "second")
    assert ask(url, second).status == 200  # at once


def test_revoked_key_is_refused_and_revoking_the_last_keeps_the_server_closed(
    serve: Serve, store: SqliteDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accounts, "TRUSTED_SECONDS", 0.0)
    number, key = create_key(store, "only")
    url = serve()
    assert ask(url, key).status == 200
    assert store.keys.all()[0].last_used == pytest.approx(time.time(), abs=30)
    assert revoke_key(store, number)
    assert not revoke_key(store, number)
    assert not revoke_key(store, 77)
    for heard in (ask(url, key), ask(url, None)):
        assert heard.status == 401
        assert "www-authenticate" not in heard.headers
    assert has_keys(store)


def test_key_of_the_environment_is_accepted_with_keys_on_record(
    serve: Serve, store: SqliteDatabase
) -> None:
    _, key = create_key(store, "other", "ada")
    url = serve(api_key="tml-given")
    mine, hers = Keyed(url, "tml-given"), Keyed(url, key)
    me = mine.get("auth/apikey/me")
    assert (me["key_id"], me["name"]) == (0, "TINKEX_SERVER_API_KEY")
    her = hers.get("auth/apikey/me")
    assert (her["name"], her["details"]["user_details"]["name"]) == ("other", "ada")
    refused = mine.send("auth/apikey/me", method="DELETE")
    assert refused.status == 400
    assert hers.send("auth/apikey/me", method="DELETE").status == 200
    assert store.keys.all()[0].revoked is not None


def test_open_server_names_no_key(serve: Serve) -> None:
    wire = Wire(serve())
    me = wire.get("auth/apikey/me")
    assert (me["key_id"], me["name"]) == (0, "open")
    assert wire.send("auth/apikey/me", method="DELETE").status == 400


def test_program_with_its_own_backend_needs_no_key(tmp_path: Path, store: SqliteDatabase) -> None:
    create_key(store, "for others")
    backend = tinkex.LocalBackend(engine=FakeEngine(), data_dir=tmp_path)
    with backend, tinkex.ServiceClient(base_url=backend.base_url) as service:
        assert service.get_server_capabilities().supported_models


# ── tokens ────────────────────────────────────────────────────────────────────────────────────────


def said(token: str) -> dict[str, Any]:
    payload = token.split(".")[1]
    read: dict[str, Any] = json.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))
    return read


def forge(token: str, **changes: Any) -> str:
    head, _, signature = token.split(".")
    body = (
        base64.urlsafe_b64encode(json.dumps({**said(token), **changes}).encode())
        .decode()
        .rstrip("=")
    )
    return f"{head}.{body}.{signature}"


MARK = 'Bearer error="invalid_token"'


@pytest.mark.covers("U45")
def test_token_stands_for_its_key(
    serve: Serve, store: SqliteDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accounts, "TRUSTED_SECONDS", 0.0)
    number, key = create_key(store, "k", "ada@example.org")
    url = serve()
    token = Keyed(url, key).post("auth/token", {})["jwt"]
    claims = said(token)
    assert claims["sub"] == "tml:user:ada@example.org"
    assert claims["email"] == "ada@example.org"
    assert claims["iss"].startswith("passport-")
    assert 3500 < claims["exp"] - time.time() <= 3600
    assert claims["exp"] - claims["iat"] == 3600
    session = Keyed(url, key).session()
    assert Keyed(url, token).get("sessions")["sessions"] == [session]
    for wrong in (
        forge(token, sub="tml:user:local"),
        forge(token, exp=4e9),
        "eyJ.x",
        "eyJ.e30.x",
        token[:-2],
        "eyJ",
    ):
        heard = ask(url, wrong)
        assert (heard.status, heard.headers["www-authenticate"]) == (401, MARK), wrong
    revoke_key(store, number)
    heard = ask(url, token)
    assert (heard.status, heard.headers["www-authenticate"]) == (401, MARK)


@pytest.mark.covers("U45")
def test_expired_token_asks_for_renewal(
    tmp_path: Path, serve: Serve, store: SqliteDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, key = create_key(store, "k")
    url = serve()
    with monkeypatch.context() as patch:
        patch.setattr(accounts, "TOKEN_SECONDS", -1)
        token = Keyed(url, key).post("auth/token", {})["jwt"]
    heard = ask(url, token)
    assert (heard.status, heard.headers["www-authenticate"]) == (401, MARK)
    assert "auth/token" in heard.json["detail"]


@pytest.mark.covers("U25", "U45")
def test_client_survives_key_rotation(
    tmp_path: Path, serve: Serve, store: SqliteDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accounts, "TRUSTED_SECONDS", 0.0)
    number, key = create_key(store, "old", "ada")
    kept = tmp_path / "key"
    kept.write_text(key)
    monkeypatch.setenv("TINKER_CREDENTIAL_CMD", f"cat {kept}")
    with tinkex.ServiceClient(base_url=serve(tokens=True)) as service:
        service.get_server_capabilities()
        kept.write_text(create_key(store, "new", "ada")[1])
        revoke_key(store, number)
        assert service.get_server_capabilities().supported_models
        kept.write_text("tml-wrong")
        revoke_key(store, number + 1)
        with pytest.raises(tinkex.AuthenticationError, match="not known here"):
            service.get_server_capabilities()


OFFICIAL = """
import os, sys, warnings
warnings.simplefilter("ignore")
import tinker
rest = tinker.ServiceClient(base_url=sys.argv[1]).create_rest_client()
for _ in range(2):
    print(len(rest.list_sessions().result(30).sessions), flush=True)
    sys.stdin.readline()
try:
    rest.list_sessions().result(30)
except tinker.AuthenticationError as error:
    print("refused", flush=True)
os._exit(0)  # its threads sometimes bring an orderly end down
"""


@pytest.mark.covers("U25", "U45")
def test_official_client_survives_key_rotation(
    tmp_path: Path, serve: Serve, store: SqliteDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accounts, "TRUSTED_SECONDS", 0.0)
    number, key = create_key(store, "old", "ada")
    kept = tmp_path / "key"
    kept.write_text(key)
    command = [sys.executable, "-c", OFFICIAL, serve(tokens=True)]
    variables = {**os.environ, "TINKER_CREDENTIAL_CMD": f"cat {kept}"}
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=variables,
    ) as client:
        assert client.stdin is not None
        assert client.stdout is not None
        assert client.stdout.readline() == "0\n", client.communicate(timeout=60)
        kept.write_text(create_key(store, "new", "ada")[1])
        revoke_key(store, number)
        client.stdin.write("\n")
        client.stdin.flush()
        assert client.stdout.readline() == "0\n"
        kept.write_text("tml-wrong")
        revoke_key(store, number + 1)
        assert client.communicate("\n", timeout=60)[0] == "refused\n"


def test_secret_is_the_owners_alone_and_stays(tmp_path: Path, store: SqliteDatabase) -> None:
    first, again = Accounts(store, "tml-x"), Accounts(store, "tml-x")
    assert first.sign("a") == again.sign("a")
    # a new key ends the tokens of the old one
    assert first.sign("a") != Accounts(store, "tml-y").sign("a")
    assert stat.S_IMODE((tmp_path / SECRET_FILE).stat().st_mode) == 0o600


@pytest.mark.parametrize("left", [b"", b"short", bytes(32)])
def test_signing_key_that_is_not_whole_is_refused(
    tmp_path: Path, store: SqliteDatabase, left: bytes
) -> None:
    (tmp_path / SECRET_FILE).write_bytes(left)
    with pytest.raises(DataDirError, match=SECRET_FILE):
        Accounts(store)
    assert (tmp_path / SECRET_FILE).read_bytes() == left


def test_signing_key_with_a_flipped_bit_is_refused(tmp_path: Path, store: SqliteDatabase) -> None:
    signed = Accounts(store).sign("a")
    assert Accounts(store).sign("a") == signed
    secret = bytearray((tmp_path / SECRET_FILE).read_bytes())
    secret[5] ^= 1
    (tmp_path / SECRET_FILE).write_bytes(secret)
    with pytest.raises(DataDirError, match=SECRET_FILE):
        Accounts(store)
    (tmp_path / SECRET_FILE).unlink()
    assert Accounts(store).sign("a") != signed


def test_server_that_lost_its_keys_stays_closed(serve: Serve, store: SqliteDatabase) -> None:
    create_key(store, "first")
    store.connection.rows("DELETE FROM keys")  # as after a power loss that took the database's log
    url = serve()
    assert ask(url, None).status == 401
    _, key = create_key(store, "second")
    assert ask(url, key).status == 200


def test_mark_of_a_keyed_directory_is_made_before_its_first_key(
    tmp_path: Path, store: SqliteDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not has_keys(store)
    monkeypatch.setattr(store.connection, "rows", lambda *_: pytest.fail("the disk is gone"))
    with pytest.raises(pytest.fail.Exception):
        create_key(store, "first")
    assert (tmp_path / KEYED_FILE).exists()


@pytest.mark.parametrize("tokens", [True, False])
def test_clients_exchange_keys_when_the_server_wants_it(
    serve: Serve, store: SqliteDatabase, tokens: bool
) -> None:
    _, key = create_key(store, "k", "ada")
    url = serve(tokens=tokens)
    with tinkex.ServiceClient(base_url=url, api_key=key) as service:
        assert service.create_sampling_client(base_model="fake").result()
    with RestClient(base_url=url, api_key=key) as rest:
        if not tokens:
            with pytest.raises(RuntimeError, match="gives none in exchange"):
                rest.whoami().result(10)
            return
        me = rest.whoami().result(10)
        assert (me.user_urn, me.org_urn, me.email) == (
            "tml:user:ada",
            "tml:organization:tinkex",
            None,
        )


# ── owners ────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def two(serve: Serve, store: SqliteDatabase) -> tuple[Keyed, Keyed]:
    """Two owners of one server."""
    keys = [create_key(store, name, name)[1] for name in ("ada", "bob")]
    url = serve(limits=Limits(poll_seconds=0.2))
    return Keyed(url, keys[0]), Keyed(url, keys[1])


def things(wire: Wire) -> dict[str, str]:
    """One of each thing that has an owner."""
    session = wire.session()
    model = wire.model(session)
    saved = wire.run("save_weights", {"model_id": model, "path": "a", "seq_id": 1})["path"]
    sampled = wire.run("save_weights_for_sampler", {"model_id": model, "path": "a", "seq_id": 2})[
        "path"
    ]
    body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "fake"}
    sampler = wire.post("create_sampling_session", body)["sampling_session_id"]
    drawn = wire.post("asample", sample_json(sampler))["request_id"]
    return {
        "session": session,
        "model": model,
        "saved": saved,
        "sampled": sampled,
        "sampler": sampler,
        "drawn": drawn,
        "request": f"{model}:1",
    }


NAMING = [op for op in OPERATIONS if op.owned_by is not protocol.OPEN]
"""Operations that name an object with an owner; what lists show is tested below."""


def test_owners_cannot_touch_objects_of_other_owners(two: tuple[Keyed, Keyed]) -> None:
    ada, bob = two
    own, its = things(bob), things(ada)
    seen = 0
    for op in NAMING:
        for body in foreign(op.name, own, its):
            heard = bob.send(_path(op, its), body, method=op.method)
            # to cancel what is not there is no error, and does nothing
            assert heard.status == (200 if op.name == "cancel_future" else 404), (
                op.name,
                body,
                heard,
            )
            seen += 1
    assert seen >= 40
    ended = {
        "finish_session",
        "unload_model",
        "delete_checkpoint",
        "get_external_weights_urls",  # there is no export
        "external_weights_upload_finish",  # there is no upload: tests/test_external_weights.py
    }
    for op in [op for op in NAMING if op.name not in ended]:
        # and the owner can: nothing was refused for another reason
        for body in foreign(op.name, its, its):
            heard = ada.send(_path(op, its), body, method=op.method)
            assert heard.status in (200, 302, 408), (op.name, body, heard)


def _path(op: Operation, its: dict[str, str]) -> str:
    parts = {
        "session_id": its["session"],
        "sampler_id": its["sampler"],
        "training_run_id": its["model"],
    }
    return op.path.format(**parts, kind="weights", name="a")


def test_checkpoints_of_another_owner_are_not_found(two: tuple[Keyed, Keyed]) -> None:
    ada, bob = two
    own, its = things(bob), things(ada)
    # the two cannot be told apart
    for path in (its["saved"], its["saved"].replace("/a", "/never")):
        number, wanted = 3 + ("never" in path), {"path": path, "optimizer": True}
        into = bob.run("load_weights", {"model_id": own["model"], "seq_id": number, **wanted})
        assert "there is no checkpoint" in into["error"]
        new = bob.run(
            "load_weights", {"session_id": own["session"], "model_seq_id": number, **wanted}
        )
        assert "there is no checkpoint" in new["error"]
    body = {
        "session_id": own["session"],
        "sampling_session_seq_id": 3,
        "model_path": its["sampled"],
    }
    refused = bob.send("create_sampling_session", body)
    assert refused.status == 400
    assert "there is no checkpoint" in refused.json["detail"]
    direct = sample_json("", sampling_session_id=None, model_path=its["sampled"])
    assert bob.send("asample", direct).status == 400


def test_published_checkpoints_can_be_used_by_others(
    two: tuple[Keyed, Keyed], store: SqliteDatabase
) -> None:
    ada, bob = two
    own, its = things(bob), things(ada)
    store.connection.rows("UPDATE checkpoints SET public = 1 WHERE owner = 'ada'")
    assert bob.post("weights_info", {"tinker_path": its["saved"]})["base_model"] == "fake"
    load = {"model_id": own["model"], "path": its["saved"], "seq_id": 3, "optimizer": True}
    assert "error" not in bob.run("load_weights", load)
    body = {
        "session_id": own["session"],
        "sampling_session_seq_id": 3,
        "model_path": its["sampled"],
    }
    sampler = bob.post("create_sampling_session", body)["sampling_session_id"]
    assert "error" not in bob.run("asample", sample_json(sampler))
    store.connection.rows("UPDATE checkpoints SET public = 0")
    assert bob.send("asample", sample_json(sampler, 1)).status == 410


def test_sample_without_a_session_has_an_owner_too(two: tuple[Keyed, Keyed]) -> None:
    ada, bob = two
    request = ada.post("asample", sample_json("", sampling_session_id=None, base_model="fake"))[
        "request_id"
    ]
    assert bob.send("retrieve_future", {"request_id": request}).status == 404
    assert bob.send("cancel_future", {"request_id": request}).status == 200
    assert "error" not in ada.result(request)


def test_numbers_of_anothers_run_cannot_be_spent(two: tuple[Keyed, Keyed]) -> None:
    ada, bob = two
    model = ada.model()
    broken = {"model_id": model, "seq_id": 1, "adam_params": "nonsense"}
    assert bob.send("optim_step", broken).status == 400
    assert "metrics" in ada.run("optim_step", step_json(model, 1))


def test_lists_hold_only_own_objects(two: tuple[Keyed, Keyed]) -> None:
    ada, bob = two
    its = things(ada)
    assert bob.get("sessions")["sessions"] == []
    assert bob.post("sessions/search", {"owner": {"type": "accessible"}})["sessions"] == []
    hers = {"type": "user", "owner_urns": ["tml:user:ada"]}
    assert bob.post("sessions/search", {"owner": hers})["sessions"] == []
    assert bob.post("checkpoints/search", {"owner": {"type": "accessible"}})["checkpoints"] == []
    assert bob.post("checkpoints/search", {"owner": hers})["checkpoints"] == []
    assert len(ada.post("checkpoints/search", {"owner": hers})["checkpoints"]) >= 2
    assert [entry["event"] for entry in bob.get("audit")["entries"]] == ["api_key_created"]
    assert bob.get("billing/usage/checkpoints/current")["data"] == []
    assert [
        found["session_id"] for found in ada.post("sessions/search", {"owner": hers})["sessions"]
    ] == [its["session"]]


def test_created_objects_carry_their_owner(two: tuple[Keyed, Keyed], store: SqliteDatabase) -> None:
    things(two[0])
    for table in ("sessions", "runs", "samplers", "checkpoints"):
        assert {row["owner"] for row in store.connection.rows(f"SELECT owner FROM {table}")} == {
            "ada"
        }, table


def test_open_server_listens_to_this_machine_only(serve: Serve) -> None:
    url = serve()
    for header in ({"Host": "evil.example"}, {"Origin": "http://evil.example"}):
        connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=10)
        with closing(connection):
            connection.request("GET", "/metrics", headers=header)
            assert connection.getresponse().status == 403


def test_access_token_of_the_owner_opens_a_checkpoint_to_others(
    two: tuple[Keyed, Keyed],
) -> None:
    ada, bob = two
    own, its = things(bob), things(ada)
    wanted = {"session_id": own["session"], "path": its["saved"], "optimizer": True}
    assert "error" in bob.run("load_weights", {**wanted, "model_seq_id": 7})
    opened = bob.run("load_weights", {**wanted, "model_seq_id": 8, "weights_access_token": ada.key})
    assert opened["model_id"] == f"{own['session']}:train:8"
    copy = {"source_path": its["saved"], "destination_project_id": "p"}
    assert bob.send("copy_weights", copy).status == 404
    heard = bob.send("copy_weights", copy, headers={"X-Tinker-Weights-Access-Token": ada.key})
    assert heard.status == 200, heard
    for wrong in ("tml-wrong", "eyJ.wrong"):
        refused = bob.send("copy_weights", copy, headers={"X-Tinker-Weights-Access-Token": wrong})
        assert refused.status == 403
        assert "www-authenticate" not in refused.headers
