"""Experiments, one a file: `get_config()` gives what `experiments.train --config=` takes."""
