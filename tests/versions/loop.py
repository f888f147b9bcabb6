"""What a user does with a client, from the first step to the last: run in a process of its own, by
any client version.

`python loop.py URL [MODULE]` prints what came out as one line of JSON. It may use only what every
version has; what some have is looked for.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from support import MODEL, make_data, train

PROMPT = [5, 6, 7, 8, 9]
WAIT = 60


def made(client: Any) -> Any:
    """Return a new client; SDKs since 0.38 give a future of it."""
    return client.result(WAIT) if hasattr(type(client), "result") else client


def numbers(values: Any) -> list[Any]:
    """Numbers as JSON has them."""
    return [None if value is None else float(value) for value in values]


def trained(service: Any, types: Any, found: dict[str, Any]) -> Any:
    """Train, look without learning, save, go on, and do the same again from what was saved."""
    data = make_data(types)
    client = made(service.create_lora_training_client(MODEL, rank=4, seed=7))
    info = client.get_info()
    found["info"] = [info.model_data.model_name, info.is_lora, info.lora_rank]
    found["text"] = client.get_tokenizer().decode(client.get_tokenizer().encode("hello cat"))
    found["losses"] = train(client, types, data, 4)
    looked = client.forward(data, "cross_entropy").result(WAIT)
    found["metrics"] = sorted(looked.metrics)
    found["forward"] = looked.metrics["loss:sum"]
    found["forward logprobs"] = [
        numbers(one["logprobs"].to_torch().flatten()) for one in looked.loss_fn_outputs
    ]

    state = client.save_state("resume").result(WAIT).path
    found["after saving"] = train(client, types, data, 3)
    whole = made(service.create_training_client_from_state_with_optimizer(state))
    found["resumed"] = train(whole, types, data, 3)
    weights = made(service.create_training_client_from_state(state))
    found["resumed without optimizer"] = train(weights, types, data, 3)
    later = made(service.create_lora_training_client(MODEL, rank=4))
    later.load_state_with_optimizer(state).result(WAIT)
    found["loaded"] = train(later, types, data, 3)
    found["saved"] = state.rpartition("/weights/")[2]
    with other_dialect(service):
        changed = made(service.create_training_client_from_state_with_optimizer(state))
        found["in another dialect"] = train(changed, types, data, 3)
    with small_chunks(service):
        found["in chunks"] = client.forward(data, "cross_entropy").result(WAIT).metrics["loss:sum"]
        split = made(service.create_training_client_from_state_with_optimizer(state))
        found["trained in chunks"] = train(split, types, data, 3)
    refused(client, types, data, found)

    policy = [
        types.Datum(model_input=one.model_input, loss_fn_inputs=policy_inputs(one)) for one in data
    ]
    rewarded = client.forward_backward(policy, "importance_sampling").result(WAIT)
    found["policy"] = rewarded.metrics["loss:sum"]
    clipped = client.forward_backward(
        policy, "ppo", {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}
    )
    found["clipped"] = clipped.result(WAIT).metrics["loss:sum"]
    client.optim_step(
        types.AdamParams(learning_rate=1e-3, beta1=0.8, grad_clip_norm=0.5, weight_decay=0.1)
    ).result(WAIT)
    found["after policy"] = client.forward(data, "cross_entropy").result(WAIT).metrics["loss:sum"]
    custom(client, types, data, found)
    return client


@contextmanager
def other_dialect(service: Any) -> Iterator[None]:
    """Let a client that can write a pass in two ways write it in the one that it was not told to
    use."""
    config: Any = getattr(getattr(service, "holder", None), "_client_config", None)
    if not hasattr(config, "proto_write_fwdbwd"):
        yield
        return
    assert config.proto_write_fwdbwd, "the server told it to write protobuf"
    vars(config)["proto_write_fwdbwd"] = False  # it is frozen, for its users
    yield
    vars(config)["proto_write_fwdbwd"] = True


@contextmanager
def small_chunks(service: Any) -> Iterator[None]:
    """Let an official client split what it sends, as it does with much data: two examples to a
    request."""
    config = getattr(getattr(service, "holder", None), "_client_config", None)
    constants = sys.modules.get("tinker.lib.public_interfaces.training_client")
    if hasattr(constants, "MAX_CHUNK_LEN"):
        owner, name = constants, "MAX_CHUNK_LEN"
    elif config is not None:
        owner, name = config, "fwdbwd_max_chunk_len"
    else:
        yield
        return
    usual = vars(owner)[name]
    vars(owner)[name] = 2
    yield
    vars(owner)[name] = usual


def refused(client: Any, types: Any, data: list[Any], found: dict[str, Any]) -> None:
    """Bad data fails where it was sent, at once, and what comes after it goes on as if it had not
    been there."""
    before = client.forward(data, "cross_entropy").result(WAIT).metrics["loss:sum"]
    datum = types.Datum(
        model_input=types.ModelInput.from_ints(PROMPT),
        loss_fn_inputs={"target_tokens": [6, 7], "weights": [1.0, 1.0]},
    )
    bad = client.forward_backward([datum], "cross_entropy")
    after = client.forward(data, "cross_entropy")
    try:
        bad.result(WAIT)
    except Exception as error:
        found["refused"] = type(error).__name__
        found["reason"] = "target_tokens" in str(error)
    found["unharmed"] = after.result(WAIT).metrics["loss:sum"] == before


def policy_inputs(datum: Any) -> dict[str, Any]:
    """Made-up inputs of a policy loss."""
    import numpy as np

    targets = datum.loss_fn_inputs["target_tokens"].to_numpy()
    count = len(targets)
    return {
        "target_tokens": targets,
        "logprobs": np.linspace(-5, -1, count, dtype=np.float32),
        "advantages": np.linspace(-1, 2, count, dtype=np.float32),
    }


def custom(client: Any, types: Any, data: list[Any], found: dict[str, Any]) -> None:
    """A loss of the user's own."""

    def loss(_: list[Any], logprobs: list[Any]) -> tuple[Any, dict[str, float]]:
        total = sum((item**2).sum() for item in logprobs)
        return total, {"squares": total.item()}

    output = client.forward_backward_custom(data, loss).result(WAIT)
    found["custom"] = output.metrics["squares"]
    client.optim_step(types.AdamParams(learning_rate=1e-3)).result(WAIT)
    found["after custom"] = client.forward(data, "cross_entropy").result(WAIT).metrics["loss:sum"]


