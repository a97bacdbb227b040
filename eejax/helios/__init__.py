"""Choosing which model serves, and how much of it is loaded (HELIOS)."""
