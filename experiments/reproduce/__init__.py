"""Reproductions of published results at a size for 2 CPU cores, one a file."""
