"""`memfit profile`: tables, and files whose numbers add up."""

from __future__ import annotations

import csv
import json

from memfit.ir.codec import from_data
from memfit.ir.profile import Profile


def test_profile_prints_segments_static_bytes_and_the_peak(memfit, tiny):
    result = memfit("profile", *tiny)
    assert result.exit_code == 0, result.stderr
    for word in ("layers.0 .. 1 (2)", "optimizer state", "peak of the step", "step time"):
        assert word in result.stdout
    assert result.stdout.splitlines()[-1].startswith("next: memfit plan encoder")


def test_profile_writes_its_files(memfit, tiny, tmp_path):
    folder = tmp_path / "new" / "profile"
    result = memfit("profile", *tiny, "-o", folder, "--json")
    assert result.exit_code == 0, result.stderr
    data = json.loads(result.stdout)
    assert data["schema_version"] == 1
    profile = from_data(Profile, json.loads((folder / "profile.json").read_text()))
    assert profile.step_s == data["step_s"]
    segments = list(csv.DictReader((folder / "segments.csv").open()))
    assert [row["name"] for row in segments] == [row["name"] for row in data["segments"]]
    timeline = list(csv.DictReader((folder / "timeline.csv").open()))
    peak = max(int(row["total_bytes"]) for row in timeline)
    assert peak == data["simulated_peak"]["peak_bytes"]
    for row in timeline:
        parts = [int(n) for name, n in row.items() if name.endswith("_bytes")]
        assert sum(parts) == 2 * int(row["total_bytes"])


def test_profile_folder_that_is_a_file_is_refused(memfit, tiny, tmp_path):
    path = tmp_path / "taken"
    path.write_text("")
    result = memfit("profile", *tiny, "-o", path)
    assert result.exit_code == 2
    assert "cannot be made" in result.stderr
