"""Rows of published measurements become runs, from their explicit columns only."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.published_runs import (
    OutOfScopeError,
    layout_string_stages,
    published_run,
    read_published,
)
from planner import runtimes
from planner.errors import DocumentError
from planner.spec.run import Run
from tests.benchmarks.rows import (
    DEEPSEEK,
    KORTHIKANTI,
    TORCHTITAN,
    ZERO_BUBBLE,
    Row,
    cited,
    row,
    write_rows,
)


def run_of(values: Row) -> Run:
    """Return the run of a row."""
    return published_run(values, "family").run


def test_dense_model_with_learned_positions() -> None:
    """Korthikanti's 22B model has biases, dropout, LayerNorm and learned positions."""
    run = run_of(cited(KORTHIKANTI, step_s=1.42, recompute_mode="full"))
    model = run.model
    assert model.parameters == pytest.approx(22e9, rel=0.02)
    assert (model.biases, model.norm, model.dropout) == ("all", "layer", True)
    assert (model.gated, model.tied_embeddings) == (False, True)
    assert model.learned_positions == 2048
    assert run.job.precision == "fp16-mixed"
    assert run.layout.recompute == "full"
    assert run.result.step_seconds == 1.42


def test_selective_recompute_names_its_modules() -> None:
    """`core_attn` recomputes the core of attention, with sequence parallelism."""
    values = cited(
        KORTHIKANTI,
        recompute_mode="selective",
        recompute_modules="core_attn",
        sequence_parallel=1,
    )
    run = run_of(values)
    assert run.layout.sequence_parallel
    assert run.runtime.settings["selective"] == "attention"
    assert run.runtime.settings["selective_modules"] == ["core_attn"]


def test_embedding_and_head_count_as_layers() -> None:
    """With one block per chunk, the first and the last stage have no block."""
    run = run_of(cited(ZERO_BUBBLE))
    assert run.layout.virtual_stages_per_rank == 3
    assert run.stages == (0, *[1] * 22, 0)
    assert run.layout.schedule == "interleaved-1f1b"
    whole = run_of(cited(ZERO_BUBBLE, vp=1, schedule_name="zb-h1"))
    assert whole.stages == (2, 3, 3, 3, 3, 3, 3, 2)
    assert whole.layout.schedule == "zb-h1"


def test_fsdp_with_the_operators_of_torchtitan() -> None:
    """torchtitan's own selective recomputation stays, and its page names the commit."""
    run = run_of(cited(TORCHTITAN))
    assert run.layout.zero_stage == 3
    assert "selective" not in run.runtime.settings
    assert run.runtime.release == "9dec370"
    assert run.runtime.settings["overlaps_gathers"] is True
    assert run.runtime.settings["fp32_gradients"] is True
    assert run.runtime.settings["optimizer_state_bytes"] == 8
    assert run.result.memory_bytes == 88476326298
    assert run.result.memory_kind == "reserved"
    other = run_of(cited(TORCHTITAN, framework="fsdp"))
    assert other.runtime.settings["selective"] == "operators"


def test_mixture_with_latent_attention_and_a_layout_string() -> None:
    """DeepSeek V3: sizes, expert degrees, 16 stages of which the last has no block."""
    published = published_run(cited(DEEPSEEK), "nemo")
    run = published.run
    assert run.model.parameters == pytest.approx(684e9, rel=0.02)
    assert run.model.experts is not None
    assert run.model.experts.first_dense_layers == 3
    assert run.model.latent_attention is not None
    assert run.model.latent_attention.query_rank == 1536
    assert run.layout.expert_parallel_degree == 32
    assert run.stages == (4, *[4] * 14, 1)
    assert run.cluster.devices == 256
    assert run.runtime.settings["fp8_scaling"] == "current"
    assert run.runtime.settings["dispatcher"] == "hybridep"
    assert published.kind == "moe, Blackwell Ultra, megatron-bridge"
    assert published.source.endswith("megatron-bridge, Blackwell")


@pytest.mark.parametrize(
    "values",
    [
        cited(KORTHIKANTI),
        cited(ZERO_BUBBLE),
        cited(TORCHTITAN),
        cited(DEEPSEEK),
        row(vocab=30522, compiled=1, tp_comm_overlap=1, launch_blocking=1),
        row(number_format="fp8-delayed", cpu_offload="optimizer"),
    ],
    ids=["Korthikanti", "zero bubble", "torchtitan", "DeepSeek", "BERT", "fp8"],
)
def test_settings_are_traits_of_the_runtime(values: Row) -> None:
    """Every setting is a trait that the runtime has, with a value of its type."""
    choice = run_of(values).runtime
    found = runtimes.get(choice.name, release=choice.release, settings=choice.settings)
    assert found.name == choice.name


