"""Tokenizers without a network: on both clients, through both libraries, and published where others
look."""

from __future__ import annotations

import asyncio
import base64
import importlib.util
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import tinkex
from faulty import Answer, faulty_server
from support import MODEL
from tinkex import ServiceClient, TinkerError, tokenizers, types
from tinkex.server.files.hub_cache import MARK, cache_root, publish_tokenizer
from tinkex.text.kimi import PATTERN, KimiTokenizer
from tinkex.tokenizers import Tokenizer, TokenizerError, load_tokenizer

TEXTS = [
    "hello cat",
    "the dog ran on the mat",
    "12 + 34 = 46",
    "naïve ☃ \n\t x",
    "",
    "</s> in text",
]
BACKENDS = ["transformers", "tokenizers"]
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}[{{ message['role'] }}]{{ message['content'] }}{{ "
    "eos_token }}"
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
        training = service.create_lora_training_client(MODEL, rank=2).result()
        sampling = service.create_sampling_client(base_model=MODEL).result()
        for client in (training, sampling):
            tokenizer = client.get_tokenizer(backend=backend)
            for text in TEXTS:
                assert tokenizer.decode(tokenizer.encode(text)) == text


def test_transformers_is_preferred_if_installed(
    server_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import PreTrainedTokenizerBase

    assert isinstance(load_tokenizer(MODEL), PreTrainedTokenizerBase)
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "transformers" else find(name)
    )
    assert isinstance(load_tokenizer(MODEL), Tokenizer)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(tinkex.ConfigurationError, match=r"tokenizers.*\n.*tinkex\[text\]"):
        load_tokenizer(MODEL)


def test_two_libraries_agree(model_dir: Path) -> None:
    ours, theirs = (
        load_tokenizer(str(model_dir), backend=backend) for backend in reversed(BACKENDS)
    )
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text)
        assert ours.encode(text, add_special_tokens=False) == theirs.encode(
            text, add_special_tokens=False
        )
        assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text))
    assert ours.decode([0, 5, 1], skip_special_tokens=True) == theirs.decode(
        [0, 5, 1], skip_special_tokens=True
    )
    assert ours.decode(5) == theirs.decode(5)
    for name in (
        "bos_token",
        "eos_token",
        "pad_token",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "vocab_size",
    ):
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
    ours, theirs = (
        load_tokenizer(str(chat_dir), backend=backend) for backend in reversed(BACKENDS)
    )
    talk = [{"role": "user", "content": "hello cat"}, {"role": "assistant", "content": "the dog"}]
    for prompt in (False, True):
        text = ours.apply_chat_template(talk, tokenize=False, add_generation_prompt=prompt)
        assert text == theirs.apply_chat_template(
            talk, tokenize=False, add_generation_prompt=prompt
        )
        assert text.startswith("<s>[user]hello cat</s>")
        assert text.endswith("[assistant]") == prompt
        tokens = ours.apply_chat_template(talk, add_generation_prompt=prompt)
        assert tokens == theirs.apply_chat_template(
            talk, add_generation_prompt=prompt, return_dict=False
        )


