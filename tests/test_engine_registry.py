"""Engines by name: the package's own, and those of other packages."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

import tinkex
from support import MODEL
from tinkex.cli.serve import serve
from tinkex.engine.api import EngineError
from tinkex.engine.base_models import read_tokenizer
from tinkex.engine.fake import FAKE, FakeEngine
from tinkex.engine.lazy import LazyEngine
from tinkex.engine.registry import BUILT_IN, engine_names, find_engine
from tinkex.local import make_engine

NAMES = sorted({*BUILT_IN, "abacus", "lost", "wrong"})
PACKAGE = """
from tinkex.engine.api import BaseModel
from tinkex.engine.fake import FakeEngine
from tinkex.engine.registry import EngineKind


def make(models, device, dtype):
    names = [f"{name} on {device} as {dtype}" for name in models]
    return FakeEngine([BaseModel(name, 64, 256, "fake") for name in names])


ENGINE = EngineKind(make, lambda device: "left" if device == "auto" else device)
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A folder where a package is installed that offers an engine, and one that is broken."""
    folder = tmp_path / "site"
    about = folder / "abacus-1.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: abacus\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(
        "[tinkex.engines]\nabacus = abacus:ENGINE\nwrong = abacus:make\nlost = abacus.lost:ENGINE\n"
    )
    (folder / "abacus.py").write_text(PACKAGE)
    return folder


def test_engine_of_another_package_serves(package: Path, tmp_path: Path) -> None:
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "tinkex", "serve", "--port", "0", "--engine", "abacus"),
            *("--dtype", "float32", "--model", "counted=/nowhere"),
            *("--data-dir", str(tmp_path / "data")),
        ],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(package), *sys.path])},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert "device: left" in line
        url = re.findall(r"http://\S+", line)[0]
        model = "counted on left as float32"
        with tinkex.ServiceClient(base_url=url) as service:
            client = service.create_lora_training_client(model, rank=4).result()
            assert client.optim_step(tinkex.AdamParams(learning_rate=0.1)).result(20)
    finally:
        process.kill()
        process.communicate(timeout=20)


def test_engines_of_other_packages_are_named(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(package)
    assert engine_names() == NAMES
    assert find_engine("abacus").pick_device("auto") == "left"
    assert f"[{'|'.join(NAMES)}]" in CliRunner().invoke(serve, ["--help"]).output


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("other", f"there is no engine 'other'; there are {', '.join(NAMES)}"),
        ("wrong", "engine 'wrong' is not usable: abacus:make is a function, not an EngineKind"),
        ("lost", "engine 'lost' cannot be imported from abacus.lost:ENGINE: No module named"),
    ],
)
def test_engine_that_cannot_be_used_is_refused(
    package: Path, monkeypatch: pytest.MonkeyPatch, name: str, words: str
) -> None:
    monkeypatch.syspath_prepend(package)
    with pytest.raises(tinkex.ConfigurationError, match=re.escape(words)):
        make_engine(engine=name)
    refused = CliRunner().invoke(serve, ["--engine", name])
    assert refused.exit_code == 2
    assert "--engine" in refused.output
    assert words in " ".join(refused.output.split())


def test_fake_engine_has_the_names_of_the_models(model_dir: Path) -> None:
    engine = make_engine({MODEL: model_dir}, "auto", engine="fake")
    assert isinstance(engine, FakeEngine)
    assert [(model.name, model.directory) for model in engine.models()] == [(MODEL, model_dir)]


@pytest.mark.parametrize("name", ["fake", "torch"])
def test_device_that_an_engine_does_not_have_is_refused(name: str) -> None:
    with pytest.raises(
        tinkex.ConfigurationError, match=f"the {name} engine has no device 'abacus'"
    ):
        make_engine(device="abacus", engine=name)


def test_lazy_engine_is_asked_for_once() -> None:
    made: list[FakeEngine] = []

    def make() -> FakeEngine:
        made.append(FakeEngine())
        return made[-1]

    lazy = LazyEngine({}, make)
    assert (lazy.passing(), lazy.sampling(), lazy.pass_step(), lazy.sample_step()) == (
        False,
        False,
        (),
        (),
    )
    lazy.drop("a")
    lazy.drop_sampler("a")
    lazy.drop_losses("a")
    lazy.sample_cancel("a")
    assert not made
    lazy.create("a", "fake", tinkex.LoraConfig(rank=4))
    lazy.snapshot("a", "s")
    (engine,) = made
    with pytest.raises(EngineError, match="already"):
        engine.create("a", "fake", tinkex.LoraConfig(rank=4))


def test_fake_kind_makes_an_engine_of_a_bundled_model() -> None:
    (model,) = FAKE.make({"tinkex/tiny": ""}, "cpu", None).models()
    assert model.name == "tinkex/tiny"


@pytest.mark.parametrize("name", ["fake", "torch"])
def test_base_model_brings_its_tokenizer_and_chat_template(name: str) -> None:
    (model,) = make_engine({"tinkex/tiny": ""}, "cpu", engine=name).models()
    tokenizer = model.tokenizer()
    assert tokenizer is model.tokenizer()
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "2 + 2?"}], tokenize=False, add_generation_prompt=True
    )
    assert prompt == "<|bos|><|user|>2 + 2?<|end|><|assistant|>"


def test_base_model_without_a_tokenizer_is_a_clear_error(tmp_path: Path) -> None:
    (model,) = FakeEngine().models()
    with pytest.raises(EngineError, match="this base model has no tokenizer on the server"):
        model.tokenizer()
    with pytest.raises(EngineError, match=r"the tokenizer of m cannot be read: .* holds no"):
        read_tokenizer("m", tmp_path)
