"""How a run ends before its last step, and how that is told: errors, hangs, memory, signals, processes left behind."""
