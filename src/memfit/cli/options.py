"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

_TARGET = "Target options"
_GOAL = "Goal"
_HOW = "How to plan"

TargetName = Annotated[
    str,
    typer.Argument(
        metavar="TARGET",
        help="encoder, torchvision:NAME, timm:NAME, transformers:NAME or path/to/file.py:function.",
        show_default=False,
    ),
]
Batch = Annotated[
    int | None, typer.Option("--batch", help="Examples per batch.", rich_help_panel=_TARGET)
]
Seq = Annotated[
    int | None, typer.Option("--seq", help="Tokens per example.", rich_help_panel=_TARGET)
]
Dtype = Annotated[
    str | None,
    typer.Option("--dtype", help="fp32, or bf16 or fp16 by autocast.", rich_help_panel=_TARGET),
]
Optimizer = Annotated[
    str | None, typer.Option("--optimizer", help="sgd, adam or adamw.", rich_help_panel=_TARGET)
]
Device = Annotated[
    str | None,
    typer.Option(
        "--device",
        help="cpu, cuda or cuda:N; left out: cuda where there is one, a file's own choice.",
        rich_help_panel=_TARGET,
    ),
]
Fields = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="FIELD=VALUE",
        help="Change a field of the model, such as n_layer=4; may be repeated.",
        rich_help_panel=_TARGET,
    ),
]
Budget = Annotated[
    str | None,
    typer.Option(
        "--budget",
        metavar="B",
        help="Bytes of the whole step: 16GiB, 16GB, a number of bytes, 60% of the plain "
        "step's peak, or auto (what is free, less 3 %).",
        rich_help_panel=_GOAL,
    ),
]
Utilization = Annotated[
    float | None,
    typer.Option(
        "--utilization",
        metavar="SHARE",
        help="The budget as a share of the device's memory, such as 0.8.",
        rich_help_panel=_GOAL,
    ),
]
ActivationReduction = Annotated[
    float | None,
    typer.Option(
        "--activation-reduction",
        metavar="SHARE",
        help="Cut this share of the activation memory, such as 0.4, instead of a budget.",
        rich_help_panel=_GOAL,
    ),
]
MaxSlowdown = Annotated[
    float | None,
    typer.Option(
        "--max-slowdown",
        metavar="RATIO",
        help="Refuse a plan slower than this, such as 1.2 times the plain step.",
        rich_help_panel=_GOAL,
    ),
]
Strategy = Annotated[
    str | None,
    typer.Option(
        "--strategy",
        metavar="S",
        help="optimal (default), ratio, interval, all or none; swap moves everything to the host, "
        "mutwo swaps or recomputes tensor by tensor.",
        rich_help_panel=_HOW,
    ),
]
Interval = Annotated[
    int | None,
    typer.Option(
        "--interval",
        metavar="K",
        help="Segments per group, for strategy interval; left out: the best.",
        rich_help_panel=_HOW,
    ),
]
Segments = Annotated[
    list[str] | None,
    typer.Option(
        "--segments",
        metavar="PATTERN",
        help="Modules to plan, such as 'layers.*', instead of those found ('**': every single "
        "layer); may be repeated.",
        rich_help_panel=_HOW,
    ),
]
Allow = Annotated[
    list[str] | None,
    typer.Option(
        "--allow",
        metavar="TECHNIQUE",
        help="Techniques a plan may use: recompute, offload, step_in_backward, tiled_loss, "
        "optimizer_offload, step_on_host, optim_bf16_sr, optim_8bit, int8_weights (symmetric, a "
        "scale per channel), int8_weights_asymmetric, int8_weights_per_tensor, "
        "int8_weights_asymmetric_per_tensor, microbatch "
        "(+NAME adds to the default: recompute, and more where nothing fits); may be repeated.",
        rich_help_panel=_HOW,
    ),
]
Force = Annotated[
    list[str] | None,
    typer.Option(
        "--force",
        metavar="TECHNIQUE",
        help="Let microbatch split a batch although batch norms then see it in parts.",
        rich_help_panel=_HOW,
    ),
]
Explain = Annotated[
    bool,
    typer.Option("--explain", help="Say of every technique why it was taken or not."),
]
Preset = Annotated[
    str | None,
    typer.Option(
        "--preset",
        metavar="NAME",
        help="Start from conservative, balanced, aggressive or maximum, or from a recipe: "
        "124m-4gib, 1b-16gib. What is given beside it goes first.",
        rich_help_panel=_HOW,
    ),
]
ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE",
        help="Start from a TOML or JSON file of options; goes before --preset.",
        rich_help_panel=_HOW,
    ),
]
HostBudget = Annotated[
    str | None,
    typer.Option(
        "--host-budget",
        metavar="B",
        help="Host memory that offloaded tensors may take; left out: half of what is free.",
        rich_help_panel=_HOW,
    ),
]
Executor = Annotated[
    str | None,
    typer.Option(
        "--executor",
        metavar="E",
        help="How segments run: graph (aten kernels; usual on the CPU), inductor (compiled; usual "
        "on CUDA), module (not captured), or auto (default): the usual one.",
        rich_help_panel=_HOW,
    ),
]
MinTensorBytes = Annotated[
    str | None,
    typer.Option(
        "--min-tensor-bytes",
        metavar="B",
        help="Tensors smaller than this, such as 100KB, are never recomputed inside a segment, "
        "nor moved to the host.",
        rich_help_panel=_HOW,
    ),
]
CudaGraphs = Annotated[
    bool,
    typer.Option(
        "--cuda-graphs",
        help="Launch forward and backward as CUDA graphs, so that the device never waits for the "
        "host. The model's Python then runs only while they are captured.",
        rich_help_panel=_HOW,
    ),
]
References = Annotated[
    str | None,
    typer.Option(
        "--references",
        metavar="NAMES",
        help="Time these beside the plan: eager (the step as it is), compiled (the whole step by "
        "torch.compile), or both: eager,compiled.",
        rich_help_panel=_HOW,
    ),
]
Accumulate = Annotated[
    int,
    typer.Option(
        "--accumulate",
        metavar="N",
        help="Batches per optimizer step.",
        rich_help_panel=_HOW,
    ),
]
# With a preset or a file beside it: what is not given comes from there.
AccumulateOrPreset = Annotated[
    int | None,
    typer.Option(
        "--accumulate",
        metavar="N",
        help="Batches per optimizer step.",
        show_default="1",
        rich_help_panel=_HOW,
    ),
]
Json = Annotated[
    bool, typer.Option("--json", help="Print one JSON object on stdout, the rest on stderr.")
]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Print what is being done.")]
