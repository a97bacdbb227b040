"""The decoder with early exits: configuration, parameters, layers, exits and KV cache."""
