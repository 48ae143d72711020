"""Modules and lines of code in one string, read back as they were, whichever version wrote it."""

from __future__ import annotations

import pytest

from memfit.ir.source import Source

FOUND = [
    Source("mlp.c_fc", "my work load.py", 12, "return a: b  # c.py:3 d"),
    Source("blocks.a b:1.fc", "model.py", 7, ""),
    Source("", "model.py", 7, "x = y"),
    Source("layer.x:12"),
    Source(),
]


@pytest.mark.parametrize("source", FOUND)
def test_names_with_spaces_and_colons_are_read_back(source: Source) -> None:
    """A file's name with spaces gave a wrong module and no line."""
    assert Source.read(source.text) == source


def test_what_earlier_versions_wrote_is_read() -> None:
    line = "x = torch.addmm(self.bias, x)"
    assert Source.read(f"mlp.c_fc pytorch_utils.py:119 {line}") == Source(
        "mlp.c_fc", "pytorch_utils.py", 119, line
    )
    assert Source.read("model.py:12") == Source("", "model.py", 12)
    assert Source.read("loss_calls.py:83 return function(*args, **kwargs)") == Source()
    assert Source.read("mlp.c_fc") == Source("mlp.c_fc")


def test_words_are_for_people() -> None:
    source = FOUND[0]
    assert source.words == "mlp.c_fc my work load.py:12 return a: b  # c.py:3 d"
    assert source.place == "my work load.py:12" and Source().words == Source().place == ""
    assert Source("", "a\tb.py", 1).text.count("\t") == 3
