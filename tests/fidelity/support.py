"""Rows of measured runs, as small as a test needs them."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

from planner.fidelity.rows import Row, Run, run_of

HEADER = (
    "source_id,source,system,hardware,gpus_per_node,interconnect,model,params,layers,hidden,ffn,heads,kv_heads,vocab,"
    "experts,topk,seq_len,gpus,tp,pp,vp,cp,ep,etp,dp,zero_fsdp,sequence_parallel,recompute,mbs,gbs,num_microbatches,"
    "precision,attention,schedule,status,step_s,tokens_s_gpu,mfu,mem_gib,mem_kind,speedup,rank_group,derived,notes"
)
COLUMNS = tuple(HEADER.split(","))

KORTHIKANTI = {
    "source": "Korthikanti et al. 2022, arXiv 2205.05198, table 5",
    "system": "Megatron-LM",
    "hardware": "A100-80GB SXM",
    "gpus_per_node": 8,
    "params": 22e9,
    "layers": 48,
    "hidden": 6144,
    "ffn": 24576,
    "heads": 64,
    "vocab": 51200,
    "seq_len": 2048,
    "gpus": 8,
    "tp": 8,
    "pp": 1,
    "mbs": 4,
    "gbs": 4,
    "precision": "fp16",
    "rank_group": "22B",
}
"""The 22B model on one node: 1.42 s with full recomputation, 1.10 s with sequence parallelism and selective."""


def row(source_id: str = "a", **values: object) -> Row:
    """A row in scope: GPT of two layers on one A100, one second; what is given goes before, "" blanks a column."""
    plain = {
        "source_id": source_id,
        "system": "Megatron-LM",
        "hardware": "A100-80GB",
        "gpus_per_node": 8,
        "layers": 2,
        "hidden": 1024,
        "heads": 16,
        "seq_len": 1024,
        "tp": 1,
        "pp": 1,
        "mbs": 1,
        "gbs": 8,
        "precision": "bf16",
        "status": "ok",
        "step_s": 1.0,
    }
    unknown = set(values) - set(COLUMNS)
    assert not unknown, f"no columns {unknown}"
    return dict.fromkeys(COLUMNS, "") | {
        name: str(value) for name, value in (plain | values).items()
    }


def cited(source_id: str, **values: object) -> Row:
    """A row of Korthikanti's 22B model."""
    return row(source_id, **(KORTHIKANTI | values))


def run(source_id: str = "a", family: str = "family", **values: object) -> Run:
    """`row` as a run."""
    return run_of(row(source_id, **values), family)


def write_rows(path: Path, rows: Sequence[Row]) -> Path:
    """A CSV file of rows."""
    with path.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.DictWriter(stream, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
    return path
