"""Tokenizers by model name, offline whenever the files are there.

`load_tokenizer` returns transformers' own tokenizer when that library is installed, else a small
one over `tokenizers` with the same method names. The bundled model's files come from the package;
others from a directory or the hub's cache. `encode` and `decode` find the tokenizer of a model by
its name, load it once and keep it. Chat templates are never applied by these: whoever calls brings
finished text.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tinkex.errors import ConfigurationError, TinkerError
from tinkex.types.sessions import RequestErrorCategory

BUNDLED = {"tinkex/tiny": Path(__file__).parent / "models" / "tiny"}
FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)
LLAMA_3, LLAMA_3_TOKENIZER = "meta-llama/Llama-3", "thinkingmachineslabinc/meta-llama-3-tokenizer"
"""Models of one family whose own repositories are closed, and an open copy of their tokenizer."""
KIMI = "moonshotai/Kimi-K2-Thinking"
KIMI_REVISION = "612681931a8c906ddb349f8ad0f582cb552189cd"
KIMI_OPTIONS = frozenset(
    {
        "tiktoken_model_path",
        "tokenizer_config_path",
        "cache_dir",
        "endpoint",
        "pat_str",
        "special_token_matching",
        "http_timeout_ms",
    }
)
"""Options that matter only for Kimi's files; other tokenizers ignore them."""

LoadFunction = Callable[[str, Mapping[str, Any]], Any]
"""Loads a tokenizer by its id and options (`revision`, when one is pinned)."""


class TokenizerError(TinkerError, ValueError):
    """Text or tokens that are none, or a tokenizer that cannot be had or does not do it.

    Example:
        >>> try:
        ...     decode(["hello"], "tinkex/tiny")
        ... except TokenizerError as error:
        ...     print(error)
        tokens must be whole numbers, got 'hello'
    """

    category = RequestErrorCategory.User


# ── by model name ─────────────────────────────────────────────────────────────────────────────────


def get_tokenizer_id(
    model_name: Any, training_client: Any = None, *, info_fun: Callable[[Any], Any] | None = None
) -> str:
    """Return the id of a model's tokenizer: from its server, else from the model's name.

    Args:
        model_name: The model; a variant after a colon is cut off.
        training_client: Is asked what it trains; when that fails, the name decides.
        info_fun: Asks it; `get_info` of the client by default.

    Returns:
        The id: a repository of the hub, or a directory.

    Example:
        >>> get_tokenizer_id("meta-llama/Llama-3.1-8B"), get_tokenizer_id("org/model/variant:rev")
        ('thinkingmachineslabinc/meta-llama-3-tokenizer', 'org/model')
    """
    if training_client is not None:
        try:
            info = info_fun(training_client) if info_fun is not None else training_client.get_info()
            told = _field(_field(info, "model_data"), "tokenizer_id")
        except Exception:
            told = None  # the name will do
        if isinstance(told, str) and told.partition(":")[0]:
            return told.partition(":")[0]
    name = str(model_name)
    if name in BUNDLED or Path(name).is_dir():
        return name
    name = name.partition(":")[0]
    if name.startswith(LLAMA_3):
        return LLAMA_3_TOKENIZER
    return name.rpartition("/")[0] if name.count("/") == 2 else name


def tokenizer_id_of(info: Any) -> str:
    """Return the id of a run's tokenizer from the server's description, an object or a mapping.

    Example:
        >>> info = GetInfoResponse(
        ...     model_data=ModelData(model_name="Qwen/Qwen3-8B"), model_id="run-1"
        ... )
        >>> tokenizer_id_of(info)
        'Qwen/Qwen3-8B'
    """
    data = _field(info, "model_data")
    name = _field(data, "base_model") or _field(data, "model_name") or "unknown"
    return get_tokenizer_id(name, info, info_fun=lambda told: told)


def _field(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)


def kimi_tokenizer(tokenizer_id: Any) -> bool:
    """Return True if a tokenizer is Kimi K2's, which needs tiktoken.

    Example:
        >>> kimi_tokenizer("moonshotai/Kimi-K2-Thinking"), kimi_tokenizer("Qwen/Qwen3-8B")
        (True, False)
    """
    return bool(tokenizer_id == KIMI)


