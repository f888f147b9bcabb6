"""Clients made side by side with async and await: a sampler, a training run, and a run restored
from a checkpoint.

Run it:  python examples/async_client_creation.py Settings: TINKER_CHECKPOINT_PATHS, a
comma-separated list of sampler checkpoints: then one sampler is made of each, all at once; where to
go: see common.py.
"""

import asyncio
import time

import common

from tinkex import SamplingClient, ServiceClient, TinkerError

PATHS = [path.strip() for path in common.text("TINKER_CHECKPOINT_PATHS").split(",") if path.strip()]


async def one_of_each(service: ServiceClient) -> None:
    """Make a sampler and a training run at the same time; save the run, and restore it."""
    model = await asyncio.to_thread(common.base_model, "meta-llama/Llama-3.2-1B")
    began = time.monotonic()
    sampler, trainer = await asyncio.gather(
        service.create_sampling_client(base_model=model),
        service.create_lora_training_client(model, rank=32),
    )
    print(f"✓ sampling client {sampler.sampling_session_id}")
    print(f"✓ LoRA training client {trainer.model_id}")
    # A method of a training client returns a future, which is awaited for the result.
    saved = await trainer.save_state(
        "async_demo_checkpoint", ttl_seconds=common.DAY, overwrite=True
    )
    print(f"✓ saved {saved.path}")
    restored = await service.create_training_client_from_state(saved.path)
    print(f"✓ restored as {restored.model_id}")
    print(f"elapsed: {time.monotonic() - began:.2f} s; 4 of 4 succeeded")
    common.proof(restored.model_id != trainer.model_id, "the checkpoint became a run of its own")


async def one_per_path(service: ServiceClient) -> None:
    """Make a sampler of every checkpoint, all at once, within a minute."""

    async def make(path: str) -> SamplingClient | TinkerError:
        try:
            return await service.create_sampling_client(model_path=path)
        except TinkerError as error:
            return error

    began = time.monotonic()
    async with asyncio.timeout(60):
        made = await asyncio.gather(*map(make, PATHS))
    for path, client in zip(PATHS, made, strict=True):
        print(f"✗ {path}: {client.format()}" if isinstance(client, TinkerError) else f"✓ {path}")
    succeeded = sum(isinstance(client, SamplingClient) for client in made)
    print(f"elapsed: {time.monotonic() - began:.2f} s; {succeeded} of {len(PATHS)} succeeded")
    common.proof(succeeded == len(PATHS), "every checkpoint has a sampler")


async def show() -> None:
    """Choose what to show by the settings."""
    service = ServiceClient(base_url=common.BASE_URL)
    try:
        await (one_per_path(service) if PATHS else one_of_each(service))
    finally:
        await service.close()


def main() -> None:
    """Run the coroutine."""
    asyncio.run(show())


if __name__ == "__main__":
    common.run(main)
