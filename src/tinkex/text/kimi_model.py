"""The name of Kimi K2, whose tokenizer is not in a tokenizer.json."""

from __future__ import annotations

from typing import Any

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


def kimi_tokenizer(tokenizer_id: Any) -> bool:
    """Return True if a tokenizer is Kimi K2's, which needs tiktoken.

    Example:
        >>> kimi_tokenizer("moonshotai/Kimi-K2-Thinking"), kimi_tokenizer("Qwen/Qwen3-8B")
        (True, False)
    """
    return bool(tokenizer_id == KIMI)
