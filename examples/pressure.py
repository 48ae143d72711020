"""A plain training loop with a safety valve: tensors move to host memory only while they must."""

from __future__ import annotations

import torch
from torch import nn

import memfit
from memfit.units import format_bytes, format_seconds

CUDA = torch.cuda.is_available()
# As if this were all the memory there is. Leave it out on a GPU: there it is known.
CAPACITY = "1GiB" if CUDA else "32MiB"
SHORT, LONG = (2048, 16384) if CUDA else (64, 512)  # rows of a batch: little and much memory


def main() -> None:
    """Train on short batches, on long ones that would not fit, and on short ones again."""
    torch.manual_seed(0)
    device = torch.device("cuda" if CUDA else "cpu")
    layers = [layer for _ in range(12) for layer in (nn.Linear(1024, 1024), nn.GELU())]
    model = nn.Sequential(*layers, nn.Linear(1024, 1)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    with memfit.pressure(threshold=0.8, capacity=CAPACITY) as valve:
        for rows in (SHORT, SHORT, LONG, LONG, SHORT, SHORT):
            before = valve.statistics.swaps
            loss = model(torch.randn(rows, 1024, device=device)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            swaps = valve.statistics.swaps - before
            print(f"{rows:6d} rows: loss {loss.item():.5f}, {swaps} tensors moved")

    done = valve.statistics
    print(
        f"{done.swaps} tensors left and {done.retrievals} came back, "
        f"{format_bytes(done.moved_bytes)} out at {done.out.gb_per_s:.1f} GB/s; "
        f"the computation waited {format_seconds(done.waited_s)}; "
        f"at most {format_bytes(done.highest_bytes)} were in use"
    )


if __name__ == "__main__":
    main()
