"""When a token may leave: exit confidences."""
