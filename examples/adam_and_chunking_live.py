"""Many examples in one call: how a call is cut into requests, and what an AdamW step can be told.

Run it:  python examples/adam_and_chunking_live.py Settings: TINKER_CHUNK_COUNT (1025 examples in
the preview), TINKER_RUN_COUNT (128 that are really sent); where to go: see common.py.
"""

from collections.abc import Iterable

import common

from tinkex import AdamParams, Datum, HttpClient, ServiceClient, types

CHUNK_COUNT = common.whole("TINKER_CHUNK_COUNT", 1025)
RUN_COUNT = common.whole("TINKER_RUN_COUNT", 128)
MOST_DATA, MOST_BYTES = 1024, 5_000_000


def one_token_data(count: int) -> list[Datum]:
    """So many of the smallest examples there are: one token in, one token out."""
    return [
        common.next_token_datum([5 + number % 100, 6 + number % 100]) for number in range(count)
    ]


def chunk_sizes(data: Iterable[Datum]) -> list[int]:
    """How a call is cut by the usual limits: so many examples or bytes go into one request."""
    sizes, filled = [0], 0
    for datum in data:
        if sizes[-1] and (sizes[-1] >= MOST_DATA or filled + datum.estimated_bytes > MOST_BYTES):
            sizes.append(0)
            filled = 0
        sizes[-1] += 1
        filled += datum.estimated_bytes
    return sizes


def main() -> None:
    """Show the preview, then train on a smaller batch."""
    sizes = chunk_sizes(one_token_data(CHUNK_COUNT))
    print(f"{CHUNK_COUNT} examples are sent in requests of {sizes}")
    if CHUNK_COUNT == 1025:
        common.proof(sizes == [1024, 1], "1025 small examples make two requests: [1024, 1]")
    common.proof(sum(sizes) == CHUNK_COUNT, "no example is lost")

    with HttpClient(base_url=common.BASE_URL) as http:
        limits = http.post(
            "client/config", types.ClientConfigRequest(sdk_version="0.36.0")
        ).result()
        default = types.ClientConfigResponse()
        most = limits.get("fwdbwd_max_chunk_len", default.fwdbwd_max_chunk_len)
        print(f"this server takes up to {most} examples in one request")

    with ServiceClient(base_url=common.BASE_URL) as service:
        client = service.create_lora_training_client(common.base_model(), rank=8).result()
        passed = client.forward_backward(one_token_data(RUN_COUNT), "cross_entropy")
        stepped = client.optim_step(
            AdamParams(learning_rate=2e-4, weight_decay=0.01, grad_clip_norm=1.0)
        )
        output, metrics = passed.result(), stepped.result().metrics or {}
    print(f"forward_backward: {len(output.loss_fn_outputs)} results, {output.metrics}")
    print(f"optim_step: {metrics}")
    common.proof(
        len(output.loss_fn_outputs) == RUN_COUNT, f"{RUN_COUNT} results, one for each example"
    )
    norms = [name for name in metrics if "grad" in name and "norm" in name]
    common.proof(norms, f"the step reports the norm of its gradient ({', '.join(norms)})")


if __name__ == "__main__":
    common.run(main)
