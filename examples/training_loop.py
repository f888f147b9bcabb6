"""The whole loop: tokens, a pass, an optimizer step, weights saved for sampling and, if wanted, a
sample of them.

Run it:  python examples/training_loop.py Settings: TINKER_PROMPT, TINKER_SAMPLE_AFTER_TRAIN (0; 1
samples from the trained weights), TINKER_SAMPLE_PROMPT; where to go: see common.py.
"""

import common

from tinkex import AdamParams, ModelInput, SamplingParams, ServiceClient

PROMPT = common.text("TINKER_PROMPT", "Fine-tuning sample prompt")
SAMPLE_PROMPT = common.text("TINKER_SAMPLE_PROMPT", "Hello from fine-tuned weights!")


def main() -> None:
    """Train one step and save."""
    with ServiceClient(base_url=common.BASE_URL) as service:
        model = common.base_model()
        common.step(f"creating a LoRA training client for {model}, rank 16")
        client = service.create_lora_training_client(model, rank=16).result()
        tokenizer = common.tokenizer_of(model)  # or client.get_tokenizer()
        tokens = tokenizer.encode(PROMPT)
        common.step(f"tokenised {PROMPT!r}: {len(tokens)} tokens")

        # Both calls return at once and are carried out in this order: no waiting in between.
        passed = client.forward_backward([common.next_token_datum(tokens)], "cross_entropy")
        stepped = client.optim_step(AdamParams())
        metrics = passed.result().metrics
        common.step("forward_backward is done")
        print(f"[metrics] {metrics}")
        common.proof(
            "loss:sum" in metrics, f"the pass reports loss:sum ({metrics.get('loss:sum')})"
        )
        print(f"[metrics] {stepped.result().metrics}")
        common.step("optim_step is done")

        saved = client.save_weights_for_sampler("sampler-weights", ttl_seconds=common.DAY).result()
        common.step("saved the weights for sampling")
        print(f"[result] {saved.path}")
        common.proof(
            saved.path.endswith("/sampler_weights/sampler-weights"),
            "the checkpoint has the name it was given",
        )

        if common.flag("TINKER_SAMPLE_AFTER_TRAIN"):
            sampler = service.create_sampling_client(model_path=saved.path).result()
            prompt = ModelInput.from_ints(tokenizer.encode(SAMPLE_PROMPT))
            response = sampler.sample(prompt, 1, SamplingParams(max_tokens=32), timeout=60).result()
            common.step(f"sampled from the trained weights: {SAMPLE_PROMPT!r}")
            common.show_samples(response.sequences, tokenizer)
    common.step("closed the session")
    print("[done]")


if __name__ == "__main__":
    common.run(main)
