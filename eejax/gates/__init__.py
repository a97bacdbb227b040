"""Gates: they compute the confidence that decides whether a token leaves at an exit."""
