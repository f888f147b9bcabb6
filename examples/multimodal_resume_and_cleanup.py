"""Text and an image in one prompt; then a run resumed from a checkpoint, and unloaded.

Run it:  python examples/multimodal_resume_and_cleanup.py Settings: TINKER_IMAGE_PATH (a PNG or
JPEG; examples/assets/gradient_32x32.png by default), TINKER_IMAGE_EXPECTED_TOKENS (how many tokens
the image takes), TINKER_CHECKPOINT_PATH (a training checkpoint to resume from); where to go: see
common.py.

Without a model that sees, the first part is skipped, and says so: the bundled model reads text
only.
"""

from pathlib import Path

import common

from tinkex import (
    ImageChunk,
    ModelInput,
    RestClient,
    SamplingParams,
    ServiceClient,
    TinkerError,
    TrainingClient,
)

PREFERRED = ("Qwen/Qwen3-VL-30B-A3B-Instruct", "Qwen/Qwen3-VL-235B-A22B-Instruct")
SIGHTED = ("vision", "vl", "image", "omni")
IMAGE = Path(common.text("TINKER_IMAGE_PATH", str(common.ASSETS / "gradient_32x32.png")))


def expected_tokens() -> int | None:
    """The setting for the image's tokens; unlike other numbers a bad one is an error, for the
    server trusts it.
    """
    said = common.text("TINKER_IMAGE_EXPECTED_TOKENS")
    if not said:
        return None
    if not said.isdecimal():
        common.fail(f"TINKER_IMAGE_EXPECTED_TOKENS must be a whole number, 0 or more, got {said!r}")
    return int(said)


def model_that_sees() -> str | None:
    """A model that takes images: the one that is set or a preferred one, else any whose name says
    so.
    """
    offered = common.offered_models()
    known = [name for name in PREFERRED if name in offered]
    by_name = [
        name
        for name in (common.text("TINKER_BASE_MODEL"), *known, *offered)
        if any(word in name.lower() for word in SIGHTED)
    ]
    return next(iter(by_name), None)


def sample_with_image(service: ServiceClient, model: str) -> None:
    """Ask a question about an image."""
    tokenizer = common.tokenizer_of(model)
    is_png = IMAGE.suffix.lower() == ".png"
    image = ImageChunk(
        data=IMAGE.read_bytes(),
        format="png" if is_png else "jpeg",
        expected_tokens=expected_tokens(),
    )
    prompt = ModelInput.from_ints(tokenizer.encode("What is in this picture? ")).append(image)
    print(f"model {model}, image {IMAGE.name} ({len(image.data)} bytes)")
    sampler = service.create_sampling_client(base_model=model).result()
    response = sampler.sample(prompt, 1, SamplingParams(max_tokens=8), timeout=60).result()
    print(f"tokens: {[sequence.tokens for sequence in response.sequences]}")
    common.show_samples(response.sequences, tokenizer)
    common.proof(response.sequences[0].tokens, "a sample came back for text and image together")


def resumed(service: ServiceClient, path: str) -> TrainingClient | None:
    """A run that goes on from a checkpoint; None, and the reason printed, when that cannot be."""
    try:
        client = service.create_training_client_from_state_with_optimizer(path).result()
    except (TinkerError, ValueError) as error:
        reason = error.format() if isinstance(error, TinkerError) else str(error)
        print(f"cannot resume from {path}: {reason}")
        return None
    print(f"resumed from {path}\nas {client.model_id}")
    return client


def resume_from_somewhere(service: ServiceClient, rest: RestClient) -> tuple[str, TrainingClient]:
    """Resume from the checkpoint that is set; else from the remembered one, a listed one, or a new
    one.
    """
    if named := common.text("TINKER_CHECKPOINT_PATH"):
        client = resumed(service, named)
        return (
            (named, client) if client else common.fail("the checkpoint that was named does not do")
        )
    cache = common.CHECKPOINT_CACHE
    if cache.is_file() and (remembered := cache.read_text().strip()):
        print(f"remembered in {cache}: {remembered}")
        if client := resumed(service, remembered):
            return remembered, client
        print("it may have been deleted since: looking at the list")
    listed = rest.list_user_checkpoints(limit=20).result().checkpoints
    for path in [one.tinker_path for one in listed if one.checkpoint_type == "training"][:3]:
        if client := resumed(service, path):
            return path, client
    print("no checkpoint to resume from: saving one")
    path = (
        common.trained_a_little(service, common.base_model())
        .save_state("to-resume", ttl_seconds=common.DAY)
        .result()
        .path
    )
    client = resumed(service, path)
    return (path, client) if client else common.fail("a checkpoint that was just saved does not do")


def main() -> None:
    """Both parts."""
    with (
        ServiceClient(base_url=common.BASE_URL) as service,
        RestClient(base_url=common.BASE_URL) as rest,
    ):
        common.section("Text and image")
        if model := model_that_sees():
            sample_with_image(service, model)
        else:
            common.skipped("the part with the image: this server offers no model that takes images")

        common.section("Resume")
        path, client = resume_from_somewhere(service, rest)
        common.CHECKPOINT_CACHE.parent.mkdir(parents=True, exist_ok=True)
        common.CHECKPOINT_CACHE.write_text(path)
        common.proof(
            client.get_info().model_id == client.model_id,
            "the run was resumed, optimizer state included",
        )

        common.section("Clean up")
        try:
            client.unload_model()
            print(f"unloaded {client.model_id}; its checkpoints stay")
        except TinkerError as error:
            print(f"this server does not unload models: {error.format()}")
        print(
            "checkpoints are deleted by: tinkex checkpoint delete PATH PATH ... (see "
            "checkpoint_multi_delete_live.py)"
        )


if __name__ == "__main__":
    common.run(main)
