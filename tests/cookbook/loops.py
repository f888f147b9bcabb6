"""The cookbook's loops on a small local model: supervised, preferences, rewards, an evaluation, a
run taken up again.

    python loops.py CLIENT SERVER DIRECTORY

CLIENT is `official` or `tinkex`; SERVER is the address of one, or `embedded` for one in this
process (which the official client reaches by a socket). The figures of every loop are written to
DIRECTORY/figures.json. No loop knows which client it is that `tinker` stands for: the first lines
of `main` decide.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib.metadata
import inspect
import json
import random
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MODEL = "Qwen/Qwen3-8B-Base"
"""A name that the cookbook knows the renderer of; the bundled model answers to it."""
RENDERER = "role_colon"
IS_CURRENT = importlib.metadata.version("tinker_cookbook") != "0.5.8"
"""Whether the cookbook has loops that train with `stable_reinforce` by default."""
SEED = 7
RATE = 3e-3
SMALL_RATE = 3e-4
EPOCHS = 3
STEPS = 8 * EPOCHS


@contextlib.contextmanager
def embedded(client: str, directory: Path) -> Iterator[str]:
    """A server within this process: mounted into the client where it can be, else on a socket."""
    from tinkex.local import LocalBackend, make_engine, publish_tokenizers
    from tinkex.tokenizers import BUNDLED

    models = {MODEL: BUNDLED["tinkex/tiny"]}
    if client == "tinkex":
        with LocalBackend(models, data_dir=directory / "data") as backend:
            yield backend.base_url
        return
    sys.path.append(str(Path(__file__).parent.parent))
    from support import serving

    engine = make_engine(models)
    publish_tokenizers(engine.models())
    with serving(engine, directory / "data") as url:
        yield url


def settle_chance(tinker: Any) -> None:
    """Give every adapter and every sample a seed, by patching the classes, as the cookbook does."""
    for name in ("create_lora_training_client", "create_lora_training_client_async"):
        create = getattr(tinker.ServiceClient, name)
        setattr(tinker.ServiceClient, name, functools.partialmethod(_seeded, create))
    plain, twin = tinker.SamplingClient.sample, tinker.SamplingClient.sample_async
    asked = Counter[tuple[int, ...]]()

    def seeded(options: dict[str, Any]) -> dict[str, Any]:
        if options["sampling_params"].seed is not None:  # one method may call the other
            return options
        tokens = tuple(options["prompt"].to_ints())
        asked[tokens] += 1
        seed = random.Random(f"{tokens} {asked[tokens]}").getrandbits(31)
        return {
            **options,
            "sampling_params": options["sampling_params"].model_copy(update={"seed": seed}),
        }

    names = list(inspect.signature(plain).parameters)[1:]

    def sample(self: Any, *args: Any, **options: Any) -> Any:
        return plain(self, **seeded(options | dict(zip(names, args, strict=False))))

    async def sample_async(self: Any, *args: Any, **options: Any) -> Any:
        return await twin(self, **seeded(options | dict(zip(names, args, strict=False))))

    tinker.SamplingClient.sample, tinker.SamplingClient.sample_async = sample, sample_async


NOTED: dict[str, list[Any]] = {}
"""The futures of all passes of the loop that runs, by the call that they came from."""


def note_passes(tinker: Any) -> None:
    """Keep the future of every pass, so that the losses of all passes can be compared."""
    trainer = tinker.TrainingClient
    plain, twin, custom = (
        trainer.forward_backward,
        trainer.forward_backward_async,
        trainer.forward_backward_custom,
    )

    def forward_backward(self: Any, *args: Any, **options: Any) -> Any:
        future = plain(self, *args, **options)
        NOTED.setdefault("plain", []).append(future)
        return future

    async def forward_backward_async(self: Any, *args: Any, **options: Any) -> Any:
        future = await twin(self, *args, **options)
        # one method may call the other
        if not any(future is noted for noted in NOTED.get("plain", ())):
            NOTED.setdefault("plain", []).append(future)
        return future

    def forward_backward_custom(self: Any, *args: Any, **options: Any) -> Any:
        future = custom(self, *args, **options)
        NOTED.setdefault("custom", []).append(future)
        return future

    trainer.forward_backward, trainer.forward_backward_custom = (
        forward_backward,
        forward_backward_custom,
    )
    trainer.forward_backward_async = forward_backward_async


def losses(call: str) -> dict[str, list[float]]:
    """The losses of the passes of the loop that has just run, as they came back; a custom pass may
    hide plain ones."""
    passes = NOTED.pop(call)
    NOTED.clear()
    return {"loss:sum": [one.result().metrics["loss:sum"] for one in passes]}


def _seeded(self: Any, create: Any, *args: Any, **options: Any) -> Any:
    return create(self, *args, **{"seed": SEED, **options})


def conversations(path: Path) -> Path:
    """Sums, asked and answered, two in a conversation: where an answer ends is learnt from the
    question after it."""
    rng = random.Random(SEED)
    chats = [[(rng.randrange(50), rng.randrange(50)) for _ in range(2)] for _ in range(72)]
    lines = [
        {"messages": [message for a, b in chat for message in exchange(a, b)]} for chat in chats
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def exchange(a: int, b: int, off: int = 0) -> list[dict[str, str]]:
    """A sum, asked and answered."""
    return [
        {"role": "user", "content": f"What is {a} + {b}?"},
        {"role": "assistant", "content": str(a + b + off)},
    ]


def common(batch_size: int) -> Any:
    """Conversion of conversations to data, for every loop."""
    from tinker_cookbook.renderers import TrainOnWhat
    from tinker_cookbook.supervised.types import ChatDatasetBuilderCommonConfig

    return ChatDatasetBuilderCommonConfig(
        model_name_for_tokenizer=MODEL,
        renderer_name=RENDERER,
        max_length=128,
        batch_size=batch_size,
        train_on_what=TrainOnWhat.ALL_TOKENS,
    )


class BrokenOffError(Exception):
    """A run that is to be taken up again has been broken off."""


def supervised(
    url: str, log: Path, text: Path, *, break_off: bool = False
) -> dict[str, list[float]]:
    """Some steps of the supervised loop, with an evaluation of what is held out; a second call
    takes a run up again."""
    from tinker_cookbook.eval.evaluators import SamplingClientEvaluator
    from tinker_cookbook.supervised import train
    from tinker_cookbook.supervised.data import FromConversationFileBuilder

    class BreakingOff(SamplingClientEvaluator):  # type: ignore[misc]
        calls = 0

        async def __call__(self, sampling_client: Any) -> dict[str, float]:
            self.calls += 1
            if self.calls == 2:
                raise BrokenOffError
            return {}

    config = train.Config(
        log_path=str(log),
        model_name=MODEL,
        recipe_name="supervised",
        renderer_name=RENDERER,
        dataset_builder=FromConversationFileBuilder(
            common_config=common(8), file_path=str(text), test_size=8
        ),
        learning_rate=RATE,
        lr_schedule="constant",
        lora_rank=8,
        base_url=url,
        num_epochs=EPOCHS,
        save_every=STEPS // 4,
        eval_every=STEPS // 2,
        evaluator_builders=[BreakingOff] if break_off else [],
    )
    with contextlib.suppress(BrokenOffError):
        asyncio.run(train.main(config))
    return figures(log, "train_mean_nll", "test/nll") | losses("plain")


def preferences(url: str, log: Path, start: str) -> dict[str, list[float]]:
    """Some steps of DPO: right sums are liked better than wrong ones."""
    import chz
    import datasets
    from tinker_cookbook.preference import train_dpo
    from tinker_cookbook.preference.dpo_datasets import DPODatasetBuilderFromComparisons
    from tinker_cookbook.preference.preference_datasets import ComparisonDatasetBuilder
    from tinker_cookbook.preference.types import Comparison, LabeledComparison

    @chz.chz
    class Sums(ComparisonDatasetBuilder):  # type: ignore[misc]
        def get_train_and_test_datasets(self) -> tuple[Any, Any]:
            rng = random.Random(SEED + 1)
            rows = [
                {"a": rng.randrange(101), "b": rng.randrange(101), "off": rng.randrange(1, 9)}
                for _ in range(24)
            ]
            return datasets.Dataset.from_list(rows[:16]), datasets.Dataset.from_list(rows[16:])

        def example_to_labeled_comparison(self, example: Any) -> Any:
            question, right = exchange(example["a"], example["b"])
            _, wrong = exchange(**example)
            pair = Comparison(
                prompt_conversation=[question], completion_A=[right], completion_B=[wrong]
            )
            return LabeledComparison(comparison=pair, label="A")

    config = train_dpo.Config(
        log_path=str(log),
        model_name=MODEL,
        recipe_name="preferences",
        renderer_name=RENDERER,
        dataset_builder=DPODatasetBuilderFromComparisons(
            common_config=common(4), comparison_builder=Sums()
        ),
        load_checkpoint_path=start,
        learning_rate=SMALL_RATE,
        lr_schedule="constant",
        base_url=url,
        save_every=0,
        eval_every=2,
        max_steps=3,
    )
    train_dpo.main(config)
    return figures(log, "dpo_loss", "margin", "accuracy", "test/nll") | losses("custom")


def rewards(url: str, log: Path, start: str) -> dict[str, list[float]]:
    """Some steps of reinforcement learning in the cookbook's arithmetic environment."""
    from tinker_cookbook.recipes.math_rl.arithmetic_env import ArithmeticDatasetBuilder
    from tinker_cookbook.rl import train

    config = train.Config(
        log_path=str(log),
        model_name=MODEL,
        recipe_name="rewards",
        renderer_name=RENDERER,
        dataset_builder=ArithmeticDatasetBuilder(
            batch_size=4,
            model_name_for_tokenizer=MODEL,
            renderer_name=RENDERER,
            n_batches=3,
            group_size=6,
        ),
        load_checkpoint_path=start,
        learning_rate=SMALL_RATE,
        lora_rank=8,
        max_tokens=12,
        base_url=url,
        eval_every=0,
        save_every=2,
        compute_post_kl=True,
    )
    asyncio.run(train.main(config))
    names = ("env/all/reward/total", "optim/entropy", "optim/kl_sample_train_v1", "kl_pre_post_v2")
    return figures(log, *names) | losses("plain")


