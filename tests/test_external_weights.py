"""Uploads of external weights: from files to a checkpoint that samples and trains, and files that
are refused."""

from __future__ import annotations

import http.client
import json
import struct
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import tinkex
from support import MODEL, Keyed, serving
from tinkex import LoraConfig, ModelInput, RestClient, SamplingParams, ServiceClient
from tinkex.engine.torch.engine import TorchEngine
from tinkex.server.access.keys import create_key, revoke_key
from tinkex.server.database.sqlite import SqliteDatabase
from tinkex.server.files import upload_files
from tinkex.server.files.imports import most_bytes
from tinkex.server.routes import uploads
from tinkex.types import ExternalWeightsUploadStartRequest

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
SHAPE = LoraConfig(rank=4, train_unembed=False)
PROMPT = ModelInput.from_ints([5, 6, 7])


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", tinkex.ExperimentalWarning)
        yield


@pytest.fixture
def url(model_dir: Path, tmp_path: Path) -> Iterator[str]:
    with serving(TorchEngine({MODEL: model_dir}, threads=1), tmp_path / "data") as url:
        yield url


@pytest.fixture
def exported(url: str, tmp_path: Path) -> Path:
    """Files of a run that has learnt something, and tokens that it samples."""
    with ServiceClient(base_url=url) as service:
        client = service.create_lora_training_client(MODEL, rank=4, train_unembed=False).result()
        data = [tinkex.Datum(PROMPT, {"target_tokens": [6, 7, 8], "weights": [1.0, 1.0, 1.0]})]
        for _ in range(3):
            client.forward_backward(data, "cross_entropy")
            client.optim_step(tinkex.AdamParams(learning_rate=0.05)).result(30)
        path = client.save_weights_external("out").result(30).path
        place = tmp_path / "exported"
        with RestClient(base_url=url) as rest:
            urls = rest.get_external_weights_urls(path).result(30).urls
        place.mkdir()
        for name, address in urls.items():
            (place / name).write_bytes(fetched(address))
        (place / "path").write_text(path)
    return place


def fetched(address: str) -> bytes:
    parts = urlsplit(address)
    with closing(http.client.HTTPConnection(parts.netloc, timeout=20)) as connection:
        connection.request("GET", f"{parts.path}?{parts.query}")
        return connection.getresponse().read()


def put(address: str, body: bytes, headers: dict[str, str] | None = None) -> tuple[int, str]:
    parts = urlsplit(address)
    with closing(http.client.HTTPConnection(parts.netloc, timeout=20)) as connection:
        with suppress(BrokenPipeError, ConnectionResetError):  # refused before all of it was sent
            connection.request("PUT", f"{parts.path}?{parts.query}", body, headers or {})
        answer = connection.getresponse()
        return answer.status, answer.read().decode()


def begin(rest: RestClient, lora: LoraConfig = SHAPE, **options: Any) -> Any:
    return rest.external_weights_upload_start(base_model=MODEL, lora_config=lora, **options).result(
        20
    )


def upload(rest: RestClient, files: dict[str, bytes], lora: LoraConfig = SHAPE) -> Any:
    """Begin, put and finish."""
    begun = begin(rest, lora)
    for name, body in files.items():
        status, said = put(begun.urls[name], body)
        assert status == 200, said
    return rest.external_weights_upload_finish(begun.upload_id).result(20)


def files_of(place: Path) -> dict[str, bytes]:
    return {name: (place / name).read_bytes() for name in (CONFIG, WEIGHTS)}


