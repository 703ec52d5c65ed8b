"""Questions about the result of a search: alternatives, relaxations, sensitivity."""
