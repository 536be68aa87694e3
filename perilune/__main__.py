"""`python -m perilune` is the command `perilune`."""

from perilune.cli.main import main

main()