@pytest.mark.covers("U39")
def test_upload_becomes_a_checkpoint_that_samples_and_trains(
    url: str, exported: Path, tmp_path: Path
) -> None:
    with RestClient(base_url=url) as rest, ServiceClient(base_url=url) as service:
        begun = begin(rest, destination_project_id="p-1")
        assert sorted(begun.urls) == [CONFIG, WEIGHTS]
        for name, address in begun.urls.items():
            assert put(address, b"x")[0] == 200
            assert put(address, (exported / name).read_bytes())[0] == 200  # the last one counts
        path = rest.external_weights_upload_finish(begun.upload_id).result(20).tinker_path
        assert path.split("/")[-2:] == ["external_weights", "uploaded"]
        assert rest.external_weights_upload_finish(begun.upload_id).result(20).tinker_path == path
        request = tinkex.types.CheckpointSearchRequest(project_ids=["p-1"])
        (found,) = rest.search_checkpoints(request).result(20).checkpoints
        assert (found.tinker_path, found.checkpoint_type, found.base_model) == (
            path,
            "external",
            MODEL,
        )
        params = SamplingParams(max_tokens=8, temperature=0, stop=[])
        drawn = []
        for source in ((exported / "path").read_text(), path):
            sampler = service.create_sampling_client(model_path=source).result()
            sequence = sampler.sample(PROMPT, 1, params).result(20).sequences[0]
            drawn.append((sequence.tokens, sequence.logprobs))
        assert drawn[0][0] == drawn[1][0]
        assert drawn[0][1] == pytest.approx(drawn[1][1], abs=1e-5)
        plain = (
            service.create_sampling_client(base_model=MODEL)
            .result()
            .sample(PROMPT, 1, params)
            .result(20)
        )
        assert plain.sequences[0].logprobs != pytest.approx(drawn[0][1], abs=1e-3)
        client = service.create_training_client_from_state(path).result()
        assert client.get_info().lora_rank == 4
        client.save_weights_external("again").result(20)
        with pytest.raises(tinkex.TinkerError, match="optimizer"):
            service.create_training_client_from_state_with_optimizer(path).result()
    assert not any((tmp_path / "data" / "uploads" / begun.upload_id).glob("adapter*"))


def changed(files: dict[str, bytes], **fields: Any) -> dict[str, bytes]:
    return files | {CONFIG: json.dumps(json.loads(files[CONFIG]) | fields).encode()}


def tensors(place: Path, change: Callable[[dict[str, Any]], Any], tmp_path: Path) -> bytes:
    found = load_file(place / WEIGHTS)
    change(found)
    save_file(found, tmp_path / "changed")
    return (tmp_path / "changed").read_bytes()


@pytest.mark.covers("U39")
def test_files_that_are_no_such_weights_are_refused(
    url: str, exported: Path, tmp_path: Path
) -> None:
    good = files_of(exported)
    first = sorted(load_file(exported / WEIGHTS))[0]
    bomb = struct.pack("<Q", 1 << 60) + b"{}"

    def damaged(change: Callable[[dict[str, Any]], Any]) -> dict[str, bytes]:
        return good | {WEIGHTS: tensors(exported, change, tmp_path)}

    cases: list[tuple[dict[str, bytes], str]] = [
        ({CONFIG: good[CONFIG]}, f"{WEIGHTS} has not been uploaded"),
        ({}, f"{CONFIG} and {WEIGHTS} has not been uploaded"),
        (changed(good, r=8), "has shape"),
        (changed(good, r=0), "r must be a whole number"),
        (changed(good, use_dora=True), "use_dora"),
        (changed(good, lora_alpha=float("nan")), "lora_alpha"),
        (good | {CONFIG: b"[" * 60_000}, "is not valid JSON"),
        (good | {CONFIG: b'{"r":' + b"9" * 5000 + b"}"}, "is not valid JSON"),
        (good | {CONFIG: b"\xff\xfe"}, "is not valid JSON"),
        (good | {WEIGHTS: bomb}, "cannot be read"),
        (good | {WEIGHTS: good[WEIGHTS][:-10]}, "cannot be read"),
        (good | {WEIGHTS: b""}, "cannot be read"),
        (damaged(lambda found: found.pop(first)), "lacks factors"),
        (
            damaged(lambda found: found.update({first: found[first] * np.float32(np.nan)})),
            "NaN or infinity",
        ),
        (damaged(lambda found: found.update({"other": found[first]})), "is not a LoRA factor"),
        (damaged(lambda found: found.update({first: found[first][:, :-1].copy()})), "has shape"),
    ]
    with RestClient(base_url=url) as rest:
        for files, words in cases:
            begun = begin(rest)
            for name, body in files.items():
                assert put(begun.urls[name], body)[0] == 200
            with pytest.raises(tinkex.BadRequestError, match=words) as caught:
                rest.external_weights_upload_finish(begun.upload_id).result(20)
            assert str(tmp_path) not in str(caught.value)
            (tmp_path / "data" / "uploads" / begun.upload_id / "done").touch()  # room for the next
        with pytest.raises(tinkex.BadRequestError, match="lora_config has rank 8"):
            upload(rest, good, LoraConfig(rank=8, train_unembed=False))
        with pytest.raises(tinkex.BadRequestError, match="does not train them"):
            upload(rest, good, LoraConfig(rank=4, train_unembed=True, train_mlp=False))
        kinds = tinkex.types.CheckpointSearchRequest(checkpoint_type="external")
        assert len(rest.search_checkpoints(kinds).result(20).checkpoints) == 1  # the export itself


