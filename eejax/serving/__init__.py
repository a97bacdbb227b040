"""Serving requests with early-exit models."""
