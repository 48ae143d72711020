"""`python -m memfit` is the command line."""

from memfit.cli import main

main()