_cache: dict[Any, Any] = {}
_cache_lock = threading.Lock()
_import_lock = threading.Lock()


def clear_cache() -> None:
    """Forget the tokenizers that were loaded.

    Example:
        >>> first = load_tokenizer("tinkex/tiny", backend="tokenizers")
        >>> clear_cache()
        >>> load_tokenizer("tinkex/tiny", backend="tokenizers") is first
        False
    """
    with _cache_lock:
        _cache.clear()


def _cached(key: Any, load: Callable[[], Any]) -> Any:
    """Load once and keep the result; failures are not kept."""
    if key in _cache:
        return _cache[key]
    loaded = load()
    with _cache_lock:
        return _cache.setdefault(key, loaded)


def get_or_load_tokenizer(
    tokenizer_id: str,
    *,
    load_fun: LoadFunction | None = None,
    backend: str | None = None,
    revision: str | None = None,
    **kimi_options: Any,
) -> Any:
    """A tokenizer, loaded once in this process.

    Args:
        tokenizer_id: Which; see `get_tokenizer_id`.
        load_fun: Loads it, in place of the libraries.
        backend: "transformers" or "tokenizers"; the first that is installed by default.
        revision: The revision of its repository; Kimi's is pinned, others are the newest by
            default.
        kimi_options: `tiktoken_model_path`, `tokenizer_config_path`, `cache_dir`, `endpoint`,
            `pat_str`, `special_token_matching`, `http_timeout_ms`.

    Returns:
        The tokenizer.

    Raises:
        TokenizerError: The id is no text, an option does not exist, or the tokenizer cannot be
            loaded.
        ConfigurationError: A library is missing, or the files are not to be had.

    Example:
        >>> tokenizer = get_or_load_tokenizer("tinkex/tiny", backend="tokenizers")
        >>> tokenizer is get_or_load_tokenizer("tinkex/tiny", backend="tokenizers")
        True
    """
    if not isinstance(tokenizer_id, str):
        raise TokenizerError(f"a tokenizer's id must be a text, got {tokenizer_id!r}")
    if unknown := kimi_options.keys() - KIMI_OPTIONS:
        raise TokenizerError(f"unknown option {min(unknown)!r}")
    is_kimi = kimi_tokenizer(tokenizer_id)
    pinned = revision or (KIMI_REVISION if is_kimi else None)
    if load_fun is not None:
        return _cached(
            ("own", tokenizer_id, pinned), lambda: _load_own(load_fun, tokenizer_id, pinned)
        )
    if is_kimi:
        key = ("kimi", pinned, *sorted((name, str(value)) for name, value in kimi_options.items()))
        return _cached(key, lambda: _load_kimi(pinned, kimi_options))
    return load_tokenizer(tokenizer_id, backend=backend, revision=revision)


def _load_own(load_fun: LoadFunction, tokenizer_id: str, revision: str | None) -> Any:
    from inspect import signature

    try:
        signature(load_fun).bind(tokenizer_id, {})
    except TypeError:
        raise TokenizerError(
            f"load_fun must take a tokenizer's id and options, got {load_fun!r}"
        ) from None
    except ValueError:  # a builtin that does not say
        pass
    try:
        loaded = load_fun(tokenizer_id, {} if revision is None else {"revision": revision})
    except TinkerError:
        raise
    except Exception as error:
        raise TokenizerError(
            f"the tokenizer {tokenizer_id!r} could not be loaded: {error!r}"
        ) from error
    if not callable(getattr(loaded, "encode", None)) or not callable(
        getattr(loaded, "decode", None)
    ):
        raise TokenizerError(f"load_fun gave no tokenizer for {tokenizer_id!r}, but {loaded!r}")
    return loaded


def _load_kimi(revision: str | None, options: Mapping[str, Any]) -> Any:
    from tinkex.text.kimi import KimiTokenizer

    try:
        return KimiTokenizer.load(revision=revision, **options)
    except TinkerError:
        raise
    except Exception as error:
        raise TokenizerError(f"the tokenizer {KIMI!r} could not be loaded: {error!r}") from error


