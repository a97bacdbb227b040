"""The device mesh (data, pipe, model) and the rules that lay logical axes onto it."""
