"""Repositories on the Hugging Face hub: made and written to by huggingface_hub's client."""

from __future__ import annotations

import contextlib
import importlib
import logging
import re
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from tinkex.errors import (
    APIConnectionError,
    APITimeoutError,
    ConfigurationError,
    RequestFailedError,
    TinkerError,
)
from tinkex.hub.hub_files import HubError, resolve_file
from tinkex.wire.redaction import Scrubber

T = TypeVar("T")

CARD = "README.md"
SHOWN_BYTES = 500


@dataclass(frozen=True, slots=True)
class Upload:
    """The files of an adapter, and where they go."""

    repo_id: str
    revision: str
    public: bool
    message: str
    create_pr: bool
    tinker_path: str
    directory: Path
    files: list[str]


class Repositories:
    """huggingface_hub's client, with errors of our kinds."""

    def __init__(self, token: str, endpoint: str, http_timeout_ms: int) -> None:
        try:
            self._library: Any = importlib.import_module("huggingface_hub")
        except ImportError:
            raise ConfigurationError(
                "putting an adapter on the hub needs the package 'huggingface_hub'",
                hint="pip install 'tinkex[text]'",
            ) from None
        self._api: Any = self._library.HfApi(endpoint=endpoint, token=token)
        self._endpoint, self._token, self._http_timeout_ms = endpoint, token, http_timeout_ms
        self._scrubber = Scrubber([token])

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        """Give the library's requests a time limit, and remove secrets from its log.

        The whole process shares its session, so other requests are left alone. Ours have the token,
        or are a PUT: large files go to signed addresses without a token.
        """
        hooks = self._library.get_session().event_hooks["request"]
        limits = dict.fromkeys(("connect", "read", "write", "pool"), self._http_timeout_ms / 1000)

        def limit(request: Any) -> None:
            if (
                request.method == "PUT"
                or request.headers.get("authorization") == f"Bearer {self._token}"
            ):
                request.extensions = {**request.extensions, "timeout": limits}

        loggers = [
            logging.getLogger(name)
            for name in (*logging.root.manager.loggerDict, "httpx")
            if _names_addresses(name)
        ]
        hooks.append(limit)
        for logger in loggers:
            logger.addFilter(self._clean)
        try:
            yield
        finally:
            hooks.remove(limit)
            for logger in loggers:
                logger.removeFilter(self._clean)

    def _clean(self, record: logging.LogRecord) -> bool:
        record.msg, record.args = self._scrubber.text(record.getMessage()), ()
        return True

    def user(self) -> str:
        """Return the name of the token's user."""
        told = self._asked(self._api.whoami)
        name = told.get("name") if isinstance(told, dict) else None
        name = name or ((told.get("user") or {}).get("name") if isinstance(told, dict) else None)
        if not name:
            raise HubError("the hub did not name the user of the token")
        return str(name)

    def push(self, upload: Upload) -> str:
        """Make the repository and the branch if missing, upload, and return its full name."""
        return self._asked(lambda: self._push(upload))

    def _push(self, upload: Upload) -> str:
        made = self._api.create_repo(upload.repo_id, private=not upload.public, exist_ok=True)
        repo = str(made.repo_id or upload.repo_id)
        self._require_ours(repo, upload)
        if upload.revision != "main":
            self._api.create_branch(repo, branch=upload.revision, exist_ok=True)
        add = self._library.CommitOperationAdd
        self._api.create_commit(
            repo,
            operations=[
                add(path_in_repo=name, path_or_fileobj=upload.directory / name)
                for name in upload.files
            ],
            commit_message=upload.message,
            revision=upload.revision,
            create_pr=upload.create_pr,
        )
        return repo

    def _asked(self, ask: Callable[[], T]) -> T:
        """Call the library; its errors become ours, without signed addresses."""
        failure: TinkerError
        try:
            with self._watched():
                return ask()
        except TinkerError:
            raise
        except Exception as error:
            failure = self._failure(error)
        raise failure

    def _require_ours(self, repo: str, upload: Upload) -> None:
        """Raise if the repository's card names another checkpoint, which would be overwritten."""
        with tempfile.TemporaryDirectory() as scratch:
            try:
                card = resolve_file(
                    repo,
                    upload.revision,
                    CARD,
                    cache_dir=scratch,
                    endpoint=self._endpoint,
                    token=self._token,
                    http_timeout_ms=self._http_timeout_ms,
                )
            except HubError as error:
                if error.status == 404:
                    return
                raise
            text = card.read_text(encoding="utf-8", errors="replace")
        found = re.findall(r"tinker://[^\s\"'`<>)\]]+", text)
        if found and upload.tinker_path not in found:
            raise HubError(
                f"{repo} holds the adapter of another checkpoint: {found[0]}",
                hint="give another repo_id or revision",
                body={"found": found[0], "expected": upload.tinker_path},
            )

    def _failure(self, error: Exception) -> TinkerError:
        kinds = {kind.__name__ for kind in type(error).__mro__}
        said = " ".join(str(one) for one in (error, error.__cause__) if one is not None)
        text = self._scrubber.text(said, SHOWN_BYTES)
        if _status(error) == 401:
            return HubError(
                "the hub does not know this token", hint="make a new one, with leave to write"
            )
        if "TimeoutException" in kinds:  # of the HTTP library, whichever it is
            return APITimeoutError(
                f"the hub at {self._endpoint} was silent for {self._http_timeout_ms} ms"
            )
        if kinds & {"TransportError", "OSError"} and _status(error) is None:
            return APIConnectionError(f"the hub at {self._endpoint} cannot be reached: {text}")
        return RequestFailedError(
            f"the hub refused: {text}", "", "server", status_code=_status(error)
        )


def _names_addresses(logger: str) -> bool:
    """Return True for a logger of huggingface_hub, or of an HTTP client that it may use."""
    return bool(re.match(r"((httpx|httpcore|urllib3|requests)\d*|huggingface_hub)(\.|$)", logger))


def _status(error: BaseException) -> int | None:
    """The HTTP status behind an error, or behind what caused it."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    return status if status or error.__cause__ is None else _status(error.__cause__)
