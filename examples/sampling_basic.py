"""The first sample: a session, a sampling client, a prompt as tokens, samples, and their text.

Run it:  python examples/sampling_basic.py
Settings: TINKER_PROMPT, TINKER_MAX_TOKENS (64), TINKER_TEMPERATURE (0.7), TINKER_NUM_SAMPLES (1),
TINKER_SAMPLE_TIMEOUT (30000 ms); where to go: see common.py.
"""

import common

from tinkex import ModelInput, SamplingParams, ServiceClient

PROMPT = common.text("TINKER_PROMPT", "Hello from Tinkex!")
NUM_SAMPLES = common.whole("TINKER_NUM_SAMPLES", 1)
TIMEOUT_MS = common.whole("TINKER_SAMPLE_TIMEOUT", 30_000)


def main() -> None:
    """Draw samples and print them."""
    with ServiceClient(base_url=common.BASE_URL) as service:
        model = common.base_model()
        sampler = service.create_sampling_client(base_model=model).result()
        tokenizer = common.tokenizer_of(model)  # or sampler.get_tokenizer()

        prompt = ModelInput.from_ints(tokenizer.encode(PROMPT))
        params = SamplingParams(
            max_tokens=common.whole("TINKER_MAX_TOKENS", 64),
            temperature=common.number("TINKER_TEMPERATURE", 0.7),
        )
        print(
            f"Sampling {NUM_SAMPLES} sequence(s) from {model}: {PROMPT!r} ({prompt.length} tokens)"
        )
        # sample() returns at once; .result() waits. Inside a coroutine: await sampler.sample(...)
        response = sampler.sample(prompt, NUM_SAMPLES, params, timeout=TIMEOUT_MS / 1000).result()

        print(f"Received {len(response.sequences)} sequence(s):")
        texts = common.show_samples(response.sequences, tokenizer)
    common.proof(len(texts) == NUM_SAMPLES, f"as many samples as were asked for: {NUM_SAMPLES}")
    common.proof(all(sequence.tokens for sequence in response.sequences), "every sample has tokens")


if __name__ == "__main__":
    common.run(main)
