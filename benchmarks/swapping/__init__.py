"""The parts of benchmarks/swap.py, one file each."""
