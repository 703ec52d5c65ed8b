"""The planning service over HTTP."""
