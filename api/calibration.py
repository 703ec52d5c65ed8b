"""Measured runs as a CSV file for `planner calibrate`; see `planner.fidelity.rows`."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from typing import Any

from planner.profiler import catalogue
from planner.spec import Layout, MeasuredRun, Plan

COLUMNS = (
    *("source_id", "system", "hardware", "model", "precision", "status", "notes"),
    *(
        "layers",
        "hidden",
        "heads",
        "kv_heads",
        "ffn",
        "vocab",
        "params",
        "experts",
        "topk",
        "attention",
    ),
    *(
        "seq_len",
        "gpus",
        "gpus_per_node",
        "tp",
        "pp",
        "dp",
        "cp",
        "ep",
        "vp",
        "mbs",
        "gbs",
        "num_microbatches",
    ),
    *(
        "schedule",
        "zero_fsdp",
        "recompute",
        "sequence_parallel",
        "step_s",
        "mem_gib",
        "mem_kind",
    ),
)
"""Run, model, layout and measurement."""
GIBIBYTE = 2**30

Row = dict[str, Any]


def rows_text(runs: Iterable[tuple[int, str, str]]) -> str:
    """The CSV file of all runs that calibration can use.

    Args:
        runs: number of the measurement, plan.json and measured.json of each.
    """
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    for number, plan, measured in runs:
        row = row_of(
            Plan.model_validate_json(plan),
            MeasuredRun.model_validate_json(measured),
            number,
        )
        if row is not None:
            writer.writerow(row)
    return text.getvalue()


def row_of(plan: Plan, run: MeasuredRun, number: int) -> Row | None:
    """The row of one run; None if calibration cannot use the run.

    Calibration uses runs of catalogue transformers, whose dimensions are known, on one
    kind of catalogue device, with one recompute mode and uniform replicas.
    """
    device, *other_devices = (group.device for group in plan.cluster.node_groups)
    shape = _shape(plan.request.model)
    recompute = [layer.recompute for stage in plan.stages for layer in stage.layers]
    block_modes = set(recompute[1:-1])  # without embedding and head
    if run.unfinished and not run.ranks:  # failed before any rank reported its memory
        return None
    if shape is None or not isinstance(device, str) or other_devices:
        return None
    if len(block_modes) != 1 or not _has_uniform_replicas(plan.layout):
        return None
    source = {
        "source_id": f"measurement-{number}",
        "hardware": device,
        "recompute": block_modes.pop(),
    }
    return shape | _layout(plan) | _measured(run) | source


def _has_uniform_replicas(layout: Layout) -> bool:
    """Whether all replicas have equal shares, and the ranks the default order."""
    return not layout.has_uneven_shares and layout.rank_order == Layout().rank_order


def _shape(model: str | None) -> Row | None:
    """Dimensions of a catalogue decoder; GPT-2 has other names for them than later models."""
    if model is None:
        return None
    entry = catalogue.entry(model)
    config = entry.config or {}
    hidden, heads = (
        _first(config, "hidden_size", "n_embd"),
        _first(config, "num_attention_heads", "n_head"),
    )
    if not entry.takes_tokens or hidden is None or heads is None:
        return None
    return {
        "system": "planner",
        "model": model,
        "params": entry.parameters,
        "layers": entry.layers,
        "hidden": hidden,
        "heads": heads,
        "kv_heads": _first(config, "num_key_value_heads") or heads,
        "ffn": _first(config, "moe_intermediate_size", "intermediate_size", "n_inner")
        or 4 * hidden,
        "vocab": _first(config, "vocab_size"),
        "experts": _first(
            config, "num_local_experts", "num_experts", "n_routed_experts"
        )
        or "",
        "topk": _first(config, "num_experts_per_tok") or "",
    }


def _first(config: dict[str, Any], *names: str) -> Any:
    return next((config[name] for name in names if config.get(name) is not None), None)


def _layout(plan: Plan) -> Row:
    layout = plan.layout
    job = plan.request.job
    nodes = {row.node for row in plan.placement}
    sizes = "-".join(str(len(stage.layers)) for stage in plan.stages)
    return {
        "precision": "pure bf16" if job.precision == "bf16" else job.precision,
        "notes": f"stage sizes: {sizes}" if len(plan.stages) > 1 else "",
        "attention": "sdpa",
        "seq_len": job.sequence_length,
        "gpus": len(plan.placement),
        "gpus_per_node": len(plan.placement) // len(nodes),
        "tp": layout.tensor_parallel_degree,
        "pp": layout.pipeline_parallel_degree,
        "dp": layout.data_parallel_degree,
        "cp": layout.context_parallel_degree,
        "ep": layout.expert_parallel_degree,
        "vp": layout.virtual_stages_per_rank,
        "mbs": layout.micro_batch_size,
        "gbs": job.global_batch_size,
        "num_microbatches": plan.micro_batches,
        "schedule": layout.schedule,
        "zero_fsdp": _zero(layout),
        "sequence_parallel": int(layout.sequence_parallel),
    }


def _zero(layout: Layout) -> str:
    within = (
        f" within {layout.zero_shard_degree} ranks" if layout.zero_shard_degree else ""
    )
    return f"ZeRO-{layout.zero_stage}{within}" if layout.zero_stage else ""


def _measured(run: MeasuredRun) -> Row:
    return {
        "status": "ok",
        "step_s": run.median_step_seconds,
        "mem_gib": max(rank.peak_bytes for rank in run.ranks) / GIBIBYTE,
        "mem_kind": "max allocated, any rank",
    }
