"""The planning service over HTTP: `api.app.create_app` builds it, `api.serve.serve` runs it."""
