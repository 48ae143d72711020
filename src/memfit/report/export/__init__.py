"""Reports for other viewers: traces, flame graphs, plots."""
