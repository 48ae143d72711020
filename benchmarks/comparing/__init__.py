"""One workload by memfit and its peers in one process: the parts of benchmarks/inside.py."""
