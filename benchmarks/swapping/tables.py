"""The rows of a report as Markdown tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from common import MIB, heading
from systems import compared_text

from swapping.everything import AT_ITS_PEAK

Row = Mapping[str, Any]


def markdown(report: dict[str, Any]) -> str:
    """All parts that have rows."""
    lines = heading("Swapping: activations moved to host memory", report)
    for part, (title, table) in _TABLES.items():
        rows = report.get(part) or {}
        if rows:
            lines += [f"## {title}", "", *table(rows), ""]
            lines += [f"- {key}: {row['error']}" for key, row in rows.items() if "error" in row]
    return "\n".join(lines) + "\n"


def _good(rows: Mapping[str, Row]) -> list[tuple[str, Row]]:
    return [(key, row) for key, row in rows.items() if "error" not in row]


def _everything(rows: Mapping[str, Row]) -> list[str]:
    lines = [
        "Bound: bytes out / rate + bytes back / rate, or the plain step if that takes longer. "
        "Rates are those of plain pinned copies in the same run. Steps ran without a cap: what is "
        "held is what the allocator kept when nothing asked it for less.",
        "",
        "| workload, executor | plain | swap | peak | held | / save_on_cpu | GB/s out, back (share "
        "of pinned) | hidden | stalls | step / bound | predicted step, peak | A/A | numbers |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for key, row in _good(rows):
        systems, moved = row["systems"], row["traffic"]
        plain, swap = systems["plain"], systems["swap"]
        if "step_s" not in swap:
            lines.append(f"| {key} | | {swap['error']} |" + " |" * 10)
            continue
        if not moved["moved_bytes"]:
            lines.append(f"| {key} | {_ms(plain)}, {_mb(plain)} | nothing was moved |" + " |" * 10)
            continue
        peer = systems.get("save_on_cpu", {})
        beside = "not measured"
        if "step_s" in peer:
            beside = f"{swap['step_s'] / peer['step_s']:.2f} of {_ms(peer)}, {_mb(peer)}"
            beside += f", held {_held(peer)}"
        said = row["predicted"]
        lines.append(
            f"| {key} | {_ms(plain)}, {_mb(plain)} | {_ms(swap)}, {_mb(swap)} "
            f"| {swap['peak_bytes'] / plain['peak_bytes'] - 1:+.0%} | {_held(swap)} | {beside} "
            f"| {moved['out_gb_per_s']:.1f}, {moved['in_gb_per_s']:.1f} "
            f"({moved['out_share']:.0%}, {moved['in_share']:.0%}) "
            f"| {moved['hidden_share']:.0%} | {moved['stalls']:.0f}, "
            f"{moved['stalled_s'] * 1e3:.0f} ms | {row['bound_ratio']:.2f} "
            f"| {said['step_s'] / swap['step_s'] - 1:+.1%}, "
            f"{said['peak_bytes'] / swap['peak_bytes'] - 1:+.1%} "
            f"| {row['a_a']:.1%} | {_numbers(row['numerics'])} |"
        )
    return lines + _at_the_peers_peak(rows)


def _at_the_peers_peak(rows: Mapping[str, Row]) -> list[str]:
    lines = [
        "",
        "| workload, executor | system | peak | held | step | / save_on_cpu |",
        "|---|---|---|---|---|---|",
    ]
    for key, row in _good(rows):
        systems = row["systems"]
        peer = systems.get("save_on_cpu", {})
        if "step_s" not in peer:
            continue
        lines += [
            f"| {key} | {name} | {_mb(system)} | {_held(system)} | {_ms(system)} "
            f"| {system['step_s'] / peer['step_s']:.2f} |"
            for name, system in systems.items()
            if "step_s" in system and name in ("save_on_cpu", *AT_ITS_PEAK)
        ]
    return lines


def _hides(rows: Mapping[str, Row]) -> list[str]:
    lines = [
        "| workload, executor | plain | peak (predicted) | moved | time / plain | predicted | A/A "
        "| hidden (predicted) | numbers |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for key, row in _good(rows):
        if "why" in row:
            lines.append(f"| {key} | {row['why']} |" + " |" * 7)
            continue
        plain, found, moved = row["systems"]["plain"], row["systems"]["hides"], row["traffic"]
        error = row["predicted_peak_bytes"] / found["peak_bytes"] - 1
        ratio, a_a = f"{row['ratio']:.3f}", f"{row['a_a']:.1%}"
        if "by_rounds" in row:
            ratio, a_a = compared_text(row["by_rounds"]), compared_text(row["a_a_by_rounds"])
        lines.append(
            f"| {key} | {_ms(plain)}, {_mb(plain)} | {_mb(found)} ({error:+.1%}) "
            f"| {moved['moved_bytes'] / MIB:.0f} MB "
            f"| {ratio} | {row['predicted_ratio']:.3f} | {a_a} "
            f"| {moved['hidden_share']:.0%} ({row['predicted_hidden_share']:.0%}) "
            f"| {_numbers(row['numerics'])} |"
        )
    return lines


def _pays(rows: Mapping[str, Row]) -> list[str]:
    lines = [
        "| workload, executor, budget | strategy | peak (predicted) | reserved | retries | step "
        "(predicted) | / unplanned | recomputed | moved | hidden |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for key, row in _good(rows):
        base = row["systems"]["unplanned"]["step_s"]
        for system, found in row["systems"].items():
            if "step_s" not in found:
                lines.append(f"| {key} | {system} | {found['error']} |" + " |" * 7)
                continue
            same = f" (the plan of {found['same_as']})" if "same_as" in found else ""
            cells = _strategy(found, base)
            lines.append(f"| {key} | {system}{same} | " + " | ".join(cells) + " |")
    for key, row in _good(rows):
        lines += ["", f"{key}, {row['budget_bytes'] / MIB:.0f} MB: {row['verdict']}"]
    return lines


def _strategy(found: Row, base: float) -> list[str]:
    peak = f"{found['peak_bytes'] / MIB:.0f} MB" if "peak_bytes" in found else ""
    step = f"{found['step_s'] * 1e3:.1f} ms ± {found['spread_s'] * 1e3:.1f}"
    if "predicted_step_s" in found:
        peak += f" ({found['predicted_peak_bytes'] / found['peak_bytes'] - 1:+.1%})"
        step += f" ({found['predicted_step_s'] / found['step_s'] - 1:+.1%})"
    reserved = f"{found['reserved_bytes'] / MIB:.0f} MB" if "reserved_bytes" in found else ""
    moved = found.get("traffic", {})
    return [
        peak,
        reserved,
        str(found.get("retries", "")),
        step,
        f"{found['step_s'] / base:.3f}",
        f"{found.get('recomputed_bytes', 0) / MIB:.0f} MB",
        f"{moved.get('moved_bytes', 0) / MIB:.0f} MB",
        f"{moved['hidden_share']:.0%}" if "hidden_share" in moved else "",
    ]


def _simulated(rows: Mapping[str, Row]) -> list[str]:
    lines = [
        "Every row is simulated: the profile above, with seconds and copy rates scaled by "
        "published peak rates; nobody measured it. Only speeds are those of the card: what such a "
        "step takes may be more than the card has.",
        "",
        "| workload, card | strategy | | step / unplanned | waits | recomputed | moved |",
        "|---|---|---|---|---|---|---|",
    ]
    for key, row in _good(rows):
        for system, found in row["systems"].items():
            if "error" in found:
                lines.append(f"| {key} | {system} | simulated | {found['error']} | | | |")
                continue
            lines.append(
                f"| {key} | {system} | simulated | {found['predicted_ratio']:.3f} "
                f"| {max(found['predicted_stall_s'], 0.0) * 1e3:.1f} ms "
                f"| {found['recomputed_bytes'] / MIB:.0f} MB "
                f"| {found['offloaded_bytes'] / MIB:.0f} MB |"
            )
    lines += [""]
    lines += sorted({f"Assumed: {row['assumed']}" for _, row in _good(rows)})
    return lines


def _valve(rows: Mapping[str, Row]) -> list[str]:
    good = dict(_good(rows))
    lines: list[str] = []
    if "with plan" in good:
        lines += [
            "| loop | peak | step | recomputed calls | swaps | waited | finite | numbers |",
            "|---|---|---|---|---|---|---|---|",
        ]
        for system, row in good["with plan"]["systems"].items():
            below = ", below each alone" if row.get("below_each") else ""
            numbers = "bitwise" if row["bitwise"] else f"{row['grad_max_rel_diff']:.1e}"
            lines.append(
                f"| {system} | {_mb(row)}{below} | {_ms(row)} | {row['replays']} "
                f"| {row.get('swaps', 0)} | {row.get('waited_s', 0.0) * 1e3:.0f} ms "
                f"| {row['finite']} | {numbers} |"
            )
        repeats = good["with plan"]["plain_repeats_itself"]
        lines += ["", f"The plain step repeats itself: {repeats}.", ""]
    for key in ("idle", "idle, bound by the device"):
        lines += _idle(key, good[key]) if key in good else []
    for key, row in good.items():
        if key.startswith("cap"):
            told = "; ".join(
                f"{way}: {found['steps']} steps{'' if found['finished'] else ', out of memory'}"
                + (f", {found['swaps']} swaps" if "swaps" in found else "")
                for way, found in row.items()
                if isinstance(found, dict)
            )
            lines += [f"{key} ({row['cap_bytes'] / MIB:.0f} MB): {told}.", ""]
    if "after" in good:
        row = good["after"]
        lines += [
            f"Swaps under pressure {row['swaps_under_pressure']}, after it {row['swaps_after']}.",
            "",
        ]
    return lines


def _idle(key: str, row: Row) -> list[str]:
    if "loop" not in row:  # an earlier form
        told = f"Threshold 0.99: {row['swaps']} swaps, time / plain with hooks {row['ratio']:.3f} "
        told += f"(A/A {row['a_a']:.3f})."
        if "dozing" in row:
            told += f" The same without hooks: {row['dozing']['ratio']:.3f}."
        return [told, ""]
    lines = [
        f"Threshold 0.99, {key}, loops of {row['loop']} steps:",
        "",
        "| loop | hooks | swaps | step | fastest | time / plain |",
        "|---|---|---|---|---|---|",
    ]
    for name, found in row["systems"].items():
        hooks = "" if "dozes" not in found else "no" if found["dozes"] else "yes"
        beside = compared_text(found["by_rounds"]) if name != "plain" else ""
        lines.append(
            f"| {name} | {hooks} | {found.get('swaps', '')} | {_ms(found)} "
            f"| {found['fastest_s'] * 1e3:.1f} ms | {beside} |"
        )
    return [*lines, ""]


def _flat(rows: Mapping[str, Row]) -> list[str]:
    lines = [
        "Flat: from the first look to the last allocated and reserved bytes do not grow, the arena "
        "stays as it is, and the process grows by no more than 16 MB.",
        *_settled(rows),
        "",
        "| loop | step | allocated | peak since | reserved | host RSS | arena | flat |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for key, row in _good(rows):
        for step, held in row["seen"].items():
            cells = " | ".join(
                f"{held[name] / MIB:.1f} MB" if name in held else ""
                for name in ("allocated", "peak", "reserved", "rss", "arena")
            )
            lines.append(f"| {key} | {step} | {cells} | {row['flat']} |")
    return lines


def _settled(rows: Mapping[str, Row]) -> list[str]:
    """What is called flat although it grew: what the allocator holds with the valve, at first."""
    lines = []
    for key, row in _good(rows):
        steps, held = list(row["seen"]), [seen["reserved"] for seen in row["seen"].values()]
        if row["flat"] and held[-1] > held[0]:
            lines.append(
                f"Of the {key}'s reserved bytes it asks that only between steps {steps[-2]} and "
                f"{steps[-1]}; before, they grew from {held[0] / MIB:.1f} to {held[-1] / MIB:.1f} "
                "MB."
            )
    return lines


def _numbers(numerics: Row) -> str:
    if numerics["bitwise_vs_unplanned"]:
        return "bitwise"
    said = f"{numerics['grad_max_rel_diff']:.1e}"
    return f"{said}: {numerics['note']}" if numerics.get("note") else said


def _ms(row: Row) -> str:
    return f"{row['step_s'] * 1e3:.1f} ms"


def _mb(row: Row) -> str:
    return f"{row['peak_bytes'] / MIB:.0f} MB"


def _held(row: Row) -> str:
    return f"{row['reserved_bytes'] / MIB:.0f} MB" if "reserved_bytes" in row else "not stored"


_TABLES: dict[str, tuple[str, Callable[[Mapping[str, Row]], list[str]]]] = {
    "everything": ("Everything moved", _everything),
    "hides": ("Only what hides is moved", _hides),
    "pays": ("Strategies at the same budget", _pays),
    "simulated": ("The same plans on other GPUs, simulated", _simulated),
    "valve": ("The safety valve", _valve),
    "flat": ("A thousand steps", _flat),
}
PARTS = tuple(_TABLES)
