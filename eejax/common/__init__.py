"""Axis names, errors and pytree helpers that every other room may use."""
