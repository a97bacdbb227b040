"""Launchers, which the command `eejax` runs by their names (`command.py`), and their tools."""

import sys

if sys.argv[0] == "-m":  # Python is still looking for the launcher that this process runs
    from eejax.experiments import interrupts

    interrupts.install()
