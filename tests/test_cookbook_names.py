"""What tinker-cookbook takes from `tinker`, row by row, and what programs rely on besides: the same
in both packages.

The rows are expressions, in cookbook/rows.txt. What needs a server is the program `Walk`, which
does with one what the cookbook does. Both are run here on tinkex under the name of tinker, and,
slowly, on the official package in a process of its own; both must give what is written down.
"""

from __future__ import annotations

import importlib
import inspect
import json
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from support import serving

ROWS = Path(__file__).parent / "cookbook" / "rows.txt"


def sections() -> dict[str, dict[str, str]]:
    """The table: for each section, the expressions and what they give."""
    found = {}
    for section in ROWS.read_text().split("\n## ")[1:]:
        title, *lines = [line for line in section.splitlines() if line]
        found[title] = dict(zip(lines[::2], (line.strip() for line in lines[1::2]), strict=True))
    return found


def known_names() -> dict[str, Any]:
    """Names for the expressions below; `tinker` is the package that has the name."""
    import asyncio
    import concurrent.futures
    import importlib
    import importlib.metadata
    import inspect
    import pickle

    import httpx

    names = {
        name: importlib.import_module(name)
        for name in ("copy", "dataclasses", "json", "torch", "typing")
    }
    tinker = importlib.import_module("tinker")
    types = importlib.import_module("tinker.types")
    Pending = importlib.import_module("tinker.lib.public_interfaces").AwaitableConcurrentFuture
    retries = importlib.import_module("tinker.lib.retry_handler").RetryConfig
    request = httpx.Request("POST", "http://example.invalid/api")
    response = httpx.Response(400, request=request, json={"detail": "no"})
    chunk = tinker.EncodedTextChunk(tokens=[1, 2])
    text = tinker.ModelInput.from_ints([1, 2, 3])
    image = types.ImageChunk(data=b"x", format="png", expected_tokens=3)
    tensor = tinker.TensorData(data=[1.0, 2.0], dtype="float32", shape=[2])
    datum = tinker.Datum(
        model_input=text, loss_fn_inputs={"target_tokens": [2, 3, 4], "weights": [0.0, 1.0, 1.0]}
    )
    saves = [
        "save_state",
        "save_weights_for_sampler",
        "save_weights_external",
        "save_weights_and_get_sampling_client",
    ]
    steps = ["forward", "forward_backward", "forward_backward_custom", "optim_step"]
    TRACED = {
        "TrainingClient": [*steps, *saves, "get_info", "create_sampling_client"],
        "SamplingClient": ["sample", "compute_logprobs", "get_base_model"],
    }
    CAPTURED = {
        "TrainingClient": [
            "forward_backward",
            "forward_backward_async",
            "optim_step",
            "save_weights_for_sampler",
        ],
        "SamplingClient": ["sample", "sample_async"],
    }

    class Own(tinker.APIFuture):  # type: ignore[name-defined, misc]
        """A program's own kind of future."""

        def __init__(self) -> None:
            self.value = 5

        def result(self, timeout: float | None = None) -> int:
            return self.value

        async def result_async(self, timeout: float | None = None) -> int:
            return self.value

        def future(self) -> Any:
            done: concurrent.futures.Future[int] = concurrent.futures.Future()
            done.set_result(self.value)
            return done

    class Unfinished(tinker.APIFuture):  # type: ignore[name-defined, misc]
        """One that lacks `future`."""

        result, result_async = Own.result, Own.result_async

    def traced(client: Any) -> list[str]:
        """Return the methods that the cookbook's tracing would wrap, by its own rule."""
        found = []
        for name, method in vars(client).items():
            if (
                not inspect.isfunction(method)
                or name.startswith(("_", "load_state"))
                or name.endswith("_async")
            ):
                continue
            if "Future" in str(inspect.signature(method).return_annotation) or name in (
                "get_info",
                "get_base_model",
            ):
                found.append(name)
        return sorted(found)

    def again(value: Any) -> Any:
        return pickle.loads(pickle.dumps(value))

    def future_of(value: Any) -> Any:
        done: concurrent.futures.Future[Any] = concurrent.futures.Future()
        done.set_result(value)
        return Pending(done)

    def called_back(future: Any) -> list[Any]:
        said: list[Any] = []
        future.add_done_callback(lambda done: said.append(done.result()))
        return said

    def patched(client: Any, name: str) -> bool:
        original, replaced = getattr(client, name), object()
        setattr(client, name, replaced)
        found = getattr(client, name) is replaced
        setattr(client, name, original)
        return found

    def takes(call: Any, *names: str) -> bool:
        return set(names) <= set(inspect.signature(call).parameters)

    def edited(datum: Any) -> list[str]:
        datum.loss_fn_inputs.pop("weights")
        datum.loss_fn_inputs["mask"] = tensor
        return sorted(datum.loss_fn_inputs)

    def inputs(**given: Any) -> dict[str, Any]:
        made = tinker.Datum(model_input=text, loss_fn_inputs=given).loss_fn_inputs
        return {name: [one.dtype, one.shape, one.tolist()] for name, one in made.items()}

    def written(array: Any) -> Any:
        tinker.TensorData.from_numpy(array).to_numpy()[0] = 9
        return array.tolist()

    def refusal() -> Any:
        return tinker.BadRequestError("no", response=response, body={"detail": "no"})

    def raising(error: Exception) -> None:
        raise error

    def caught(kind: type[Exception], call: Any) -> str:
        try:
            call()
        except kind as error:
            return type(error).__name__
        return ""

    async def awaited(future: Any) -> Any:
        return await future

    async def gathered(*futures: Any) -> Any:
        return await asyncio.gather(*futures)

    async def completed(*futures: Any) -> Any:
        return sorted([await one for one in asyncio.as_completed(futures)])

    async def as_tasks(*futures: Any) -> Any:
        done, _ = await asyncio.wait([asyncio.ensure_future(one) for one in futures])
        return sorted(one.result() for one in done)

    return locals() | names | {"np": importlib.import_module("numpy")}


