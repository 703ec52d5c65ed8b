"""Examples of every operation, for the OpenAPI document and the pages.

A test sends each of them to a service.
"""

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
SHORT_PREDICTION = SHORT_PLAN | {
    "layout": {"tp": 8, "pp": 4, "dp": 2, "zero": 1, "recompute": "selective"}
}
LONG_PREDICTION = LONG_PLAN | {
    "layout": {
        "tensor_parallel_degree": 8,
        "pipeline_parallel_degree": 4,
        "data_parallel_degree": 2,
        "zero_stage": 1,
        "recompute": "selective",
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

PROFILE: dict[str, Any] = {"model": "gpt2", "sequence_length": 1024, "dtype": "bf16"}
RESIDUALS = {"low": -0.2, "high": 0.2}
INTERVAL = {"time": RESIDUALS, "memory": RESIDUALS}
CALIBRATION: dict[str, Any] = {
    "name": "our cluster",
    "measured_runs": 12,
    "constants": {"step_seconds": 0.05, "inter_node_fraction": 0.7},
    "intervals": {
        "runtime": INTERVAL,
        "architecture": INTERVAL,
        "neither": INTERVAL,
    },
}
PLAN_ID = "5aa50f48916b0f6f2f6a3f2c1f4f0d0f5c9f0e0a3b7d6c5e4f3a2b1c0d9e8f7a"
JOB_ID = "2f1c8ee0c5f24c0f9a0d6d9c6f6b7a51"
MEASURED_RUN: dict[str, Any] = {
    "plan_id": PLAN_ID,
    "model": "llama-3.1-70b",
    "devices": "64 x NVIDIA H100 80GB HBM3",
    "steps": 3,
    "losses": [11.92, 11.64, 11.21],
    "step_seconds": [22.9, 22.6, 22.7],
    "median_step_seconds": 22.7,
    "tokens_per_second": 46193,
    "ranks": [
        {
            "rank": 0,
            "pipeline": 0,
            "parameters": 2205000000,
            "peak_bytes": 75700000000,
        }
    ],
}

PARAMETERS: dict[str, Any] = {
    "plan_id": PLAN_ID,
    "other": PLAN_ID,
    "profile_id": PLAN_ID,
    "calibration_id": PLAN_ID,
    "job_id": JOB_ID,
    "measurement_id": 1,
    "name": "plan",
    "target": "torchrun",
    "limit": 50,
    "first_micro_batch": 0,
    "micro_batches": 4,
    "prefer": "wait=30",
    "last-event-id": "0",
}
"""Example of every parameter, by its name."""


def _example(summary: str, value: Any) -> dict[str, Any]:
    return {"summary": summary, "value": value}


BODIES: dict[str, dict[str, Any]] = {
    "create_plan": {
        "short": _example(SHORT_SUMMARY, SHORT_PLAN),
        "long": _example(LONG_SUMMARY, LONG_PLAN),
    },
    "create_prediction": {
        "short": _example(SHORT_SUMMARY, SHORT_PREDICTION),
        "long": _example(LONG_SUMMARY, LONG_PREDICTION),
    },
    "create_sweep": {"sweep": _example("Two clusters and two batches", SWEEP)},
    "create_calibration": {
        "document": _example("The calibration.json of planner calibrate", CALIBRATION),
        "fit": _example("A fit to the stored runs", {"name": "runs of this service"}),
    },
    "create_profile": {"catalogue": _example("A catalogue model", PROFILE)},
    "create_measurement": {
        "measured": _example("The measured.json of planner run", MEASURED_RUN)
    },
}
"""Examples of the body of every operation that takes one."""


def add_examples(document: dict[str, Any]) -> None:
    """Add the examples to an OpenAPI document."""
    for path in document["paths"].values():
        for operation in path.values():
            for parameter in operation.get("parameters", ()):
                if parameter["name"] in PARAMETERS:
                    parameter["example"] = PARAMETERS[parameter["name"]]
            if "requestBody" in operation:
                body = operation["requestBody"]["content"]["application/json"]
                body["examples"] = BODIES.get(operation["operationId"], {})
