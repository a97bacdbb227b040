"""The model in other frameworks' clothes."""
