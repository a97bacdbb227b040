"""Saving and restoring training runs and models, whatever the mesh."""
