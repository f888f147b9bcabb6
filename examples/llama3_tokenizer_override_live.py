"""Llama 3's own repositories are closed, so its tokenizer is taken from an open copy; this shows
the rule at work.

Run it:  python examples/llama3_tokenizer_override_live.py
Settings: TINKER_PROMPT; where to go: see common.py.

The backend inside this process has no Llama: there the rule is shown by name, and tokens come from
the bundled model.
"""

import common

from tinkex import ModelInput, SamplingParams, ServiceClient, tokenizers

OPEN_COPY = "thinkingmachineslabinc/meta-llama-3-tokenizer"
BEGIN_OF_TEXT = 128_000
PROMPT = common.text("TINKER_PROMPT", "Which tokenizer does this model use?")


def main() -> None:
    """Show which tokenizer a name means, then sample and decode with it."""
    common.section("Which tokenizer")
    for name in (
        "meta-llama/Llama-3.1-8B",
        "meta-llama/Llama-3.3-70B-Instruct",
        "Qwen/Qwen3-8B",
        "org/model/variant",
    ):
        print(f"{name} -> {tokenizers.get_tokenizer_id(name)}")
    common.proof(
        tokenizers.get_tokenizer_id(common.LLAMA) == OPEN_COPY, f"Llama 3 is read with {OPEN_COPY}"
    )
    common.proof(
        tokenizers.get_tokenizer_id("Qwen/Qwen3-8B") == "Qwen/Qwen3-8B",
        "other models are read with their own",
    )

    with ServiceClient(base_url=common.BASE_URL) as service:
        model = common.base_model()
        common.section(f"Sampling from {model}")
        tokenizer = common.tokenizer_of(model)
        print(f"tokenizer id: {tokenizers.get_tokenizer_id(model)}")
        ids = tokenizer.encode(PROMPT)
        print(f"prompt: {PROMPT!r}\nids:    {ids}")
        sampler = service.create_sampling_client(base_model=model).result()
        params = SamplingParams(max_tokens=16, temperature=0.7)
        response = sampler.sample(ModelInput.from_ints(ids), 1, params, timeout=60).result()
        texts = common.show_samples(response.sequences, tokenizer)
    if tokenizers.get_tokenizer_id(model) == OPEN_COPY:
        common.proof(ids[0] == BEGIN_OF_TEXT, f"the prompt begins with Llama 3's {BEGIN_OF_TEXT}")
    common.proof(
        tokenizer.decode(ids, skip_special_tokens=True) == PROMPT, "decoding gives the prompt back"
    )
    common.proof(
        len(texts) == 1 and response.sequences[0].tokens, "a sample came back and was decoded"
    )


if __name__ == "__main__":
    common.run(main)
