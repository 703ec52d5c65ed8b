"""Rows of published runs: what is read, what is filled by rule, what is out of scope and why."""

from __future__ import annotations

from pathlib import Path

import pytest

from planner.errors import DocumentError
from planner.fidelity.rows import OutOfScope, read_runs, run_of
from tests.fidelity.support import cited, row, run, write_rows


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"hardware": "Cloud TPUv3"}, "hardware without catalogue entry"),
        ({"precision": "fp8 rowwise"}, "number format not modelled"),
        ({"precision": "MXFP8"}, "number format not modelled"),
        ({"precision": "fp32"}, "number format not modelled"),
        ({"hidden": ""}, r"no dimensions \(hidden\)"),
        ({"layers": ""}, r"no dimensions \(layers\)"),
        ({"heads": "unknown"}, r"no dimensions \(heads\)"),
        ({"model": "7B LoRA"}, r"no dimensions \(adapters\)"),
        ({"tp": "", "gpus": 8}, r"no layout \(degrees\)"),
        ({"tp": 3, "gpus": 8}, r"no layout"),
        ({"mbs": "", "gbs": ""}, r"no layout \(micro-batch size\)"),
        ({"step_s": ""}, "nothing measured"),
        ({"status": "crashed"}, "nothing measured"),
    ],
)
def test_out_of_scope(values: dict[str, object], reason: str) -> None:
    """A row that says too little, or what is not modelled, is left out with a reason."""
    with pytest.raises(OutOfScope, match=reason):
        run_of(row(**values), "family")


def test_a_row_as_a_run() -> None:
    """What a row states is what is predicted."""
    found = run_of(cited("22b", step_s=1.42, recompute="full"), "papers")
    assert (found.family, found.source_id, found.framework.name, found.device) == (
        "papers",
        "22b",
        "megatron-lm",
        "a100-sxm4-80gb",
    )
    assert (found.shape.layers, found.shape.hidden, found.shape.feed_forward) == (
        48,
        6144,
        24576,
    )
    assert (found.layout.tensor_parallel_degree, found.layout.data_parallel_degree) == (
        8,
        1,
    )
    assert (found.nodes, found.devices_per_node, found.recompute, found.dtype) == (
        1,
        8,
        "full",
        "fp16",
    )
    assert found.shape.parameters == pytest.approx(22e9, rel=0.02)


def test_degrees_follow_from_each_other() -> None:
    """The data-parallel degree is what is left of the devices; the micro-batch size what is left of the batch."""
    filled = run(gpus=16, tp=2, pp=2, gbs=64, mbs="", num_microbatches=8)
    assert (filled.layout.data_parallel_degree, filled.layout.micro_batch_size) == (
        4,
        2,
    )
    assert (filled.nodes, filled.devices_per_node) == (2, 8)
    assert (
        run(gpus="", dp=2, tp=2, gbs="", mbs=2, num_microbatches=3).global_batch_size
        == 12
    )


def test_one_device_needs_no_degrees() -> None:
    """A run on one device is split in no way."""
    assert run(gpus=1, tp="", pp="").layout.devices == 1


def test_sizes_that_are_not_stated() -> None:
    """Feed-forward 4 x hidden, as many key as query heads, GPT-2's vocabulary."""
    shape = run().shape
    assert (shape.feed_forward, shape.kv_heads, shape.vocabulary) == (4096, 16, 50_304)
    assert not shape.is_gated
    assert run(ffn=2816).shape.is_gated


def test_the_parameter_count_tells_gate_and_tie() -> None:
    """Llama-2 7B's stated count fits a gated network with two embeddings only."""
    llama = run(
        params=6.738e9, layers=32, hidden=4096, ffn=11008, heads=32, vocab=32000
    )
    assert llama.shape.is_gated
    assert not llama.shape.is_tied


@pytest.mark.parametrize(
    ("layers", "pp", "notes", "blocks"),
    [
        (8, 4, "", (2, 2, 2, 2)),
        (22, 8, "", (2, 3, 3, 3, 3, 3, 3, 2)),
        (10, 4, "", (2, 3, 3, 2)),
        (9, 2, "", (4, 5)),
        (10, 3, "stage sizes incl. embedding and head: 3-5-4", (2, 5, 3)),
    ],
)
def test_stages(layers: int, pp: int, notes: str, blocks: tuple[int, ...]) -> None:
    """Equal blocks; else embedding and head count as a block each; else as the row tells."""
    assert run(layers=layers, pp=pp, notes=notes, gbs=8 * pp).blocks_per_stage == blocks


