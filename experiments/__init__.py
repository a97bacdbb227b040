"""Launchers, which the command `eejax` runs by their names (`command.py`)."""

import sys

if sys.argv[0] == "-m":  # Python looks for the launcher: this process is one
    from eejax.experiments import interrupts

    interrupts.install()
