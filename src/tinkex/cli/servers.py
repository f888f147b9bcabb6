"""Where the commands that need a model find one: the server that is configured, else one inside
this process.
"""

from __future__ import annotations

from typing import Any

import click

from tinkex.cli.options import Connection, seconds_of
from tinkex.client.futures.api_future import start
from tinkex.client.rest import RestClient
from tinkex.client.service import ServiceClient
from tinkex.client.settings.config import is_embedded
from tinkex.errors import TinkerError
from tinkex.local import DEFAULT_MODEL
from tinkex.tokenizers import BUNDLED, get_or_load_tokenizer
from tinkex.types.sessions import GetServerCapabilitiesResponse


def open_service(
    base_url: str | None, api_key: str | None, timeout: int | None, display_name: str | None = None
) -> ServiceClient:
    """A client of a server; `timeout` is in milliseconds, as the option has it."""
    connection = Connection(api_key, base_url, seconds_of(timeout))
    return ServiceClient(config=connection.config(), display_name=display_name)


def place_of(service: ServiceClient) -> str:
    """Where a client's server is, in words."""
    url = service.holder.config.base_url
    return "inside this process" if is_embedded(url) else f"at {url}"


def model_of(service: ServiceClient, model: str | None, option: str) -> str:
    """The model that was asked for; the bundled one in this process, where nothing is asked for.

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
    """Return what a server offers; one that does not answer is given up as soon as for a session."""
    start(service.holder.opened()).result()
    return RestClient(service.holder).get_server_capabilities().result()


def context_of(service: ServiceClient, model: str | None) -> int | None:
    """How many tokens a model takes at once, where the server says so."""
    try:
        offered = capabilities_of(service).supported_models
    except TinkerError:
        return None
    return next((one.max_context_length for one in offered if one.model_name == model), None)


def tokenizer_of(tokenizer_id: str) -> Any:
    """A tokenizer; the bundled model's without transformers, which takes seconds to import."""
    return get_or_load_tokenizer(
        tokenizer_id, backend="tokenizers" if tokenizer_id in BUNDLED else None
    )
