"""Telemetry beside a sample: a reporter that sends events in the background, and a log line for
every request.

Run it:  python examples/telemetry_live.py Settings: TINKER_PROMPT, TINKER_TELEMETRY (0 switches
telemetry off, and this example with it); where to go: see common.py. On the hosted service a client
reports by itself (`service.get_telemetry()`); elsewhere only who asks for it.
"""

import logging
import sys
from collections.abc import Mapping
from typing import Any

import common

from tinkex import HttpClient, ModelInput, SamplingParams, ServiceClient, events, telemetry

PROMPT = common.text("TINKER_PROMPT", "Write a single sentence about telemetry.")


def main() -> None:
    """Report the beginning and the end of a sample."""
    logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
    # it is in this process, and would tell the same
    logging.getLogger("tinkex.server").setLevel(logging.WARNING)
    posts: list[str] = []

    def note(name: str, measurements: Mapping[str, float], metadata: Mapping[str, Any]) -> None:
        if str(metadata["path"]).endswith("telemetry"):
            posts.append(str(metadata["result"]))

    with (
        ServiceClient(base_url=common.BASE_URL) as service,
        HttpClient(base_url=common.BASE_URL) as http,
    ):
        if not telemetry.is_enabled(http.config):
            common.skipped("telemetry is off: TINKER_TELEMETRY says so")
            return
        model = common.base_model()
        tokenizer = common.tokenizer_of(model)
        sampler = service.create_sampling_client(base_model=model).result()
        reporter = telemetry.init(service.session_id, http.config, common.TelemetryPost(http))

        logger = telemetry.attach_logger()
        events.attach("telemetry-posts", [events.HTTP_STOP], note)
        telemetry.log(reporter, "example.start", {"model": model})
        prompt = ModelInput.from_ints(tokenizer.encode(PROMPT))
        response = sampler.sample(prompt, 1, SamplingParams(max_tokens=32), timeout=15).result()
        common.show_samples(response.sequences, tokenizer)
        telemetry.log(reporter, "example.end", {"sequences": len(response.sequences)})
        flushed = telemetry.flush(reporter, sync=True)
        telemetry.detach(logger)
        events.detach("telemetry-posts")
        telemetry.stop(reporter)
    common.proof(
        flushed and posts and set(posts) == {"ok"},
        f"{len(posts)} telemetry request(s), all answered well",
    )


if __name__ == "__main__":
    common.run(main)
