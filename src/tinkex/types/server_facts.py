"""Models and health of a server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

from tinkex.types.record import Record, settle


class SupportedModel(Record, frozen=True, kw_only=True):
    """A base model the server offers.

    Example:
        >>> model = SupportedModel(
        ...     model_name="Qwen/Qwen3-8B", max_context_length=32_768, trainable=True
        ... )
        >>> model.max_context_length
        32768
    """

    model_name: str | None = None
    max_context_length: int | None = None
    trainable: bool | None = None
    sampleable: bool | None = None


if TYPE_CHECKING:
    Models: TypeAlias = list[SupportedModel]
else:
    # Some servers list names; those are read by hand.
    Models = list[Any]


class GetServerCapabilitiesResponse(Record, frozen=True, kw_only=True):
    """Models and features of a server; a model may be listed by its name alone.

    Example:
        >>> offer = GetServerCapabilitiesResponse.model_validate(
        ...     {"supported_models": ["tinkex/tiny"]}
        ... )
        >>> "tinkex/tiny" in offer.model_names()  # offer = rest.get_server_capabilities().result()
        True
    """

    supported_models: Models

    def __post_init__(self) -> None:
        listed = [model for model in self.supported_models if model is not None]
        models = [
            SupportedModel(model_name=model) if isinstance(model, str) else model
            for model in listed
        ]
        settle(self, "supported_models", [SupportedModel.model_validate(model) for model in models])

    def model_names(self) -> list[str | None]:
        """The names of the models, in their order; None for one that has no name.

        Example:
            >>> models = [
            ...     SupportedModel(model_name="tinkex/tiny"),
            ...     SupportedModel(model_name="Qwen/Qwen3-8B"),
            ... ]
            >>> GetServerCapabilitiesResponse(supported_models=models).model_names()
            ['tinkex/tiny', 'Qwen/Qwen3-8B']
        """
        return [model.model_name for model in self.supported_models]


class HealthResponse(Record, frozen=True, kw_only=True):
    """The server is up.

    Example:
        >>> HealthResponse(status="ok").status
        'ok'
    """

    status: str