@pytest.mark.covers("U39")
def test_file_may_not_be_larger_than_its_shape_allows(
    url: str, exported: Path, tmp_path: Path, model_dir: Path
) -> None:
    with RestClient(base_url=url) as rest:
        begun = begin(rest)
        most = most_bytes(model_dir, SHAPE)
        assert most < 10 * len((exported / WEIGHTS).read_bytes()) + (2 << 20)
        status, said = put(begun.urls[WEIGHTS], b"x" * (most + 1))
        assert status == 413, said
        assert put(begun.urls[CONFIG], b"x" * (uploads.CONFIG_BYTES + 1))[0] == 413
        chunks = iter([b"x" * 40_000] * 3)
        parts = urlsplit(begun.urls[CONFIG])
        # a length that is not told
        with closing(http.client.HTTPConnection(parts.netloc, timeout=20)) as connection:
            connection.request("PUT", f"{parts.path}?{parts.query}", chunks, encode_chunked=True,
                               headers={"Transfer-Encoding": "chunked"})  # fmt: skip
            assert connection.getresponse().status == 413
        place = tmp_path / "data" / "uploads" / begun.upload_id
        assert [path.name for path in place.iterdir()] == [upload_files.ABOUT]
        assert put(begun.urls[CONFIG], b"{}", {"Content-Encoding": "gzip"})[0] == 415


@pytest.mark.covers("U39")
def test_addresses_are_for_one_file_of_one_upload(url: str) -> None:
    with RestClient(base_url=url) as rest:
        one, two = begin(rest), begin(rest)
        address = one.urls[CONFIG]
        wrong = [
            address.replace(CONFIG, WEIGHTS),
            address.replace(one.upload_id, two.upload_id),
            address.replace("expires=", "expires=9"),
            address[:-1] + ("0" if address[-1] != "0" else "1"),
            address.split("?")[0],
        ]
        assert [put(other, b"{}")[0] for other in wrong] == [403] * 5
        assert put(address, b"{}")[0] == 200


@pytest.mark.covers("U39")
@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"base_model": "nobody"}, "there is no base model"),
        ({"lora_config": {"rank": 0}}, "rank must be between 1 and"),
        ({"lora_config": {"rank": 10**9}}, "rank must be between 1 and"),
        (
            {
                "lora_config": {
                    "rank": 4,
                    "train_mlp": False,
                    "train_attn": False,
                    "train_unembed": False,
                }
            },
            "no layers",
        ),
        ({"destination_project_id": ""}, "destination_project_id"),
        ({"colour": "red"}, "colour"),
    ],
    ids=str,
)
def test_upload_that_makes_no_sense_does_not_begin(
    url: str, fields: dict[str, Any], words: str
) -> None:
    from support import Wire

    heard = Wire(url).send(
        "external_weights_upload_start", {"base_model": MODEL, "lora_config": {"rank": 4}} | fields
    )
    assert heard.status == 400
    assert words in heard.json["detail"]
    if "colour" in fields:
        with pytest.raises(TypeError):
            ExternalWeightsUploadStartRequest(base_model=MODEL, lora_config=SHAPE, colour="red")  # type: ignore[call-arg]


