"""Every generation of the official client against one server: each must find what its version
expects, and the same.

The clients are in directories of their own (`tools/clients.py` fetches them), over the environment
of these tests.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, get_args, get_origin
from urllib.parse import quote

import msgspec
import pytest

from support import MODEL, Wire, pass_json, sample_json, serving, step_json
from tinkex import types
from tinkex.engine.fake import FakeEngine
from tinkex.types.record import Record
from tinkex.wire import codec
from tinkex.wire.protocol import OPERATIONS

HERE = Path(__file__).parent
# What clients know how to put together again from several parts of a call; of others they say
# nothing.
REDUCTIONS = {"mean", "sum", "min", "max", "slack", "hash2", "unique"}
# Where a run is named, or a version: different each time.
OWN = {"version", "file", "unloaded", "lists"}


def _clients() -> ModuleType:
    spec = importlib.util.spec_from_file_location("clients", HERE.parent / "tools" / "clients.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


clients = _clients()
NEWEST = clients.VERSIONS[-1]
MATRIX = [
    pytest.param(version, marks=() if version in clients.QUICK else pytest.mark.slow)
    for version in clients.VERSIONS
]
Loop = Callable[[str, str], dict[str, Any]]


@pytest.fixture(scope="session")
def loop() -> Loop:
    """Run the loop with one version of the client, once per server; return the outcomes."""
    known: dict[tuple[str, str], dict[str, Any]] = {}

    def run(version: str, url: str) -> dict[str, Any]:
        if (version, url) not in known:
            try:
                place = clients.fetch(version)
            except clients.FetchError as error:
                pytest.fail(str(error), pytrace=False)
            known[version, url] = run_loop(place, url)
        return known[version, url]

    return run


def run_loop(place: Path, url: str, module: str = "tinker") -> dict[str, Any]:
    """In a process of its own, where the client of that directory comes before any other."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(place), str(HERE)])}
    done = subprocess.run(
        [sys.executable, str(HERE / "versions" / "loop.py"), url, module],
        env=environment,
        capture_output=True,
        text=True,
        timeout=130,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert Path(found["file"]).is_relative_to(place)
    return found


def check(found: dict[str, Any]) -> None:
    """Check the rules that hold for any client, with any numbers."""
    losses = found["losses"]
    assert losses[-1] < 0.8 * losses[0]
    assert losses == sorted(losses, reverse=True)
    assert "loss:sum" in found["metrics"]
    assert {name.split(":")[1] for name in found["metrics"]} <= REDUCTIONS
    straight = found["after saving"]
    assert straight[0] == found["forward"]
    assert found["resumed"] == found["loaded"] == found["in another dialect"] == straight
    assert found["resumed without optimizer"][0] == straight[0]
    assert found["resumed without optimizer"] != straight
    assert found["trained in chunks"] == pytest.approx(straight, rel=1e-6)
    assert found["text"] == "hello cat"
    assert (found["refused"], found["reason"], found["unharmed"]) == (
        "RequestFailedError",
        True,
        True,
    )
    assert found["after custom"] < found["after policy"]

    drawn = found["named weights"]
    for name in ("named weights", "nameless weights", "base model"):
        assert found[f"{name} again"] == found[name], "a seed decides"
        assert [len(tokens) for tokens, _, _ in found[name]] == [6, 6, 6]
        assert {reason for _, _, reason in found[name]} == {"length"}
    assert found["nameless weights"] == drawn
    assert [tokens for tokens, _, _ in found["base model"]] != [tokens for tokens, _, _ in drawn]
    first = drawn[0][0]
    assert found["stopped"] == [first[:3], "stop"]
    assert found["stopped by text"] == first[:3]
    assert found["scores"] == found["prompt logprobs"]
    assert found["scores"][0] is None
    assert all(score < 0 for score in found["scores"][1:])
    assert found["topk tokens"][0] is None
    assert [len(tokens) for tokens in found["topk tokens"][1:]] == [2, 2, 2, 2]
    assert found["weights info"] == [MODEL, True, 4]
    assert found["models"] == [MODEL]
    assert [found["saved"], found["named"]] == ["resume", "final"]
    assert found.get("unloaded", True)
    if found["lists"]["checkpoints"] != "not there":
        assert found["lists"] == {
            "run": MODEL,
            "checkpoints": ["sampler:sampler_weights/final", "training:weights/resume"],
            "runs": True,
        }


def compare(found: dict[str, Any], reference: dict[str, Any]) -> None:
    """The same numbers, and exactly the same of what can be counted."""
    assert found.keys() - OWN == reference.keys() - OWN
    for name in sorted(found.keys() - OWN):
        assert alike(found[name], reference[name]), (name, found[name], reference[name])
    assert found["lists"] == reference["lists"]


def alike(found: Any, wanted: Any) -> bool:
    """Equal, and for fractions equal to a millionth."""
    if isinstance(wanted, list):
        return (
            isinstance(found, list) and len(found) == len(wanted) and all(map(alike, found, wanted))
        )
    if isinstance(wanted, float):
        return isinstance(found, float) and found == pytest.approx(wanted, rel=1e-6, abs=1e-6)
    return bool(found == wanted)


@pytest.mark.timeout(300)  # it may have to fetch two clients, and to run two
@pytest.mark.covers(
    "S1",
    "S2",
    "S3",
    "S5",
    "S7",
    "S8",
    "S11",
    "S13",
    "S20",
    "S24",
    "S28",
    "S32",
    "S36",
    "S37",
    "U41",
)
@pytest.mark.parametrize("version", MATRIX)
def test_client_of_any_version_runs_the_loop(version: str, server_url: str, loop: Loop) -> None:
    found = loop(version, server_url)
    assert found["version"] == version
    check(found)
    compare(found, loop(NEWEST, server_url))
    assert ("unloaded" in found) == (
        clients.VERSIONS.index(version) < clients.VERSIONS.index("0.26.2")
    )


@pytest.fixture(scope="session")
def brisk_url(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server that holds polls for a moment only, and announces almost every result before it
    sends it."""
    from tinkex.engine.torch.engine import TorchEngine
    from tinkex.local import publish_tokenizers
    from tinkex.server.server_limits import Limits

    engine = TorchEngine({MODEL: model_dir})
    publish_tokenizers(engine.models())
    limits = Limits(poll_seconds=0.05, announced_bytes=100)
    with serving(engine, tmp_path_factory.mktemp("brisk"), limits=limits) as url:
        yield url


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.covers("S26", "S27")
@pytest.mark.parametrize("version", clients.VERSIONS)
def test_every_client_version_retries_on_request(version: str, brisk_url: str, loop: Loop) -> None:
    found = loop(version, brisk_url)
    check(found)
    compare(found, loop(NEWEST, brisk_url))


@pytest.mark.timeout(300)
def test_search_equals_the_official_search(server_url: str, loop: Loop) -> None:
    import tinkex

    found = run_loop(Path(tinkex.__file__).parents[1], server_url, "tinkex")
    check(found)
    compare(found, loop(NEWEST, server_url))


def test_client_that_cannot_be_fetched_is_missed_aloud(tmp_path: Path) -> None:
    (tmp_path / "index").mkdir()
    options = ["--no-index", "--find-links", str(tmp_path / "index")]
    with pytest.raises(
        clients.FetchError, match=r"cannot fetch tinker==0\.15\.0 from the package index"
    ) as caught:
        clients.fetch("0.15.0", tmp_path / "clients", options)
    assert "No matching distribution" in str(caught.value)
    assert list((tmp_path / "clients").iterdir()) == []


def test_existing_client_is_not_downloaded(tmp_path: Path) -> None:
    (tmp_path / "0.15.0").mkdir()
    assert clients.fetch("0.15.0", tmp_path, ["--no-such-option"]) == tmp_path / "0.15.0"


# ── the Elixir client's dialect: JSON only, and a null for whatever is not given ──────────────────


@pytest.fixture(scope="session")
def wire(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Wire]:
    """A server over the fake engine, without any client."""
    with serving(FakeEngine(), tmp_path_factory.mktemp("wire")) as url:
        yield Wire(url)


SESSION = {
    "tags": ["tinkex-elixir"],
    "user_metadata": None,
    "sdk_version": "0.15.0",
    "project_id": None,
}
LORA = {"rank": 4, "seed": None, "train_mlp": True, "train_attn": True, "train_unembed": True}


def elixir_model(wire: Wire) -> tuple[str, str]:
    """A session and a model, asked for as the Elixir client asks."""
    session = wire.post("create_session", {**SESSION, "type": "create_session"})["session_id"]
    wanted = {"session_id": session, "model_seq_id": 0, "base_model": "fake", "user_metadata": None}
    made = wire.run("create_model", {**wanted, "lora_config": LORA, "type": "create_model"})
    return session, made["model_id"]


def elixir_pass(model_id: str, seq_id: int, key: str = "forward_backward_input") -> dict[str, Any]:
    """A pass with a null wherever something is optional."""
    tensor = {
        "data": [2, 3, 4],
        "dtype": "int64",
        "shape": None,
        "sparse_crow_indices": None,
        "sparse_col_indices": None,
    }
    chunk = {"tokens": [1, 2, 3], "type": "encoded_text"}
    datum = {"model_input": {"chunks": [chunk]}, "loss_fn_inputs": {"target_tokens": tensor}}
    return {
        "model_id": model_id,
        "seq_id": seq_id,
        key: {"data": [datum], "loss_fn": "cross_entropy", "loss_fn_config": None},
    }


@pytest.mark.covers("S1", "S2", "S5", "S7")
def test_elixir_dialect_trains_saves_loads_and_samples(wire: Wire) -> None:
    session, model_id = elixir_model(wire)
    assert model_id == f"{session}:train:0"
    assert wire.post("session_heartbeat", {"session_id": session, "type": "session_heartbeat"})
    first = wire.run("forward_backward", elixir_pass(model_id, 1))
    adam = {
        "learning_rate": 0.1,
        "beta1": 0.9,
        "beta2": 0.95,
        "eps": 1e-12,
        "weight_decay": 0.0,
        "grad_clip_norm": 0.0,
    }
    wire.run(
        "optim_step", {"model_id": model_id, "seq_id": 2, "adam_params": adam, "type": "optim_step"}
    )
    looked = wire.run("forward", elixir_pass(model_id, 3, "forward_input"))
    assert looked["metrics"]["loss:sum"] < first["metrics"]["loss:sum"]
    output = looked["loss_fn_outputs"][0]["logprobs"]
    assert (len(output["data"]), output["dtype"], output["shape"]) == (3, "float32", [3])

    saving = {
        "model_id": model_id,
        "path": "elixir",
        "seq_id": 4,
        "type": "save_weights",
        "ttl_seconds": None,
    }
    state = wire.run("save_weights", saving)["path"]
    loading = {
        "model_id": model_id,
        "path": state,
        "optimizer": True,
        "seq_id": 5,
        "type": "load_weights",
    }
    assert (
        wire.run("load_weights", {**loading, "weights_access_token": None})["model_id"] == model_id
    )
    info = wire.post("weights_info", {"tinker_path": state})
    assert (info["base_model"], info["lora_rank"]) == ("fake", 4)

    keeping = {"model_id": model_id, "ttl_seconds": None, "type": "save_weights_for_sampler"}
    named = wire.run(
        "save_weights_for_sampler",
        {**keeping, "path": "elixir", "sampling_session_seq_id": None, "seq_id": 6},
    )
    nameless = wire.run(
        "save_weights_for_sampler",
        {**keeping, "path": None, "sampling_session_seq_id": 0, "seq_id": 7},
    )
    assert named["path"].endswith("/sampler_weights/elixir")
    opening = {
        "session_id": session,
        "sampling_session_seq_id": 1,
        "base_model": None,
        "model_path": named["path"],
    }
    sampler = wire.post("create_sampling_session", {**opening, "type": "create_sampling_session"})
    drawn = [
        wire.run("asample", elixir_sample(sampling_session_id=one["sampling_session_id"], seq_id=0))
        for one in (sampler, nameless)
    ]
    assert drawn[0]["sequences"][0]["tokens"] == drawn[1]["sequences"][0]["tokens"]
    assert (
        wire.get(f"samplers/{quote(sampler['sampling_session_id'], safe='')}")["model_path"]
        == named["path"]
    )
    assert drawn[0]["sequences"][0]["stop_reason"] == "length"
    assert len(drawn[0]["sequences"][0]["logprobs"]) == 3
    assert (
        wire.run("unload_model", {"model_id": model_id, "type": "unload_model"})["model_id"]
        == model_id
    )


@pytest.mark.covers("U41")
@pytest.mark.parametrize(
    "kind", [{}, {"kind": None}, {"kind": "snapshot"}], ids=["absent", "null", "snapshot"]
)
def test_save_without_a_kind_is_a_snapshot(wire: Wire, kind: dict[str, Any]) -> None:
    _, model_id = elixir_model(wire)
    saving = {"model_id": model_id, "path": None, **kind}

    def draw(sampler: str, seq_id: int) -> Any:
        body = elixir_sample(sampling_session_id=sampler, seq_id=seq_id)
        return wire.run("asample", body)["sequences"][0]["logprobs"]

    first = wire.run(
        "save_weights_for_sampler", {**saving, "sampling_session_seq_id": 0, "seq_id": 1}
    )
    before = draw(first["sampling_session_id"], 0)
    wire.run("forward_backward", elixir_pass(model_id, 2))
    wire.run("optim_step", step_json(model_id, 3))
    second = wire.run(
        "save_weights_for_sampler", {**saving, "sampling_session_seq_id": 1, "seq_id": 4}
    )
    assert draw(first["sampling_session_id"], 1) == before
    assert draw(second["sampling_session_id"], 0) != before


def elixir_sample(**fields: Any) -> dict[str, Any]:
    """A sample with a null wherever something is optional."""
    params = {
        "max_tokens": 3,
        "temperature": 1.0,
        "top_k": -1,
        "top_p": 1.0,
        "seed": 1,
        "stop": None,
    }
    return {
        "sampling_session_id": None,
        "seq_id": None,
        "base_model": None,
        "model_path": None,
        "prompt": {"chunks": [{"tokens": [5, 6, 7], "type": "encoded_text"}]},
        "sampling_params": params,
        "num_samples": 1,
        "prompt_logprobs": None,
        "topk_prompt_logprobs": 0,
        "type": "sample",
        **fields,
    }


@pytest.mark.covers("S5", "S37")
def test_sample_without_a_sampling_session_names_its_model(wire: Wire) -> None:
    receipt = wire.post(
        "asample", elixir_sample(base_model="fake", num_samples=2, prompt_logprobs=True)
    )
    assert len(set(receipt["sample_sequence_ids"])) == 2
    drawn = wire.result(receipt["request_id"])
    assert len(drawn["sequences"]) == 2
    assert [score is None for score in drawn["prompt_logprobs"]] == [True, False, False]
    heard = wire.send("asample", elixir_sample())
    assert heard.status == 400
    assert "base_model or a model_path" in heard.json["detail"]


NULLS: dict[str, tuple[str, ...]] = {
    "create_session": ("user_metadata", "project_id", "display_name"),
    "create_model": ("user_metadata", "lora_config", "optimizer_config"),
    "optim_step": ("seq_id",),
    "forward_backward": ("seq_id",),
    "save_weights": ("path", "seq_id", "ttl_seconds", "user_metadata"),
    "asample": ("seq_id", "prompt_logprobs", "num_samples", "topk_prompt_logprobs"),
    "retrieve_future": ("allow_metadata_only",),
}


@pytest.mark.covers("S1")
@pytest.mark.parametrize(
    ("path", "field"), [(path, field) for path, fields in NULLS.items() for field in fields]
)
def test_null_equals_an_absent_field(wire: Wire, path: str, field: str) -> None:
    session, model_id = elixir_model(wire)
    receipt = wire.post("forward_backward", pass_json(model_id, 1))
    bodies = {
        "create_session": SESSION,
        "create_model": {"session_id": session, "model_seq_id": 1, "base_model": "fake"},
        "forward_backward": pass_json(model_id, 2),
        "optim_step": step_json(model_id, 2),
        "save_weights": {"model_id": model_id, "path": "name", "seq_id": 2},
        "asample": sample_json("unused") | {"sampling_session_id": None, "base_model": "fake"},
        "retrieve_future": receipt,
    }
    heard = wire.send(path, {**bodies[path], field: None})
    assert heard.status == 200, heard
    if "request_id" in heard.json and path != "retrieve_future":
        assert "error" not in wire.result(heard.json["request_id"])


def least(kind: Any) -> Any:
    """A small valid value of a type, as decoded JSON."""
    known: dict[Any, Any] = {
        str: "x",
        int: 1,
        float: 1.0,
        bool: True,
        types.ModelInput: {"chunks": []},
    }
    if kind in known:
        return known[kind]
    if isinstance(kind, type) and issubclass(kind, Record):
        return {
            field.name: least(field.type)
            for field in msgspec.structs.fields(kind)
            if field.required
        }
    if isinstance(kind, type) and issubclass(kind, Enum):
        return next(iter(kind)).value
    choices = get_args(kind)
    if get_origin(kind) is Literal:
        return choices[0]
    return [] if get_origin(kind) is list else {} if get_origin(kind) is dict else least(choices[0])


REQUESTS = {
    op.request for op in OPERATIONS if op.request is not None and issubclass(op.request, Record)
}
OPTIONAL = sorted(
    (kind.__name__, field.name)
    for kind in REQUESTS
    for field in msgspec.structs.fields(kind)
    if not field.required and field.name != "type"
)


@pytest.mark.covers("S1")
@pytest.mark.parametrize(("name", "field"), OPTIONAL)
def test_null_is_read_like_an_absent_field(name: str, field: str) -> None:
    kind = next(kind for kind in REQUESTS if kind.__name__ == name)
    body = least(kind)
    if kind is types.OptimStepRequest:  # of its several ways to give them, one must be used
        body["optimizer_params" if field == "adam_params" else "adam_params"] = {
            "type": "adamw",
            "learning_rate": 0.1,
        }
    assert codec.decode(kind, json.dumps({**body, field: None}).encode()) == codec.decode(
        kind, json.dumps(body).encode()
    )


def test_null_for_a_required_field_is_refused() -> None:
    for body in ({"request_id": None}, {"request_id": None, "allow_metadata_only": None}):
        with pytest.raises(ValueError, match="got `null`"):
            codec.decode(types.FutureRetrieveRequest, json.dumps(body).encode())


def test_inner_nulls_are_dropped() -> None:
    params = {"max_tokens": None, "temperature": None, "top_k": None, "seed": 3}
    body = elixir_sample(sampling_params=params, num_samples=None)
    request = codec.decode(types.SampleRequest, json.dumps(body).encode())
    assert request.sampling_params == types.SamplingParams(seed=3)
    assert request.num_samples == 1
    session = {"tags": None, "user_metadata": {"kept": None}, "sdk_version": None}
    opened = codec.decode(types.CreateSessionRequest, json.dumps(session).encode())
    assert (opened.tags, opened.user_metadata) == ([], {"kept": None})
