"""Gates: confidences that decide whether a token leaves at an exit."""
