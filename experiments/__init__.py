"""Launchers: python -m experiments.NAME --config=configs/NAME.py --workdir=runs/NAME."""
