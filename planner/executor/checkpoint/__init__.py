"""Where values come from and go to: seeds, weights' files, and checkpoints that any other layout can read."""
