"""Names of models as OpenAI-compatible callers give them, and the routes that list them."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from support import Keyed, Wire, serving
from tinkex.engine.api import BaseModel
from tinkex.engine.fake import FakeEngine
from tinkex.server.access.keys import create_key
from tinkex.server.database.sqlite import SqliteDatabase

BASES = tuple(BaseModel(name, context_length=length, vocab_size=128, arch="fake")
              for name, length in
              (("fake", 512), ("org/other", 2048)))  # fmt: skip


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    with serving(FakeEngine(BASES), tmp_path) as url:
        yield url


def ask(url: str, path: str = "", headers: dict[str, str] | None = None) -> tuple[int, Any]:
    request = urllib.request.Request(f"{url}/oai/api/v1/models{path}", headers=headers or {})
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with closing(error):
            return error.code, json.load(error)["error"]


def saved(
    wire: Wire, base: str = "fake", kind: str = "save_weights_for_sampler", name: str = "final"
) -> str:
    model = wire.model(base_model=base)
    return str(wire.run(kind, {"model_id": model, "path": name, "seq_id": 1})["path"])


@pytest.mark.covers("U57")
def test_model_may_be_a_base_a_path_or_both(url: str) -> None:
    path = saved(Wire(url), "org/other")
    base = {"object": "model", "owned_by": "tinkex", "parent": None}
    for name in ("org/other", "org/other:peft:32768"):
        status, found = ask(url, f"/{name}")
        assert status == 200
        assert found.pop("created") > 1e9
        assert found == {**base, "id": name, "root": "org/other", "max_model_len": 2048}
    for name in (path, f"org/other;{path}", f"org/other:peft:2048;{path}"):
        for sent in (name, quote(name), quote(name, safe="")):
            status, found = ask(url, f"/{sent}")
            assert (status, found["id"]) == (200, name), sent
            assert (found["root"], found["parent"], found["max_model_len"]) == (
                path,
                "org/other",
                2048,
            )


@pytest.mark.covers("U57")
@pytest.mark.parametrize(
    ("name", "status", "words"),
    [
        ("fake;{path}", 400, "was trained on 'org/other', not on 'fake'"),
        ("fake:peft:512;{path}", 400, "was trained on 'org/other', not on 'fake:peft:512'"),
        ("nobody;{path}", 404, "there is no model"),
        ("nobody", 404, "the base models here are fake, org/other"),
        ("fake;", 400, "or <base model>;tinker://"),
        (";{path}", 400, "or <base model>;tinker://"),
        ("fake;final", 400, "is not a checkpoint path"),
        ("fake;{path};{path}", 400, "is not a checkpoint path"),
        ("tinker://nobody:train:0/sampler_weights/final", 404, "there is no checkpoint"),
        ("{training}", 400, "is a training checkpoint"),
        ("x" * 1001, 400, "at most 1000 characters"),
    ],
)
def test_unknown_name_is_a_user_error(url: str, name: str, status: int, words: str) -> None:
    wire = Wire(url)
    path = saved(wire, "org/other")
    name = name.format(
        path=path, training=saved(wire, kind="save_weights") if "{training}" in name else ""
    )
    code, error = ask(url, f"/{quote(name)}")
    assert code == status, error
    assert words in error["message"]
    assert error["param"] == "model"
    assert error["code"] == ("model_not_found" if status == 404 else "invalid_model")


@pytest.mark.covers("U57")
def test_models_are_listed_with_checkpoints_newest_first(url: str) -> None:
    wire = Wire(url)
    first, second = saved(wire), saved(wire, "org/other")
    saved(wire, kind="save_weights")
    status, found = ask(url)
    assert (status, found["object"]) == (200, "list")
    assert [one["id"] for one in found["data"]] == ["fake", "org/other", second, first]
    assert [one["parent"] for one in found["data"]] == [None, None, "org/other", "fake"]
    assert [one["id"] for one in ask(url, "?limit=3")[1]["data"]] == ["fake", "org/other", second]
    for wrong in ("0", "1001", "x", "-1", "9" * 5000):
        assert ask(url, f"?limit={wrong}")[0] == 400


@pytest.mark.covers("U57")
def test_models_of_others_are_found_only_if_published(tmp_path: Path) -> None:
    with ExitStack() as stack:
        store = stack.enter_context(closing(SqliteDatabase(tmp_path)))
        ada, bob = (create_key(store, owner, owner)[1] for owner in ("ada", "bob"))
        url = stack.enter_context(serving(FakeEngine(BASES), tmp_path))
        hers = Keyed(url, ada)
        path = saved(hers)
        as_owner: Callable[[str], dict[str, str]] = lambda key: {"Authorization": f"Bearer {key}"}  # noqa: E731
        assert ask(url, f"/{path}")[0] == 401
        assert ask(url)[0] == 401
        assert ask(url, "", as_owner("tml-wrong"))[0] == 401
        assert ask(url, f"/{path}", as_owner(ada))[1]["owned_by"] == "ada"
        assert ask(url, f"/{path}", {"X-API-Key": ada})[0] == 200
        for name in (path, f"fake;{path}"):
            status, error = ask(url, f"/{name}", as_owner(bob))
            assert (status, error["code"]) == (404, "model_not_found")
        run, kind, name = path.removeprefix("tinker://").split("/")
        hers.post(f"training_runs/{run}/checkpoints/{kind}/{name}/publish", {})
        assert ask(url, f"/fake;{path}", as_owner(bob))[0] == 200
        assert path not in [one["id"] for one in ask(url, "", as_owner(bob))[1]["data"]]
        assert path in [one["id"] for one in ask(url, "", as_owner(ada))[1]["data"]]


def test_open_server_lists_models_to_this_machine_only(url: str) -> None:
    status, error = ask(url, "", {"Host": "evil.example"})
    assert (status, error["type"]) == (403, "permission_error")
    status, error = ask(url, "/fake", {"Origin": "http://evil.example"})
    assert (status, error["type"]) == (403, "permission_error")
