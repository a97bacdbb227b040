"""Training: state, optimiser, step, loop and metrics."""
