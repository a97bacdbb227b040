"""The model behind the interfaces of other libraries."""