def sampled(service: Any, types: Any, client: Any, found: dict[str, Any]) -> None:
    """Sample from named weights, from nameless ones and from the base model, and score a prompt."""
    path = client.save_weights_for_sampler("final").result(WAIT).path
    found["named"] = path.rpartition("/sampler_weights/")[2]
    prompt = types.ModelInput.from_ints(PROMPT)
    params = types.SamplingParams(max_tokens=6, seed=3, temperature=0.9, stop=[])
    samplers = {
        "named weights": made(service.create_sampling_client(model_path=path)),
        "nameless weights": made(client.save_weights_and_get_sampling_client()),
        "base model": made(service.create_sampling_client(base_model=MODEL)),
    }
    for name, sampler in samplers.items():
        for turn in ("", " again"):
            drawn = sampler.sample(prompt, num_samples=3, sampling_params=params).result(WAIT)
            found[name + turn] = [
                [list(one.tokens), numbers(one.logprobs), str(one.stop_reason)]
                for one in drawn.sequences
            ]
    sampler = samplers["named weights"]
    first = found["named weights"][0][0]
    stops = types.SamplingParams(max_tokens=6, seed=3, temperature=0.9, stop=[first[2]])
    stopped = sampler.sample(prompt, num_samples=1, sampling_params=stops).result(WAIT).sequences[0]
    found["stopped"] = [list(stopped.tokens), str(stopped.stop_reason)]
    text = sampler.get_tokenizer().decode(first[:3])
    words = types.SamplingParams(max_tokens=6, seed=3, temperature=0.9, stop=text)
    found["stopped by text"] = list(
        sampler.sample(prompt, 1, words).result(WAIT).sequences[0].tokens
    )
    greedy = types.SamplingParams(max_tokens=4, temperature=0, stop=[])
    scored = sampler.sample(
        prompt,
        num_samples=1,
        sampling_params=greedy,
        include_prompt_logprobs=True,
        topk_prompt_logprobs=2,
    ).result(WAIT)
    found["greedy"] = list(scored.sequences[0].tokens)
    found["prompt logprobs"] = numbers(scored.prompt_logprobs)
    found["topk tokens"] = [
        one and [token for token, _ in one] for one in scored.topk_prompt_logprobs
    ]
    found["topk logprobs"] = [
        one and numbers(value for _, value in one) for one in scored.topk_prompt_logprobs
    ]
    found["scores"] = numbers(sampler.compute_logprobs(prompt).result(WAIT))


