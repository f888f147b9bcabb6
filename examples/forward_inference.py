"""A pass without a gradient: the log-probabilities of a text, as a torch tensor.

Run it:  python examples/forward_inference.py
Settings: TINKER_PROMPT; where to go: see common.py.
"""

import common

from tinkex import ServiceClient

PROMPT = common.text("TINKER_PROMPT", "Hello from forward inference!")


def main() -> None:
    """Compute and describe the log-probabilities."""
    with ServiceClient(base_url=common.BASE_URL) as service:
        model = common.base_model()
        client = service.create_lora_training_client(model, rank=16).result()
        datum = common.next_token_datum(common.tokenizer_of(model).encode(PROMPT))
        print(f"forward pass of {model} over {PROMPT!r}")
        output = client.forward([datum], "cross_entropy").result()

    print(f"output type: {output.loss_fn_output_type}")
    print(f"metrics:     {output.metrics}")
    # to_numpy() where there is no torch
    logprobs = output.loss_fn_outputs[0]["logprobs"].to_torch()
    print(f"shape {list(logprobs.shape)}, type {logprobs.dtype}")
    print(f"first 5: {[round(value, 4) for value in logprobs[:5].tolist()]}")
    print(f"mean {logprobs.mean():.4f}, min {logprobs.min():.4f}, max {logprobs.max():.4f}")
    count = datum.model_input.length
    common.proof(
        list(logprobs.shape) == [count],
        f"one log-probability for each of the {count} predicted tokens",
    )
    common.proof(bool(logprobs.isfinite().all()), "all of them are finite")


if __name__ == "__main__":
    common.run(main)
