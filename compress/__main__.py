"""`python -m compress` is `compress`."""

from compress.cli import main

main()
