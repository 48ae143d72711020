"""A plain training loop, observed: memory by phase, a spike, and where the seconds of a step go."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
from torch import nn

import memfit
from memfit.observe import LiveLine, MemoryProfiler, component_report, component_times

CUDA = torch.cuda.is_available()
WIDTH, ROWS, STEPS = (2048, 8192, 12) if CUDA else (512, 2048, 12)
LONG = 8  # the step whose batch is four times as long


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """The loss of a batch."""
    return (model(batch) - 1).square().mean()


def main() -> None:
    """Train with a live line, then print the report, the spikes and the components."""
    torch.manual_seed(0)
    device = torch.device("cuda" if CUDA else "cpu")
    layers = [layer for _ in range(6) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
    model = nn.Sequential(*layers).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    batches = (
        torch.randn(ROWS * (4 if step == LONG else 1), WIDTH, device=device)
        for step in range(STEPS)
    )

    with MemoryProfiler() as memory, LiveLine(memory, budget="4GiB", samples=ROWS):
        for batch in memory.steps(batches):
            with memory.phase("forward"):
                loss = loss_of(model, batch)
            with memory.phase("backward"):
                loss.backward()
            with memory.phase("optimizer"):
                optimizer.step()
                optimizer.zero_grad()

    print(memory.generate_report())
    for spike in memory.identify_spikes(threshold_mb=100):
        print(f"spike: step {spike.step}, {spike.phase}, {spike.delta_mb:.0f} MB more")
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())
    memory.export_csv(folder / "memory.csv")
    memory.export_json(folder / "memory.json")
    print(f"memory.csv and memory.json are in {folder}\n")

    batch = torch.randn(ROWS, WIDTH, device=device)
    workload = memfit.Workload(model, loss_of, optimizer, batch, name="mlp")
    print(component_report(component_times(workload, [batch], steps=4)))


if __name__ == "__main__":
    main()