def test_chat_templates_are_not_trusted(chat_dir: Path) -> None:
    (chat_dir / "chat_template.jinja").write_text("{{ messages.__class__.__mro__ }}")
    tokenizer = Tokenizer.from_directory(chat_dir)
    with pytest.raises(Exception, match="unsafe"):
        tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False)
    (chat_dir / "chat_template.jinja").write_text("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(ValueError, match="alternate"):
        Tokenizer.from_directory(chat_dir).apply_chat_template([])


def test_missing_chat_template_is_a_clear_error(model_dir: Path) -> None:
    with pytest.raises(ValueError, match="no chat template"):
        Tokenizer.from_directory(model_dir).apply_chat_template([{"role": "user", "content": "x"}])


def test_template_in_the_configuration_is_found(chat_dir: Path) -> None:
    (chat_dir / "chat_template.jinja").unlink()
    config = json.loads((chat_dir / "tokenizer_config.json").read_text())
    config["chat_template"] = "{{ messages[0]['content'] }}!"
    (chat_dir / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer.from_directory(chat_dir)
    assert (
        tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi!"
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_unknown_name_gives_advice(home: Path, backend: str) -> None:
    with pytest.raises(tinkex.ConfigurationError, match="nobody/nothing") as caught:
        load_tokenizer("nobody/nothing", backend=backend)
    assert "hint: " in str(caught.value)


def test_unknown_backend_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'spacy'.*'transformers' or 'tokenizers'"):
        load_tokenizer(MODEL, backend="spacy")


def test_directory_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(tinkex.ConfigurationError, match=str(tmp_path)):
        load_tokenizer(str(tmp_path), backend="tokenizers")


# ── the hub's cache ───────────────────────────────────────────────────────────────────────────────

READ = """
import sys
from transformers import AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
print(tokenizer.decode(tokenizer.encode("hello cat")))
"""


def test_published_files_are_found_by_others(home: Path, model_dir: Path) -> None:
    from transformers import AutoTokenizer

    snapshot = publish_tokenizer("org/name", model_dir)
    assert snapshot is not None
    assert snapshot.is_relative_to(home)
    assert not list(snapshot.glob("*.safetensors"))
    found: Any = AutoTokenizer.from_pretrained("org/name", cache_dir=home)
    assert found.decode(found.encode("hello cat")) == "hello cat"
    assert load_tokenizer.__module__ == "tinkex.tokenizers"


@pytest.mark.slow
def test_published_tokenizer_is_found_by_other_programs(home: Path, model_dir: Path) -> None:
    publish_tokenizer("org/name", model_dir)
    shown = subprocess.run(
        [sys.executable, "-c", READ, "org/name"],
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert shown.stdout.strip() == "hello cat", shown.stderr


def test_publishing_again_changes_nothing(home: Path, model_dir: Path) -> None:
    first = publish_tokenizer("org/name", model_dir)
    before = sorted(path for path in home.rglob("*"))
    assert publish_tokenizer("org/name", model_dir) == first
    assert sorted(path for path in home.rglob("*")) == before


def test_changed_tokenizer_is_published_again(home: Path, chat_dir: Path) -> None:
    first = publish_tokenizer("org/name", chat_dir)
    (chat_dir / "chat_template.jinja").write_text("other")
    second = publish_tokenizer("org/name", chat_dir)
    assert first != second
    assert second is not None
    main = home / "models--org--name" / "refs" / "main"
    assert main.read_text() == second.name


def test_cached_tokenizer_is_kept(home: Path, model_dir: Path) -> None:
    foreign = home / "models--org--name" / "snapshots" / "abc"
    foreign.mkdir(parents=True)
    (foreign / "tokenizer.json").write_text("{}")
    assert publish_tokenizer("org/name", model_dir) is None
    assert sorted(path.name for path in home.rglob("*")) == [
        "abc",
        "models--org--name",
        "snapshots",
        "tokenizer.json",
    ]
    assert not list(home.rglob(MARK))


@pytest.mark.parametrize(
    "name", ["../escape", "a/b/c", "/abs", "a b", "", ".hidden", "a/..", "x\n"]
)
def test_names_that_are_no_repositories_are_not_published(
    home: Path, model_dir: Path, name: str
) -> None:
    assert publish_tokenizer(name, model_dir) is None
    assert not home.exists()


def test_model_without_a_tokenizer_is_not_published(home: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert publish_tokenizer("org/name", tmp_path) is None
    assert not home.exists()


def test_cache_that_cannot_be_written_is_only_a_warning(
    home: Path, model_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    home.write_text("a file where a directory should be")
    assert publish_tokenizer("org/name", model_dir) is None
    assert "org/name" in caplog.text


PUBLISH = """
import sys
from pathlib import Path
from tinkex.server.files.hub_cache import publish_tokenizer
sys.stdin.readline()
for round in range(20):
    assert publish_tokenizer("org/name", Path(sys.argv[1])) is not None
"""


def test_two_processes_may_publish_at_once(home: Path, model_dir: Path) -> None:
    def begin() -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", PUBLISH, str(model_dir)],
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
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
def test_cache_has_the_path_of_the_hub_library(
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
    from tinkex.engine.api import BaseModel
    from tinkex.engine.fake import FakeEngine
    from tinkex.local import publish_tokenizers

    engine = FakeEngine(base_models=[BaseModel("org/name", 64, 256, "fake", model_dir)])
    monkeypatch.setenv("TINKEX_HUB_CACHE", "0")
    publish_tokenizers(engine.models())
    assert not home.exists()
    monkeypatch.setenv("TINKEX_HUB_CACHE", "1")
    publish_tokenizers(engine.models())
    assert (home / "models--org--name").exists()


# ── by model name ─────────────────────────────────────────────────────────────────────────────────


class Letters:
    """A tokenizer of single characters."""

    def encode(self, text: str) -> list[int]:
        if text == "boom":
            raise RuntimeError("no such letters")
        return [ord(letter) for letter in text]

    def decode(self, tokens: list[int]) -> str:
        return "".join(map(chr, tokens))


@pytest.fixture(autouse=True)
def empty_cache() -> Iterator[None]:
    tokenizers.clear_cache()
    yield
    tokenizers.clear_cache()


def info(tokenizer_id: Any) -> Any:
    return SimpleNamespace(model_data=SimpleNamespace(tokenizer_id=tokenizer_id))


@pytest.mark.covers("1.1.1/1", "1.1.2/1", "1.1.2/2", "1.1.2/3", "1.1.2/4", "1.1.2/5", "1.1.2/6")
@pytest.mark.parametrize(
    ("name", "told", "expected"),
    [
        ("gpt2", info("struct/tokenizer:abc123"), "struct/tokenizer"),
        ("gpt2", {"model_data": {"tokenizer_id": "plain/mapping:x"}}, "plain/mapping"),
        # what the server says is not mapped
        ("gpt2", info("meta-llama/Llama-3.1-8B"), "meta-llama/Llama-3.1-8B"),
        ("gpt2", info(None), "gpt2"),
        ("gpt2", info(7), "gpt2"),
        ("gpt2", {}, "gpt2"),
        ("gpt2", OSError("no info"), "gpt2"),
        ("org/model/variant:rev", None, "org/model"),
        ("org/model:rev", None, "org/model"),
        ("meta-llama/Llama-3.1-8B", None, "thinkingmachineslabinc/meta-llama-3-tokenizer"),
        ("meta-llama/Llama-3", None, "thinkingmachineslabinc/meta-llama-3-tokenizer"),
        (
            "meta-llama/Llama-3.3-70B-Instruct/x:y",
            None,
            "thinkingmachineslabinc/meta-llama-3-tokenizer",
        ),
        ("meta-llama/Llama-2-7b", None, "meta-llama/Llama-2-7b"),
        ("a/b/c/d", None, "a/b/c/d"),
        ("gpt2", None, "gpt2"),
        (123, None, "123"),
    ],
)
def test_tokenizers_id_is_resolved_in_a_fixed_order(name: Any, told: Any, expected: str) -> None:
    def say(client: object) -> Any:
        if isinstance(told, Exception):
            raise told
        return told

    client = None if told is None else object()
    assert tokenizers.get_tokenizer_id(name, client, info_fun=say) == expected


@pytest.mark.covers("1.1.2/1")
def test_training_client_is_asked_by_its_own_method_and_a_directory_is_itself(
    tmp_path: Path,
) -> None:
    client = SimpleNamespace(get_info=lambda: info("asked/it"))
    assert tokenizers.get_tokenizer_id("gpt2", client) == "asked/it"
    assert tokenizers.get_tokenizer_id("gpt2", SimpleNamespace()) == "gpt2"
    assert tokenizers.get_tokenizer_id(str(tmp_path)) == str(tmp_path)


@pytest.mark.covers("1.1.1/2", "1.1.3/1")
def test_tokenizer_is_loaded_once_and_the_first_of_two_stays() -> None:
    loads: list[tuple[str, Any]] = []
    together = threading.Barrier(2, timeout=10)

    def load(tokenizer_id: str, options: Any) -> Letters:
        loads.append((tokenizer_id, dict(options)))
        together.wait()
        return Letters()

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(
            lambda _: tokenizers.get_or_load_tokenizer("x/y", load_fun=load), range(2)
        )
    assert first is second
    assert loads == [("x/y", {})] * 2
    assert tokenizers.get_or_load_tokenizer("x/y", load_fun=load) is first
    assert len(loads) == 2


@pytest.mark.covers("1.1.3/2")
def test_failure_to_load_names_the_tokenizer_and_is_not_kept() -> None:
    attempts = iter(
        [KeyError("first"), "no tokenizer", tinkex.ConfigurationError("passes through"), Letters()]
    )

    def load(tokenizer_id: str, options: Any) -> Any:
        given = next(attempts)
        if isinstance(given, Exception):
            raise given
        return given

    with pytest.raises(TokenizerError, match=r"'x/y' could not be loaded: KeyError\('first'\)"):
        tokenizers.get_or_load_tokenizer("x/y", load_fun=load)
    with pytest.raises(TokenizerError, match="gave no tokenizer for 'x/y', but 'no tokenizer'"):
        tokenizers.get_or_load_tokenizer("x/y", load_fun=load)
    with pytest.raises(tinkex.ConfigurationError, match="passes through"):
        tokenizers.get_or_load_tokenizer("x/y", load_fun=load)
    assert isinstance(tokenizers.get_or_load_tokenizer("x/y", load_fun=load), Letters)
    for wrong in (lambda tokenizer_id: Letters(), "load"):
        with pytest.raises(TokenizerError, match="load_fun must take"):
            tokenizers.get_or_load_tokenizer("z", load_fun=wrong)  # type: ignore[arg-type]


@pytest.mark.covers("1.1.3/4", "1.1.4/1", "1.1.4/2")
def test_only_kimis_revision_is_pinned() -> None:
    seen: dict[str, Any] = {}

    def load(tokenizer_id: str, options: Any) -> Letters:
        seen[tokenizer_id] = dict(options)
        return Letters()

    for name in ("gpt2", tokenizers.KIMI):
        tokenizers.get_or_load_tokenizer(name, load_fun=load)
    assert seen == {
        "gpt2": {},
        tokenizers.KIMI: {"revision": "612681931a8c906ddb349f8ad0f582cb552189cd"},
    }
    tokenizers.get_or_load_tokenizer("gpt2", load_fun=load, revision="abc")
    assert seen["gpt2"] == {"revision": "abc"}


@pytest.mark.covers("1.1.1/3", "1.1.1/4", "1.1.1/5")
def test_text_is_encoded_and_decoded_by_a_models_name(model_dir: Path) -> None:
    name = str(model_dir)
    for backend in BACKENDS:
        tokens = tokenizers.encode("hello cat", name, backend=backend)
        assert tokens == load_tokenizer(name).encode("hello cat")
        assert tokenizers.decode(tokens, name, backend=backend) == "hello cat"
    assert tokenizers.encode_text is tokenizers.encode
    assert tokenizers.kimi_tokenizer("moonshotai/Kimi-K2-Thinking")
    assert not tokenizers.kimi_tokenizer("moonshotai/Kimi-K2-Thinking-x")


@pytest.mark.covers("1.1.1/7")
@pytest.mark.parametrize("backend", BACKENDS)
def test_text_gets_the_special_tokens_of_its_tokenizer_and_no_template(
    model_dir: Path, tmp_path: Path, backend: str
) -> None:
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / file).write_bytes((model_dir / file).read_bytes())
    rules = json.loads((tmp_path / "tokenizer.json").read_text())
    begin = {"SpecialToken": {"id": "<s>", "type_id": 0}}
    rules["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [begin, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [
            begin,
            {"Sequence": {"id": "A", "type_id": 0}},
            {"Sequence": {"id": "B", "type_id": 1}},
        ],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [0], "tokens": ["<s>"]}},
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(rules))
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config["chat_template"] = "{% for message in messages %}CHAT{{ message.content }}{% endfor %}"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    plain = load_tokenizer(str(model_dir)).encode("hello cat")
    assert tokenizers.encode("hello cat", str(tmp_path), backend=backend) == [0, *plain]


LOOSE: Any = tokenizers
"""The module without its types: what is refused here is what they forbid."""


@pytest.mark.covers("1.1.1/6", "1.1.5/1", "1.1.5/2", "1.1.5/3", "1.1.5/4", "1.1.5/5", "1.1.5/6")
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda o: LOOSE.encode(7, "m", **o), "text must be"),
        (lambda o: LOOSE.encode(b"x", "m", **o), "text must be a string, got bytes"),
        (lambda o: LOOSE.encode("x", None, **o), "model_name must be"),
        (lambda o: LOOSE.decode([1], 7, **o), "model_name must be a string, got 7"),
        (lambda o: LOOSE.decode("12", "m", **o), "tokens must be a list"),
        (lambda o: LOOSE.decode([1, "2"], "m", **o), "whole numbers, got '2'"),
        (lambda o: LOOSE.decode([1.0], "m", **o), "whole numbers, got 1.0"),
        (lambda o: LOOSE.decode([True], "m", **o), "whole numbers, got True"),
        (lambda o: LOOSE.get_or_load_tokenizer(7, **o), "id must be"),
        (lambda o: LOOSE.get_or_load_tokenizer("m", colour="red", **o), "unknown option 'colour'"),
        (lambda o: LOOSE.encode("boom", "m", **o), "could not encode: RuntimeError"),
        (lambda o: LOOSE.decode([-1], "m", **o), "could not decode: ValueError"),
    ],
)
def test_bad_input_is_refused_with_its_reason(call: Any, message: str) -> None:
    with pytest.raises(TokenizerError, match=message) as caught:
        call({"load_fun": lambda tokenizer_id, options: Letters()})
    assert caught.value.type == "validation"
    assert caught.value.is_user_error
    assert isinstance(caught.value, ValueError)


