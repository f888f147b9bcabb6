"""A warning about adapters of an output layer that is tied to the embeddings."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

OUTPUT_LAYERS = {"lm_head", "unembed_tokens"}
ADVICE = (
    "merging it into the weights changes the embeddings as well, and what the model says. Use it "
    "unmerged, or train with --no-train-unembed."
)


def warn_of_files(directory: Path) -> str | None:
    """Warn as `warn_of_tied` does, if the files are an adapter's."""
    try:
        settings = json.loads((directory / "adapter_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(settings, dict):
        return None
    return warn_of_tied(settings, str(settings.get("base_model_name_or_path") or ""))


def warn_of_tied(settings: Mapping[str, Any], base_model: str) -> str | None:
    """Warn if an adapter changes an output layer that is, or may be, tied; return the warning."""
    targets = settings.get("target_modules")
    if not isinstance(targets, list) or not OUTPUT_LAYERS & {
        str(target).rpartition(".")[2] for target in targets
    }:
        return None
    tied = is_tied(base_model)
    if tied is False:
        return None
    if tied:
        told = (
            f"the adapter changes the output layer, which {base_model} ties to its embeddings: "
            f"{ADVICE}"
        )
    else:
        told = (
            "the adapter changes the output layer. If the base model ties that to its embeddings "
            f"(tie_word_embeddings in config.json), {ADVICE}"
        )
    click.echo(f"Warning: {told}", err=True)
    return told


def is_tied(base_model: str) -> bool | None:
    """Return True if a base model ties its output layer to its embeddings, None if unknown."""
    from tinkex.engine.families.family import families

    found = _config(base_model)
    if found is None:
        return None
    if (said := found.get("tie_word_embeddings")) is not None:
        return bool(said)
    arch = str(found.get("model_type"))
    if arch in families():
        return families()[arch].tied
    return True if "gemma" in arch else None  # those with images, too


def _config(base_model: str) -> dict[str, Any] | None:
    """Return the configuration of a base model on this machine."""
    if not base_model:
        return None
    from tinkex.tokenizers import BUNDLED

    places = [BUNDLED.get(base_model, Path(base_model)) / "config.json"]
    try:
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(base_model, "config.json")
        places += [Path(cached)] if isinstance(cached, str) else []
    except (ImportError, ValueError):  # a name that no repository of the hub can have
        pass
    for place in places:
        try:
            found = json.loads(place.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if isinstance(found, dict):
            return found
    return None
