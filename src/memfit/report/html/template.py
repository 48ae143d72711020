"""The templates of pages: their style, in light and dark, is one for all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


def template(name: str, filters: Mapping[str, Callable[..., Any]] | None = None, **own: str) -> Any:
    """The template of this name, one of those in `assets` or its text in `own`."""
    from jinja2 import ChoiceLoader, DictLoader, Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=ChoiceLoader([DictLoader(own), PackageLoader("memfit.report.html", "assets")]),
        autoescape=lambda name: name is not None and name.endswith(".html.j2"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(filters or {})
    return environment.get_template(name)