@pytest.mark.covers("1.1.6/1", "1.1.6/2", "1.1.6/3")
def test_model_input_is_made_of_text() -> None:
    load: dict[str, Any] = {"load_fun": lambda tokenizer_id, options: Letters()}
    makers: list[Any] = [types.ModelInput.from_text, types.ModelInput.from_text_or_raise]
    for make in makers:
        made = make("hi", model_name="m", **load)
        assert made.to_ints() == [104, 105]
        assert [chunk.type for chunk in made.chunks] == ["encoded_text"]
        with pytest.raises(ValueError, match="model_name"):
            make("hi", **load)
        with pytest.raises(TokenizerError, match="text must be"):
            make(7, model_name="m", **load)
        with pytest.raises(TokenizerError, match="no effect"):
            make("hi", tokenizer=Letters(), **load)


def says(info: Any) -> Callable[[Any], Any]:
    return lambda client: info


@pytest.mark.covers("1.3/1", "1.3/2")
def test_clients_help_with_tokenizers(server_url: str) -> None:
    seen: list[str] = []

    def load(tokenizer_id: str, options: Any) -> Letters:
        seen.append(tokenizer_id)
        return Letters()

    with ServiceClient(base_url=server_url) as service:
        training = service.create_lora_training_client(MODEL, rank=2).result()
        sampling = service.create_sampling_client(base_model=MODEL).result()
        assert training.decode(training.encode("hello cat")) == "hello cat"
        assert isinstance(training.get_tokenizer(load_fun=load), Letters)
        assert isinstance(sampling.get_tokenizer(load_fun=load), Letters)
        for data in (
            {"base_model": "a/b/c"},
            {"model_name": "d"},
            {},
            {"tokenizer_id": "e:1", "base_model": "x"},
        ):
            training.get_tokenizer(info_fun=says({"model_data": data}), load_fun=load)
        sampling.get_tokenizer(
            sampler_fun=lambda client: SimpleNamespace(base_model="f/g/h:1"), load_fun=load
        )

        def refuse(client: object) -> Any:
            raise OSError("no info")

        with pytest.raises(OSError, match="no info"):
            training.get_tokenizer(info_fun=refuse, load_fun=load)
    assert seen == [MODEL, "a/b", "d", "unknown", "e", "f/g"]


