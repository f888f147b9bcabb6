"""An operation that fails twice and then succeeds, with every attempt told; and exceptions that are
reported.

Run it:  python examples/retry_and_capture.py      (needs no server)
Settings: with TINKER_API_KEY the exception is also reported as telemetry; where to: see common.py.
"""

import asyncio
from collections.abc import Mapping
from typing import Any

import common

from tinkex import HttpClient, InternalServerError, RetryConfig, events, telemetry, types
from tinkex.client.http.retry import RetryHandler

RETRIES = [events.RETRY_START, events.RETRY_RETRY, events.RETRY_STOP, events.RETRY_FAILED]


def retry() -> None:
    """Try again after 200 and 400 ms."""
    calls: list[int] = []
    delays: list[int] = []

    def tell(name: str, measurements: Mapping[str, float], metadata: Mapping[str, Any]) -> None:
        what = name.rpartition(".")[2]
        line = f"  attempt {metadata['attempt']}: {what}"
        if name == events.RETRY_RETRY:
            delays.append(round(measurements["delay_ms"]))
            line += f" in {delays[-1]} ms, because: {metadata['error']}"
        print(line)

    async def shaky() -> str:
        calls.append(len(calls))
        if len(calls) < 3:
            raise InternalServerError(f"simulated failure {len(calls)}")
        return "done"

    events.attach("retries", RETRIES, tell)
    config = RetryConfig(max_retries=2, retry_delay_base=0.2, jitter_factor=0.0)
    result = asyncio.run(RetryHandler(config, "shaky").execute(shaky))
    events.detach("retries")
    print(f"result: {result!r} after {len(calls)} attempts")
    common.proof(result == "done" and calls == [0, 1, 2], "it succeeded at the third attempt")
    common.proof(delays == [200, 400], "it waited 200 and 400 ms")


def capture(reporter: telemetry.Reporter | None) -> bool:
    """Report a fatal exception on its way out; whether it came through."""

    @telemetry.capture_exceptions(reporter, fatal=True)
    def fails() -> None:
        raise ValueError("simulated fatal error")

    try:
        fails()
    except ValueError as error:
        print(f"captured and passed on: {error}")
        return True
    return False


def main() -> None:
    """Both parts."""
    common.section("Retry")
    retry()
    common.section("Capture")
    if not common.API_KEY:
        print("without TINKER_API_KEY nothing is reported")
        common.proof(capture(None), "the exception came through")
        return
    with HttpClient(base_url=common.BASE_URL) as http:
        opened = http.post("create_session", types.CreateSessionRequest(tags=["example"])).result()
        post = common.TelemetryPost(http)
        reporter = telemetry.Reporter(post, opened["session_id"])
        common.proof(capture(reporter), "the exception came through")
        reporter.stop()
    print(f"sent: {', '.join(post.sent)}")
    common.proof("UNHANDLED_EXCEPTION" in post.sent, "it was reported")


if __name__ == "__main__":
    common.run(main)
