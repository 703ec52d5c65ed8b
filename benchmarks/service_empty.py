"""A FastAPI route that does nothing, for comparison: ``python -m benchmarks.service_empty PORT``."""

from __future__ import annotations

import sys

import uvicorn
from fastapi import FastAPI, Response

app = FastAPI()


@app.get("/readyz")
async def empty() -> Response:
    """Return nothing."""
    return Response(b"{}", media_type="application/json")


if __name__ == "__main__":
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
