"""The planning service over HTTP: `planner.api.app.create_app` builds it, `planner.api.serve.serve` runs it."""
