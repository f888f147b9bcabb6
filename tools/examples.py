"""For the documentation site: a docstring's `Example:` is shown as code, as `Examples:` is."""

from __future__ import annotations

import re
from typing import Any

import griffe


class ShowExamples(griffe.Extension):  # type: ignore[misc]
    """Gives the section the name that is understood."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        """Rename the section of one object."""
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)