@pytest.mark.covers("U39")
def test_unfinished_uploads_are_few_and_expire(
    url: str, exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "data" / "uploads"
    with RestClient(base_url=url) as rest:
        begun = [begin(rest) for _ in range(uploads.MOST_UNFINISHED)]
        with pytest.raises(tinkex.BadRequestError, match="which is the limit"):
            begin(rest)
        for name, body in files_of(exported).items():
            assert put(begun[0].urls[name], body)[0] == 200
        rest.external_weights_upload_finish(begun[0].upload_id).result(20)
        begin(rest)  # one that has ended makes room
        upload_files.sweep_uploads(root)
        assert len(list(root.iterdir())) == uploads.MOST_UNFINISHED + 1
        later = begun[0].expires.timestamp() + 3700
        monkeypatch.setattr("tinkex.server.files.upload_files.time.time", lambda: later)
        assert put(begun[1].urls[CONFIG], b"{}")[0] == 403
        with pytest.raises(tinkex.NotFoundError, match="there is no upload"):
            rest.external_weights_upload_finish(begun[1].upload_id).result(20)
        upload_files.sweep_uploads(root)
        assert list(root.iterdir()) == []


@pytest.mark.covers("U39")
def test_upload_of_another_owner_is_not_found(model_dir: Path, tmp_path: Path) -> None:
    with ExitStack() as stack:
        store = stack.enter_context(closing(SqliteDatabase(tmp_path)))
        ada, bob = (create_key(store, owner, owner)[1] for owner in ("ada", "bob"))
        url = stack.enter_context(serving(TorchEngine({MODEL: model_dir}, threads=1), tmp_path))
        asked = {"base_model": MODEL, "lora_config": {"rank": 4}}
        begun = Keyed(url, ada).post("external_weights_upload_start", asked)
        for name in (begun["upload_id"], "0" * 32, "../..", "x" * 500):
            assert (
                Keyed(url, bob).send("external_weights_upload_finish", {"upload_id": name}).status
                == 404
            )
        assert (
            Keyed(url, ada)
            .send("external_weights_upload_finish", {"upload_id": begun["upload_id"]})
            .status
            == 400
        )


@pytest.mark.covers("U39")
def test_upload_methods_warn_that_they_are_experimental(url: str) -> None:
    with RestClient(base_url=url) as rest:
        with pytest.warns(tinkex.ExperimentalWarning, match="external_weights_upload_start"):
            begun = rest.external_weights_upload_start(base_model=MODEL, lora_config=SHAPE).result(
                20
            )
        with pytest.warns(tinkex.ExperimentalWarning, match="external_weights_upload_finish"):
            future = rest.external_weights_upload_finish(begun.upload_id)
        with pytest.raises(tinkex.BadRequestError):
            future.result(20)


def test_address_of_an_upload_ends_with_its_key(model_dir: Path, tmp_path: Path) -> None:
    engine = TorchEngine({MODEL: model_dir}, threads=1)
    with serving(engine, tmp_path) as url, closing(SqliteDatabase(tmp_path)) as store:
        number, key = create_key(store, "key")
        with RestClient(base_url=url, api_key=key) as rest:
            address = begin(rest).urls[CONFIG]
        assert put(address, b"{}")[0] == 200
        assert put(address.replace(f"key={number}", "key=0"), b"{}")[0] == 403
        assert revoke_key(store, number)
        status, said = put(address, b"{}")
    assert status == 403
    assert "the API key that this address was made for has been revoked" in said
