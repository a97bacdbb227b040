"""Tables and figures: numpy in, figure out."""
