"""Tokenizers by model name.

`load_tokenizer` returns transformers' own tokenizer if that library is installed, else a small one
over `tokenizers` with the same methods. The bundled model's files come with the package, others
from a directory or the hub's cache; they are downloaded only if neither has them. `encode` and
`decode` find a model's tokenizer by its name, load it once and keep it. They apply no chat
template.
"""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tinkex.errors import ConfigurationError, TinkerError
from tinkex.text.json_tokenizer import Tokenizer as Tokenizer
from tinkex.text.kimi import (
    KIMI as KIMI,
    KIMI_OPTIONS,
    KIMI_REVISION as KIMI_REVISION,
    KimiTokenizer,
    kimi_tokenizer as kimi_tokenizer,
)
from tinkex.types.future_requests import RequestErrorCategory

BUNDLED = {"tinkex/tiny": Path(__file__).parent / "models" / "tiny"}
FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)
LLAMA_3, LLAMA_3_TOKENIZER = "meta-llama/Llama-3", "thinkingmachineslabinc/meta-llama-3-tokenizer"
"""Models of one family whose own repositories are closed, and an open copy of their tokenizer."""
LoadFunction = Callable[[str, Mapping[str, Any]], Any]
"""Loads a tokenizer by its id and options (`revision`, when one is pinned)."""


class TokenizerError(TinkerError, ValueError):
    """Invalid text or tokens, or a tokenizer that cannot be loaded or fails.

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
        training_client: Asked what it trains; if that fails, the name decides.
        info_fun: Asks it; the client's `get_info` by default.

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
    """Return a tokenizer, loaded once per process.

    Args:
        tokenizer_id: Its id, as `get_tokenizer_id` gives it.
        load_fun: Loads it in place of the libraries.
        backend: "transformers" or "tokenizers"; the first that is installed by default.
        revision: The revision of its repository; by default the newest, for Kimi a pinned one.
        kimi_options: `tiktoken_model_path`, `tokenizer_config_path`, `cache_dir`, `endpoint`,
            `pat_str`, `special_token_matching`, `http_timeout_ms`.

    Returns:
        The tokenizer.

    Raises:
        TokenizerError: The id is not a string, an option is unknown, or loading failed.
        ConfigurationError: A library is missing, or the files cannot be found.

    Example:
        >>> tokenizer = get_or_load_tokenizer("tinkex/tiny", backend="tokenizers")
        >>> tokenizer is get_or_load_tokenizer("tinkex/tiny", backend="tokenizers")
        True
    """
    if not isinstance(tokenizer_id, str):
        raise TokenizerError(f"a tokenizer's id must be a string, got {tokenizer_id!r}")
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
        return _cached(
            key, lambda: _loaded(KIMI, lambda: KimiTokenizer.load(revision=pinned, **kimi_options))
        )
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
    options = {} if revision is None else {"revision": revision}
    loaded = _loaded(tokenizer_id, lambda: load_fun(tokenizer_id, options))
    if not all(callable(getattr(loaded, name, None)) for name in ("encode", "decode")):
        raise TokenizerError(f"load_fun gave no tokenizer for {tokenizer_id!r}, but {loaded!r}")
    return loaded


def _loaded(tokenizer_id: str, load: Callable[[], Any]) -> Any:
    try:
        return load()
    except TinkerError:
        raise
    except Exception as error:
        raise TokenizerError(
            f"the tokenizer {tokenizer_id!r} could not be loaded: {error!r}"
        ) from error


def encode(
    text: str,
    model_name: str,
    *,
    training_client: Any = None,
    info_fun: Callable[[Any], Any] | None = None,
    allow_special_tokens: bool = True,
    **options: Any,
) -> list[int]:
    """Return the token ids of a text, with the special tokens the tokenizer adds.

    Args:
        text: The text.
        model_name: The model.
        training_client: Asked first for the tokenizer's id.
        info_fun: Asks it; the client's `get_info` by default.
        allow_special_tokens: Turn text that spells a special token into that token (Kimi only).
        options: Options of `get_or_load_tokenizer`.

    Returns:
        The token ids.

    Raises:
        TokenizerError: The text or the name is not a string, or the tokenizer fails.

    Example:
        >>> tokens = encode("hello", "tinkex/tiny", backend="tokenizers")
        >>> decode(tokens, "tinkex/tiny", backend="tokenizers")
        '<|bos|>hello'
    """
    if not isinstance(text, str):
        raise TokenizerError(f"text must be a string, got {type(text).__name__}")
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
    """Return the text of token ids.

    Args:
        ids: The token ids.
        model_name: The model.
        training_client: Asked first for the tokenizer's id.
        info_fun: Asks it; the client's `get_info` by default.
        options: Options of `get_or_load_tokenizer`.

    Returns:
        The text.

    Raises:
        TokenizerError: The ids are not a list of whole numbers, or the tokenizer fails.

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
        raise TokenizerError(f"model_name must be a string, got {model_name!r}")
    tokenizer_id = get_tokenizer_id(model_name, client, info_fun=info_fun)
    return get_or_load_tokenizer(tokenizer_id, **options), tokenizer_id


# ── loading ───────────────────────────────────────────────────────────────────────────────────────


def load_tokenizer(name: str, *, backend: str | None = None, revision: str | None = None) -> Any:
    """Load the tokenizer of a model.

    Args:
        name: A model name, a hub id (a variant after a colon is cut off) or a directory.
        backend: "transformers" or "tokenizers"; the first that is installed by default.
        revision: The revision of its repository; the newest by default.

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
    """Return the directory of the cached (or downloaded) tokenizer files."""
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
