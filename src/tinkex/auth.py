"""Check for a credential and whether the server accepts it, like the official SDK's `auth`."""

from __future__ import annotations

from tinkex.client.rest import RestClient
from tinkex.client.settings import environment
from tinkex.client.settings.credentials import stored_key


def get_tinker_token() -> str | None:
    """The key of the environment, else the stored one; the credential command is not run.

    Example:
        >>> import os
        >>> os.environ["TINKER_API_KEY"] = "tml-1234"
        >>> get_tinker_token()
        'tml-1234'
    """
    return environment.text("TINKER_API_KEY") or stored_key()


def tinker_has_credentials() -> bool:
    """Return True if there is a credential of any kind; the command counts without being run.

    Example:
        >>> import os
        >>> os.environ["TINKER_API_KEY"] = "tml-1234"
        >>> tinker_has_credentials()
        True
    """
    return get_tinker_token() is not None or environment.text("TINKER_CREDENTIAL_CMD") is not None


def raise_if_tinker_not_accessible() -> None:
    """Ask the server what it offers; raises the error that stands in the way, if there is one.

    Example:
        >>> import os
        >>> os.environ["TINKER_BASE_URL"] = "local"
        >>> raise_if_tinker_not_accessible()
    """
    with RestClient() as rest:
        rest.get_server_capabilities().result()
