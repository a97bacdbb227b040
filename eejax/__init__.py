"""Early-exit language models in JAX: training, tuning and serving."""

__version__ = "0.1.0"
