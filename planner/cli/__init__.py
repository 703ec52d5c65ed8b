"""The `planner` command: one file per verb."""
