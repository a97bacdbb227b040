"""Launchers: python -m experiments.NAME --config=configs/NAME.py --workdir=runs/NAME."""

import sys

if sys.argv[0] == "-m":  # Python looks for the launcher: this process is one
    from experiments import interrupts

    interrupts.install()
