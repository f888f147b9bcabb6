"""The embedded backend: the server's application, called by clients in the same process.

No other module knows both the server and the client. `ServiceClient(base_url="local")` shares one
backend per process, opened on first use and closed with the last client. A `LocalBackend` of your
own can have other models and another data directory.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from tinkex.client.futures.api_future import start
from tinkex.client.http.asgi_exchange import AsgiExchange, LateExchange
from tinkex.client.http.exchange import Exchange
from tinkex.client.settings.config import LOCAL
from tinkex.errors import ConfigurationError

if TYPE_CHECKING:
    from tinkex.engine.api import BaseModel, Engine
    from tinkex.server.workers.fleet import Fleet

DEFAULT_MODEL = "tinkex/tiny"
DEFAULT_ENGINE = "torch"
Device = Literal["auto", "cpu", "cuda"]
Dtype = Literal["float32", "bfloat16"]


def default_data_dir() -> Path:
    """Return the data directory: TINKEX_DATA_DIR, else the user's data directory for tinkex.

    Returns:
        The directory, which may not exist yet.

    Example:
        >>> import os
        >>> os.environ["TINKEX_DATA_DIR"] = "/data/tinkex"
        >>> default_data_dir()
        PosixPath('/data/tinkex')
    """
    if path := os.environ.get("TINKEX_DATA_DIR"):
        return Path(path).expanduser()
    from platformdirs import user_data_path

    return user_data_path("tinkex")


def resolve_models(models: Mapping[str, str | Path] | None) -> dict[str, Path]:
    """Return a directory for each model name.

    A name without a place is bundled or looked up on the hub, cache first.

    Args:
        models: Directories or hub ids by model name; empty ones stand for the name itself.

    Returns:
        A directory for each name.

    Raises:
        EngineError: One is neither a directory nor on the hub.

    Example:
        >>> resolve_models({"tinkex/tiny": ""})
        {'tinkex/tiny': PosixPath('.../models/tiny')}
    """
    from tinkex.engine.base_models import locate_models

    return locate_models(models or {DEFAULT_MODEL: ""})


def pick_device(device: Device) -> str:
    """Return the device that the PyTorch engine computes on, after a check that it is there.

    Args:
        device: `auto` is the GPU where PyTorch can use one, else the CPU.

    Returns:
        The device.

    Raises:
        ConfigurationError: The `local` extra is not installed, or there is no such device.

    Example:
        >>> pick_device("cpu")
        'cpu'
    """
    from tinkex.engine.registry import find_engine

    return find_engine(DEFAULT_ENGINE).pick_device(device)


def make_engine(
    models: Mapping[str, str | Path] | None = None,
    device: str = "cpu",
    dtype: Dtype | None = None,
    engine: str = DEFAULT_ENGINE,
) -> Engine:
    """Make an engine over these models; each is loaded when first used.

    Args:
        models: Directories or hub ids by model name; the bundled model by default.
        device: What computes; `auto` is the GPU where PyTorch can use one, else the CPU.
        dtype: Of the base weights; float32 on a CPU and bfloat16 on a GPU by default.
        engine: The kind of engine, by its name in the registry.

    Returns:
        The engine.

    Raises:
        ConfigurationError: There is no such engine or device, or a package is not installed.

    Example:
        >>> [model.name for model in make_engine({"tinkex/tiny": ""}).models()]
        ['tinkex/tiny']
    """
    from tinkex.engine.registry import find_engine

    kind = find_engine(engine)
    return kind.make(models or {DEFAULT_MODEL: ""}, kind.pick_device(device), dtype)


def lazy_engine(models: Mapping[str, str | Path] | None = None) -> Engine:
    """Return the default engine, made when there is something to compute.

    To import torch takes seconds.

    Args:
        models: Directories or hub ids by model name; the bundled model by default.

    Returns:
        The engine.

    Raises:
        ConfigurationError: The `local` extra is not installed.
        EngineError: One of the models cannot be used.
    """
    from tinkex.engine.lazy import LazyEngine
    from tinkex.engine.torch.kind import require_packages

    require_packages()

    found = resolve_models(models)
    return LazyEngine(found, lambda: make_engine(found))


def make_fleet(
    workers: str,
    models: Mapping[str, str | Path] | None = None,
    *,
    data_dir: Path,
    device: str = "cpu",
    dtype: Dtype | None = None,
    engine: str = DEFAULT_ENGINE,
    cluster: Path | None = None,
    shared: Literal["auto", "yes", "no"] = "auto",
) -> Fleet | None:
    """Make a fleet: engines in processes of their own, which `create_app` starts.

    Args:
        workers: `local:N` for N processes on this machine, `ray` or `ray:HOST:PORT` for actors of
            Ray; `local` for none.
        models: Directories or hub ids by model name; the bundled model by default.
        data_dir: The server's data directory.
        device: What computes.
        dtype: Of the base weights.
        engine: The kind of engine, by its name in the registry.
        cluster: A file with the number of workers of each base model.
        shared: Whether workers see the data directory: files need not travel then.

    Returns:
        The fleet, or None if the engine is to be in this process.

    Raises:
        ConfigurationError: The plan is not understood, or Ray is not there.

    Example:
        >>> make_fleet("local", data_dir=Path("tinkex-data")) is None
        True
    """
    from tinkex.cluster.layout import WorkersOption, make_engines, plan_replicas, read_plan

    option = WorkersOption.parse(workers)
    if not option.count and cluster is None:
        return None
    plans = plan_replicas(
        option,
        models or {DEFAULT_MODEL: ""},
        engine=engine,
        device=device,
        dtype=dtype,
        cluster=[] if cluster is None else read_plan(cluster),
    )
    from tinkex.server.workers.fleet import Fleet

    return Fleet(make_engines(option, plans, data_dir, shared))


def publish_tokenizers(models: Iterable[BaseModel]) -> None:
    """Put the models' tokenizers into the hub's cache, unless TINKEX_HUB_CACHE is 0.

    Args:
        models: The base models.
    """
    from tinkex.server.files.hub_cache import publish_tokenizer

    if os.environ.get("TINKEX_HUB_CACHE", "1") != "0":
        for model in models:
            if model.directory is not None:
                publish_tokenizer(model.name, model.directory)


def unusable(data_dir: Path, error: Exception) -> ConfigurationError:
    """Return the error for a data directory that cannot be used.

    Args:
        data_dir: The directory.
        error: Why it cannot.

    Returns:
        The error, to be raised.
    """
    reason = getattr(error, "strerror", None) or str(error)
    remedy = "free some space or allow writing there, or " if isinstance(error, OSError) else ""
    return ConfigurationError(
        f"the data directory {data_dir} cannot be used: {reason}",
        hint=f"{remedy}set TINKEX_DATA_DIR to another directory",
    )


class LocalBackend:
    """A server and engine inside this process.

    Args:
        models: Directories (or hub ids) by model name; the bundled model by default.
        data_dir: Where checkpoints and facts are kept.
        engine: An engine or a fleet of your own, instead of models.
        workers: `local:N` puts engines into N processes of their own; see `make_fleet`.
        app_options: Further options of `tinkex.server.app.create_app`, e.g. `limits`.

    Example:
        >>> with LocalBackend(data_dir="tinkex-data") as backend:
        ...     with RestClient(base_url=backend.base_url) as rest:
        ...         rest.get_server_capabilities().result()
        GetServerCapabilitiesResponse(supported_models=[SupportedModel(...)])
    """

    _numbers = itertools.count(1)

    def __init__(
        self,
        models: Mapping[str, str | Path] | None = None,
        *,
        data_dir: str | Path | None = None,
        engine: Engine | Fleet | None = None,
        workers: str = "local",
        **app_options: Any,
    ) -> None:
        self._models = models
        self._engine = engine
        self._workers = workers
        self._options = app_options
        self.data_dir = Path(data_dir) if data_dir is not None else default_data_dir()
        self.base_url = f"{LOCAL}:{next(self._numbers)}"
        self._exchange: AsgiExchange | None = None
        self._opening = asyncio.Lock()
        self._closed = False
        self._users = 0
        _named[self.base_url] = self

    async def _opened(self) -> AsgiExchange:
        """Return the running application, started by the first request; on tinkex's loop only."""
        if self._exchange is not None:
            return self._exchange
        async with self._opening:
            if self._closed:
                raise ConfigurationError(f"the embedded backend {self.base_url!r} is closed")
            if self._exchange is None:
                app = await asyncio.to_thread(self._build)
                exchange = AsgiExchange(app)
                await exchange.open()
                self._exchange = exchange
            return self._exchange

    def _build(self) -> Any:
        engine = (
            self._engine
            or make_fleet(self._workers, self._models, data_dir=self.data_dir)
            or lazy_engine(self._models)
        )
        from tinkex.server.app import create_app
        from tinkex.server.database.interface import DatabaseError
        from tinkex.server.files.data_dir import DataDirError

        try:
            app = create_app(engine, self.data_dir, embedded=True, **self._options)
        except (OSError, DataDirError, DatabaseError) as error:
            raise unusable(self.data_dir, error) from error
        publish_tokenizers(app.state.server.workers.models().values())
        return app

    async def aclose(self) -> None:
        """Like `close`, in any event loop."""
        await start(self._closing())

    async def _closing(self) -> None:
        _named.pop(self.base_url, None)
        async with self._opening:
            self._closed = True
            if self._exchange is not None:
                exchange, self._exchange = self._exchange, None
                await exchange.close()

    def close(self) -> None:
        """Stop; what was saved stays.

        Example:
            >>> backend = LocalBackend(data_dir="tinkex-data")
            >>> backend.close()
        """
        start(self._closing()).result()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Lease(LateExchange):
    """One client's hold on a backend; a shared backend closes with its last lease."""

    def __init__(self, backend: LocalBackend, *, shared: bool) -> None:
        super().__init__(backend._opened)
        self._backend = backend
        self._shared = shared
        self._closed = False

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._shared and _release(self._backend):
            with contextlib.suppress(Exception):
                await self._backend._closing()


_lock = threading.Lock()
_named: dict[str, LocalBackend] = {}
_shared: dict[Path, LocalBackend] = {}


def _forget() -> None:
    """Forget the backends in a forked child, which does not have their threads."""
    global _lock
    _lock = threading.Lock()
    _named.clear()
    _shared.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


def _release(backend: LocalBackend) -> bool:
    with _lock:
        backend._users -= 1
        if backend._users:
            return False
        _shared.pop(backend.data_dir, None)
        return True


def open_exchange(base_url: str) -> Exchange:
    """Return the exchange of an embedded base URL; called by the transport.

    Args:
        base_url: `local`, or the base URL of a `LocalBackend`.

    Returns:
        The exchange.

    Raises:
        ConfigurationError: There is no such backend.
    """
    if base_url != LOCAL:
        if base_url not in _named:
            raise ConfigurationError(
                f"there is no embedded backend {base_url!r}; it may have been closed"
            )
        return _Lease(_named[base_url], shared=False)
    with _lock:
        data_dir = default_data_dir()
        backend = _shared.get(data_dir)
        if backend is None:
            backend = _shared[data_dir] = LocalBackend(data_dir=data_dir)
        backend._users += 1
        return _Lease(backend, shared=True)
