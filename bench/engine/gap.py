"""How far the log-probabilities of samples lie from those that the trainer gives for the same
tokens.

    PYTHONPATH=src python bench/engine/gap.py --shape 135m
    PYTHONPATH=src python bench/engine/gap.py --shape 8b --device cuda
    PYTHONPATH=src python bench/engine/gap.py --shape 30b-a3b --device cuda      # 61 GB of weights

The adapter has been trained for a step, so that it takes part. `--sharpen` multiplies what the head
reads: a random model's distributions are nearly flat, and those of a trained one are not.
"""

from __future__ import annotations

import argparse

import numpy as np
from shapes import SHAPES, random_engine
from train import mixed

from tinkex.engine.api import PassJob, SampleJob
from tinkex.engine.torch.engine import TorchEngine
from tinkex.types.inputs import Datum, ModelInput
from tinkex.types.optimizers import AdamParams
from tinkex.types.sampled import SampleResponse
from tinkex.types.sampling import SampleRequest, SamplingParams
from tinkex.types.training import ForwardBackwardOutput, LoraConfig


def passed(engine: TorchEngine, data: list[Datum], *, backward: bool) -> ForwardBackwardOutput:
    """One pass of the trainer."""
    engine.pass_start(PassJob("pass", "a", data, "cross_entropy", {}, backward=backward))
    while True:
        for done in engine.pass_step():
            if isinstance(done.result, Exception):
                raise done.result
            return done.result


def drawn(
    engine: TorchEngine, prompts: list[ModelInput], samples: int, tokens: int
) -> dict[str, SampleResponse]:
    """Samples of all prompts, beside each other."""
    params = SamplingParams(max_tokens=tokens, stop=[])
    for at, prompt in enumerate(prompts):
        request = SampleRequest(prompt=prompt, sampling_params=params, num_samples=samples)
        engine.sample_start(SampleJob(str(at), "s", request, at))
    ended: dict[str, SampleResponse] = {}
    while engine.sampling():
        for done in engine.sample_step():
            if isinstance(done.result, Exception):
                raise done.result
            ended[done.job] = done.result
    return ended


def gaps(
    engine: TorchEngine, prompts: list[ModelInput], samples: int, tokens: int
) -> tuple[np.ndarray, np.ndarray]:
    """For every token: what the trainer's log-probability has more than the sampler's, and the
    latter.
    """
    data, theirs = [], []
    for job, response in drawn(engine, prompts, samples, tokens).items():
        prompt = prompts[int(job)].to_numpy()
        for sequence in response.sequences:
            whole = np.concatenate([prompt, sequence.tokens_np])
            data.append(Datum(ModelInput.from_ints(whole[:-1]), {"target_tokens": whole[1:]}))
            theirs.append(np.asarray(sequence.logprobs))
    output = passed(engine, data, backward=False)
    size = prompts[0].length
    trained = [values["logprobs"].to_numpy()[size - 1 :] for values in output.loss_fn_outputs]
    return np.concatenate(trained) - np.concatenate(theirs), np.concatenate(theirs)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="135m", choices=SHAPES)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=48, help="tokens of a prompt")
    parser.add_argument("--samples", type=int, default=4, help="of each prompt")
    parser.add_argument("--tokens", type=int, default=64, help="of each sample")
    parser.add_argument("--sharpen", type=float, nargs="+", default=[1.0, 3.0])
    given = parser.parse_args()
    vocab = SHAPES[given.shape]["vocab_size"]
    engine = random_engine(given.shape, given.device)
    model = engine._bases["m"].model
    engine.create("a", "m", LoraConfig(rank=32, train_unembed=False))
    passed(engine, mixed(1024, 256, vocab), backward=True)
    engine.optim_step("a", AdamParams(learning_rate=1e-3))
    engine.snapshot("a", "s")
    random = np.random.default_rng(0)
    prompts = [
        ModelInput.from_ints(random.integers(0, vocab, given.prompt)) for _ in range(given.prompts)
    ]
    dtype, before = str(model.embed_VD.dtype).removeprefix("torch."), 1.0
    for sharpened in given.sharpen:
        model.norm_D.mul_(sharpened / before)
        before = sharpened
        gap, theirs = gaps(engine, prompts, given.samples, given.tokens)
        print(
            f"{given.shape}, {dtype}, {gap.size} tokens at {theirs.mean():.2f}: KL "
            f"{np.mean(np.expm1(gap) - gap):.2e}, "
            f"|difference| {np.abs(gap).mean():.1e} in the mean, {np.abs(gap).max():.1e} at most",
            flush=True,
        )


if __name__ == "__main__":
    main()
