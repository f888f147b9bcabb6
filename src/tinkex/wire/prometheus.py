"""The text that Prometheus reads: one writer for the numbers of a client and those of a server."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_FORBIDDEN = re.compile(r"[^a-zA-Z0-9_:]")
_ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


def name_of(text: str) -> str:
    """A name as Prometheus takes it: what it does not allow becomes an underscore.

    Example:
        >>> name_of("1st.loss")
        '_1st_loss'
    """
    cleaned = _FORBIDDEN.sub("_", text)
    return f"_{cleaned}" if cleaned[:1].isdigit() or not cleaned else cleaned


def labels(**values: object) -> str:
    """Labels as they stand behind a name.

    Example:
        >>> labels(operation="sample", status=200)
        '{operation="sample",status="200"}'
    """
    return (
        "{"
        + ",".join(f'{name}="{str(value).translate(_ESCAPES)}"' for name, value in values.items())
        + "}"
    )


def family(name: str, kind: str, help_text: str, values: Mapping[str, float]) -> Iterator[str]:
    """The lines of a counter or a gauge; `values` are by their labels, "" for none."""
    yield from heading(name, kind, help_text)
    for labelled, value in values.items():
        yield f"{name}{labelled} {value}"


def heading(name: str, kind: str, help_text: str) -> Iterator[str]:
    """The lines before the values of one name."""
    yield f"# HELP {name} {help_text}"
    yield f"# TYPE {name} {kind}"


def histogram(
    name: str, bounds: Sequence[float], counts: Sequence[int], total: float, **labelled: object
) -> Iterator[str]:
    """Return a histogram's lines without its heading.

    `counts` has one number per bucket, and one for the values above all of them.
    """
    for bound, count in zip((*bounds, "+Inf"), accumulate(counts), strict=True):
        yield f"{name}_bucket{labels(**labelled, le=bound)} {count}"
    own = labels(**labelled) if labelled else ""
    yield f"{name}_sum{own} {total}"
    yield f"{name}_count{own} {sum(counts)}"
