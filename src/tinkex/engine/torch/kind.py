"""The PyTorch engine as a kind that is chosen by name; torch is imported when used."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path

from tinkex.engine.api import Engine
from tinkex.engine.base_models import locate_models
from tinkex.engine.registry import EngineKind
from tinkex.errors import ConfigurationError

LOCAL_PACKAGES = ("torch", "safetensors", "starlette", "uvicorn", "tokenizers", "huggingface_hub")
DEVICES = ("auto", "cpu", "cuda")


def require_packages() -> None:
    """Check that the packages of the `local` extra are installed.

    Raises:
        ConfigurationError: Something is missing; the message says what.
    """
    missing = [name for name in LOCAL_PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigurationError(
            "running models on this machine needs packages that are not installed: "
            f"{', '.join(missing)}",
            hint="pip install 'tinkex[local]'",
        )


def pick_device(device: str) -> str:
    """Return the device for an option: `auto` is the GPU if PyTorch can use one."""
    if device not in DEVICES:
        raise ConfigurationError(
            f"the torch engine has no device {device!r}; there are {', '.join(DEVICES)}"
        )
    require_packages()
    from tinkex.engine.torch.openmp import calm_openmp

    calm_openmp()  # takes effect best before torch is imported
    import torch

    if device == "cpu" or (device == "auto" and not torch.cuda.is_available()):
        return "cpu"
    if not torch.cuda.is_available():
        raise ConfigurationError(
            "there is no GPU here that PyTorch can use",
            hint="see what `tinkex doctor` finds, or compute on the cpu",
        )
    return "cuda"


def make(models: Mapping[str, str | Path], device: str, dtype: str | None) -> Engine:
    """Make an engine; each model is loaded when first used."""
    import torch

    from tinkex.engine.torch.engine import TorchEngine

    kinds = {None: None, "float32": torch.float32, "bfloat16": torch.bfloat16}
    return TorchEngine(locate_models(models), device=device, dtype=kinds[dtype])


TORCH = EngineKind(make, pick_device)