def evaluate(expressions: list[str]) -> list[str]:
    """Return the value of each expression, or the type of its error."""
    names = known_names()
    answers = []
    for expression in expressions:
        try:
            answers.append(repr(eval(expression, dict(names))))
        except Exception as error:
            kinds = (kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "builtins")
            answers.append(next(kinds))
    return answers


class Walk:
    """A program that does with a server what the cookbook does, and writes down what it finds."""

    def __init__(self, url: str) -> None:
        import torch

        self.tinker: Any = importlib.import_module("tinker")
        tinker, self.url = self.tinker, url
        self.seen: dict[str, Any] = {}
        self.prompt = tinker.ModelInput.from_ints([5, 6, 7])
        self.params = tinker.SamplingParams(max_tokens=4, seed=3, temperature=0.7)
        tokens = torch.arange(1, 9)
        inputs = {"target_tokens": tokens, "weights": torch.ones(8)}
        self.datum = tinker.Datum(
            model_input=tinker.ModelInput.from_ints(tokens.tolist()),
            loss_fn_inputs={
                name: tinker.TensorData.from_torch(one) for name, one in inputs.items()
            },
        )

    def run(self) -> dict[str, Any]:
        tinker = self.tinker
        made = self.warned(
            "an argument that is not known",
            lambda: tinker.ServiceClient(
                {"by": "walk"}, base_url=self.url, api_key="tml-walk", display_name="d", other=1
            ),
        )
        self.service = made
        creating = made.create_lora_training_client(
            "fake", rank=4, seed=1, user_metadata={"renderer_name": "r"}
        )
        self.training = creating.result()
        kinds = (tinker.TrainingClient, tinker.APIFuture, tinker.BackcompatTrainingClientFuture)
        self.seen["a new client"] = [
            [isinstance(one, kind) for kind in kinds] for one in (creating, self.training)
        ]
        self.train()
        self.sample()
        self.rest()
        self.refusals()
        self.deprecated()
        closing = made.close("success", detail="over")
        self.seen["close"] = [
            isinstance(closing, tinker.APIFuture),
            closing.result(),
            made.close("success").result(),
        ]
        self.seen["after the end"] = self.refused(
            lambda: made.create_sampling_client(base_model="fake")
        )
        self.seen["info after the end"] = self.training.get_info().model_data.model_name
        return self.seen

    def train(self) -> None:
        import asyncio

        tinker, training, datum, seen = self.tinker, self.training, self.datum, self.seen

        async def pipelined() -> str:
            calls = []
            for _ in range(2):
                calls.append(training.forward_backward([datum, datum], loss_fn="cross_entropy"))
                calls.append(training.optim_step(tinker.AdamParams(learning_rate=0.01)))
            save = training.save_state("000001", ttl_seconds=3600)
            seen["sent at once"] = [isinstance(one, tinker.APIFuture) for one in (*calls, save)]
            first, second = await calls[0].result_async(), await calls[2]
            logprobs = first.loss_fn_outputs[0]["logprobs"]
            seen["a pass"] = [
                len(first.loss_fn_outputs),
                type(logprobs).__name__,
                logprobs.shape,
                sorted(first.metrics),
            ]
            seen["a step between two passes"] = (
                first.metrics["loss:sum"] != second.metrics["loss:sum"]
            )
            seen["steps"] = [type((await one).metrics).__name__ for one in calls[1::2]]
            return str((await save).path)

        async def together() -> list[Any]:
            futures = [training.forward([datum], "cross_entropy") for _ in range(3)]
            gathered = await asyncio.gather(*futures)
            completed = [await one for one in asyncio.as_completed(futures)]
            done, _ = await asyncio.wait(
                [asyncio.ensure_future(one) for one in futures], timeout=30
            )
            waited = await asyncio.wait_for(futures[0], 30)
            tasks = await asyncio.gather(*(asyncio.create_task(one.coroutine()) for one in futures))
            return [len(gathered), len(completed), len(done), type(waited).__name__, len(tasks)]

        def loss(data: list[Any], logprobs: list[Any]) -> Any:
            return -sum(one.sum() for one in logprobs), {"mine": 2.0}

        self.loss = loss
        self.state = asyncio.run(pipelined())
        seen["a state's path"] = [
            self.state.startswith("tinker://"),
            self.state.rpartition("/weights/")[2],
        ]
        seen["together"] = asyncio.run(together())
        custom = training.forward_backward_custom([datum], loss)
        seen["a loss of one's own"] = [
            isinstance(custom, tinker.APIFuture),
            sorted(custom.result().metrics),
        ]
        again = asyncio.run(training.forward_backward_custom([datum], loss).coroutine())
        seen["a loss of one's own, async"] = sorted(again.metrics)
        for name, args in {
            "forward": ([datum], "cross_entropy"),
            "forward_backward": ([datum], "cross_entropy"),
            "optim_step": (tinker.AdamParams(),),
            "save_state": ("000002",),
            "save_weights_for_sampler": ("000002",),
        }.items():
            future = getattr(training, name)(*args)
            seen[name] = [isinstance(future, tinker.APIFuture), type(future.result()).__name__]
        seen["info"] = [
            training.get_info().model_id == training.model_id,
            training.get_info().model_data.model_name,
        ]
        self.path = training.save_weights_for_sampler("final", ttl_seconds=3600).result().path
        seen["a sampler's path"] = self.path.rpartition("/sampler_weights/")[2]

    def sample(self) -> None:
        import asyncio
        import concurrent.futures
        import pickle

        tinker, seen, prompt, params = self.tinker, self.seen, self.prompt, self.params
        opening = self.service.create_sampling_client(model_path=self.path, base_model="fake")
        opened: list[str] = []
        opening.future().add_done_callback(lambda done: opened.append(type(done.result()).__name__))
        sampler = self.sampler = asyncio.run(opening.coroutine())
        kinds: Any = (
            tinker.SamplingClient,
            tinker.APIFuture,
            tinker.BackcompatSamplingClientFuture,
        )
        seen["a new sampler"] = [
            [isinstance(one, kind) for kind in kinds] for one in (opening, sampler)
        ]
        seen["a sampler"] = [
            type(sampler).__name__,
            type(sampler._sampling_session_id).__name__,
            opened,
        ]
        seen["its model"] = sampler.get_base_model()
        futures = [
            sampler.sample(prompt=prompt, num_samples=2, sampling_params=params),
            sampler.sample(prompt, 1, params),
        ]
        seen["sample"] = [
            isinstance(one, concurrent.futures.Future | tinker.APIFuture) for one in futures
        ]
        seen["a future of a sample"] = [type(one.future()).__name__ for one in futures]
        done, _ = concurrent.futures.wait(futures, timeout=30)
        seen["waited for"] = [len(done), len(list(concurrent.futures.as_completed(futures)))]
        drawn = futures[0].result().sequences
        kinds = [
            [type(one.tokens).__name__, type(one.logprobs).__name__, one.stop_reason]
            for one in drawn
        ]
        seen["sequences"] = [kinds, [[len(one.tokens), len(one.logprobs)] for one in drawn]]

        async def sampled() -> list[Any]:
            several = [
                sampler.sample(prompt=prompt, num_samples=1, sampling_params=params)
                for _ in range(2)
            ]
            several.append(asyncio.create_task(sampler.sample(prompt, 1, params).coroutine()))
            options = {"include_prompt_logprobs": True, "topk_prompt_logprobs": 2}
            more = await sampler.sample(prompt, 1, params, **options)
            pairs = [
                one and [[type(part).__name__ for part in pair] for pair in one]
                for one in more.topk_prompt_logprobs
            ]
            scores = [type(one).__name__ for one in more.prompt_logprobs]
            return [[type(one).__name__ for one in await asyncio.gather(*several)], scores, pairs]

        seen["sampled together"] = asyncio.run(sampled())
        scores = asyncio.run(sampler.compute_logprobs(prompt).coroutine())
        seen["scores"] = [
            [type(one).__name__ for one in scores],
            sampler.compute_logprobs(prompt).result() == scores,
        ]
        live = self.training.save_weights_and_get_sampling_client().result()
        other = self.training.save_weights_and_get_sampling_client(kind="snapshot").result()
        twin = pickle.loads(pickle.dumps(live))
        tokens = [
            one.sample(prompt, 1, params).result().sequences[0].tokens
            for one in (live, other, twin)
        ]
        seen["a sampler, pickled"] = [
            isinstance(twin, tinker.SamplingClient),
            tokens[0] == tokens[1] == tokens[2],
        ]

    def rest(self) -> None:
        import asyncio

        tinker, seen, state, path = self.tinker, self.seen, self.state, self.path
        rest = self.client = self.warned("create_rest_client", self.service.create_rest_client)
        run = rest.get_training_run_by_tinker_path(state).result()
        other = asyncio.run(rest.get_training_run_by_tinker_path(path).coroutine())
        seen["a run, looked up"] = [run.user_metadata, run.base_model, other.user_metadata]
        for name, args in {
            "list_training_runs": (),
            "list_checkpoints": (self.training.model_id,),
            "list_user_checkpoints": (),
            "list_sessions": (),
            "get_sampler": (self.sampler._sampling_session_id,),
        }.items():
            future = getattr(rest, name)(*args)
            answers = [future.result(), asyncio.run(future.coroutine()), future.future().result()]
            seen[name] = [
                isinstance(future, tinker.APIFuture),
                *(type(one).__name__ for one in answers),
            ]
        seen["weights"] = type(rest.get_weights_info_by_tinker_path(state).result()).__name__
        seen["ttl"] = rest.set_checkpoint_ttl_from_tinker_path(state, 3600).result()
        seen["publish"] = rest.publish_checkpoint_from_tinker_path(path).result()
        seen["unpublish"] = asyncio.run(
            rest.unpublish_checkpoint_from_tinker_path(path).coroutine()
        )
        service = self.service
        resumed = [
            service.create_training_client_from_state_with_optimizer(state).result(),
            asyncio.run(service.create_training_client_from_state(state).coroutine()),
        ]
        seen["resumed"] = [type(one).__name__ for one in resumed]
        seen["deleted"] = rest.delete_checkpoint_from_tinker_path(path).result()

    def refusals(self) -> None:
        import pickle

        tinker, service, training, rest = self.tinker, self.service, self.training, self.client
        adam = tinker.AdamParams()
        none = {"train_mlp": False, "train_attn": False, "train_unembed": False}
        missing = "tinker://none/weights/x"
        for name, call in {
            "a run that is not there": lambda: rest.get_training_run("none").result(),
            "a path that is none": lambda: rest.get_training_run_by_tinker_path("none"),
            "a path of a run that is not there": lambda: rest.get_training_run_by_tinker_path(
                missing
            ).result(),
            "a checkpoint that is gone": lambda: rest.delete_checkpoint_from_tinker_path(
                self.path
            ).result(),
            "a sampler of what is gone": lambda: service.create_sampling_client(
                model_path=self.path
            ).result(),
            "a sampler of nothing": lambda: service.create_sampling_client(),
            "a sampler of another path": lambda: service.create_sampling_client(
                model_path="x"
            ).result(),
            "a model that is not there": lambda: service.create_lora_training_client(
                "none"
            ).result(),
            "nothing to train": lambda: service.create_lora_training_client("fake", **none),
            "no data": lambda: training.forward_backward([], "cross_entropy"),
            "two kinds of parameters": lambda: training.optim_step(adam, adam_params=adam),
            "no parameters": lambda: training.optim_step(),
            "a name that is taken": lambda: training.save_state("000002").result(),
            "a handle that is none": lambda: tinker.SamplingClient.from_sampler_handle("x"),
            "a pickled trainer": lambda: pickle.dumps(training),
            "a pickled service": lambda: pickle.dumps(service),
        }.items():
            self.seen[name] = self.refused(call)

    def refused(self, call: Any) -> Any:
        """What an error says of itself, as plain values; and that it is the same when it has been
        pickled."""
        import pickle

        try:
            call()
        except Exception as error:
            kinds = [kind.__name__ for kind in type(error).__mro__]
            if "TinkerError" not in kinds:
                return next(
                    kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "builtins"
                )
            given: Any = error
            said = kinds[0]
            copy = pickle.loads(pickle.dumps(error))
            right = [
                given.message == str(error) == error.args[0],
                type(copy) is type(error),
                str(copy) == str(error),
            ]
            if "RequestFailedError" in kinds:
                said += f", {given.category.value}"
                right += [isinstance(given.request_id, str), copy.request_id == given.request_id]
            if "APIStatusError" in kinds:
                answer, sent = given.response, given.request
                said += (
                    f", {sent.method} {str(sent.url).partition('/api/v1/')[2].partition('/')[0]}"
                )
                said += (
                    f": {given.status_code}, {answer.headers['Content-Type']} of "
                    f"{sorted(given.body)}"
                )
                right += [
                    answer.status_code == given.status_code,
                    answer.json() == given.body == copy.body,
                ]
                right += [
                    type(answer.content) is bytes,
                    json.loads(answer.text) == given.body,
                    not answer.is_success,
                ]
            return said if all(right) else [said, right]
        return "nothing"

    def deprecated(self) -> None:
        import logging

        service, training, datum, state = self.service, self.training, self.datum, self.state
        logging.disable(logging.ERROR)  # the official client says some of it twice
        for name in (
            "load_state",
            "load_state_async",
            "load_state_with_optimizer",
            "load_state_with_optimizer_async",
        ):
            self.warned(
                name,
                getattr(service.create_lora_training_client("fake", rank=4).result(), name),
                state,
            )
        for end in ("", "_async"):
            custom = getattr(training, f"forward_backward_custom{end}")
            sampler = getattr(training, f"save_weights_and_get_sampling_client{end}")
            self.warned(
                f"loss_type_input{end}", custom, [datum], self.loss, loss_type_input="logprobs"
            )
            self.warned(f"a sampler's name{end}", sampler, "x")
            search = importlib.import_module("tinker.types").SessionSearchRequest()
            for name, args in {
                "get_audit_log": (),
                "get_billing_usage": ("2026-01-01", "2026-01-02"),
                "get_current_checkpoint_storage_usage": (),
            }.items():
                self.warned(name + end, getattr(self.client, name + end), *args)
        self.warned("search_sessions", self.client.search_sessions, search)
        adam, policy = self.tinker.AdamParams(), {"base_model": "fake"}
        twins: list[tuple[Any, str, tuple[Any, ...], dict[str, Any]]] = [
            (service, "get_server_capabilities_async", (), {}),
            (service, "create_sampling_client_async", (), policy),
            (service, "create_lora_training_client_async", ("fake",), {"rank": 4}),
            (service, "create_training_client_from_state_async", (state,), {}),
            (service, "create_training_client_from_state_with_optimizer_async", (state,), {}),
            (training, "save_weights_and_get_sampling_client_async", (), {}),
            (training, "forward_async", ([datum], "cross_entropy"), {}),
            (training, "forward_backward_async", ([datum], "cross_entropy"), {}),
            (training, "optim_step_async", (adam,), {}),
            (training, "save_state_async", ("000009",), {}),
            (training, "save_weights_for_sampler_async", ("000009",), {}),
            (training, "get_info_async", (), {}),
            (self.sampler, "get_base_model_async", (), {}),
            (self.sampler, "sample_async", (self.prompt, 1, self.params), {}),
            (self.sampler, "compute_logprobs_async", (self.prompt,), {}),
            (self.client, "list_sessions_async", (), {}),
        ]
        for owner, name, args, options in twins:
            self.warned(name, getattr(owner, name), *args, **options)
        self.warned("get_server_capabilities", service.get_server_capabilities)
        self.warned("forward_backward", training.forward_backward, [datum], "cross_entropy")
        self.warned("optim_step", training.optim_step, self.tinker.AdamParams())
        sampled = self.warned("sample", self.sampler.sample, self.prompt, 1, self.params)
        self.warned("done of a sample", sampled.done)
        self.warned("done of a sample again", sampled.done)
        creating = self.warned("a sampler", service.create_sampling_client, **policy)
        self.warned("an attribute of the future", lambda: creating.holder)
        self.warned("a method of the future", creating.get_base_model)
        logging.disable(logging.NOTSET)

    def warned(self, name: str, call: Any, *args: Any, **options: Any) -> Any:
        """Note what a call warns of, and what a coroutine gives when it is awaited; wait for the
        future."""
        import asyncio
        import contextlib
        import warnings

        async def awaited(call: Any) -> None:
            # what becomes of it is seen elsewhere
            with contextlib.suppress(self.tinker.TinkerError):
                first = await call
                twice = isinstance(first, self.tinker.APIFuture)
                self.seen[f"awaited: {name}"] = (
                    ["future", type(await first).__name__] if twice else type(first).__name__
                )

        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            value = call(*args, **options)
            if inspect.iscoroutine(value):
                asyncio.run(awaited(value))
            elif isinstance(value, self.tinker.APIFuture):
                with contextlib.suppress(self.tinker.TinkerError):
                    value.result()
        about = [one.category.__name__ for one in said if one.category is not ResourceWarning]
        self.seen[f"warnings: {name}"] = about
        return value


