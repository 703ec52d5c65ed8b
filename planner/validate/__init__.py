"""Recomputes a plan from first principles, sharing no code with cost model and solver."""