def encode(
    text: str,
    model_name: str,
    *,
    training_client: Any = None,
    info_fun: Callable[[Any], Any] | None = None,
    allow_special_tokens: bool = True,
    **options: Any,
) -> list[int]:
    """Tokenise a text with a model's tokenizer, with the special tokens it adds by itself.

    Args:
        text: What to tokenise.
        model_name: The model.
        training_client: Is asked for the tokenizer's id first.
        info_fun: Asks it.
        allow_special_tokens: Whether text that spells a special token becomes it; Kimi's only.
        options: Those of `get_or_load_tokenizer`.

    Returns:
        The token ids.

    Raises:
        TokenizerError: The text or the name is no text, or the tokenizer fails.

    Example:
        >>> tokens = encode("hello", "tinkex/tiny", backend="tokenizers")
        >>> decode(tokens, "tinkex/tiny", backend="tokenizers")
        '<|bos|>hello'
    """
    if not isinstance(text, str):
        raise TokenizerError(f"text must be a text, got {type(text).__name__}")
    tokenizer, tokenizer_id = _tokenizer_of(model_name, training_client, info_fun, options)
    try:
        own = kimi_tokenizer(tokenizer_id) and not allow_special_tokens
        tokens = (
            tokenizer.encode(text, allow_special_tokens=False) if own else tokenizer.encode(text)
        )
        return [int(token) for token in getattr(tokens, "ids", tokens)]
    except Exception as error:
        raise TokenizerError(f"{tokenizer_id!r} could not encode: {error!r}") from error


encode_text = encode
"""Another name of `encode`."""


def decode(
    ids: Sequence[int],
    model_name: str,
    *,
    training_client: Any = None,
    info_fun: Callable[[Any], Any] | None = None,
    **options: Any,
) -> str:
    """The text of tokens, by a model's tokenizer; the options are those of `encode`.

    Args:
        ids: The token ids.
        model_name: The model.
        training_client: A run of it, whose server says which tokenizer it has.
        info_fun: Says what the run trains, in place of `get_info`.
        options: As for `encode`.

    Returns:
        The text.

    Raises:
        TokenizerError: The tokens are no list of whole numbers, or the tokenizer fails.

    Example:
        >>> tokens = encode("hello", "tinkex/tiny", backend="tokenizers")
        >>> decode(tokens[1:], "tinkex/tiny", backend="tokenizers")
        'hello'
    """
    if not isinstance(ids, list | tuple):
        raise TokenizerError(f"tokens must be a list of whole numbers, got {type(ids).__name__}")
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int | np.integer):
            raise TokenizerError(f"tokens must be whole numbers, got {token!r}")
    options.pop("allow_special_tokens", None)
    tokenizer, tokenizer_id = _tokenizer_of(model_name, training_client, info_fun, options)
    try:
        return str(tokenizer.decode([int(token) for token in ids]))
    except Exception as error:
        raise TokenizerError(f"{tokenizer_id!r} could not decode: {error!r}") from error


def _tokenizer_of(
    model_name: Any, client: Any, info_fun: Callable[[Any], Any] | None, options: Mapping[str, Any]
) -> tuple[Any, str]:
    if not isinstance(model_name, str):
        raise TokenizerError(f"model_name must be a text, got {model_name!r}")
    tokenizer_id = get_tokenizer_id(model_name, client, info_fun=info_fun)
    return get_or_load_tokenizer(tokenizer_id, **options), tokenizer_id


# ── loading ───────────────────────────────────────────────────────────────────────────────────────


