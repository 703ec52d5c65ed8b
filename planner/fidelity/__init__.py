"""Published runs against the cost model: read, predict, compare, calibrate."""
