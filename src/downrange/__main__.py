"""`python -m downrange`: the `downrange` command where it is not on the path."""

from downrange.cli.main import main

main()
