"""Ten regularizers in a loss that really trains: `forward_backward_custom` with `regularizers=`.

Run it:  python examples/structured_regularizers_live.py
Where to go: see common.py. The terms one by one, with known numbers: structured_regularizers.py.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import common
import torch

from tinkex import AdamParams, Datum, RegularizerSpec, ServiceClient
from tinkex.regularizers import (
    L1,
    L2,
    Consistency,
    ElasticNet,
    Entropy,
    GradientPenalty,
    KLDivergence,
    Orthogonality,
)

PROMPT = "The quick brown fox jumps over the lazy dog."


def base_loss(
    data: list[Datum], logprobs: list[torch.Tensor]
) -> tuple[torch.Tensor, dict[str, float]]:
    """The mean negative log-likelihood of all tokens."""
    loss = -torch.cat(logprobs).mean()
    return loss, {"base_nll": float(loss.detach()), "base_perplexity": float(loss.detach().exp())}


def uniform(data: Sequence[Datum]) -> list[torch.Tensor]:
    """What the divergences compare with: all tokens of a text equally likely."""
    lengths = [datum.model_input.length for datum in data]
    return [torch.full((length,), -math.log(length)) for length in lengths]


def rotated(
    data: Sequence[Datum], logprobs: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, Mapping[str, Any]]:
    """Consistency with the same log-probabilities, rotated by one place; a plain function is a
    regularizer, too.
    """
    pairs = [
        Datum(datum.model_input, {"original_logprobs": part.detach().roll(1)})
        for datum, part in zip(data, logprobs, strict=True)
    ]
    return Consistency().compute(pairs, logprobs)


def sum_of_squares(logprobs: Sequence[torch.Tensor]) -> torch.Tensor:
    """The function whose gradient the penalty holds near the length 1."""
    return torch.cat(list(logprobs)).square().sum()


TERMS = [
    RegularizerSpec(L1(), 0.01, "l1"),
    RegularizerSpec(L2(center="mean"), 0.005, "l2"),
    RegularizerSpec(ElasticNet(l1_ratio=0.6), 0.002, "elastic_net"),
    RegularizerSpec(Entropy(mode="maximize", temperature=0.5), 0.001, "entropy"),
    RegularizerSpec(KLDivergence(compute_reference=uniform), 0.01, "kl_forward"),
    RegularizerSpec(
        KLDivergence(compute_reference=uniform, direction="reverse"), 0.01, "kl_reverse"
    ),
    RegularizerSpec(KLDivergence(compute_reference=uniform, symmetric=True), 0.005, "kl_symmetric"),
    RegularizerSpec(rotated, 0.02, "consistency"),
    RegularizerSpec(Orthogonality(), 0.003, "orthogonality"),
    RegularizerSpec(GradientPenalty(sum_of_squares), 0.001, "gradient_penalty"),
]


def main() -> None:
    """One step on the composed loss."""
    with ServiceClient(base_url=common.BASE_URL) as service:
        model = common.base_model()
        client = service.create_lora_training_client(model, rank=16).result()
        data = [common.next_token_datum(common.tokenizer_of(model).encode(PROMPT))]
        print(f"training {model} on {PROMPT!r} with {len(TERMS)} regularizers")
        output = client.forward_backward_custom(data, base_loss, regularizers=TERMS).result()
        stepped = client.optim_step(AdamParams(learning_rate=1e-4)).result()

    names = ["base_nll", "base_perplexity", *(f"{term.name}/value" for term in TERMS)]
    common.section("The loss and its terms")
    for name in names:
        print(f"{name:<24} {output.metrics.get(name, math.nan):>12.6f}")
    common.section("All metrics")
    for name, value in sorted(output.metrics.items()):
        if name not in names:
            print(f"{name:<32} {value:>12.6f}")
    print(f"optim_step: {stepped.metrics}")
    found = [output.metrics[name] for name in names if name in output.metrics]
    common.proof(
        len(found) == 12, "the loss, its perplexity and all ten terms are among the metrics"
    )
    common.proof(all(map(math.isfinite, found)), "all of them are finite")
    total = output.metrics["base_nll"] + output.metrics["regularizer_total"]
    common.proof(
        math.isclose(output.metrics["loss:sum"], total, rel_tol=1e-4),
        "the loss is the sum of its parts",
    )


if __name__ == "__main__":
    common.run(main)
