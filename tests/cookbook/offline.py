"""A plugin for pytest, for the cookbook's own tests: what has to be fetched from the hub first is
skipped at once.

It skips by what a test asks for, not by name, so that the same tests are left out whichever client
`tinker` stands for.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Stand in the way of everything that fetches."""
    import datasets
    import huggingface_hub
    import transformers

    for kind in ("AutoTokenizer", "AutoProcessor", "AutoConfig", "AutoModelForCausalLM"):
        loader = getattr(transformers, kind)
        loader.from_pretrained = _unless_here(loader.from_pretrained)
    for module, name in (
        (datasets, "load_dataset"),
        (huggingface_hub, "hf_hub_download"),
        (huggingface_hub, "snapshot_download"),
    ):
        setattr(module, name, _unless_here(getattr(module, name)))


def _unless_here(load: Callable[..., Any]) -> Callable[..., Any]:
    def loaded(name: Any = None, *args: Any, **options: Any) -> Any:
        if name is None or not Path(str(name)).exists():
            pytest.skip("needs files of the hub")
        return load(name, *args, **options)

    return loaded


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, Any, Any]:
    """Skip what a fixture could not fetch by another way."""
    return (yield from _skipping())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """Skip what could not be fetched by another way."""
    return (yield from _skipping())


def _skipping() -> Generator[None, Any, Any]:
    from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled

    try:
        return (yield)
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, LocalEntryNotFoundError | OfflineModeIsEnabled):
                pytest.skip("needs files of the hub")
            cause = cause.__cause__ or cause.__context__
        raise
