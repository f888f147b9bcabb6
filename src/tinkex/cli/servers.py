"""The model of a command: on the configured server, else inside this process."""

from __future__ import annotations

from typing import Any

import click

from tinkex.client.futures.api_future import start
from tinkex.client.rest import RestClient
from tinkex.client.service import ServiceClient
from tinkex.client.settings.config import is_embedded
from tinkex.errors import TinkerError
from tinkex.local import DEFAULT_MODEL
from tinkex.tokenizers import BUNDLED, get_or_load_tokenizer
from tinkex.types.server_facts import GetServerCapabilitiesResponse


def place_of(service: ServiceClient) -> str:
    """Return the place of a client's server in words."""
    url = service.holder.config.base_url
    return "inside this process" if is_embedded(url) else f"at {url}"


def model_of(service: ServiceClient, model: str | None, option: str) -> str:
    """Return the requested model; inside this process the default is the bundled one.

    Raises:
        click.UsageError: No model was named for a server elsewhere; the message lists those it has.
    """
    url = service.holder.config.base_url
    if model:
        return model
    if is_embedded(url):
        return DEFAULT_MODEL
    names = sorted(filter(None, capabilities_of(service).model_names()))
    listed = f"it has {', '.join(names)}" if names else "it lists none"
    raise click.UsageError(f"{option} is required with a server: {url}; {listed}")


def capabilities_of(service: ServiceClient) -> GetServerCapabilitiesResponse:
    """Return the server's capabilities; give up on a silent server as soon as a session does."""
    start(service.holder.opened()).result()
    return RestClient(service.holder).get_server_capabilities().result()


def context_of(service: ServiceClient, model: str | None) -> int | None:
    """Return the context length of a model, if the server tells."""
    try:
        offered = capabilities_of(service).supported_models
    except TinkerError:
        return None
    return next((one.max_context_length for one in offered if one.model_name == model), None)


def tokenizer_of(tokenizer_id: str) -> Any:
    """Return a tokenizer; the bundled model's without transformers, whose import takes seconds."""
    return get_or_load_tokenizer(
        tokenizer_id, backend="tokenizers" if tokenizer_id in BUNDLED else None
    )
