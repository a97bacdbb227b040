"""Simulation of serving under a policy, for comparisons and reproductions."""