SEEN: dict[str, Any] = {
    "warnings: an argument that is not known": ["FutureWarning"],
    "a new client": [[True, True, True], [True, False, False]],
    "sent at once": [True, True, True, True, True],
    "a pass": [2, "TensorData", [8], ["loss:sum"]],
    "a step between two passes": True,
    "steps": ["dict", "dict"],
    "a state's path": [True, "000001"],
    "together": [3, 3, 3, "ForwardBackwardOutput", 3],
    "a loss of one's own": [True, ["loss:sum", "mine", "surrogate_loss:sum"]],
    "a loss of one's own, async": ["loss:sum", "mine", "surrogate_loss:sum"],
    "forward": [True, "ForwardBackwardOutput"],
    "forward_backward": [True, "ForwardBackwardOutput"],
    "optim_step": [True, "OptimStepResponse"],
    "save_state": [True, "SaveWeightsResponse"],
    "save_weights_for_sampler": [True, "SaveWeightsForSamplerResponse"],
    "info": [True, "fake"],
    "a sampler's path": "final",
    "a new sampler": [[True, True, True], [True, False, False]],
    "a sampler": ["SamplingClient", "str", ["SamplingClient"]],
    "its model": "fake",
    "sample": [True, True],
    "a future of a sample": ["Future", "Future"],
    "waited for": [2, 2],
    "sequences": [[["list", "list", "length"], ["list", "list", "length"]], [[4, 4], [4, 4]]],
    "sampled together": [
        ["SampleResponse", "SampleResponse", "SampleResponse"],
        ["NoneType", "float", "float"],
        [None, [["int", "float"]], [["int", "float"]]],
    ],
    "scores": [["NoneType", "float", "float"], True],
    "a sampler, pickled": [True, True],
    "warnings: create_rest_client": ["FutureWarning"],
    "a run, looked up": [{"renderer_name": "r"}, "fake", {"renderer_name": "r"}],
    "list_training_runs": [
        True,
        "TrainingRunsResponse",
        "TrainingRunsResponse",
        "TrainingRunsResponse",
    ],
    "list_checkpoints": [
        True,
        "CheckpointsListResponse",
        "CheckpointsListResponse",
        "CheckpointsListResponse",
    ],
    "list_user_checkpoints": [
        True,
        "CheckpointsListResponse",
        "CheckpointsListResponse",
        "CheckpointsListResponse",
    ],
    "list_sessions": [True, "ListSessionsResponse", "ListSessionsResponse", "ListSessionsResponse"],
    "get_sampler": [True, "GetSamplerResponse", "GetSamplerResponse", "GetSamplerResponse"],
    "weights": "WeightsInfoResponse",
    "ttl": None,
    "publish": None,
    "unpublish": None,
    "resumed": ["TrainingClient", "TrainingClient"],
    "deleted": None,
    "a run that is not there": "NotFoundError, GET training_runs: 404, application/json of "
    "['detail']",
    "a path that is none": "ValueError",
    "a path of a run that is not there": "NotFoundError, GET training_runs: 404, application/json "
    "of ['detail']",
    "a checkpoint that is gone": "NotFoundError, DELETE training_runs: 404, application/json of "
    "['detail']",
    "a sampler of what is gone": "BadRequestError, POST create_sampling_session: 400, "
    "application/json of ['detail']",
    "a sampler of nothing": "ValueError",
    "a sampler of another path": "ValueError",
    "a model that is not there": "BadRequestError, POST create_model: 400, application/json of "
    "['detail']",
    "nothing to train": "AssertionError",
    "no data": "ValueError",
    "two kinds of parameters": "ValueError",
    "no parameters": "TypeError",
    "a name that is taken": "RequestFailedError, user",
    "a handle that is none": "ValueError",
    "a pickled trainer": "TypeError",
    "a pickled service": "TypeError",
    "warnings: load_state": ["FutureWarning"],
    "awaited: load_state_async": ["future", "LoadWeightsResponse"],
    "warnings: load_state_async": ["FutureWarning"],
    "warnings: load_state_with_optimizer": ["FutureWarning"],
    "awaited: load_state_with_optimizer_async": ["future", "LoadWeightsResponse"],
    "warnings: load_state_with_optimizer_async": ["FutureWarning"],
    "warnings: loss_type_input": ["DeprecationWarning"],
    "warnings: a sampler's name": ["DeprecationWarning"],
    "warnings: get_audit_log": ["FutureWarning"],
    "warnings: get_billing_usage": ["FutureWarning"],
    "warnings: get_current_checkpoint_storage_usage": ["FutureWarning"],
    "awaited: loss_type_input_async": ["future", "ForwardBackwardOutput"],
    "warnings: loss_type_input_async": ["FutureWarning", "DeprecationWarning"],
    "awaited: a sampler's name_async": "SamplingClient",
    "warnings: a sampler's name_async": ["FutureWarning", "DeprecationWarning"],
    "awaited: get_audit_log_async": "AuditLogResponse",
    "warnings: get_audit_log_async": ["FutureWarning"],
    "awaited: get_billing_usage_async": "BillingUsageResponse",
    "warnings: get_billing_usage_async": ["FutureWarning"],
    "awaited: get_current_checkpoint_storage_usage_async": "CurrentCheckpointStorageUsageResponse",
    "warnings: get_current_checkpoint_storage_usage_async": ["FutureWarning"],
    "warnings: search_sessions": ["ExperimentalWarning"],
    "awaited: get_server_capabilities_async": "GetServerCapabilitiesResponse",
    "warnings: get_server_capabilities_async": ["FutureWarning"],
    "awaited: create_sampling_client_async": "SamplingClient",
    "warnings: create_sampling_client_async": ["FutureWarning"],
    "awaited: create_lora_training_client_async": "TrainingClient",
    "warnings: create_lora_training_client_async": ["FutureWarning"],
    "awaited: create_training_client_from_state_async": "TrainingClient",
    "warnings: create_training_client_from_state_async": ["FutureWarning"],
    "awaited: create_training_client_from_state_with_optimizer_async": "TrainingClient",
    "warnings: create_training_client_from_state_with_optimizer_async": ["FutureWarning"],
    "awaited: save_weights_and_get_sampling_client_async": "SamplingClient",
    "warnings: save_weights_and_get_sampling_client_async": ["FutureWarning"],
    "awaited: forward_async": ["future", "ForwardBackwardOutput"],
    "warnings: forward_async": ["FutureWarning"],
    "awaited: forward_backward_async": ["future", "ForwardBackwardOutput"],
    "warnings: forward_backward_async": ["FutureWarning"],
    "awaited: optim_step_async": ["future", "OptimStepResponse"],
    "warnings: optim_step_async": ["FutureWarning"],
    "awaited: save_state_async": ["future", "SaveWeightsResponse"],
    "warnings: save_state_async": ["FutureWarning"],
    "awaited: save_weights_for_sampler_async": ["future", "SaveWeightsForSamplerResponse"],
    "warnings: save_weights_for_sampler_async": ["FutureWarning"],
    "awaited: get_info_async": "GetInfoResponse",
    "warnings: get_info_async": ["FutureWarning"],
    "awaited: get_base_model_async": "str",
    "warnings: get_base_model_async": ["FutureWarning"],
    "awaited: sample_async": "SampleResponse",
    "warnings: sample_async": ["FutureWarning"],
    "awaited: compute_logprobs_async": "list",
    "warnings: compute_logprobs_async": ["FutureWarning"],
    "awaited: list_sessions_async": "ListSessionsResponse",
    "warnings: list_sessions_async": ["FutureWarning"],
    "warnings: get_server_capabilities": ["FutureWarning"],
    "warnings: forward_backward": [],
    "warnings: optim_step": [],
    "warnings: sample": [],
    "warnings: done of a sample": ["FutureWarning"],
    "warnings: done of a sample again": [],
    "warnings: a sampler": [],
    "warnings: an attribute of the future": ["FutureWarning"],
    "warnings: a method of the future": ["FutureWarning"],
    "close": [True, None, None],
    "after the end": "RuntimeError",
    "info after the end": "fake",
}


