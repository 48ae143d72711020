"""What is known of compiled steps beside the eager one that is traced here: measurements only.

The peak of a compiled step is not estimated: what inductor fuses and saves is not told by the
operators of the eager one.
"""

from __future__ import annotations

# Peaks in MB of the step by single operators, and of memfit's unplanned step by compiled segments,
# on an H200; the files are those of benchmarks/results.
COMPILED_BESIDE_EAGER = {
    "gpt2@8x1024 bf16": (12678, 6736, ("estimates-h200.md", "recipes-h200.md")),
    "gpt2-large@8x1024 bf16": (46238, 25904, ("inside-setup-h200.md",)),
    "llama-1b@2x2048 bf16": (30729, 23650, ("inside-llama-h200.md",)),
    "encoder@256x128": (19081, 14178, ("inside-peers-h200.md",)),
    "vit_b_16@64": (8579, 8505, ("inside-peers-h200.md",)),
    "resnet152@64": (11411, 12365, ("inside-resnets-compiled-h200.md",)),
}


def eager_note() -> str:
    """Say which step is estimated, and what compiled ones took that were measured."""
    shares = [
        f"{name} {compiled / eager:.0%} of {eager} MB"
        for name, (eager, compiled, _) in COMPILED_BESIDE_EAGER.items()
    ]
    sources = dict.fromkeys(file for *_, files in COMPILED_BESIDE_EAGER.values() for file in files)
    return (
        "the peak is that of the eager step, operator by operator. On CUDA memfit usually "
        "compiles; what compiled code takes is not estimated. It held, measured on an H200: "
        f"{', '.join(shares)}. So a language model may fit a card that is refused here, or "
        f"need less than is said (benchmarks/results: {', '.join(sources)})"
    )
