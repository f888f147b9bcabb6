"""Look at a server: the models it offers, its health, and the log-probabilities of a prompt's
tokens.

Run it:  python examples/live_capabilities_and_logprobs.py
Settings: TINKER_PROMPT; where to go: see common.py.
"""

import common

from tinkex import HttpClient, ModelInput, RestClient, ServiceClient

PROMPT = common.text("TINKER_PROMPT", "Hello from Tinkex!")


def main() -> None:
    """Ask for capabilities and health, then score a prompt."""
    with (
        ServiceClient(base_url=common.BASE_URL) as service,
        HttpClient(base_url=common.BASE_URL) as http,
    ):
        common.section("Server capabilities")
        with RestClient(base_url=common.BASE_URL) as rest:  # it needs no session
            capabilities = rest.get_server_capabilities().result()
        for supported in capabilities.supported_models:
            print(
                f"- {supported.model_name}: context {supported.max_context_length}, "
                f"trainable {supported.trainable}, sampleable {supported.sampleable}"
            )
        print(f"names only: {', '.join(str(name) for name in capabilities.model_names())}")

        common.section("Health")
        health = http.get("healthz").result()  # an endpoint by its path: answers come as plain data
        print(f"status: {health['status']}")
        common.proof(health["status"] in ("ok", "ready"), "the server is healthy")

        common.section("Prompt log-probabilities")
        model = common.base_model()
        tokenizer = common.tokenizer_of(model)
        tokens = tokenizer.encode(PROMPT)
        sampler = service.create_sampling_client(base_model=model).result()
        logprobs = sampler.compute_logprobs(ModelInput.from_ints(tokens), timeout=60).result()
        print(f"{model}: {PROMPT!r}")
        for token, logprob in zip(tokens, logprobs, strict=True):
            said = "none: nothing comes before it" if logprob is None else f"{logprob:.4f}"
            print(f"  {token:6d} {tokenizer.decode([token])!r:>12}  {said}")
    common.proof(len(logprobs) == len(tokens), f"one entry for each of the {len(tokens)} tokens")
    common.proof(logprobs[0] is None, "the first entry is none")
    common.proof(
        all(value is not None and value <= 0 for value in logprobs[1:]),
        "the others are log-probabilities",
    )


if __name__ == "__main__":
    common.run(main)
