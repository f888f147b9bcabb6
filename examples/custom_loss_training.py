"""A loss of your own, written in torch: it gets the log-probabilities, its gradient goes back to
the server.

Run it:  python examples/custom_loss_training.py
Where to go: see common.py.
"""

import time

import common
import torch

from tinkex import AdamParams, Datum, ServiceClient

PROMPT = "Name three planets in the solar system."


def negative_log_likelihood(
    data: list[Datum], logprobs: list[torch.Tensor]
) -> tuple[torch.Tensor, dict[str, float]]:
    """The mean negative log-likelihood, with its perplexity as a metric; one tensor comes for each
    datum.
    """
    loss = -torch.cat(logprobs).mean()
    return loss, {"custom_perplexity": float(loss.detach().exp())}


def main() -> None:
    """One pass with the custom loss, one optimizer step."""
    with ServiceClient(base_url=common.BASE_URL) as service:
        model = common.base_model()
        client = service.create_lora_training_client(model, rank=16).result()
        tokens = common.tokenizer_of(model).encode(PROMPT)
        print(f"training {model} on {PROMPT!r} ({len(tokens)} tokens)")

        began = time.monotonic()
        output = client.forward_backward_custom(
            [common.next_token_datum(tokens)], negative_log_likelihood
        ).result()
        print(f"forward_backward_custom took {time.monotonic() - began:.2f} s")
        print(f"output type: {output.loss_fn_output_type}")
        for name, value in sorted(output.metrics.items()):
            print(f"  {name}: {value:.6f}")
        print(f"first output: {output.loss_fn_outputs[0]['logprobs'].tolist()}")
        common.proof(
            output.metrics.get("custom_perplexity", 0) >= 1,
            "custom_perplexity is among the metrics",
        )
        common.proof(len(output.metrics) > 2, "the server's metrics are beside it")

        stepped = client.optim_step(AdamParams(learning_rate=1e-4)).result()
        print(f"optim_step: {stepped.metrics}")
        again = client.forward_backward_custom(
            [common.next_token_datum(tokens)], negative_log_likelihood
        ).result()
    before, after = output.metrics["loss:sum"], again.metrics["loss:sum"]
    common.proof(after < before, f"the step lowered the loss ({before:.4f} to {after:.4f})")


if __name__ == "__main__":
    common.run(main)
