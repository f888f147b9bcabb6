"""Which route keeps a session alive: `session_heartbeat` does; `heartbeat`, which older texts name,
is not there.

Run it:  python examples/heartbeat_probe.py Where to go: see common.py. Clients send heartbeats by
themselves; this is for whoever writes a server or a client.
"""

import common

from tinkex import HttpClient, NotFoundError, types


def main() -> None:
    """Open a session and knock at both doors."""
    with HttpClient(base_url=common.BASE_URL) as http:
        opened = http.post("create_session", types.CreateSessionRequest(tags=["example"])).result()
        request = types.SessionHeartbeatRequest(session_id=opened["session_id"])

        answer = http.post("session_heartbeat", request, response="wrapped").result()
        print(f"POST /api/v1/session_heartbeat -> {answer.status_code}")
        try:
            http.post("heartbeat", request, max_retries=0).result()
            status = 200
        except NotFoundError as error:
            status = error.status_code
        print(f"POST /api/v1/heartbeat         -> {status}")
    common.proof(
        answer.status_code == 200 and status == 404, "the first is there, the second is not"
    )


if __name__ == "__main__":
    common.run(main)