def test_client_requests_its_tokenizer_id_once() -> None:
    """Of an older server, which told nothing when the clients were made; what was refused is asked
    for again."""
    named: list[str] = []

    def load(tokenizer_id: str, options: Any) -> Letters:
        named.append(tokenizer_id)
        return Letters()

    with faulty_server() as faulty:
        refused = Answer(404, {"detail": "not yet"})
        faulty.script("client/config", refused)
        faulty.script("retrieve_future", Answer(body={"model_id": "run"}))
        faulty.script("create_sampling_session", Answer(body={"sampling_session_id": "x"}))
        told = {"model_id": "run", "model_data": {"tokenizer_id": "own/run"}}
        faulty.script("get_info", refused, refused, Answer(body=told, delay=0.05))
        told = {"sampler_id": "x", "base_model": "own/sampler"}
        faulty.script("samplers/x", refused, refused, Answer(body=told, delay=0.05))
        with ServiceClient(base_url=faulty.base_url, api_key="tml-x") as service:
            clients: list[tuple[Any, str]] = [
                (service.create_lora_training_client("m").result(), "get_info"),
                (
                    service.create_sampling_client("tinker://r/sampler_weights/a").result(),
                    "samplers/x",
                ),
            ]
            for client, path in clients:
                with pytest.raises(tinkex.NotFoundError):
                    client.get_tokenizer(load_fun=load)
                with ThreadPoolExecutor(3) as pool:
                    asked = [pool.submit(client.get_tokenizer, load_fun=load) for _ in range(3)]
                    asyncio.run(client.get_tokenizer_async(load_fun=load))
                    found = {type(one.result()) for one in asked} | {
                        type(client.get_tokenizer(load_fun=load))
                    }
                assert found == {Letters}
                assert len(faulty.requests(path)) == 3
    assert set(named) == {"own/run", "own/sampler"}


