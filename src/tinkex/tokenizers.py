"""Tokenizers by model name, offline whenever the files are there.

`load_tokenizer` returns transformers' own tokenizer when that library is installed, else a small one over `tokenizers`
with the same method names. The bundled model's files come from the package; others from a directory or the hub's cache.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from tinkex.errors import ConfigurationError

BUNDLED = {"tinkex/tiny": Path(__file__).parent / "models" / "tiny"}
FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


def load_tokenizer(name: str, *, backend: str | None = None) -> Any:
    """The tokenizer of a model.

    Args:
        name: A model name, a hub id (a revision after a colon is cut off) or a directory.
        backend: "transformers" or "tokenizers"; the first that is installed by default.

    Raises:
        ConfigurationError: Neither library is installed, or the files are not on this machine.
    """
    if backend is None:
        backend = "transformers" if importlib.util.find_spec("transformers") else "tokenizers"
    if backend not in ("transformers", "tokenizers"):
        raise ValueError(f"unknown tokenizer backend {backend!r}; use 'transformers' or 'tokenizers'")
    if importlib.util.find_spec(backend) is None:
        raise ConfigurationError(
            f"the tokenizer of {name!r} needs the package {backend!r}", hint="pip install 'tinkex[text]'"
        )
    return _load(name, backend)


@lru_cache(maxsize=32)
def _load(name: str, backend: str) -> Any:
    source = BUNDLED.get(name) or (Path(name) if Path(name).is_dir() else None)
    repository = name.split(":", 1)[0]
    if backend == "transformers":
        from transformers import AutoTokenizer

        try:
            return AutoTokenizer.from_pretrained(str(source or repository))
        except OSError as error:
            raise _unavailable(repository, error) from error
    return Tokenizer.from_directory(source or _from_hub(repository))


def _from_hub(repository: str) -> Path:
    """The directory of the cached (or downloaded) tokenizer files."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    found: dict[str, Path] = {}
    for file in FILES:
        try:
            found[file] = Path(hf_hub_download(repository, file, local_files_only=True))
        except LocalEntryNotFoundError:
            continue
    if "tokenizer.json" in found:
        return found["tokenizer.json"].parent
    try:
        return Path(hf_hub_download(repository, "tokenizer.json")).parent
    except Exception as error:
        raise _unavailable(repository, error) from error


def _unavailable(repository: str, error: Exception) -> ConfigurationError:
    return ConfigurationError(
        f"the tokenizer of {repository!r} is neither on this machine nor could it be downloaded: {error}",
        hint="pass a directory that holds tokenizer.json, or download the model once",
    )


class Tokenizer:
    """A fast tokenizer with the method names of transformers'."""

    def __init__(self, tokenizer: Any, config: Mapping[str, Any], chat_template: str | None) -> None:
        self._tokenizer = tokenizer
        self._config = config
        self.chat_template = chat_template
        self.bos_token = _token_text(config.get("bos_token"))
        self.eos_token = _token_text(config.get("eos_token"))
        self.pad_token = _token_text(config.get("pad_token"))
        self.bos_token_id = self._id(self.bos_token)
        self.eos_token_id = self._id(self.eos_token)
        self.pad_token_id = self._id(self.pad_token)

    @classmethod
    def from_directory(cls, directory: Path) -> Tokenizer:
        """Read tokenizer.json and, when there, its configuration and chat template."""
        import tokenizers

        file = directory / "tokenizer.json"
        if not file.is_file():
            raise ConfigurationError(f"{directory} holds no tokenizer.json")
        config_file, template_file = directory / "tokenizer_config.json", directory / "chat_template.jinja"
        config = json.loads(config_file.read_text()) if config_file.is_file() else {}
        template = template_file.read_text() if template_file.is_file() else config.get("chat_template")
        return cls(tokenizers.Tokenizer.from_file(str(file)), config, template)

    def _id(self, token: str | None) -> int | None:
        return None if token is None else self._tokenizer.token_to_id(token)

    @property
    def vocab_size(self) -> int:
        """How many tokens there are, added ones left out."""
        return int(self._tokenizer.get_vocab_size(with_added_tokens=False))

    def __len__(self) -> int:
        return int(self._tokenizer.get_vocab_size())

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Text to token ids."""
        return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, tokens: Sequence[int] | int, skip_special_tokens: bool = False) -> str:
        """Token ids to text."""
        ids = [tokens] if isinstance(tokens, int) else [int(token) for token in tokens]
        return str(self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))

    def convert_tokens_to_ids(self, token: str) -> int | None:
        """The id of a token, by its text."""
        return self._id(token)

    def convert_ids_to_tokens(self, token_id: int) -> str | None:
        """The text of a token, by its id."""
        text: str | None = self._tokenizer.id_to_token(token_id)
        return text

    def get_vocab(self) -> dict[str, int]:
        """All tokens and their ids."""
        return dict(self._tokenizer.get_vocab())

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        tokenize: bool = True,
        add_generation_prompt: bool = False,
        **variables: Any,
    ) -> Any:
        """A conversation as the model expects it: token ids, or text with `tokenize=False`."""
        if self.chat_template is None:
            raise ValueError("this tokenizer has no chat template")
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = _raise
        text = environment.from_string(self.chat_template).render(
            messages=list(conversation),
            add_generation_prompt=add_generation_prompt,
            bos_token=self.bos_token or "",
            eos_token=self.eos_token or "",
            **variables,
        )
        return self.encode(text, add_special_tokens=False) if tokenize else text


def _raise(message: str) -> None:
    raise ValueError(message)


def _token_text(value: Any) -> str | None:
    return value.get("content") if isinstance(value, Mapping) else value
