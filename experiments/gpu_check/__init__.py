"""Checks and measurements for one GPU, stage after stage: see `__main__`."""