def load_tokenizer(name: str, *, backend: str | None = None, revision: str | None = None) -> Any:
    """The tokenizer of a model.

    Args:
        name: A model name, a hub id (a variant after a colon is cut off) or a directory.
        backend: "transformers" or "tokenizers"; the first that is installed by default.
        revision: The revision of its repository; the newest that is known by default.

    Returns:
        The tokenizer.

    Raises:
        ConfigurationError: Neither library is installed, or the files are not on this machine.
        ValueError: There is no such backend.

    Example:
        >>> tokenizer = load_tokenizer("tinkex/tiny", backend="tokenizers")
        >>> tokenizer.decode(tokenizer.encode("hello"), skip_special_tokens=True)
        'hello'
    """
    if backend is None:
        backend = "transformers" if importlib.util.find_spec("transformers") else "tokenizers"
    if backend not in ("transformers", "tokenizers"):
        raise ValueError(
            f"unknown tokenizer backend {backend!r}; use 'transformers' or 'tokenizers'"
        )
    if importlib.util.find_spec(backend) is None:
        raise ConfigurationError(
            f"the tokenizer of {name!r} needs the package {backend!r}",
            hint="pip install 'tinkex[text]'",
        )
    chosen = backend
    return _cached((chosen, name, revision), lambda: _load(name, chosen, revision))


def _load(name: str, backend: str, revision: str | None) -> Any:
    source = BUNDLED.get(name) or (Path(name) if Path(name).is_dir() else None)
    repository = name.split(":", 1)[0]
    if backend == "transformers":
        with _import_lock:  # while one thread imports it, others find a module without its names
            from transformers import AutoTokenizer

        try:
            return AutoTokenizer.from_pretrained(
                str(source or repository), revision=revision or "main"
            )
        except OSError as error:
            raise _unavailable(repository, error) from error
    return Tokenizer.from_directory(source or _from_hub(repository, revision))


