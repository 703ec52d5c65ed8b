"""Requests that the OpenAPI document and the pages show: one request in both forms."""

from __future__ import annotations

from typing import Any

SHORT_PLAN: dict[str, Any] = {
    "model": "llama-3.1-70b",
    "devices": "64xh100-sxm5-80gb",
    "batch": 128,
    "sequence": 8192,
}
LONG_PLAN: dict[str, Any] = {
    "model": "llama-3.1-70b",
    "cluster": {
        "name": "64xh100-sxm5-80gb",
        "node_groups": [
            {
                "name": "h100-sxm5-80gb",
                "device": "h100-sxm5-80gb",
                "nodes": 8,
                "devices_per_node": 8,
            }
        ],
    },
    "job": {"global_batch_size": 128, "sequence_length": 8192},
}
SHORT_PREDICTION = SHORT_PLAN | {"layout": {"tp": 8, "pp": 4, "dp": 2}}
LONG_PREDICTION = LONG_PLAN | {
    "layout": {
        "tensor_parallel_degree": 8,
        "pipeline_parallel_degree": 4,
        "data_parallel_degree": 2,
    }
}

SWEEP: dict[str, Any] = {
    "models": ["llama-3.1-8b"],
    "clusters": ["8xh100-sxm5-80gb", "16xh100-sxm5-80gb"],
    "batches": [64, 128],
    "sequence": 4096,
}

SHORT_SUMMARY = "Short form: a catalogue model, devices and batch"
LONG_SUMMARY = "Long form: documents for cluster and job"


def openapi_examples(short: dict[str, Any], long: dict[str, Any]) -> dict[str, Any]:
    """The examples of an operation that takes both forms, for the OpenAPI document."""
    return {
        "short": {"summary": SHORT_SUMMARY, "value": short},
        "long": {"summary": LONG_SUMMARY, "value": long},
    }