ASKED = {
    "asample",
    "client_config",
    "client_dynamic_config",
    "create_model",
    "create_sampling_session",
    "create_session",
    "delete_checkpoint",
    "finish_session",
    "forward_backward",
    "get_audit_log",
    "get_billing_usage",
    "get_current_checkpoint_storage_usage",
    "get_info",
    "get_sampler",
    "get_server_capabilities",
    "get_training_run",
    "join_sampling_session",
    "list_checkpoints",
    "list_sessions",
    "list_training_runs",
    "list_user_checkpoints",
    "load_weights",
    "optim_step",
    "publish_checkpoint",
    "retrieve_future",
    "save_weights",
    "save_weights_for_sampler",
    "search_sessions",
    "set_checkpoint_ttl",
    "unpublish_checkpoint",
    "weights_info",
}
"""What a server is asked for by that program."""
BESIDES = {"retrieve_futures", "session_heartbeat", "telemetry"}
"""What depends on the time that things take, and how results of several samples are fetched at
once, as ours are."""


@pytest.fixture(scope="module")
def renamed() -> Iterator[None]:
    """tinkex under the name of tinker, and afterwards as it was."""
    known = {
        name: sys.modules.pop(name)
        for name in list(sys.modules)
        if name.partition(".")[0] == "tinker"
    }
    compat: Any = importlib.import_module("tinkex.compat")
    compat.install()
    yield
    compat.uninstall()
    sys.modules.update(known)


