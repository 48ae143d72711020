"""The public names, frozen: adding or dropping one is a choice, made here."""

from __future__ import annotations

import pytest

import memfit

PUBLIC = [
    "InfeasibleError",
    "Plan",
    "Workload",
    "apply",
    "estimate",
    "find_batch_size",
    "fit",
    "fit_workload",
    "plan",
    "pressure",
    "profile",
    "tiled_cross_entropy",
]
MOST_NAMES = 12


def test_public_names_are_these() -> None:
    assert memfit.__all__ == PUBLIC == sorted(PUBLIC)
    assert len(PUBLIC) <= MOST_NAMES
    assert set(PUBLIC) <= set(dir(memfit))


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_name_is_importable_and_documented(name: str) -> None:
    value = getattr(memfit, name)
    assert value.__name__ == name
    assert value.__module__.partition(".")[0] == "memfit"
    doc = value.__doc__ or ""
    assert doc.strip()
    assert not doc.startswith(f"{name}("), "a dataclass writes its signature where no docstring is"


def test_other_names_are_refused() -> None:
    with pytest.raises(AttributeError, match="no attribute 'fits'"):
        memfit.fits  # noqa: B018
