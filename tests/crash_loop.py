"""The training, saving and sampling loop of the crash test, for either client. Run as a program;
prints what it got."""

from __future__ import annotations

import importlib
import json
import sys
from typing import Any


def main() -> None:
    """Run it: URL PACKAGE MODEL STEPS."""
    url, package, model, steps = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
    tinker: Any = importlib.import_module(package)
    types = tinker.types
    if package == "tinkex":
        tinker.configure(patience=100, first_contact_patience=60)

    def datum(*tokens: int) -> Any:
        return types.Datum(
            types.ModelInput.from_ints(list(tokens)), {"target_tokens": [t + 1 for t in tokens]}
        )

    def learnt(sample: Any) -> Any:
        drawn = len(sample.tokens)
        tokens, advantages = (
            [5, 6, 7, *sample.tokens],
            [0.0, 0.0, *(1.0 + at for at in range(drawn))],
        )
        logprobs = [0.0, 0.0, *sample.logprobs]
        inputs = {"target_tokens": tokens[1:], "logprobs": logprobs, "advantages": advantages}
        prompts = [
            types.PromptProvenanceSpan(sequence_id=sample.sequence_id, offset=3 - n, length=n)
            for n in (3, 2)
        ]
        spans = [
            types.SampledProvenanceSpan(sequence_id=sample.sequence_id, length=drawn - less)
            for less in (1, 0)
        ]
        made = types.Datum(types.ModelInput.from_ints(tokens[:-1]), inputs)
        return made.with_provenance([prompts[0], spans[0]], [prompts[1], spans[1]])

    service = tinker.ServiceClient(base_url=url, api_key="tml-any")
    client = service.create_lora_training_client(model, rank=4, seed=3).result()
    prompt = types.ModelInput.from_ints([5, 6, 7])
    passes, stepped, drawn, saved = [], [], [], []
    for step in range(steps):
        passes.append(
            client.forward_backward([datum(1 + step, 2, 3), datum(4, 5)], "cross_entropy")
        )
        passes.append(client.forward_backward([datum(7, 8 + step)], "cross_entropy"))
        stepped.append(client.optim_step(types.AdamParams(learning_rate=0.01)))
        if step % 3 == 2:  # a sampler without a name, sampled from while the training goes on
            sampler = client.save_weights_and_get_sampling_client(
                record_stability_info=True
            ).result()
            drawn += [
                sampler.sample(prompt, 2, types.SamplingParams(max_tokens=5, seed=seed))
                for seed in (1, 2)
            ]
            passes.append(
                client.forward_backward(
                    [learnt(s) for s in drawn[-2].result().sequences], "stable_reinforce"
                )
            )
            saved.append(client.save_state(f"at-{step}").result().path)
        if step % 6 == 4:  # a named one
            named = service.create_sampling_client(
                model_path=client.save_weights_for_sampler(f"s-{step}").result().path
            ).result()
            drawn.append(named.sample(prompt, 1, types.SamplingParams(max_tokens=4, seed=step)))
        if step % 6 == 5:  # back to what was saved, with everything that was learnt since forgotten
            client.load_state_with_optimizer(saved[0]).result()
    saved.append(client.save_state("end").result().path)
    again = service.create_training_client_from_state_with_optimizer(saved[-1]).result()
    passes += [again.forward_backward([datum(1, 2, 3)], "cross_entropy")]
    passes += [client.forward_backward([datum(1, 2, 3)], "cross_entropy")]
    results = [future.result() for future in passes]
    given = {
        "losses": [result.metrics["loss:sum"] for result in results],
        "logprobs": [
            [list(out["logprobs"].tolist()) for out in result.loss_fn_outputs] for result in results
        ],
        "norms": [future.result().metrics for future in stepped],
        "samples": [
            [
                (list(s.tokens), [float(p) for p in s.logprobs or ()])
                for s in future.result().sequences
            ]
            for future in drawn
        ],
        "saved": [path.rpartition("/")[2] for path in saved],
    }
    print(json.dumps(given), flush=True)


if __name__ == "__main__":
    main()