# ── Kimi ──────────────────────────────────────────────────────────────────────────────────────────


class StandIn:
    """What is used of tiktoken's Encoding, for where it is not installed: pairs are merged by rank,
    lowest first."""

    def __init__(
        self,
        name: str,
        *,
        pat_str: str,
        mergeable_ranks: dict[bytes, int],
        special_tokens: dict[str, int],
    ):
        self._ranks, self._special = mergeable_ranks, special_tokens
        self._texts = {rank: token for token, rank in mergeable_ranks.items()}
        self._texts |= {number: text.encode() for text, number in special_tokens.items()}

    def encode(self, text: str, *, allowed_special: str) -> list[int]:
        assert allowed_special == "all"
        parts = re.split(f"({'|'.join(map(re.escape, self._special))})", text)
        return [
            number
            for index, part in enumerate(parts)
            for number in ([self._special[part]] if index % 2 else self.encode_ordinary(part))
        ]

    def encode_ordinary(self, text: str) -> list[int]:
        pieces = [bytes([byte]) for byte in text.encode()]
        while pairs := [
            (self._ranks[left + right], index)
            for index, (left, right) in enumerate(itertools.pairwise(pieces))
            if left + right in self._ranks
        ]:
            index = min(pairs)[1]
            pieces[index : index + 2] = [pieces[index] + pieces[index + 1]]
        return [self._ranks[piece] for piece in pieces]

    def decode_bytes(self, tokens: list[int]) -> bytes:
        return b"".join(self._texts[token] for token in tokens)


