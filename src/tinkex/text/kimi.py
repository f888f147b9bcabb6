"""The tokenizer of Kimi K2, which comes as a file of ranks for tiktoken."""

from __future__ import annotations

import base64
import binascii
import importlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

from tinkex.errors import ConfigurationError

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
SPECIAL_TOKENS = 256
Matching: TypeAlias = Literal["parity", "longest"]

_UPPER, _LOWER = (
    r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]",
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]",
)
_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_SHORT}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_SHORT}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
"""Splits text before the ranks apply; the first alternative that fits is taken."""


def kimi_tokenizer(tokenizer_id: Any) -> bool:
    """Return True if a tokenizer is Kimi K2's, which needs tiktoken.

    Example:
        >>> kimi_tokenizer("moonshotai/Kimi-K2-Thinking"), kimi_tokenizer("Qwen/Qwen3-8B")
        (True, False)
    """
    return bool(tokenizer_id == KIMI)


def read_ranks(path: Path) -> dict[bytes, int]:
    """Read the ranks of a `tiktoken.model`: lines of base64, a blank and a number; skip others.

    Raises:
        ConfigurationError: There are none.
    """
    ranks: dict[bytes, int] = {}
    for line in path.read_bytes().splitlines():
        token, _, rank = line.strip().partition(b" ")
        if not rank.strip().isdigit():
            continue
        try:
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except binascii.Error:
            continue
    ranks.pop(b"", None)
    if not ranks:
        raise ConfigurationError(f"{path} holds no ranks: it is not a tiktoken file")
    return ranks


def read_special_tokens(config: Mapping[str, Any], first: int) -> dict[str, int]:
    """Return the special tokens, which follow the ranks.

    Their names come from `tokenizer_config.json`; tokens without one are reserved.
    """
    added = config.get("added_tokens_decoder")
    named = added if isinstance(added, Mapping) else {}
    tokens: dict[str, int] = {}
    for number in range(first, first + SPECIAL_TOKENS):
        entry = named.get(str(number))
        name = entry.get("content") if isinstance(entry, Mapping) else None
        tokens[name if isinstance(name, str) and name else f"<|reserved_token_{number}|>"] = number
    return tokens


class KimiTokenizer:
    """A tokenizer over ranks and special tokens, with the method names of transformers'.

    Args:
        ranks: The bytes of each token and its id.
        special_tokens: Tokens that are taken whole, and their ids.
        pattern: The pattern that splits text first.
        matching: Which special token is taken where one begins with another: tiktoken's own choice,
            or the longest.

    Raises:
        ConfigurationError: tiktoken is not installed.
    """

    def __init__(
        self,
        ranks: Mapping[bytes, int],
        special_tokens: Mapping[str, int],
        pattern: str = PATTERN,
        matching: Matching = "parity",
    ) -> None:
        if matching not in ("parity", "longest"):
            raise ValueError(
                f"special_token_matching must be 'parity' or 'longest', got {matching!r}"
            )
        try:
            tiktoken: Any = importlib.import_module("tiktoken")
        except ImportError:
            raise ConfigurationError(
                f"the tokenizer of {KIMI} needs the package 'tiktoken'", hint="pip install tiktoken"
            ) from None
        self._encoding: Any = tiktoken.Encoding(
            name="kimi",
            pat_str=pattern,
            mergeable_ranks=dict(ranks),
            special_tokens=dict(special_tokens),
        )
        self._special = dict(special_tokens)
        self._known = set(ranks.values()) | set(special_tokens.values())
        longest_first = sorted(special_tokens, key=len, reverse=True)
        self._splitter = (
            re.compile(f"({'|'.join(map(re.escape, longest_first))})")
            if matching == "longest"
            else None
        )

    @classmethod
    def load(
        cls,
        *,
        tiktoken_model_path: str | os.PathLike[str] | None = None,
        tokenizer_config_path: str | os.PathLike[str] | None = None,
        revision: str | None = None,
        pat_str: str | None = None,
        special_token_matching: Matching = "parity",
        **fetching: Any,
    ) -> KimiTokenizer:
        """Read the files that are named, and fetch the others at the pinned revision.

        Args:
            tiktoken_model_path: The file of ranks.
            tokenizer_config_path: The file that names the special tokens.
            revision: The revision of the repository.
            pat_str: The pattern that splits text.
            special_token_matching: See the class.
            fetching: Options of `resolve_file`.
        """
        from tinkex.hub.hub_files import resolve_file

        def place(given: str | os.PathLike[str] | None, name: str) -> Path:
            if given is not None:
                return Path(given).expanduser()
            return resolve_file(KIMI, revision or KIMI_REVISION, name, **fetching)

        ranks = read_ranks(place(tiktoken_model_path, "tiktoken.model"))
        config = json.loads(place(tokenizer_config_path, "tokenizer_config.json").read_text())
        special = read_special_tokens(config if isinstance(config, Mapping) else {}, len(ranks))
        return cls(ranks, special, pat_str or PATTERN, special_token_matching)

    @property
    def vocab_size(self) -> int:
        """Number of tokens."""
        return len(self._known)

    def encode(self, text: str, allow_special_tokens: bool = True) -> list[int]:
        """Tokenise a text; text that spells a special token becomes it if that is allowed."""
        try:
            return self._encode(text, allow_special_tokens)
        except BaseException as error:
            # how tiktoken says that a byte is no token; no Exception
            if type(error).__name__ != "PanicException":
                raise
            raise ValueError("the text has bytes that the tokenizer cannot encode") from error

    def _encode(self, text: str, allow_special_tokens: bool) -> list[int]:
        if not allow_special_tokens:
            return list(self._encoding.encode_ordinary(text))
        if self._splitter is None:
            return list(self._encoding.encode(text, allowed_special="all"))
        tokens: list[int] = []
        for index, part in enumerate(self._splitter.split(text)):
            tokens += [self._special[part]] if index % 2 else self._encoding.encode_ordinary(part)
        return tokens

    def decode(self, tokens: Sequence[int]) -> str:
        """Token ids to text; bytes that are no text become the replacement character.

        Raises:
            ValueError: There is no such token.
        """
        if unknown := [token for token in tokens if token not in self._known]:
            raise ValueError(f"there is no token {unknown[0]}")
        data: bytes = self._encoding.decode_bytes(list(tokens))
        return data.decode("utf-8", errors="replace")
