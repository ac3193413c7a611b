"""`python -m dualtrack` is the command `dualtrack`."""

from dualtrack.cli import main

main()