def off_policy(url: str, log: Path, start: str) -> dict[str, list[float]]:
    """Run the asynchronous RL loop with its default loss; its samples are up to two steps old."""
    from tinker_cookbook.recipes.math_rl.arithmetic_env import ArithmeticDatasetBuilder
    from tinker_cookbook.rl import train

    config = train.Config(
        log_path=str(log),
        model_name=MODEL,
        recipe_name="off policy",
        renderer_name=RENDERER,
        dataset_builder=ArithmeticDatasetBuilder(
            batch_size=4,
            model_name_for_tokenizer=MODEL,
            renderer_name=RENDERER,
            n_batches=8,
            group_size=6,
        ),
        async_config=train.AsyncConfig(max_steps_off_policy=2, groups_per_batch=4),
        load_checkpoint_path=start,
        learning_rate=SMALL_RATE,
        lora_rank=8,
        max_tokens=12,
        base_url=url,
        eval_every=0,
        save_every=0,
        max_steps=5,
    )
    assert config.training_loss_fn() == "stable_reinforce"
    asyncio.run(train.main(config))
    return figures(log, "env/all/reward/total", "optim/kl_sample_train_v1") | losses("plain")


def plain_rewards(url: str, log: Path) -> dict[str, list[float]]:
    """Run the cookbook's one-file RL loop with its default loss, on sums and with a reward for
    variety."""
    import datasets
    from tinker_cookbook.recipes import rl_loop

    rng = random.Random(SEED + 2)
    rows = [(rng.randrange(50), rng.randrange(50)) for _ in range(12)]
    sums = {
        "question": [f"What is {a} + {b}?" for a, b in rows],
        "answer": [f"#### {a + b}" for a, b in rows],
    }
    local = datasets.DatasetDict({"train": datasets.Dataset.from_dict(sums)})
    fetch, reward = rl_loop.datasets.load_dataset, rl_loop.get_reward
    rl_loop.datasets.load_dataset = lambda *_, **__: local
    rl_loop.get_reward = lambda response, _: len(set(response)) / 10
    try:
        config = rl_loop.Config(
            base_url=url,
            log_path=str(log),
            model_name=MODEL,
            batch_size=4,
            group_size=4,
            learning_rate=SMALL_RATE,
            lora_rank=8,
            max_tokens=12,
            save_every=0,
        )
        assert config.loss_fn == "stable_reinforce"
        rl_loop.main(config)
    finally:
        rl_loop.datasets.load_dataset, rl_loop.get_reward = fetch, reward
    return figures(log, "reward/total") | losses("plain")


