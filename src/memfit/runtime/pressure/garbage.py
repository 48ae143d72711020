"""Collections of garbage, which may hold host memory: rare enough to cost next to nothing.

A step that failed leaves its graph behind in a cycle (an error, its frames, the graph), and with
it what the graph has in host memory. A full collection looks through all objects of the process,
which takes longer than a small step. So between two of them lies some time, the longer the longer
the last one took, and whoever asks in between is told no.
"""

from __future__ import annotations

import gc
import time

_SHARE = 50  # one part in so many of a process's time

_not_before = 0.0  # for the process: every collection looks at the whole of it


def collected() -> bool:
    """Whether garbage was collected now; it is not where the last time was not long ago."""
    global _not_before
    start = time.monotonic()
    if start < _not_before:
        return False
    gc.collect()
    stop = time.monotonic()
    _not_before = stop + _SHARE * (stop - start)
    return True
