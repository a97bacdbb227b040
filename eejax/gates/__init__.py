"""Exit confidences: pure functions from hidden states and logits to a number in [0, 1]."""
