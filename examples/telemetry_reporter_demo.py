"""Everything a telemetry reporter does: events of four severities, an exception, flushing,
draining, its end.

Run it:  python examples/telemetry_reporter_demo.py
Settings: TINKER_PROMPT; where to go: see common.py.
"""

import common

from tinkex import HttpClient, ModelInput, SamplingParams, ServiceClient, telemetry

PROMPT = common.text("TINKER_PROMPT", "Explain telemetry in one sentence.")


def main() -> None:
    """Seven steps."""
    with (
        ServiceClient(base_url=common.BASE_URL) as service,
        HttpClient(base_url=common.BASE_URL) as http,
    ):
        model = common.base_model()
        sampler = service.create_sampling_client(base_model=model).result()
        post = common.TelemetryPost(http)
        reporter = telemetry.Reporter(post, service.session_id)
        print(f"1. a reporter for {reporter.session_id}")

        for severity in ("debug", "info", "warning", "error"):
            reporter.log(f"demo.{severity}", {"severity": severity}, severity)
        print("2. logged an event of each severity")

        try:
            raise RuntimeError("a failure that is caught")
        except RuntimeError as error:
            reporter.log_exception(error, "warning")
        print("3. reported an exception that is not fatal")

        tokenizer = common.tokenizer_of(model)
        prompt = ModelInput.from_ints(tokenizer.encode(PROMPT))
        response = sampler.sample(prompt, 1, SamplingParams(max_tokens=32), timeout=60).result()
        reporter.log("demo.sampled", {"tokens": len(response.sequences[0].tokens)})
        print("4. sampled, and logged that:")
        common.show_samples(response.sequences, tokenizer)

        drained = reporter.flush(sync=True, wait_drained=True)
        print(f"5. flushed; drained: {str(drained).lower()}")
        common.proof(drained, "nothing waits to be sent")

        for number in range(5):
            reporter.log("demo.batch", {"number": number})
        print("6. logged 5 more events")

        stopped = reporter.stop()
        print(
            f"7. stopped: {str(stopped).lower()}; later events are dropped: "
            f"{not reporter.log('too.late')}"
        )
    common.section("What was sent")
    for kind in dict.fromkeys(post.sent):
        print(f"{kind}: {post.sent.count(kind)}")
    common.proof(post.sent.count("GENERIC_EVENT") == 10, "ten events of our own")
    common.proof("UNHANDLED_EXCEPTION" in post.sent, "the exception")
    common.proof(
        post.sent[0] == "SESSION_START" and post.sent[-1] == "SESSION_END", "SESSION_END came last"
    )


if __name__ == "__main__":
    common.run(main)
