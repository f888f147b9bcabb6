"""RestClient and AdminClient: runs, checkpoints, sessions, and usage.

Neither opens a session. Every method starts at once and returns a future: `await` it, or call
`.result()`. Arguments are checked before anything is sent; wrong ones raise ValueError.
"""

from __future__ import annotations

from tinkex.client.rest_parts.rest_accounts import RestAccounts, RestUsage
from tinkex.client.rest_parts.rest_base import RestBase
from tinkex.client.rest_parts.rest_checkpoints import RestCheckpoints
from tinkex.client.rest_parts.rest_runs import RestExperimental, RestRuns, RestSessions
from tinkex.client.session_client import made_of


@made_of(RestBase, RestRuns, RestCheckpoints, RestSessions, RestAccounts, RestExperimental)
class RestClient(RestRuns, RestCheckpoints, RestSessions, RestAccounts, RestExperimental):
    """Looks up, shares, copies and deletes runs, checkpoints and sessions.

    In the examples `rest` is one; `help(tinkex)` shows how the others, such as `client`, are made.

    Args:
        base_url: The server; TINKER_BASE_URL by default.
        api_key: The key; TINKER_API_KEY by default.
        config: All settings at once, in place of these.

    Example:
        >>> saved = client.save_state("step-100").result()
        >>> with RestClient(base_url="local") as rest:
        ...     for checkpoint in rest.list_checkpoints(client.model_id).result().checkpoints:
        ...         print(checkpoint.tinker_path, checkpoint.size_bytes)
        tinker://.../weights/step-100 ...
    """


@made_of(RestBase, RestUsage)
class AdminClient(RestUsage):
    """The audit log and the usage of an organization, for its administrators.

    Args:
        base_url: The server; TINKER_BASE_URL by default.
        api_key: The key; TINKER_API_KEY by default.
        config: All settings at once, in place of these.

    Example:
        >>> with AdminClient(base_url="local") as admin:
        ...     admin.get_billing_usage("2026-07-13T00:00:00Z", "2026-07-14T00:00:00Z").result()
        BillingUsageResponse(...)
    """