@contextmanager
def server(place: Path) -> Iterator[str]:
    """A server without a model, which answers at once."""
    from tinkex.engine.fake import FakeEngine

    with serving(FakeEngine(), place) as url:
        yield url


def asked(url: str) -> set[str]:
    """Return the operations that were requested from a server."""
    with urllib.request.urlopen(f"{url}/metrics") as answer:
        return (
            set(re.findall(r'tinkex_requests_total\{operation="(\w+)"', answer.read().decode()))
            - BESIDES
        )


@pytest.fixture(scope="module")
def official(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Compare the rows of the official package with those of the program on tinkex."""
    shared = (known_names, evaluate, Walk)
    code = (
        "from __future__ import annotations\nimport importlib, inspect, json, os, sys\nfrom "
        "typing import Any\n"
    )
    code += "".join(inspect.getsource(one) + "\n" for one in shared)
    code += "rows, url = json.load(sys.stdin)\n"
    code += "answers, walked = evaluate(rows), Walk(url).run()\n"
    code += "origin = importlib.import_module('tinker').ServiceClient.__module__\n"
    code += (
        "print(json.dumps({'origin': origin, 'rows': answers, 'seen': walked}), "
        "flush=True)\nos._exit(0)\n"
    )
    with server(tmp_path_factory.mktemp("official")) as url:
        given = json.dumps([[one for rows in sections().values() for one in rows], url])
        done = subprocess.run(
            [sys.executable, "-c", code], input=given, capture_output=True, text=True, timeout=100
        )
        assert done.returncode == 0, done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        assert found["origin"] == "tinker"
        return found | {"asked": asked(url)}


@pytest.mark.covers("U1", "U13", "U16", "U35", "U36")
@pytest.mark.parametrize("section", sections())
def test_every_row_holds_for_tinkex(renamed: None, section: str) -> None:
    rows = sections()[section]
    assert dict(zip(rows, evaluate(list(rows)), strict=True)) == rows


@pytest.mark.slow
def test_every_row_holds_for_the_official_package(official: dict[str, Any]) -> None:
    rows = {
        expression: answer for part in sections().values() for expression, answer in part.items()
    }
    assert dict(zip(rows, official["rows"], strict=True)) == rows


@pytest.mark.covers("U2", "U6", "U7", "U9", "U10", "U11", "U15", "U17", "U18")
def test_program_meets_its_documented_result(renamed: None, tmp_path: Path) -> None:
    with server(tmp_path) as url:
        assert json.loads(json.dumps(Walk(url).run())) == SEEN
        assert asked(url) == ASKED


@pytest.mark.slow
def test_program_finds_the_same_with_the_official_package(official: dict[str, Any]) -> None:
    assert official["seen"] == SEEN
    assert official["asked"] == ASKED
