"""`python -m nouscoder`."""

from nouscoder.cli import main

main()
