"""`python -m headrace.cli`, the same as the command `headrace`."""

from headrace.cli.app import main

main()
