"""A tokenizer over `tokenizers`, for where transformers is not installed."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tinkex.errors import ConfigurationError


class Tokenizer:
    """A fast tokenizer with the methods of those of transformers.

    Example:
        >>> from tinkex.tokenizers import load_tokenizer
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
        """Read tokenizer.json and, if present, its configuration and chat template.

        Args:
            directory: The directory of the files.

        Returns:
            The tokenizer.

        Raises:
            ConfigurationError: There is no tokenizer.json, or the package `tokenizers` is missing.

        Example:
            >>> from tinkex.tokenizers import BUNDLED
            >>> Tokenizer.from_directory(BUNDLED["tinkex/tiny"]).bos_token
            '<|bos|>'
        """
        import tokenizers

        file = directory / "tokenizer.json"
        if not file.is_file():
            raise ConfigurationError(f"{directory} holds no tokenizer.json")
        written = directory / "tokenizer_config.json"
        config = json.loads(written.read_text()) if written.is_file() else {}
        template = config.get("chat_template")
        if (separate := directory / "chat_template.jinja").is_file():
            template = separate.read_text()
        return cls(tokenizers.Tokenizer.from_file(str(file)), config, template)

    def _id(self, token: str | None) -> int | None:
        return None if token is None else self._tokenizer.token_to_id(token)

    @property
    def backend_tokenizer(self) -> Any:
        """The tokenizer of the package `tokenizers`, by the name that it has in transformers."""
        return self._tokenizer

    @property
    def vocab_size(self) -> int:
        """Number of tokens, without added ones."""
        return int(self._tokenizer.get_vocab_size(with_added_tokens=False))

    def __len__(self) -> int:
        return int(self._tokenizer.get_vocab_size())

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text.

        Args:
            text: The text.
            add_special_tokens: Add the tokens that the tokenizer puts around text.

        Returns:
            The token ids.

        Example:
            >>> from tinkex.tokenizers import load_tokenizer
            >>> tokenizer = load_tokenizer("tinkex/tiny", backend="tokenizers")
            >>> tokenizer.encode("hello", add_special_tokens=False)
            [263, 1028]
        """
        return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, tokens: Sequence[int] | int, skip_special_tokens: bool = False) -> str:
        """Return the text of token ids.

        Args:
            tokens: The token ids.
            skip_special_tokens: Leave out special tokens.

        Returns:
            The text.

        Example:
            >>> from tinkex.tokenizers import load_tokenizer
            >>> tokenizer = load_tokenizer("tinkex/tiny", backend="tokenizers")
            >>> tokenizer.decode([0, 263, 1028], skip_special_tokens=True)
            'hello'
        """
        ids = [tokens] if isinstance(tokens, int) else [int(token) for token in tokens]
        return str(self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))

    def convert_tokens_to_ids(self, token: str) -> int | None:
        """Return the id of a token, or None.

        Args:
            token: Its text.

        Returns:
            Its id, or None.

        Example:
            >>> from tinkex.tokenizers import load_tokenizer
            >>> tokenizer = load_tokenizer("tinkex/tiny", backend="tokenizers")
            >>> tokenizer.convert_tokens_to_ids(tokenizer.eos_token) == tokenizer.eos_token_id
            True
        """
        return self._id(token)

    def convert_ids_to_tokens(self, token_id: int) -> str | None:
        """Like `convert_tokens_to_ids`, in reverse: return the text of an id, or None.

        Example:
            >>> from tinkex.tokenizers import load_tokenizer
            >>> tokenizer = load_tokenizer("tinkex/tiny", backend="tokenizers")
            >>> tokenizer.convert_ids_to_tokens(tokenizer.bos_token_id)
            '<|bos|>'
        """
        text: str | None = self._tokenizer.id_to_token(token_id)
        return text

    def get_vocab(self) -> dict[str, int]:
        """Return all tokens and their ids.

        Example:
            >>> from tinkex.tokenizers import load_tokenizer
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
        """Return a conversation as the model expects it, as token ids or text.

        Args:
            conversation: Messages with `role` and `content`.
            tokenize: Return token ids; text if False.
            add_generation_prompt: End with what begins an answer.
            variables: Further variables of the template.

        Returns:
            Token ids or text.

        Raises:
            ValueError: The tokenizer has no chat template.

        Example:
            >>> from tinkex.tokenizers import load_tokenizer
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
    """Return a compiled chat template; compiling takes a hundred times as long as using it."""
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = _raise
    return environment.from_string(template)


def _raise(message: str) -> None:
    raise ValueError(message)


def _token_text(value: Any) -> str | None:
    return value.get("content") if isinstance(value, Mapping) else value
