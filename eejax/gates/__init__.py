"""Gates: confidences by which a token leaves at an exit."""