def looked_up(service: Any, client: Any, found: dict[str, Any]) -> None:
    """Return a server's answers about itself and its stored objects."""
    found["models"] = [one.model_name for one in service.get_server_capabilities().supported_models]
    rest = service.create_rest_client()
    model_id = client.get_info().model_id
    info = rest.get_weights_info_by_tinker_path(f"tinker://{model_id}/weights/resume").result(WAIT)
    found["weights info"] = [info.base_model, info.is_lora, info.lora_rank]
    found["lists"] = {}
    calls: dict[str, Callable[[], Any]] = {
        "run": lambda: rest.get_training_run(model_id).result(WAIT).base_model,
        "checkpoints": lambda: sorted(
            f"{one.checkpoint_type}:{one.checkpoint_id}"
            for one in rest.list_checkpoints(model_id).result(WAIT).checkpoints
        ),
        "runs": lambda: (
            model_id
            in [one.training_run_id for one in rest.list_training_runs().result(WAIT).training_runs]
        ),
    }
    for name, call in calls.items():
        try:
            found["lists"][name] = call()
        except Exception as error:
            if getattr(error, "status_code", None) != 404:
                raise
            found["lists"][name] = "not there"


def unloaded(client: Any, data: list[Any], found: dict[str, Any]) -> None:
    """Give a model up, in the versions that can: their users reach for the generated client to do
    it."""
    if not (hasattr(client, "holder") and hasattr(client.holder, "aclient")):
        return
    from tinker.lib.client_connection_pool_type import ClientConnectionPoolType
    from tinker.types import UnloadModelRequest

    model_id = client.get_info().model_id

    async def unload() -> bool:
        with client.holder.aclient(ClientConnectionPoolType.TRAIN) as connection:
            if not hasattr(connection.models, "unload"):
                return False
            receipt = await connection.models.unload(request=UnloadModelRequest(model_id=model_id))
            return receipt.request_id is not None

    if not client.holder.run_coroutine_threadsafe(unload()).result(WAIT):
        return
    try:
        client.forward(data, "cross_entropy").result(WAIT)
    except Exception as error:
        found["unloaded"] = "no longer loaded" in str(error) or "has been unloaded" in str(error)


def main(url: str, module: str = "tinker") -> None:
    """Run it all, and print what was found."""
    tinker = importlib.import_module(module)
    found: dict[str, Any] = {"version": tinker.__version__, "file": tinker.__file__}
    service = tinker.ServiceClient(base_url=url, api_key="tml-any-key-will-do")
    client = trained(service, tinker.types, found)
    sampled(service, tinker.types, client, found)
    looked_up(service, client, found)
    unloaded(client, make_data(tinker.types), found)
    print(json.dumps(found), flush=True)
    if module == "tinker":  # whose threads now and then abort the process while Python winds up
        os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