@pytest.fixture
def tiktoken(monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec("tiktoken") is None:
        monkeypatch.setitem(sys.modules, "tiktoken", SimpleNamespace(Encoding=StandIn))


def kimi_files(directory: Path, added: dict[str, Any]) -> dict[str, Any]:
    ranks = "".join(
        f"{base64.b64encode(c.encode()).decode()} {n}\n" for n, c in enumerate("Say hi")
    )
    (directory / "tiktoken.model").write_text(f"\nnot a line at all\n!!! 7\n{ranks}\n")
    (directory / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added}))
    return {
        "tiktoken_model_path": str(directory / "tiktoken.model"),
        "tokenizer_config_path": str(directory / "tokenizer_config.json"),
    }


BOS = {"6": {"content": "<|bos|>"}, "7": {"content": "<|bos|>>"}}


@pytest.mark.covers("1.1.4/4", "1.1.4/5", "1.1.4/6", "1.1.4/8", "1.1.4/11")
def test_kimis_tokenizer_is_made_of_ranks_and_special_tokens(
    tmp_path: Path, tiktoken: None
) -> None:
    files = kimi_files(tmp_path, {"6": {"content": "<|bos|>"}})
    name = tokenizers.KIMI
    for text, tokens in (
        ("Say hi", [0, 1, 2, 3, 4, 5]),
        ("<|bos|>Say", [6, 0, 1, 2]),
        ("<|reserved_token_261|>", [261]),
    ):
        assert tokenizers.encode(text, name, **files) == tokens
        assert tokenizers.decode(tokens, name, **files) == text
    # its letters are no tokens of this small one
    with pytest.raises(TokenizerError, match="could not encode"):
        tokenizers.encode("<|bos|>Say", name, allow_special_tokens=False, **files)
    with pytest.raises(TokenizerError, match="there is no token 262"):
        tokenizers.decode([262], name, **files)


