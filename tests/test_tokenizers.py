"""Tokenizers without a network: on both clients, through both libraries, and published where others look."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import tinkex
from support import MODEL
from tinkex import ServiceClient
from tinkex.server.hub_cache import MARK, cache_root, publish_tokenizer
from tinkex.tokenizers import Tokenizer, load_tokenizer

TEXTS = ["hello cat", "the dog ran on the mat", "12 + 34 = 46", "naïve ☃ \n\t x", "", "</s> in text"]
BACKENDS = ["transformers", "tokenizers"]
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}[{{ message['role'] }}]{{ message['content'] }}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty hub cache."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


@pytest.mark.covers("C54", "C77")
@pytest.mark.parametrize("backend", BACKENDS)
def test_both_clients_have_the_models_tokenizer(server_url: str, backend: str) -> None:
    with ServiceClient(base_url=server_url) as service:
        training = service.create_lora_training_client(MODEL, rank=2)
        sampling = service.create_sampling_client(base_model=MODEL)
        for client in (training, sampling):
            tokenizer = client.get_tokenizer(backend=backend)
            for text in TEXTS:
                assert tokenizer.decode(tokenizer.encode(text)) == text


def test_transformers_is_preferred_when_it_is_there(server_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import PreTrainedTokenizerBase

    assert isinstance(load_tokenizer(MODEL), PreTrainedTokenizerBase)
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "transformers" else find(name))
    assert isinstance(load_tokenizer(MODEL), Tokenizer)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(tinkex.ConfigurationError, match=r"tokenizers.*\n.*tinkex\[text\]"):
        load_tokenizer(MODEL)


def test_the_two_libraries_agree(model_dir: Path) -> None:
    ours, theirs = (load_tokenizer(str(model_dir), backend=backend) for backend in reversed(BACKENDS))
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text)
        assert ours.encode(text, add_special_tokens=False) == theirs.encode(text, add_special_tokens=False)
        assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text))
    assert ours.decode([0, 5, 1], skip_special_tokens=True) == theirs.decode([0, 5, 1], skip_special_tokens=True)
    assert ours.decode(5) == theirs.decode(5)
    for name in ("bos_token", "eos_token", "pad_token", "bos_token_id", "eos_token_id", "pad_token_id", "vocab_size"):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert len(ours) == len(theirs)
    assert ours.get_vocab() == theirs.get_vocab()
    assert ours.convert_tokens_to_ids("</s>") == theirs.convert_tokens_to_ids("</s>") == 1
    assert ours.convert_ids_to_tokens(1) == theirs.convert_ids_to_tokens(1) == "</s>"


@pytest.fixture
def chat_dir(model_dir: Path, tmp_path: Path) -> Path:
    copy = tmp_path / "chat"
    shutil.copytree(model_dir, copy, ignore=shutil.ignore_patterns("*.safetensors"))
    (copy / "chat_template.jinja").write_text(TEMPLATE)
    return copy


def test_chat_templates_agree(chat_dir: Path) -> None:
    ours, theirs = (load_tokenizer(str(chat_dir), backend=backend) for backend in reversed(BACKENDS))
    talk = [{"role": "user", "content": "hello cat"}, {"role": "assistant", "content": "the dog"}]
    for prompt in (False, True):
        text = ours.apply_chat_template(talk, tokenize=False, add_generation_prompt=prompt)
        assert text == theirs.apply_chat_template(talk, tokenize=False, add_generation_prompt=prompt)
        assert text.startswith("<s>[user]hello cat</s>")
        assert text.endswith("[assistant]") == prompt
        tokens = ours.apply_chat_template(talk, add_generation_prompt=prompt)
        assert tokens == theirs.apply_chat_template(talk, add_generation_prompt=prompt, return_dict=False)


def test_chat_templates_are_not_trusted(chat_dir: Path) -> None:
    (chat_dir / "chat_template.jinja").write_text("{{ messages.__class__.__mro__ }}")
    tokenizer = Tokenizer.from_directory(chat_dir)
    with pytest.raises(Exception, match="unsafe"):
        tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False)
    (chat_dir / "chat_template.jinja").write_text("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(ValueError, match="alternate"):
        Tokenizer.from_directory(chat_dir).apply_chat_template([])


def test_a_tokenizer_without_a_chat_template_says_so(model_dir: Path) -> None:
    with pytest.raises(ValueError, match="no chat template"):
        Tokenizer.from_directory(model_dir).apply_chat_template([{"role": "user", "content": "x"}])


def test_a_template_in_the_configuration_is_found(chat_dir: Path) -> None:
    (chat_dir / "chat_template.jinja").unlink()
    config = json.loads((chat_dir / "tokenizer_config.json").read_text())
    config["chat_template"] = "{{ messages[0]['content'] }}!"
    (chat_dir / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer.from_directory(chat_dir)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi!"


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_unknown_name_says_what_to_do(home: Path, backend: str) -> None:
    with pytest.raises(tinkex.ConfigurationError, match="nobody/nothing") as caught:
        load_tokenizer("nobody/nothing", backend=backend)
    assert "hint: " in str(caught.value)


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'spacy'.*'transformers' or 'tokenizers'"):
        load_tokenizer(MODEL, backend="spacy")


def test_a_directory_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(tinkex.ConfigurationError, match=str(tmp_path)):
        load_tokenizer(str(tmp_path), backend="tokenizers")


# ── the hub's cache ──────────────────────────────────────────────────────────────────────────────────────────────

READ = """
import sys
from transformers import AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
print(tokenizer.decode(tokenizer.encode("hello cat")))
"""


def test_others_find_what_was_published(home: Path, model_dir: Path) -> None:
    snapshot = publish_tokenizer("org/name", model_dir)
    assert snapshot is not None
    assert snapshot.is_relative_to(home)
    assert not list(snapshot.glob("*.safetensors"))
    shown = subprocess.run(
        [sys.executable, "-c", READ, "org/name"],
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert shown.stdout.strip() == "hello cat", shown.stderr
    assert load_tokenizer.__module__ == "tinkex.tokenizers"


def test_publishing_again_changes_nothing(home: Path, model_dir: Path) -> None:
    first = publish_tokenizer("org/name", model_dir)
    before = sorted(path for path in home.rglob("*"))
    assert publish_tokenizer("org/name", model_dir) == first
    assert sorted(path for path in home.rglob("*")) == before


def test_a_changed_tokenizer_is_published_anew(home: Path, chat_dir: Path) -> None:
    first = publish_tokenizer("org/name", chat_dir)
    (chat_dir / "chat_template.jinja").write_text("other")
    second = publish_tokenizer("org/name", chat_dir)
    assert first != second
    assert second is not None
    main = home / "models--org--name" / "refs" / "main"
    assert main.read_text() == second.name


def test_what_is_cached_already_is_left_alone(home: Path, model_dir: Path) -> None:
    foreign = home / "models--org--name" / "snapshots" / "abc"
    foreign.mkdir(parents=True)
    (foreign / "tokenizer.json").write_text("{}")
    assert publish_tokenizer("org/name", model_dir) is None
    assert sorted(path.name for path in home.rglob("*")) == ["abc", "models--org--name", "snapshots", "tokenizer.json"]
    assert not list(home.rglob(MARK))


@pytest.mark.parametrize("name", ["../escape", "a/b/c", "/abs", "a b", "", ".hidden", "a/..", "x\n"])
def test_names_that_are_no_repositories_are_not_published(home: Path, model_dir: Path, name: str) -> None:
    assert publish_tokenizer(name, model_dir) is None
    assert not home.exists()


def test_a_model_without_a_tokenizer_is_not_published(home: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert publish_tokenizer("org/name", tmp_path) is None
    assert not home.exists()


def test_a_cache_that_cannot_be_written_is_only_a_warning(
    home: Path, model_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    home.write_text("a file where a directory should be")
    assert publish_tokenizer("org/name", model_dir) is None
    assert "org/name" in caplog.text


PUBLISH = """
import sys
from pathlib import Path
from tinkex.server.hub_cache import publish_tokenizer
sys.stdin.readline()
for round in range(20):
    assert publish_tokenizer("org/name", Path(sys.argv[1])) is not None
