"""Graphics cards as facts: memory as CUDA reports it, and the rates of their data sheets."""

from __future__ import annotations

import re
from dataclasses import dataclass

from memfit.errors import UsageError

GIB = 2**30
MIB = 2**20
# A workspace on each thread that multiplies: that of the forward and that of the backward. Measured
# on an H200; for the others what torch asks for.
CUBLAS_THREADS, CUBLAS_BYTES, CUBLAS_HOPPER_BYTES = 2, 8 * MIB + 128 * 1024, 33 * MIB
CONTEXT_BYTES = GIB // 2  # CUDA's own, outside of every tensor
PCIE_BYTES_PER_S = {3: 12.5e9, 4: 25e9, 5: 50e9}  # what pinned copies reach on 16 lanes


@dataclass(frozen=True)
class Card:
    """One card. FLOP/s are dense ones with sums in fp32; `memory_bytes` varies a little by driver.

    `half_flops` is for fp16; a card without `bf16` does bf16 at the rate of fp32.
    """

    name: str
    memory_bytes: int
    half_flops: float
    tf32_flops: float
    fp32_flops: float
    bytes_per_s: float
    pcie: int
    bf16: bool = True
    hopper: bool = False

    @property
    def usable_bytes(self) -> int:
        """What is left for the step beside CUDA's own context."""
        return self.memory_bytes - CONTEXT_BYTES

    @property
    def copy_bytes_per_s(self) -> float:
        """Between host and card, each way."""
        return PCIE_BYTES_PER_S[self.pcie]

    @property
    def workspace_bytes(self) -> int:
        """What cuBLAS keeps for itself among the tensors."""
        return CUBLAS_THREADS * (CUBLAS_HOPPER_BYTES if self.hopper else CUBLAS_BYTES)


def _card(
    name: str,
    gibibytes: float,
    half: float,
    tf32: float,
    fp32: float,
    gb_per_s: float,
    pcie: int,
    *,
    bf16: bool = True,
    hopper: bool = False,
) -> Card:
    rates = (half * 1e12, tf32 * 1e12, fp32 * 1e12, gb_per_s * 1e9)
    return Card(name, int(gibibytes * GIB), *rates, pcie, bf16, hopper)


CARDS: tuple[Card, ...] = (
    #     name             GiB    TFLOP/s half, tf32, fp32   GB/s  PCIe
    _card("T4", 14.56, 65.0, 8.1, 8.1, 320, 3, bf16=False),
    _card("RTX 3060", 11.76, 25.5, 12.7, 12.7, 360, 4),
    _card("RTX 3090", 23.69, 71.0, 35.6, 35.6, 936, 4),
    _card("RTX 4070 Ti", 11.72, 80.2, 40.1, 40.1, 504, 4),
    _card("RTX 4080", 15.70, 97.5, 48.7, 48.7, 717, 4),
    _card("RTX 4090 Laptop", 15.70, 66.0, 33.0, 33.0, 576, 4),
    _card("RTX 4090", 23.64, 165.2, 82.6, 82.6, 1008, 4),
    _card("RTX 5070 Ti", 15.47, 87.9, 43.9, 43.9, 896, 5),
    _card("RTX 5080", 15.47, 112.6, 56.3, 56.3, 960, 5),
    _card("RTX 5090", 31.36, 209.5, 104.8, 104.8, 1792, 5),
    _card("A100 40GB", 39.39, 312.0, 156.0, 19.5, 1555, 4),
    _card("A100 80GB", 79.15, 312.0, 156.0, 19.5, 2039, 4),
    _card("H100", 79.10, 989.4, 494.7, 66.9, 3350, 5, hopper=True),
    _card("H200", 139.72, 989.4, 494.7, 66.9, 4800, 5, hopper=True),
)
_MEANT = {"a100": "a10080gb", "a10040": "a10040gb", "a10080": "a10080gb", "h10080gb": "h100"}
_FILLERS = re.compile(r"nvidia|geforce|tesla|rtx|gpu|[^a-z0-9]")


def find_card(name: str) -> Card:
    """Return the card of this name: "RTX 4090", "rtx4090" and "4090" are one."""
    wanted = _key(name)
    wanted = _MEANT.get(wanted, wanted)
    for card in CARDS:
        if _key(card.name) == wanted:
            return card
    known = ", ".join(card.name for card in CARDS)
    raise UsageError(
        f"unknown card {name!r}", hint=f"known are {known}; or give its memory: --budget 24GiB"
    )


def _key(name: str) -> str:
    return _FILLERS.sub("", name.lower())
