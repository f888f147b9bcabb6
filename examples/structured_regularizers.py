"""A tour of regularizers: named, weighted terms that are added to a loss. All of it offline, with
known numbers.

Run it:  python examples/structured_regularizers.py      (needs torch, no server)

Every number that matters is compared with one worked out beforehand; the program ends with status 1
if one is off.
"""

import asyncio
import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import common
import torch

from tinkex import Datum, ModelInput, events, regularizers
from tinkex.regularizers import (
    L1,
    L2,
    Consistency,
    CustomLossOutput,
    ElasticNet,
    Entropy,
    GradientPenalty,
    KLDivergence,
    Orthogonality,
    RegularizerError,
    RegularizerSpec,
)

LOGPROBS = torch.tensor([-0.5, -1.2, -0.8, -2.1, -0.3, -1.5, -0.9, -1.8, -0.6, -1.1])
REFERENCE = torch.tensor([0.22, 0.18, 0.12, 0.10, 0.08, 0.07, 0.06, 0.06, 0.06, 0.05]).log()
PAIR = torch.tensor([-0.45, -1.05, -0.75, -2.05, -0.25, -1.35, -0.85, -1.65, -0.55, -1.05])

# name, weight, the term, and what must come out: its value and the norm of its gradient
TERMS: list[tuple[str, float, Any, float, float]] = [
    ("l1_sparsity", 0.01, L1(), 10.8000, 3.1623),
    ("entropy", 0.001, Entropy(mode="maximize"), -3.1972, 0.6867),
    ("entropy_at_half", 0.001, Entropy(mode="maximize", temperature=0.5), -1.9354, 0.4833),
    ("l2_centred", 0.005, L2(center="mean"), 3.0360, 3.4848),
    ("elastic_net", 0.002, ElasticNet(l1_ratio=0.6), 12.3600, 4.8349),
    ("kl_forward", 0.01, KLDivergence(REFERENCE), 6.0870, 3.7822),
    ("kl_reverse", 0.01, KLDivergence(REFERENCE, direction="reverse"), -1.1569, 0.3603),
    ("kl_symmetric", 0.01, KLDivergence(REFERENCE, symmetric=True), 2.4650, 1.7687),
    ("consistency", 0.02, Consistency(pair_field="pair"), 0.0085, 0.0583),
    ("orthogonality", 0.003, Orthogonality(), 0.0, 0.0),
    ("gradient_penalty", 0.001, GradientPenalty(torch.sum), 4.6754, 0.0),
]


def near(found: float | None, expected: float) -> bool:
    """Whether a number is the expected one to four decimals."""
    return found is not None and abs(found - expected) < 6e-5


def base_loss(
    data: Sequence[Datum], logprobs: torch.Tensor
) -> tuple[torch.Tensor, Mapping[str, Any]]:
    """The loss that the terms are added to: the mean negative log-likelihood."""
    loss = -logprobs.mean()
    return loss, {"perplexity": loss.exp()}


