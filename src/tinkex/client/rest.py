"""RestClient and AdminClient: stored runs, checkpoints and sessions, and the account's usage.

Neither opens a session. Every method starts at once and returns a future: `await` it, or call
`.result()`. Arguments are checked before anything is sent; wrong ones raise ValueError.
"""

from __future__ import annotations

import datetime as dt

from tinkex.client.class_parts import made_of
from tinkex.client.futures.api_future import APIFuture
from tinkex.client.futures.twins import value_twin
from tinkex.client.rest_parts.rest_accounts import RestAccounts, UsageCalls
from tinkex.client.rest_parts.rest_base import RestBase
from tinkex.client.rest_parts.rest_checkpoints import RestCheckpoints
from tinkex.client.rest_parts.rest_experimental import RestExperimental
from tinkex.client.rest_parts.rest_runs import RestRuns
from tinkex.client.rest_parts.rest_sessions import RestSessions
from tinkex.types.account import (
    AuditEventType,
    AuditLogResponse,
    BillingUsageResponse,
    CurrentCheckpointStorageUsageResponse,
)


@made_of(RestBase, RestRuns, RestCheckpoints, RestSessions, RestAccounts, RestExperimental)
class RestClient(RestRuns, RestCheckpoints, RestSessions, RestAccounts, RestExperimental):
    """Training runs, checkpoints and sessions: look them up, share, copy and delete them.

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


@made_of(RestBase)
class AdminClient(UsageCalls):
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

    def get_audit_log(
        self, event_type: AuditEventType = "all", day: dt.date | None = None
    ) -> APIFuture[AuditLogResponse]:
        """Return the audit log of a day.

        Args:
            event_type: "all", "checkpoints", "projects", "teams" or "organizations".
            day: The day, from midnight to midnight UTC; today by default.

        Returns:
            A future of the day's events.

        Raises:
            ValueError: There is no such kind of events, or the day is not a date.

        Example:
            >>> saved = client.save_state("step-100").result()
            >>> admin.get_audit_log("checkpoints").result().entries[-1].event
            'checkpoint_saved'
        """
        return self._audit_log(event_type, day)

    get_audit_log_async = value_twin(get_audit_log)

    def get_billing_usage(
        self, starting_on: dt.datetime | str, ending_before: dt.datetime | str
    ) -> APIFuture[BillingUsageResponse]:
        """Return the usage, hour by hour.

        Args:
            starting_on: The first hour: a datetime, or text such as `2026-07-13T00:00:00Z`. It is
                in UTC if it has no zone.
            ending_before: The hour after the last one; at most 14 days later.

        Returns:
            A future of the usage, by hour.

        Raises:
            ValueError: A time cannot be read.

        Example:
            >>> admin.get_billing_usage("2026-07-13T00:00:00Z", "2026-07-14T00:00:00Z").result()
            BillingUsageResponse(...)
        """
        return self._billing_usage(starting_on, ending_before)

    get_billing_usage_async = value_twin(get_billing_usage)

    def get_current_checkpoint_storage_usage(
        self, project_id: str | None = None
    ) -> APIFuture[CurrentCheckpointStorageUsageResponse]:
        """Return the storage that checkpoints use now, in one project or in all.

        Args:
            project_id: The project; all by default.

        Returns:
            A future of count and bytes, by project and owner.

        Example:
            >>> saved = client.save_state("step-100").result()
            >>> [
            ...     item.size_bytes
            ...     for item in admin.get_current_checkpoint_storage_usage().result().data
            ... ]
            [...]
        """
        return self._storage_usage(project_id)

    get_current_checkpoint_storage_usage_async = value_twin(get_current_checkpoint_storage_usage)
