"""Single files of Hugging Face repositories, kept once they are here; and the token that
repositories ask for.
"""

from __future__ import annotations

import os
import re
import tempfile
import urllib.error
import urllib.request
from collections.abc import Mapping
from email.message import Message
from pathlib import Path
from typing import IO, Any
from urllib.parse import quote, urlsplit

from tinkex.client.settings import environment
from tinkex.errors import APIConnectionError, APITimeoutError, TinkerError
from tinkex.types.future_requests import RequestErrorCategory
from tinkex.wire.redacted_http import REDACTED, forms_of

ENDPOINT = "https://huggingface.co"
HTTP_TIMEOUT_MS = 120_000
SHOWN_BYTES = 500
"""Bytes of a refusal that are kept."""
CHUNK = 1 << 20
PLACES = (
    "the option hf_token, HF_TOKEN, HUGGING_FACE_HUB_TOKEN and the file that a login leaves "
    "its token in"
)


class HubError(TinkerError, ValueError):
    """A repository, file or token cannot be used; `category` says whose fault it is."""

    category = RequestErrorCategory.User


def default_cache_dir() -> Path:
    """Return the user's cache directory for tinkex."""
    from platformdirs import user_cache_path

    return user_cache_path("tinkex")


def endpoint_of(endpoint: str | None = None) -> str:
    """Return the hub's address: as given, else HF_ENDPOINT, else the public one."""
    return (endpoint or environment.text("HF_ENDPOINT") or ENDPOINT).rstrip("/")


def sanitize_repo_id(repo_id: str) -> str:
    """Return a repository's name as the name of a directory.

    Example:
        >>> sanitize_repo_id("moonshotai/Kimi-K2-Thinking")
        'moonshotai__Kimi-K2-Thinking'
    """
    return repo_id.replace("/", "__").replace("..", "_")


def build_hf_url(repo_id: str, revision: str, filename: str, endpoint: str | None = None) -> str:
    """Return the address of a file.

    Example:
        >>> build_hf_url("gpt2", "main", "tokenizer.json", "https://huggingface.co")
        'https://huggingface.co/gpt2/resolve/main/tokenizer.json'
    """
    place = f"{quote(repo_id)}/resolve/{quote(revision, safe='')}/{quote(filename)}"
    return f"{endpoint_of(endpoint)}/{place}"


def resolve_file(
    repo_id: str,
    revision: str,
    filename: str,
    *,
    cache_dir: str | os.PathLike[str] | None = None,
    endpoint: str | None = None,
    token: str | None = None,
    http_timeout_ms: int = HTTP_TIMEOUT_MS,
) -> Path:
    """Return a local copy of a repository's file; it is fetched only once.

    Args:
        repo_id: The repository.
        revision: A branch, a tag, or better a commit.
        filename: The path in the repository.
        cache_dir: The directory of the cache; files are kept in its folder `hf`.
        endpoint: The hub's address; HF_ENDPOINT by default.
        token: Sent along; by default the one that `resolve_token` finds, if any.
        http_timeout_ms: The longest silence of the hub, in milliseconds.

    Raises:
        HubError: There is no such file, the hub refuses, or a name leads out of the cache.
        APIConnectionError: The hub cannot be reached.
    """
    for kind, value in (("repo_id", repo_id), ("revision", revision), ("filename", filename)):
        _check_name(kind, value)
    root = Path(cache_dir).expanduser() if cache_dir is not None else default_cache_dir()
    path = root / "hf" / sanitize_repo_id(repo_id) / revision / filename
    if not path.exists():
        url = build_hf_url(repo_id, revision, filename, endpoint)
        sent = token or _found_token()
        _fetch(
            url, path, {"Authorization": f"Bearer {sent}"} if sent else {}, http_timeout_ms / 1000
        )
    return path


def _check_name(kind: str, value: Any) -> None:
    if not isinstance(value, str) or not value:
        raise HubError(f"{kind} must be a string that is not empty, got {value!r}")
    parts = re.split(r"[/\\]", value)
    if ".." in parts or "" in parts or "\0" in value or ":" in parts[0]:
        raise HubError(f"{kind} {value!r} would leave the cache directory")


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects, without the token if they lead to another host."""

    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: Message,
        newurl: str,
    ) -> urllib.request.Request | None:
        request = super().redirect_request(req, fp, code, msg, headers, newurl)  # type: ignore[arg-type]
        if request is not None and urlsplit(newurl)[:2] != urlsplit(req.full_url)[:2]:
            request.remove_header("Authorization")
        return request


def _fetch(url: str, path: Path, headers: Mapping[str, str], timeout: float) -> None:
    """Fetch an address into a file, under another name until it is whole."""
    opener = urllib.request.build_opener(_Redirects)
    failure: TinkerError
    try:
        with opener.open(
            urllib.request.Request(url, headers=dict(headers)), timeout=timeout
        ) as answer:
            path.parent.mkdir(parents=True, exist_ok=True)
            handle, scratch = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
            try:
                with os.fdopen(handle, "wb") as file:
                    _copy(answer, file)
                os.replace(scratch, path)
            except BaseException:
                os.unlink(scratch)
                raise
        return
    except urllib.error.HTTPError as refused:
        with refused:
            failure = _refusal(
                url, refused.code, refused.read(SHOWN_BYTES).decode(errors="replace"), headers
            )
    except TimeoutError as error:
        raise APITimeoutError(f"{_shown(url)} did not answer in time") from error
    except OSError as error:  # URLError is one
        raise APIConnectionError(
            f"{_shown(url)} cannot be fetched: {getattr(error, 'reason', error)}"
        ) from error
    # outside the except block, so that the error has no cause, which holds the signed address
    raise failure


def _copy(answer: Any, file: IO[bytes]) -> None:
    expected, size = answer.headers.get("Content-Length"), 0
    while chunk := answer.read(CHUNK):
        file.write(chunk)
        size += len(chunk)
    if expected is not None and str(size) != expected:
        raise OSError(f"{size} of {expected} bytes came")


def _refusal(url: str, status: int, body: str, headers: Mapping[str, str]) -> HubError:
    for secret in headers.values():  # the hub may repeat what it was sent
        for form in forms_of(secret.rpartition(" ")[2]):
            body = body.replace(form, REDACTED)
    told = {"status": status, "body": body}
    if status == 404:
        return HubError(f"{_shown(url)} was not found on HuggingFace", body=told, status_code=404)
    return HubError(f"{_shown(url)}: the hub answered {status}", body=told, status_code=status)


def _shown(url: str) -> str:
    return url.partition("?")[0]


# ── the token ─────────────────────────────────────────────────────────────────────────────────────


def resolve_token(
    *,
    hf_token: str | None = None,
    token: str | None = None,
    token_path: str | os.PathLike[str] | None = None,
) -> str:
    """Return the first token found: as given, in the environment, or in the file of a login.

    Raises:
        HubError: There is none; the message says where it was looked for.
    """
    found = (hf_token or "").strip() or (token or "").strip() or _found_token(token_path)
    if not found:
        raise HubError(
            f"no Hugging Face token: none in {PLACES}", hint="run `hf auth login`, or set HF_TOKEN"
        )
    return found


def _found_token(token_path: str | os.PathLike[str] | None = None) -> str | None:
    if named := environment.hf_token():
        return named
    path = Path(token_path).expanduser() if token_path is not None else environment.hf_token_path()
    try:
        return path.read_text().strip() or None
    except (OSError, UnicodeDecodeError):
        return None
