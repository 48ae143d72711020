"""The rows of a comparison as Markdown tables."""

from __future__ import annotations

from typing import Any

from common import MIB, heading

INFINITE = 2**62


def markdown(report: dict[str, Any]) -> str:
    """All rows as Markdown tables."""
    title = "Inside the segment: per-tensor plans beside torch.compile and checkpointing"
    lines = [
        *heading(title, report),
        "| workload | budget | predicted peak | measured peak | reserved | retries "
        "| time / unplanned (predicted) | A/A | numbers |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, rows in report["workloads"].items():
        lines += [_fit_line(name, key, row) for key, row in rows["fits"].items()]
    lines += ["", *_set_ups(report)]
    lines += ["", "| workload | system | peak | step | / first row |", "|---|---|---|---|---|"]
    for name, rows in report["workloads"].items():
        systems = rows["systems"]
        if "error" in systems:
            lines.append(f"| {name} | {systems['error']} | | | |")
            continue
        base = next((r["step_s"] for r in systems.values() if "step_s" in r), 1.0)
        for system, row in sorted(systems.items(), key=lambda item: -item[1].get("peak_bytes", 0)):
            if "error" in row:
                lines.append(f"| {name} | {system} | {row['error']} | | |")
                continue
            peak = f"{row['peak_bytes'] / MIB:.0f} MB" if "peak_bytes" in row else ""
            lines.append(
                f"| {name} | {system} | {peak} | {row['step_s'] * 1e3:.1f} ms "
                f"± {row['spread_s'] * 1e3:.1f} | {row['step_s'] / base:.3f} |"
            )
    return "\n".join([*lines, *_at_equal_peaks(report)]) + "\n"


def _set_ups(report: dict[str, Any]) -> list[str]:
    """Seconds until a workload's first fit was ready, and the smallest budget of any plan."""
    lines: list[str] = []
    for name, rows in report["workloads"].items():
        fits = list(rows["fits"].values())
        least: dict[str, int] = {}
        for key, fit in rows["fits"].items():
            how = key.partition(" with ")[2] or "recompute"
            size = fit.get("minimum_feasible_bytes") or fit.get("minimum_bytes")
            least[how] = min(size or INFINITE, least.get(how, INFINITE))
        first = next((f["fit_s"] for f in fits if "fit_s" in f), None)
        known = {how: size for how, size in least.items() if size < INFINITE}
        words = [
            f"the smallest budget by {how} is {size / MIB:.0f} MB reserved"
            for how, size in known.items()
        ]
        if first is not None and "profile_s" in rows:
            words.append(f"profile {rows['profile_s']:.0f} s, the first fit {first:.0f} s")
        lines += [f"- {name}: {', '.join(words)}"] if words else []
    return lines


def _at_equal_peaks(report: dict[str, Any]) -> list[str]:
    """For every peer the fastest of memfit's steps that takes no more memory."""
    lines = [
        "",
        "| workload | peer | peak | step | the fastest of memfit at no higher peak | / peer |",
        "|---|---|---|---|---|---|",
    ]
    before = len(lines)
    for name, rows in report["workloads"].items():
        timed = {k: r for k, r in rows["systems"].items() if k != "error" and "peak_bytes" in r}
        ours = {k: r for k, r in timed.items() if k.startswith("memfit") and "step_s" in r}
        for peer, row in sorted(timed.items(), key=lambda item: -item[1]["peak_bytes"]):
            if peer in ours or "step_s" not in row:
                continue
            lean = {k: r for k, r in ours.items() if r["peak_bytes"] <= row["peak_bytes"]}
            told = "none | "
            if lean:
                best = min(lean, key=lambda k: lean[k]["step_s"])
                peak, step_s = lean[best]["peak_bytes"], lean[best]["step_s"]
                told = f"{best}: {peak / MIB:.0f} MB, {step_s * 1e3:.1f} ms "
                told += f"| {step_s / row['step_s']:.3f}"
            lines.append(
                f"| {name} | {peer} | {row['peak_bytes'] / MIB:.0f} MB "
                f"| {row['step_s'] * 1e3:.1f} ms | {told} |"
            )
    return lines if len(lines) > before else []


def _fit_line(name: str, key: str, row: dict[str, Any]) -> str:
    if "error" in row:
        return f"| {name} {key} | {row['error']} |" + " |" * 7
    budget = f"{row['budget_bytes'] / MIB:.0f} MB"
    if "refused_bytes" in row:
        budget += f" ({', '.join(f'{size / MIB:.0f}' for size in row['refused_bytes'])} refused)"
    if "why" in row:
        minimum = (row["minimum_bytes"] or 0) / MIB
        return f"| {name} {key} | {budget} | refused: the minimum is {minimum:.0f} MB | | | | | | |"
    error = row["predicted_peak_bytes"] / row["measured_peak_bytes"] - 1
    predicted = row.get("predicted_time_ratio")
    ratio = ""  # where the unplanned step was not timed beside it
    if row["unplanned_step_s"] is not None:
        ratio = f"{row['measured_step_s'] / row['unplanned_step_s']:.3f} "
        predicted = predicted or row["predicted_step_s"] / row["unplanned_step_s"]
    same = "" if row["same_code_ratio"] is None else f"{row['same_code_ratio']:.3f}"
    numbers = row["numerics"]
    errors = numbers["error_vs_reference"]
    said = "bitwise" if numbers["bitwise_vs_unplanned"] else f"{numbers['grad_max_rel_diff']:.1e}"
    if errors:
        said += f" ({errors['planned']:.1e} / {errors['unplanned']:.1e} from fp32)"
    return (
        f"| {name} {key} | {budget} | {row['predicted_peak_bytes'] / MIB:.0f} MB "
        f"| {row['measured_peak_bytes'] / MIB:.0f} MB ({error:+.1%}) "
        f"| {row['measured_reserved_bytes'] / MIB:.0f} MB | {row['retries']} "
        f"| {ratio}({predicted:.3f}) | {same} | {said} |"
    )