def _from_hub(repository: str, revision: str | None = None) -> Path:
    """The directory of the cached (or downloaded) tokenizer files."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    found: dict[str, Path] = {}
    for file in FILES:
        try:
            found[file] = Path(
                hf_hub_download(repository, file, revision=revision, local_files_only=True)
            )
        except LocalEntryNotFoundError:
            continue
    if "tokenizer.json" in found:
        return found["tokenizer.json"].parent
    try:
        return Path(hf_hub_download(repository, "tokenizer.json", revision=revision)).parent
    except Exception as error:
        raise _unavailable(repository, error) from error


def _unavailable(repository: str, error: Exception) -> ConfigurationError:
    return ConfigurationError(
        f"the tokenizer of {repository!r} is neither on this machine nor could it be downloaded: "
        f"{error}",
        hint="pass a directory that holds tokenizer.json, or download the model once",
    )


class Tokenizer:
    """A fast tokenizer with the method names of transformers'.

    Example:
        >>> tokenizer = load_tokenizer("tinkex/tiny", backend="tokenizers")
        >>> (
        ...     tokenizer.eos_token,
        ...     tokenizer.decode(tokenizer.encode("hello", add_special_tokens=False)),
        ... )
        ('<|eos|>', 'hello')
    """

    def __init__(
        self, tokenizer: Any, config: Mapping[str, Any], chat_template: str | None
    ) -> None:
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
        """Read tokenizer.json and, when there, its configuration and chat template.

        Args:
            directory: Where the files are.

        Returns:
            The tokenizer.

        Raises:
            ConfigurationError: There is no tokenizer.json, or the package `tokenizers` is missing.

        Example:
            >>> Tokenizer.from_directory(BUNDLED["tinkex/tiny"]).bos_token
            '<|bos|>'
        """
        import tokenizers

        file = directory / "tokenizer.json"
        if not file.is_file():
            raise ConfigurationError(f"{directory} holds no tokenizer.json")
        config_file, template_file = (
            directory / "tokenizer_config.json",
            directory / "chat_template.jinja",
        )
        config = json.loads(config_file.read_text()) if config_file.is_file() else {}
        template = (
            template_file.read_text() if template_file.is_file() else config.get("chat_template")
        )
        return cls(tokenizers.Tokenizer.from_file(str(file)), config, template)

    def _id(self, token: str | None) -> int | None:
        return None if token is None else self._tokenizer.token_to_id(token)

    @property
    def vocab_size(self) -> int:
        """Number of tokens, without added ones."""
        return int(self._tokenizer.get_vocab_size(with_added_tokens=False))

    def __len__(self) -> int:
        return int(self._tokenizer.get_vocab_size())

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Text to token ids.

        Args:
            text: The text.
            add_special_tokens: Add those that the tokenizer puts around text.

        Returns:
            The token ids.

        Example:
            >>> tokenizer = load_tokenizer("tinkex/tiny", backend="tokenizers")
            >>> tokenizer.encode("hello", add_special_tokens=False)
            [263, 1028]
        """
        return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, tokens: Sequence[int] | int, skip_special_tokens: bool = False) -> str:
        """Token ids to text.

        Args:
            tokens: The token ids.
            skip_special_tokens: Leave special tokens out.

        Returns:
            The text.

        Example:
            >>> tokenizer = load_tokenizer("tinkex/tiny", backend="tokenizers")
            >>> tokens = tokenizer.encode("hello")
            >>> tokenizer.decode(tokens), tokenizer.decode(tokens, skip_special_tokens=True)
            ('<|bos|>hello', 'hello')
        """
        ids = [tokens] if isinstance(tokens, int) else [int(token) for token in tokens]
        return str(self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))

    def convert_tokens_to_ids(self, token: str) -> int | None:
        """The id of a token, by its text.

        Args:
            token: Its text.

        Returns:
            Its id, or None.

        Example:
            >>> tokenizer = load_tokenizer("tinkex/tiny", backend="tokenizers")
            >>> tokenizer.convert_tokens_to_ids(tokenizer.eos_token) == tokenizer.eos_token_id
            True
        """
        return self._id(token)

    def convert_ids_to_tokens(self, token_id: int) -> str | None:
        """The text of a token, by its id.

        Args:
            token_id: Its id.

        Returns:
            Its text, or None.

        Example:
            >>> tokenizer = load_tokenizer("tinkex/tiny", backend="tokenizers")
            >>> tokenizer.convert_ids_to_tokens(tokenizer.bos_token_id)
            '<|bos|>'
        """
        text: str | None = self._tokenizer.id_to_token(token_id)
        return text

    def get_vocab(self) -> dict[str, int]:
        """All tokens and their ids.

        Example:
            >>> tokenizer = load_tokenizer("tinkex/tiny", backend="tokenizers")
            >>> tokenizer.get_vocab()["<|bos|>"] == tokenizer.bos_token_id
            True
        """
        return dict(self._tokenizer.get_vocab())

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        tokenize: bool = True,
        add_generation_prompt: bool = False,
        **variables: Any,
    ) -> Any:
        """A conversation as the model expects it: token ids, or text with `tokenize=False`.

        Args:
            conversation: Messages with `role` and `content`.
            tokenize: Give token ids in place of text.
            add_generation_prompt: End with the words that begin an answer.
            variables: Further variables of the template.

        Returns:
            Token ids or text.

        Raises:
            ValueError: The tokenizer has no chat template.

        Example:
            >>> tokenizer = load_tokenizer("tinkex/tiny", backend="tokenizers")
            >>> question = [{"role": "user", "content": "2 + 2?"}]
            >>> print(
            ...     tokenizer.apply_chat_template(
            ...         question, tokenize=False, add_generation_prompt=True
            ...     )
            ... )
            <|bos|><|user|>2 + 2?<|end|><|assistant|>
        """
        if self.chat_template is None:
            raise ValueError("this tokenizer has no chat template")
        text = _compiled(self.chat_template).render(
            messages=list(conversation),
            add_generation_prompt=add_generation_prompt,
            bos_token=self.bos_token or "",
            eos_token=self.eos_token or "",
            **variables,
        )
        return self.encode(text, add_special_tokens=False) if tokenize else text


@functools.lru_cache(maxsize=16)
def _compiled(template: str) -> Any:
    """A chat template, ready to be used; that takes a hundred times as long as its use."""
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = _raise
    return environment.from_string(template)


def _raise(message: str) -> None:
    raise ValueError(message)


def _token_text(value: Any) -> str | None:
    return value.get("content") if isinstance(value, Mapping) else value