async def evaluation(url: str, path: str) -> dict[str, list[float]]:
    """Return how well a saved adapter adds, by the cookbook's evaluator."""
    import tinker
    from tinker_cookbook.recipes.math_rl.arithmetic_env import ArithmeticDatasetBuilder
    from tinker_cookbook.rl.metric_util import RLTestSetEvaluator

    builder = ArithmeticDatasetBuilder(
        batch_size=8,
        model_name_for_tokenizer=MODEL,
        renderer_name=RENDERER,
        n_batches=1,
        group_size=2,
    )
    problems, _ = await builder()
    service = tinker.ServiceClient(base_url=url)
    sampler: Any = service.create_sampling_client(model_path=path, base_model=MODEL)
    if hasattr(tinker.APIFuture, "coroutine"):  # the client is made through a future
        sampler = await sampler
    found = await RLTestSetEvaluator(problems, max_tokens=12)(sampler)
    await service.close("success")
    return {
        name: [value]
        for name, value in found.items()
        if name.endswith(("reward/total", "ac_tokens_per_turn"))
    }


def figures(log: Path, *names: str) -> dict[str, list[float]]:
    """Return the cookbook's records of a run, in order; each of the names must be there."""
    lines = [json.loads(line) for line in (log / "metrics.jsonl").read_text().splitlines()]
    found = {name: [line[name] for line in lines if name in line] for name in names}
    absent = [name for name, values in found.items() if not values]
    if absent:
        raise LookupError(
            f"{log.name} has no {', '.join(absent)}, but {', '.join(sorted({*lines[-1]}))}"
        )
    return found


