"""The HTML report: one file, which needs no network and no library."""
