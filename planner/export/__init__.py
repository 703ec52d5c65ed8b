"""The same plan for other runtimes and launchers."""
