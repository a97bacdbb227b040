"""Experiments, one a file: `get_config()` gives what `eejax train --config=` takes."""