"""


def test_two_processes_may_publish_at_once(home: Path, model_dir: Path) -> None:
    def begin() -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", PUBLISH, str(model_dir)], stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    processes = [begin(), begin()]
    for process in processes:
        _, errors = process.communicate("go\n", timeout=60)
        assert process.returncode == 0, errors
    repository = home / "models--org--name"
    [snapshot] = (repository / "snapshots").iterdir()
    assert (repository / "refs" / "main").read_text() == snapshot.name
    assert (snapshot / "tokenizer.json").read_bytes() == (model_dir / "tokenizer.json").read_bytes()


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"HF_HUB_CACHE": "/a/hub", "HF_HOME": "/b"}, "/a/hub"),
        ({"HF_HOME": "/b"}, "/b/hub"),
        ({"XDG_CACHE_HOME": "/c"}, "/c/huggingface/hub"),
    ],
    ids=str,
)
def test_the_cache_is_where_the_hub_library_looks(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], expected: str
) -> None:
    for name in ("HF_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME", "HUGGINGFACE_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert str(cache_root()) == expected


def test_publishing_can_be_switched_off(
    home: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from tinkex.engine import BaseModel
    from tinkex.engine.fake import FakeEngine
    from tinkex.local import publish_tokenizers

    engine = FakeEngine(base_models=[BaseModel("org/name", 64, 256, "fake", model_dir)])
    monkeypatch.setenv("TINKEX_HUB_CACHE", "0")
    publish_tokenizers(engine)
    assert not home.exists()
    monkeypatch.setenv("TINKEX_HUB_CACHE", "1")
    publish_tokenizers(engine)
    assert (home / "models--org--name").exists()
