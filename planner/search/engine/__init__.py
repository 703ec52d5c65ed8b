"""Search over all layouts of a workload: one table, one bound, one loop."""