def test_stages_of_aleph_alpha() -> None:
    """43 layers, the embedding, the last norm and the head among them: 11, 11, 11 and 10."""
    found = run(layers=40, pp=4, gbs=32, system="AA-Scaling (Megatron-style, PyTorch)")
    assert found.blocks_per_stage == (10, 11, 11, 8)


@pytest.mark.parametrize(
    ("words", "kernel"),
    [
        ("flash_attentionv1.0.8", "flash-1"),
        ("flash_attention2 + RMS kernel", "flash"),
        ("flash-attn 2.5", "flash"),
        ("FA3", "flash-3"),
    ],
)
def test_versions_of_flash_attention(words: str, kernel: str) -> None:
    """The first version and the third are kernels of their own."""
    assert run(attention=words).attention == kernel


def test_step_seconds_from_throughput() -> None:
    """Tokens of the batch / tokens per second of all devices."""
    assert run(
        gpus=4, step_s="", tokens_s_gpu=1000, gbs=8, seq_len=1024
    ).step_seconds == pytest.approx(8 * 1024 / 4000)


def test_running_out_is_a_measurement() -> None:
    """A run that ran out of memory is in scope, without a time."""
    found = run(status="OOM", step_s="")
    assert found.ran_out
    assert found.step_seconds is None


@pytest.mark.parametrize(
    ("kind", "read", "rank", "unit"),
    [
        ("torch max_memory_allocated, rank 0", "allocated", "first", 2**30),
        ("max allocated on the LAST rank", "allocated", "last", 2**30),
        ("max reserved GiB, max over ranks", "reserved", "largest", 2**30),
        ("nvidia-smi GB", "device", "largest", 2**30),
        ("torch.max_memory_allocated (reported GB)", "allocated", "largest", 10**9),
    ],
)
def test_kinds_of_memory(kind: str, read: str, rank: str, unit: int) -> None:
    """Whose memory it is, what it counts, and whether a gigabyte is 10^9 or 2^30 bytes."""
    found = run(mem_gib=10, mem_kind=kind)
    assert (found.memory_kind, found.memory_rank, found.memory_bytes) == (
        read,
        rank,
        10 * unit,
    )


@pytest.mark.parametrize(
    ("words", "stage"),
    [
        ("none (DDP)", 0),
        ("ZeRO-1", 1),
        ("zero-2", 2),
        ("FSDP full_shard", 3),
        ("ZeRO-3", 3),
    ],
)
def test_zero_stages(words: str, stage: int) -> None:
    """ZeRO stages by their usual names."""
    assert run(zero_fsdp=words).layout.zero_stage == stage


@pytest.mark.parametrize(
    ("words", "degree"),
    [
        ("zero1 within 8 GPUs", 8),
        ("fsdp 4", 4),
        ("HSDP", 8),
        ("fsdp 16", None),
        ("zero1 over all dp", None),
    ],
)
def test_hybrid_sharding(words: str, degree: int | None) -> None:
    """Groups that share out the states, as stated or a node's; all 16 ranks are no group of their own."""
    assert (
        run(
            zero_fsdp=words, gpus=16, gpus_per_node=8, tp=1, pp=1, dp=16, gbs=64
        ).layout.zero_shard_degree
        == degree
    )


def test_a_folder_is_read_by_family(tmp_path: Path) -> None:
    """Every file is a family; rows are counted, those out of scope by reason; other CSV files are none of ours."""
    write_rows(tmp_path / "first.csv", [row("a"), row("b", hardware="Cloud TPU")])
    write_rows(tmp_path / "second.csv", [row("c")])
    (tmp_path / "links.csv").write_text("ranks,bytes\n8,1024\n", encoding="utf-8")
    found = read_runs(tmp_path)
    assert [(one.family, one.source_id) for one in found.runs] == [
        ("first", "a"),
        ("second", "c"),
    ]
    assert found.rows == {"first": 2, "second": 1}
    assert dict(found.out_of_scope["first"]) == {"hardware without catalogue entry": 1}


def test_what_holds_no_runs_is_refused(tmp_path: Path) -> None:
    """A missing file, and a file without the columns, are told with what is wanted."""
    with pytest.raises(DocumentError, match="cannot be read"):
        read_runs(tmp_path / "none.csv")
    (tmp_path / "links.csv").write_text("ranks,bytes\n8,1024\n", encoding="utf-8")
    with pytest.raises(DocumentError, match="source_id, hardware"):
        read_runs(tmp_path / "links.csv")
