"""Numbers of what clients do: how many requests were made, and how long they took.

Run it:  python examples/metrics_live.py
Settings: TINKER_PROMPT, TINKER_MAX_TOKENS (32), TINKER_TEMPERATURE (0.7), TINKER_NUM_SAMPLES (1),
TINKER_SAMPLE_TIMEOUT (30000 ms); where to go: see common.py.
"""

import common

from tinkex import ModelInput, SamplingParams, ServiceClient, metrics

PROMPT = common.text("TINKER_PROMPT", "Quick metrics check from Tinkex")


def main() -> None:
    """Sample, then look at the numbers."""
    metrics.reset()  # counting begins with the first call of any of these functions
    with ServiceClient(base_url=common.BASE_URL) as service:
        model = common.base_model()
        tokenizer = common.tokenizer_of(model)
        sampler = service.create_sampling_client(base_model=model).result()
        params = SamplingParams(
            max_tokens=common.whole("TINKER_MAX_TOKENS", 32),
            temperature=common.number("TINKER_TEMPERATURE", 0.7),
        )
        timeout = common.whole("TINKER_SAMPLE_TIMEOUT", 30_000) / 1000
        prompt = ModelInput.from_ints(tokenizer.encode(PROMPT))
        response = sampler.sample(
            prompt, common.whole("TINKER_NUM_SAMPLES", 1), params, timeout=timeout
        ).result()
        common.show_samples(response.sequences, tokenizer)
        # a program may count things of its own
        metrics.increment("samples", len(response.sequences))

        metrics.flush()
        seen = metrics.snapshot()

    common.section("Counters")
    for name, count in sorted(seen.counters.items()):
        print(f"{name}: {count}")
    took = seen.histograms["tinkex_request_duration_ms"]
    common.section("Latency")
    print(
        f"{took.count} requests, mean {took.mean:.1f} ms, p50 {took.p50:.1f}, p95 {took.p95:.1f}, "
        f"p99 {took.p99:.1f}"
    )
    total, succeeded = (
        seen.counters["tinkex_requests_total"],
        seen.counters.get("tinkex_requests_success", 0),
    )
    common.proof(total == succeeded >= 3, f"all {total} requests succeeded")
    percentiles = [took.p50 or 0, took.p95 or 0, took.p99 or 0]
    common.proof(percentiles == sorted(percentiles), "the percentiles are in order")


if __name__ == "__main__":
    common.run(main)
