"""Which layers make a stage."""
