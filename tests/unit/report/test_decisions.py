"""A plan tensor by tensor: six columns, ranks of the whole step, counts as in the report."""

from __future__ import annotations

import csv
from dataclasses import replace

from memfit.ir.plan import Plan
from memfit.report.csv import write_csv
from memfit.report.decisions import (
    DECISION_COLUMNS,
    decision_rows,
    explained_rows,
    tensor_counts,
)
from memfit.report.plan import decisions_line


def rows_by_name(plan: Plan) -> dict:
    rows = list(explained_rows(plan))
    assert len({row["activation_name"] for row in rows}) == len(rows)
    return {row["activation_name"]: row for row in rows}


def test_rows_have_the_six_columns_and_no_others(mixed):
    rows = list(decision_rows(mixed))
    assert all(tuple(row) == DECISION_COLUMNS for row in rows)
    assert " ".join(DECISION_COLUMNS) == (
        "activation_name decision median_mem_size_bytes recomp_time_s creation_rank "
        "first_bw_use_rank"
    )
    assert {row["decision"] for row in rows} == {"RETAINED", "RECOMPUTE"}


def test_counts_are_those_of_the_report(mixed):
    rows = list(decision_rows(mixed))
    again = sum(row["decision"] == "RECOMPUTE" for row in rows)
    counts = tensor_counts(mixed)
    assert (again, len(rows)) == (counts["recompute"], counts.total()) == (11, 22)
    assert f"{again} of {len(rows)} tensors" in decisions_line(mixed)
    kept = mixed.unplanned()
    assert all(row["decision"] == "RETAINED" for row in decision_rows(kept))


def test_ranks_are_those_of_the_whole_step(mixed):
    rows = rows_by_name(mixed)
    ranks = {n: (r["creation_rank"], r["first_bw_use_rank"]) for n, r in rows.items()}
    # Forward: stem 0, blocks.0 from 1, .1 6, .2 11, .3 16, .4 21, head 26.
    # Backward: head 27, blocks.4 from 28, .3 32, .2 36, .1 40, .0 44, stem 48.
    assert ranks["stem/conv_0"] == (0, 48)
    assert ranks["head/mm_0"] == (26, -1)
    assert ranks["blocks.0/a"] == (1, 46) and ranks["blocks.0/x"] == (-1, 47)
    assert ranks["blocks.1/c"] == (8, 40)
    assert ranks["blocks.4/b"] == (22, 29)


def test_decisions_are_those_of_the_variant_or_of_the_run(mixed):
    rows = rows_by_name(mixed)
    decided = {name: row["decision"] for name, row in rows.items()}
    assert [decided[f"blocks.0/{n}"] for n in "xabc"] == ["RETAINED"] * 2 + ["RECOMPUTE"] * 2
    assert {decided[f"blocks.2/{n}"] for n in "xabc"} == {"RETAINED"}
    # The run goes on from what enters blocks.3; what enters blocks.4 it makes anew.
    assert [decided[f"blocks.3/{n}"] for n in "xabc"] == ["RETAINED"] + ["RECOMPUTE"] * 3
    assert {decided[f"blocks.4/{n}"] for n in "xabc"} == {"RECOMPUTE"}
    assert rows["blocks.0/b"]["recomp_time_s"] == 0.01
    assert rows["blocks.0/b"]["reason"] == "why b"
    assert rows["blocks.3/b"]["recomp_time_s"] == mixed.segments[4].recompute_s
    assert rows["blocks.3/b"]["reason"] == mixed.segments[4].reason


def test_offloaded_tensors_are_swapped(moving):
    decided = {name: row["decision"] for name, row in rows_by_name(moving).items()}
    assert [decided[f"blocks.0/{n}"] for n in "xabc"] == ["RETAINED", "SWAP", "SWAP", "RETAINED"]
    inside = ["RETAINED", "SWAP", "RETAINED", "RECOMPUTE"]
    assert [decided[f"blocks.2/{n}"] for n in "xabc"] == inside
    assert decided["head/mm_0"] == "SWAP"
    assert set(decided.values()) == {"RETAINED", "RECOMPUTE", "SWAP"}
    assert list(decided.values()).count("SWAP") == tensor_counts(moving)["offload"] == 6
    assert rows_by_name(moving)["blocks.0/b"]["reason"] == "why b"


def test_what_a_run_recomputes_is_not_swapped(moving):
    """The calls of a run keep a variant for other plans: the run decides."""
    segments = tuple(replace(s, variant=2) if s.run == 0 else s for s in moving.segments)
    rows = rows_by_name(replace(moving, segments=segments))
    assert {rows[f"blocks.4/{n}"]["decision"] for n in "xabc"} == {"RECOMPUTE"}


def test_uncaptured_segments_give_their_own_activations(mixed):
    stem = replace(
        mixed.segments[0],
        decision="recompute",
        run=7,
        activations=(replace(mixed.segments[0].activations[0], decision="recompute"),),
    )
    rows = rows_by_name(replace(mixed, segments=(stem, *mixed.segments[1:])))
    assert rows["stem/conv_0"]["decision"] == "RECOMPUTE"
    assert rows["stem/conv_0"]["creation_rank"] == 0


def test_a_plan_without_activations_still_has_its_columns(plan, tmp_path):
    path = tmp_path / "decisions.csv"
    write_csv(path, decision_rows(plan), DECISION_COLUMNS)
    assert list(csv.reader(path.open())) == [list(DECISION_COLUMNS)]
