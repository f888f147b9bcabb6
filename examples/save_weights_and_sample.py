"""From training straight to sampling: the weights are saved and a sampling client is made of them
in one call.

Run it:  python examples/save_weights_and_sample.py Settings: TINKER_PROMPT, TINKER_MAX_TOKENS (32),
TINKER_LORA_RANK (8), TINKER_SAVE_TTL_SECONDS (a checkpoint with a name that expires after so many
seconds, 3600 or more, instead of a sampler that lives as long as the session); where to go: see
common.py.
"""

import common

from tinkex import ModelInput, SamplingClient, SamplingParams, ServiceClient, TrainingClient

PROMPT = common.text("TINKER_PROMPT", "Hello from Tinkex!")
RANK = common.whole("TINKER_LORA_RANK", 8)
TTL = common.whole("TINKER_SAVE_TTL_SECONDS", 0)


def sampler_of(service: ServiceClient, client: TrainingClient) -> SamplingClient:
    """A sampler of the run's weights as they are now."""
    if not TTL:
        print("saving the weights for this session")
        return client.save_weights_and_get_sampling_client().result()
    saved = client.save_weights_for_sampler("save-and-sample", ttl_seconds=TTL).result()
    print(f"saved {saved.path}, to expire in {TTL} s")
    return service.create_sampling_client(model_path=saved.path).result()


def main() -> None:
    """Make a run, save it, sample."""
    with ServiceClient(base_url=common.BASE_URL) as service:
        model = common.base_model("Qwen/Qwen3-8B")
        print(f"a LoRA training client for {model}, rank {RANK}")
        client = service.create_lora_training_client(model, rank=RANK).result()
        sampler = sampler_of(service, client)

        # the sampler knows which model is under it
        tokenizer = sampler.get_tokenizer(backend="tokenizers")
        print(f"tokenizer: {len(tokenizer)} tokens, of {sampler.get_base_model()}")
        common.proof(
            sampler.get_base_model() == model,
            "the sampler's tokenizer was found through its base model",
        )

        prompt = ModelInput.from_ints(tokenizer.encode(PROMPT))
        params = SamplingParams(max_tokens=common.whole("TINKER_MAX_TOKENS", 32), temperature=0.7)
        response = sampler.sample(prompt, 1, params, timeout=60).result()
        common.show_samples(response.sequences, tokenizer)
    common.proof(response.sequences[0].tokens, "a sample of the saved weights came back")


if __name__ == "__main__":
    common.run(main)
