"""The calls underneath, one by one: open a session, create a model, poll for it, ask about it,
unload it.

Run it:  python examples/model_info_and_unload.py Where to go: see common.py. `ServiceClient` does
all this by itself; here every request is made by its path.

Some servers cannot unload a model. That is said, and is no failure.
"""

import time
from typing import Any

import common

from tinkex import APIStatusError, HttpClient, LoraConfig, tokenizers, types

POLLS = 60


def awaited(http: HttpClient, receipt: dict[str, Any]) -> dict[str, Any]:
    """The result behind a receipt: asked for each second while the server says that it is not
    ready.
    """
    for number in range(1, POLLS + 1):
        answer: dict[str, Any] = http.post(
            "retrieve_future",
            types.FutureRetrieveRequest(request_id=receipt["request_id"]),
            max_retries=60,
        ).result()
        print(f"  poll {number}: {answer.get('type') or 'ready'}")
        if answer.get("type") != "try_again":
            return answer
        time.sleep(1)
    common.fail(f"{receipt['request_id']} was not ready after {POLLS} polls")


def unload(http: HttpClient, model_id: str) -> None:
    """Have the model unloaded, where the server can."""
    try:
        answer = http.post("unload_model", types.UnloadModelRequest(model_id=model_id)).result()
        if "request_id" in answer:
            answer = awaited(http, answer)
    except APIStatusError as error:
        if error.status_code not in (404, 405, 501):
            raise
        print(f"this server does not unload models: {error.format()}")
        return
    print(f"unloaded: {answer}")
    common.proof(answer.get("error") is None, "the model was unloaded")


def main() -> None:
    """Make the calls in their order."""
    with HttpClient(base_url=common.BASE_URL) as http:
        model = common.base_model()
        session = http.post("create_session", types.CreateSessionRequest(tags=["example"])).result()
        print(f"session {session['session_id']}")

        request = types.CreateModelRequest(
            session_id=session["session_id"],
            model_seq_id=0,
            base_model=model,
            lora_config=LoraConfig(rank=32),
        )
        created = awaited(http, http.post("create_model", request).result())
        model_id = created["model_id"]
        print(f"model id {model_id}")

        info = types.GetInfoResponse.model_validate(
            http.post("get_info", types.GetInfoRequest(model_id=model_id)).result()
        )
        tokenizer_id = info.model_data.tokenizer_id or tokenizers.get_tokenizer_id(model)
        print(f"name         {info.model_data.model_name}")
        print(f"architecture {info.model_data.arch}")
        print(f"tokenizer id {tokenizer_id}")
        print(f"LoRA         {info.is_lora}, rank {info.lora_rank}")
        common.proof(tokenizer_id, f"the model's tokenizer is known: {tokenizer_id}")
        unload(http, model_id)


if __name__ == "__main__":
    common.run(main)
