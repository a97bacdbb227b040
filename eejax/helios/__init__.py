"""Choice of the model that serves, and of how much of it is loaded (HELIOS)."""