@pytest.mark.covers("1.1.4/6", "1.1.4/7", "1.1.4/8")
def test_special_tokens_can_be_taken_as_text_or_the_longest_first(
    tmp_path: Path, tiktoken: None
) -> None:
    ranks = {bytes([byte]): byte for byte in range(256)}
    special = {"<a>": 256, "<a>b": 257}
    tokenizer = KimiTokenizer(ranks, special, matching="longest")
    assert tokenizer.encode("x<a>b<a>") == [120, 257, 256]
    assert tokenizer.encode("<a>", allow_special_tokens=False) == list(b"<a>")
    assert tokenizer.decode([256, 195]) == "<a>\ufffd"
    assert tokenizer.vocab_size == 258
    with pytest.raises(ValueError, match="special_token_matching"):
        KimiTokenizer(ranks, special, matching="shortest")  # type: ignore[arg-type]


@pytest.mark.covers("1.1.4/10")
def test_text_is_split_as_kimi_splits_it() -> None:
    # comes with transformers, and knows the same classes of characters
    regex = importlib.import_module("regex")
    pattern = regex.compile(PATTERN, regex.VERSION1)
    for text, expected in {
        "汉字abc": ["汉字", "abc"],
        "Hello World's end": ["Hello", " World's", " end"],
        "HTTPServer it'LL": ["HTTPServer", " it'LL"],
        "12345": ["123", "45"],
        "a  b": ["a", " ", " b"],
        "x\r\n\n y": ["x", "\r\n\n", " y"],
        " !?\n": [" !?\n"],
        "end   ": ["end", "   "],
    }.items():
        assert pattern.findall(text) == expected, text


@pytest.mark.covers("1.1.4/4")
def test_bad_rank_files_and_missing_library_are_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = kimi_files(tmp_path, BOS)
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    with pytest.raises(
        tinkex.ConfigurationError, match=r"needs the package 'tiktoken'\n.*pip install tiktoken"
    ):
        tokenizers.encode("x", tokenizers.KIMI, **files)
    (tmp_path / "tiktoken.model").write_text("\n")
    with pytest.raises(tinkex.ConfigurationError, match="holds no ranks"):
        tokenizers.encode("x", tokenizers.KIMI, **files)


@pytest.mark.covers("1.1.4/2", "1.1.4/3")
def test_kimis_files_are_fetched_at_the_pinned_revision(
    tmp_path: Path, tiktoken: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    kimi_files(tmp_path, BOS)
    with faulty_server() as server:
        place = f"/{tokenizers.KIMI}/resolve/{tokenizers.KIMI_REVISION}"
        for name in ("tiktoken.model", "tokenizer_config.json"):
            server.script(f"{place}/{name}", Answer(200, (tmp_path / name).read_bytes()))
        options: dict[str, Any] = {"cache_dir": tmp_path / "cache", "endpoint": server.base_url}
        assert tokenizers.encode("hi", tokenizers.KIMI, **options) == [4, 5]
        assert [seen.path for seen in server.seen] == [
            f"{place}/tiktoken.model",
            f"{place}/tokenizer_config.json",
        ]
        other = {**options, "revision": "abc"}
        with pytest.raises(TinkerError, match="not found on HuggingFace"):
            tokenizers.encode("hi", tokenizers.KIMI, **other)


@pytest.mark.slow
def test_tokenizer_can_be_asked_for_by_many_threads_before_its_library_is_imported() -> None:
    program = (
        "from concurrent.futures import ThreadPoolExecutor as Pool\n"
        "from tinkex.tokenizers import load_tokenizer\n"
        "pool = Pool(9)\n"
        "loaded = list(pool.map(lambda _: load_tokenizer('tinkex/tiny', backend='transformers'), "
        "range(9)))\n"
        "assert all(one is loaded[0] for one in loaded)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