def test_blank_columns_leave_the_defaults() -> None:
    """A row that states no trait has no settings."""
    run = run_of(row())
    assert run.runtime.settings == {}
    assert run.cluster.node_groups[0].inter_node is None
    assert run.layout.expert_tensor_parallel_degree is None


def test_stated_network() -> None:
    """It is a nominal link between the nodes of a cluster, or the domains of a rack."""
    network = {"network_gbytes_per_s_per_gpu": 25, "gpus": 16, "dp": 16, "gbs": 16}
    link = run_of(row(**network)).cluster.node_groups[0].inter_node
    assert link is not None
    assert link.bandwidth_bytes_per_second == 25e9
    assert link.is_nominal
    halves = network | {"gpus": 8, "gpus_per_node": 4, "dp": 8}
    assert run_of(row(**halves)).cluster.node_groups[0].inter_node == link
    one_node = network | {"gpus": 8, "dp": 8}
    assert run_of(row(**one_node)).cluster.node_groups[0].inter_node is None
    rack = network | {"device": "gb200-nvl72-186gb", "gpus_per_node": 4}
    assert run_of(row(**rack)).cluster.node_groups[0].inter_node is None


def test_overlap_of_data_parallel_collectives() -> None:
    """The column states both collectives, unless the runtime overlaps only one."""
    both = run_of(row(dp_comm_overlap=1)).runtime.settings
    assert both["overlaps_reduction"] is both["overlaps_gathers"] is True
    neither = run_of(row(dp_comm_overlap=0)).runtime.settings
    assert neither["overlaps_reduction"] is neither["overlaps_gathers"] is False
    one = run_of(row(dp_comm_overlap=1, framework="internevo")).runtime.settings
    assert one == {"overlaps_reduction": True}


def test_states_and_formats() -> None:
    """No master copy is pure bf16, eight-bit Adam has two bytes of states."""
    run = run_of(
        row(master_dtype="none", optimizer="adamw-8bit", optimizer_state_dtype="int8")
    )
    assert run.job.precision == "bf16"
    assert run.job.optimizer == "adam-8bit"
    assert run.runtime.settings["optimizer_state_bytes"] == 2
    assert run_of(row(number_format="fp8-rowwise")).job.precision == "fp8"
    assert run_of(row(number_format="tf32")).job.precision == "fp32"


def test_recomputed_fraction() -> None:
    """Every second layer is half of them; a number of layers is its share."""
    half = row(recompute_mode="custom", recompute_modules="every 2nd layer full")
    assert run_of(half).layout.recompute == "full"
    assert run_of(half).runtime.settings["recompute_fraction"] == 0.5
    one = row(recompute_mode="custom", recompute_modules="full x1 layers")
    assert run_of(one).runtime.settings["recompute_fraction"] == 0.5


def test_attention_biases_of_dense_models() -> None:
    """Dense models with a gate have biases in attention only, mixtures everywhere."""
    assert run_of(row(biases=1)).model.biases == "attention"
    mixture = row(biases=1, experts=8, topk=2, moe_ffn=2816)
    assert run_of(mixture).model.biases == "all"
    assert run_of(row(biases=1, gated_ffn=0)).model.biases == "all"


def test_recipes_name_the_runtime() -> None:
    """DGX Cloud's recipes and NVIDIA's MLPerf submissions run NeMo."""
    assert run_of(row(recipe="dgxc")).runtime.name == "nemo"
    assert run_of(row(recipe="mlperf-nvidia")).runtime.name == "nemo"
    assert run_of(row(recipe="simumax")).runtime.name == "megatron-core"
    assert run_of(row(framework="oneflow")).runtime.name == "libai"