class TopHeavy:
    """A regularizer as an object: anything with `compute`; a `name()` is what its numbers are
    called.
    """

    def name(self) -> str:
        """What it is called."""
        return "top_heavy"

    def compute(
        self, data: Sequence[Datum], logprobs: Any, opts: Mapping[str, Any]
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """The largest probability."""
        largest = logprobs.exp().max()
        return largest * opts.get("scale", 1.0), {"at": int(logprobs.argmax())}


def table(output: CustomLossOutput) -> None:
    """Print a composed loss, a line for each part."""
    assert output.base_loss is not None
    print(f"{'item':<18}{'weight':>8}{'value':>10}{'added':>10}{'grad norm':>11}")
    print(
        f"{'base':<18}{'-':>8}{output.base_loss.value:>10.4f}{'-':>10}"
        f"{output.base_loss.grad_norm or 0:>11.4f}"
    )
    for name, term in output.regularizers.items():
        print(
            f"{name:<18}{term.weight:>8}{term.value:>10.4f}{term.contribution:>10.4f}"
            f"{term.grad_norm or 0:>11.4f}"
        )
    print(
        f"{'total':<18}{'':>8}{output.loss_total:>10.4f}{output.regularizer_total:>10.4f}"
        f"{output.total_grad_norm or 0:>11.4f}"
    )


def refused(what: str, attempt: Callable[[], object]) -> None:
    """Show that something is refused."""
    try:
        attempt()
    except (ValueError, KeyError, RegularizerError) as error:
        print(f"- {what}: {type(error).__name__}: {error}")
    else:
        common.fail(f"{what} was not refused")


def main() -> None:
    """Walk through fifteen sections."""
    common.section("1. Specs: what is added, with which weight, under which name")
    specs = [RegularizerSpec(term, weight, name) for name, weight, term, *_ in TERMS]
    for spec in specs:
        print(f"- {spec.name} x {spec.weight}: {type(spec.fn).__name__}")

    common.section("2. The base loss")
    loss, metrics = base_loss([], LOGPROBS)
    print(f"-mean = {loss:.4f}, perplexity {metrics['perplexity']:.4f}")
    common.proof(
        near(float(loss), 1.08) and near(float(metrics["perplexity"]), 2.9447), "1.0800 and 2.9447"
    )

    common.section("3. Data: examples may carry what terms compare with")
    tokens = list(range(len(PAIR)))
    data = [Datum(ModelInput.from_ints(tokens), {"target_tokens": tokens, "pair": PAIR})]
    print(
        f"one datum with the inputs {', '.join(data[0].loss_fn_inputs)}; {LOGPROBS.numel()} "
        "log-probabilities"
    )

    common.section("4. Without regularizers")
    alone = regularizers.compute(data, LOGPROBS, base_loss)
    print(f"loss {alone.loss_total:.4f}, added {alone.regularizer_total:.4f}")
    common.proof(
        near(alone.loss_total, 1.08) and alone.regularizer_total == 0,
        "the base loss is all there is",
    )

    common.section("5. Eleven regularizers, and the norms of their gradients")
    output = regularizers.compute(data, LOGPROBS, base_loss, specs, track_grad_norms=True)
    table(output)
    for name, weight, _, value, norm in TERMS:
        term = output.regularizers[name]
        common.proof(
            near(term.value, value) and near(term.contribution, weight * value),
            f"{name} is {value:.4f}",
        )
        common.proof(near(term.grad_norm, norm), f"its gradient has the norm {norm:.4f}")
    common.proof(
        near(output.loss_total, 1.3016) and near(output.regularizer_total, 0.2216),
        "the loss is 1.3016",
    )

    common.section("6. Gradient norms of the whole")
    assert output.base_loss is not None
    print(f"base {output.base_loss.grad_norm:.4f}, with all terms {output.total_grad_norm:.4f}")
    common.proof(near(output.base_loss.grad_norm, 0.3162), "the base's is 0.3162")
    common.proof(near(output.total_grad_norm, 0.3195), "the whole's is 0.3195")

    common.section("7. Side by side or one after the other")
    seconds = {}
    outputs = {}
    for parallel in (True, False):
        began = time.perf_counter()
        outputs[parallel] = regularizers.compute(
            data, LOGPROBS, base_loss, specs, parallel=parallel
        )
        seconds[parallel] = time.perf_counter() - began
    print(f"parallel {seconds[True] * 1000:.1f} ms, sequential {seconds[False] * 1000:.1f} ms")
    common.proof(outputs[True] == outputs[False], "both give the same numbers")

    common.section("8. Asynchronous regularizers")

    async def slow(
        data: Sequence[Datum], logprobs: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        await asyncio.sleep(0.05)  # asks another service, say
        return logprobs.abs().sum(), {}

    waited = regularizers.execute_one(
        RegularizerSpec(slow, 0.01, "slow", async_=True), data, LOGPROBS
    )
    print(f"slow: {waited.value:.4f}")
    common.proof(near(waited.value, 10.8), "the result was waited for")

    common.section("9. The executor by itself")
    ran = regularizers.execute_all(specs, data, LOGPROBS, max_concurrency=2)
    print(", ".join(f"{term.name} {term.value:.4f}" for term in ran[:4]), "...")
    common.proof(
        [term.name for term in ran] == [spec.name for spec in specs],
        "outputs are in the order of the specs",
    )

    common.section("10. Gradient norms by themselves")
    square = regularizers.compute_grad_norm(lambda x: x.square().sum(), LOGPROBS)
    l1 = regularizers.grad_norm_for_regularizer(specs[0], data, LOGPROBS)
    total = regularizers.total_grad_norm(base_loss, specs, data, LOGPROBS)
    print(f"of sum x^2 {square:.4f}, of {specs[0].name} {l1:.4f}, of the composed loss {total:.4f}")
    common.proof(
        near(square, 7.6681) and near(l1, 3.1623) and near(total, 0.3195),
        "7.6681, 3.1623 and 0.3195",
    )

    common.section("11. Events")
    heard: list[str] = []
    events.attach(
        "tour", regularizers.events(), lambda name, measurements, metadata: heard.append(name)
    )
    regularizers.compute(data, LOGPROBS, base_loss, specs[:2])
    events.detach("tour")
    print("\n".join(heard))
    common.proof(
        heard.count(events.REGULARIZER_STOP) == 2 and heard[-1] == events.CUSTOM_LOSS_STOP,
        "all were told",
    )

    common.section("12. JSON")
    written = json.dumps(output.to_json())
    print(f"{written[:200]} ...")
    common.proof(
        json.loads(written)["regularizers"]["l1_sparsity"]["weight"] == 0.01, "it reads back"
    )

    common.section("13. Mistakes are refused, by name")
    refused("a negative weight", lambda: RegularizerSpec(L1(), -1.0))
    refused("no name", lambda: RegularizerSpec(lambda data, logprobs: (logprobs.sum(), {}), 0.1))
    refused(
        "the same name twice",
        lambda: regularizers.compute(data, LOGPROBS, base_loss, specs[:1] * 2),
    )
    refused("an unknown mode", lambda: Entropy(mode="sideways"))
    refused(
        "a field that is not there",
        lambda: regularizers.execute_one(
            RegularizerSpec(Consistency(pair_field="nothing"), 1.0), data, LOGPROBS
        ),
    )

    common.section("14. Objects of your own")
    spec = RegularizerSpec(TopHeavy(), weight=0.1, opts={"scale": 2.0})
    own = regularizers.execute_one(spec, data, LOGPROBS)
    print(f"{own.name}: {own.value:.4f}, metrics {own.custom}")
    common.proof(near(own.value, 2 * float(LOGPROBS.exp().max())), "its options were passed on")

    common.section("15. In training")
    print(
        "client.forward_backward_custom(data, base_loss, regularizers=specs) trains on such a loss:"
    )
    print("see examples/structured_regularizers_live.py")


if __name__ == "__main__":
    common.run(main)
