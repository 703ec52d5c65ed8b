"""Which layout wins, and the proof."""