@pytest.mark.parametrize(
    ("citation", "source"),
    [
        ("Zero Bubble PP (arXiv 2401.10241) Tables 3-5", "arXiv 2401.10241"),
        ("owner/code docs/page.md @1234567 Table 1", "owner/code"),
        ("owner/code@1234567:docs/page.md", "owner/code"),
        ("owner/results_v3.1 A/results/b.txt", "owner/results"),
        ("somebody's table", "family"),
    ],
)
def test_sources(citation: str, source: str) -> None:
    """A source is a paper, a repository, or else the file."""
    assert published_run(row(source=citation), "family").source == source


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"device": ""}, "device"),
        ({"device": "tpu-v4"}, "catalogue"),
        ({"number_format": "mxfp8"}, "number format"),
        ({"number_format": "nvfp4"}, "number format"),
        ({"framework": "pipedream"}, "framework"),
        ({"attention_kind": "hybrid-mamba"}, "blocks"),
        ({"schedule_name": "v-half", "pp": 2, "dp": 4}, "schedule"),
        ({"recompute_mode": ""}, "recompute"),
        (
            {"recompute_mode": "custom", "recompute_modules": "some not stated"},
            "recompute",
        ),
        ({"cpu_offload": "activations of 20 layers"}, "offload"),
        ({"layers_per_stage": "3-4", "pp": 2, "dp": 4}, "blocks per stage"),
        ({"dp": 4}, "degrees"),
        ({"gbs": 12}, "batch"),
        ({"step_s": ""}, "neither"),
        ({"mbs": ""}, "mbs"),
    ],
)
def test_out_of_scope(values: dict[str, object], reason: str) -> None:
    """A run without terms in the cost model is out of scope, and the reason is named."""
    with pytest.raises(OutOfScopeError, match=reason):
        published_run(row(**values), "family")


@pytest.mark.parametrize(
    ("text", "stages"),
    [
        ("Et*3|(tt|)*6mL", (3, 2, 2, 2, 2, 2, 2, 0)),
        ("Et*4|(t*4|)*14tmL", (4, *[4] * 14, 1)),
        ("Ettt|ttt|tttL", (3, 3, 3)),
    ],
)
def test_layout_strings(text: str, stages: tuple[int, ...]) -> None:
    """Repetitions of blocks and of stages are expanded."""
    assert layout_string_stages(text) == stages


def test_tensor_degree_of_experts() -> None:
    """It is read for mixtures, and has no meaning without experts."""
    degrees = {"tp": 2, "dp": 4, "etp": 1}
    mixture = row(experts=8, topk=2, moe_ffn=2816, **degrees)
    assert run_of(mixture).layout.expert_tensor_parallel_degree == 1
    assert run_of(row(**degrees)).layout.expert_tensor_parallel_degree is None


def test_first_and_last() -> None:
    """The stages between the first and the last have equal numbers of blocks."""
    values = row(layers=12, pp=4, dp=2, layers_per_stage="first 2 last 2")
    assert run_of(values).stages == (2, 4, 4, 2)


def test_runs_out_of_memory() -> None:
    """A run that ran out of memory has no time and no memory."""
    published = published_run(
        row(status_kind="oom", step_s="", use_time=0, memory_bytes=5), "family"
    )
    assert published.run.result.outcome == "oom"
    assert published.run.result.memory_bytes is None
    assert not published.use_memory
    assert published.use_fit


def test_layer_times() -> None:
    """A timed layer has no vocabulary and no step."""
    published = published_run(row(layers=1, vocab=0, time_kind="layer"), "family")
    assert published.is_layer_time
    assert published.run.result.timed == "layers"


def test_folder(tmp_path: Path) -> None:
    """Scored rows are runs or out of scope; others, and other files, are left out."""
    unscored = row(use_time=0, use_fit=0, why_not="time: toy model | memory: none")
    rows = [row(), row(device=""), row(device=""), unscored]
    write_rows(tmp_path / "mine.csv", rows)
    (tmp_path / "links.csv").write_text("op,seconds\nall_reduce,1\n", encoding="utf-8")
    found = read_published(tmp_path)
    assert [one.family for one in found.runs] == ["mine"]
    assert found.rows == {"mine": 3}
    assert found.out_of_scope == {"mine": {"device not stated": 2}}
    assert found.not_scored == {"mine": {"not scored: time: toy model": 1}}
    assert found.in_scope == pytest.approx(1 / 3)
    assert read_published(tmp_path / "mine.csv").rows == {"mine": 3}


def test_missing_data(tmp_path: Path) -> None:
    """A missing folder, and files without the columns, are document errors."""
    with pytest.raises(DocumentError) as missing:
        read_published(tmp_path / "nothing")
    assert missing.value.problems[0].field == "--data"
    (tmp_path / "links.csv").write_text("op,seconds\n", encoding="utf-8")
    with pytest.raises(DocumentError):
        read_published(tmp_path)
