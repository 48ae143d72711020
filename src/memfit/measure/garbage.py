"""What Python's garbage collector looks through while steps are measured.

Garbage in cycles holds memory that would be counted, so it is collected before every recording,
many times in a fit. Each time the collector visits all there is: half a million objects of torch
and its compilers alone, which takes a third of a second.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def only_new_garbage() -> Iterator[None]:
    """Collect garbage once, and within the block only look for what has been made since.

    Whoever has frozen objects before, the outermost block included, has done so for the same end,
    and they cannot be told apart: then nothing is done.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
