"""Source: the module and the line of code behind a tensor, as graphs hold them in one string."""

from __future__ import annotations

import re
from dataclasses import astuple, dataclass

_BETWEEN = "\t"  # stands in no path and in no line that was stripped
# As earlier versions wrote it: "mlp.c_fc model.py:12 code". The module's path may be left out.
_EARLIER = re.compile(r"(?:(?P<module>\S+) )?(?P<file>\S+):(?P<line>\d+)(?: (?P<code>.*))?")
# Earlier versions named this line of memfit's own for tensors of the loss.
_OWN = "loss_calls.py:83 return function(*args, **kwargs)"


@dataclass(frozen=True)
class Source:
    """A module's path, and a line of code by its file, number and text; empty where not known."""

    module: str = ""
    file: str = ""  # without folders
    line: int = 0
    code: str = ""

    @staticmethod
    def read(text: str) -> Source:
        """What `text` stands for, whichever version wrote it."""
        if _BETWEEN in text:
            module, file, line, code = text.split(_BETWEEN, 3)
            return Source(module, file, int(line) if line.isdecimal() else 0, code)
        if text.endswith(_OWN):
            return Source()
        if match := _EARLIER.fullmatch(text):
            return Source(
                match["module"] or "", match["file"], int(match["line"]), match["code"] or ""
            )
        return Source(text)

    @property
    def text(self) -> str:
        """The string that `read` reads; empty where nothing is known."""
        if self == Source():
            return ""
        return _BETWEEN.join(str(part).replace(_BETWEEN, " ") for part in astuple(self))

    @property
    def place(self) -> str:
        """The file and the number of the line: "model.py:12"."""
        return f"{self.file}:{self.line}" if self.file else ""

    @property
    def line_words(self) -> str:
        """The place and the code there."""
        return " ".join(filter(None, (self.place, self.code)))

    @property
    def words(self) -> str:
        """All that is known, for people."""
        return " ".join(filter(None, (self.module, self.place, self.code)))
