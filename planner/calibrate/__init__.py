"""Constants and intervals of the cost model, fitted to measured runs."""
