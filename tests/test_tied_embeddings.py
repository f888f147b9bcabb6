"""Models with tied embeddings: training without the output layer, and the warning on export."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from support import MODEL
from tinkex import LocalBackend, RestClient
from tinkex.cli import run
from tinkex.cli.transfers import is_tied, warn_of_tied


@pytest.fixture
def place(tmp_path: Path) -> Path:
    lines = [{"prompt": "Tom found a", "completion": " red ball."}] * 4
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path


@pytest.fixture
def url(model_dir: Path, tmp_path: Path) -> Iterator[str]:
    with LocalBackend({MODEL: model_dir}, data_dir=tmp_path / "data") as backend:
        yield backend.base_url


@pytest.mark.parametrize("option", [None, "--no-train-unembed"])
def test_run_may_leave_the_output_layer_alone(
    option: str | None, place: Path, url: str, capsys: pytest.CaptureFixture[str], model_dir: Path
) -> None:
    words = [
        "train",
        str(place / "data.jsonl"),
        "--base-url",
        url,
        "--base-model",
        MODEL,
        "--steps",
        "1",
    ]
    words += ["--rank", "2", "-o", str(place / "out"), *([option] if option else [])]
    assert run(words).exit_code == 0
    path = json.loads((place / "out" / "run.json").read_text())["sampler"]
    with RestClient(base_url=url) as rest:
        assert rest.get_weights_info_by_tinker_path(path).result(20).train_unembed is (
            option is None
        )
    for command in ("export", "download"):
        capsys.readouterr()
        result = run(["checkpoint", command, path, "-o", str(place / command), "--base-url", url])
        assert result.exit_code == 0
        said = capsys.readouterr().err
        (config,) = (place / command).rglob("adapter_config.json")
        targets = json.loads(config.read_text())["target_modules"]
        assert ("lm_head" in targets) is (option is None)
        assert ("--no-train-unembed" in said) is (option is None)
        assert result.data is not None
        assert ("warning" in result.data) is (option is None)


@pytest.mark.parametrize(
    ("tied", "words"), [(True, "ties to its embeddings"), (False, None), (None, "If the base")]
)
def test_warning_depends_on_the_base_model(
    tied: bool | None, words: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = tmp_path / "base"
    base.mkdir()
    if tied is not None:
        (base / "config.json").write_text(json.dumps({"tie_word_embeddings": tied}))
    for targets in (["q_proj", "lm_head"], ["unembed_tokens"]):
        told = warn_of_tied({"target_modules": targets}, str(base))
        assert (told is None) if words is None else words in str(told)
    assert warn_of_tied({"target_modules": ["q_proj"]}, str(base)) is None
    assert is_tied("tinkex/tiny") is True
    assert is_tied("no/such model") is None


@pytest.mark.parametrize(
    ("arch", "tied"),
    [
        ("smollm3", True),
        ("gemma3_text", True),
        ("llama", False),
        ("qwen3", False),
        ("gemma3", True),
        ("unknown", None),
    ],
)
def test_base_model_ties_as_its_family_does_by_default(
    arch: str, tied: bool | None, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": arch}))
    assert is_tied(str(tmp_path)) is tied