def last_checkpoint(log: Path) -> dict[str, str]:
    """Return the paths of a run's newest state and sampler weights."""
    line: dict[str, str] = json.loads((log / "checkpoints.jsonl").read_text().splitlines()[-1])
    return line


def run_all(url: str, directory: Path) -> dict[str, dict[str, list[float]]]:
    """Every loop, the later ones from where the first one came to."""
    text = conversations(directory / "sums.jsonl")
    found = {"supervised": supervised(url, directory / "supervised", text)}
    found["broken off"] = supervised(url, directory / "resumed", text, break_off=True)
    found["resumed"] = supervised(url, directory / "resumed", text)
    start = last_checkpoint(directory / "supervised")
    found["preferences"] = preferences(url, directory / "preferences", start["state_path"])
    found["rewards"] = rewards(url, directory / "rewards", start["state_path"])
    if IS_CURRENT:
        found["plain rewards"] = plain_rewards(url, directory / "plain rewards")
        found["off policy"] = off_policy(url, directory / "off policy", start["state_path"])
    found["evaluation"] = asyncio.run(
        evaluation(url, last_checkpoint(directory / "rewards")["sampler_path"])
    )
    return found


def main(client: str, server: str, place: str) -> None:
    """Choose the client, find a server, run, and write down what came out."""
    if client == "tinkex":
        import tinkex.compat  # noqa: F401
    import tinker

    directory = Path(place)
    directory.mkdir(parents=True, exist_ok=True)
    settle_chance(tinker)
    note_passes(tinker)
    with (
        embedded(client, directory)
        if server == "embedded"
        else contextlib.nullcontext(server) as url
    ):
        found = run_all(url, directory)
    known = {"client": tinker.ServiceClient.__module__.partition(".")[0], "loops": found}
    (directory / "figures.json").write_text(json.dumps(known, indent=1))


if __name__ == "__main__":
    main(*sys.argv[1:])
