"""`python -m benchmarks.other_planners`: our plans under other planners' cost models.

The other planners are stand-ins with small closed forms, written by the tests in the
layout of the real checkouts.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator
from math import inf
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import other_planners_calculon as calculon
from benchmarks import other_planners_galvatron as galvatron
from benchmarks import other_planners_metis as metis
from benchmarks import other_planners_piper as piper
from benchmarks.other_planners import (
    Outcome,
    PlannerCase,
    Row,
    neutral_calibration,
    search,
    table_text,
)
from planner.spec import Layout, Plan
from planner.spec.plan import Stage

CASE = calculon.Case("tiny.json", devices=8, samples=16, has_overlap=False)
MODEL = {
    "hidden": 16,
    "feedforward": 64,
    "seq_size": 8,
    "attn_heads": 4,
    "attn_size": 4,
    "num_blocks": 8,
}
SYSTEM = {
    "mem1": {"GiB": 1},
    "mem2": {"GiB": 512},
    "networks": [{"size": 4, "rate": 1e18}, {"size": 64, "rate": 1e18}],
}
LLM = '''
"""A closed form with Calculon's names: blocks and bubbles; exchanges are free."""

def human_format(value, unit):
    raise AssertionError("nothing is logged")


class Network:
    processor_usage = 0.0

    def __init__(self, document):
        self.size, self.rate = document["size"], document["rate"]

    def time(self, operation, size, ranks):
        passes = {"p2p": 1, "all_reduce": 2 * (ranks - 1) / ranks}[operation]
        return passes * size / self.rate


class System:
    def __init__(self, document):
        self.mem1 = type("Memory", (), {"capacity": document["mem1"]["GiB"] * 2**30})
        self.networks = [Network(each) for each in document["networks"]]
        assert document["mem2"]["GiB"] == 0

    def get_network(self, tier):
        return self.networks[tier]


class Llm:
    class Error(Exception):
        pass

    class Application:
        def __init__(self, document):
            vars(self).update(document)

    class Execution:
        @staticmethod
        def from_json(document):
            assert len(document) == 23
            found = Llm.Execution()
            vars(found).update(document)
            return found

    def __init__(self, application, log):
        self.app = application

    @staticmethod
    def _factors(number):
        return [each for each in range(1, number + 1) if number % each == 0]

    @staticmethod
    def get_all_tensor_parallelisms(devices, hidden, heads):
        return [each for each in Llm._factors(devices) if heads % each == 0]

    def compile(self, system, execution):
        self.exe = execution
        if execution.tensor_par_net == 0 and execution.tensor_par > 4:
            raise self.Error("too many ranks")

    def _compute_block_stats(self):
        exe = self.exe
        exchange = 2e-4 if exe.tensor_par > 1 else 0.0
        seconds = 1e-3 * exe.microbatch_size / exe.tensor_par
        again = {"none": 0.0, "attn_only": 0.2, "full": 1.0}
        saved = {"none": 40.0, "attn_only": 20.0, "full": 2.0}
        mode, split = exe.activation_recompute, exe.tensor_par
        states = 16e6 / split
        self._block_fw_flops = self._block_agrad_flops = self._block_wgrad_flops = 1
        self._block_fw_time = self._block_agrad_time = self._block_wgrad_time = seconds
        self._baseblock_fw_tp_time_exposed = exchange
        self._baseblock_agrad_tp_time_exposed = exchange
        self._block_re_time = again[mode] * seconds
        self._baseblock_recomm_time_exposed = 0.0
        self._block_optim_time = 0.0
        self._block_act_storage_space = 1e6 * saved[mode] * exe.microbatch_size / split
        self._block_act_checkpoint_size = 0.0
        self._block_act_working_space = self._block_act_storage_space
        self._block_act_grad_space = 0.0
        self._block_weight_space = states / 8
        self._block_weight_grad_space_no_sharding = 0.0

    def run(self, system):
        self._compute_block_stats()
        exe, app = self.exe, self.app
        blocks = app.num_blocks // exe.pipeline_par
        count = exe.batch_size // exe.data_par // exe.microbatch_size
        block = 3 * self._block_fw_time + self._block_re_time
        block += 2 * self._baseblock_fw_tp_time_exposed
        bubble = (exe.pipeline_par - 1) * blocks * block / exe.pipeline_interleaving
        self.seconds = count * blocks * block + bubble
        sharing = exe.data_par if exe.optimizer_sharding else 1
        states = blocks * self._block_weight_space * (1 + 7 / sharing)
        held = min(count, exe.pipeline_par) * blocks * self._block_act_storage_space
        if states + held > system.mem1.capacity:
            raise self.Error("out of memory")

    def get_total_time(self):
        return self.seconds
'''
SEARCH = '''
"""Calculon's command: every execution of the stand-in, through a pool of processes."""

import json
import multiprocessing as mp
from itertools import product
from pathlib import Path

from calculon.llm.llm import Llm, System

NAMES = ("tensor_par", "pipeline_par", "data_par", "microbatch_size")
REST = {
    "tensor_par_net": 0, "pipeline_par_net": 0, "data_par_net": 0,
    "datatype": "float16", "fused_activation": True, "attention_type": "multihead",
    "tensor_par_comm_type": "ar", "tensor_par_overlap": "none",
    "seq_par_ag_redo": False, "data_par_overlap": False, "weight_offload": False,
    "activations_offload": False, "optimizer_offload": False, "training": True,
}


def price(application, system, execution):
    priced = Llm(Llm.Application(application), None)
    try:
        priced.compile(system, Llm.Execution.from_json(execution))
        priced.run(system)
    except Llm.Error:
        return None
    return {"execution": execution, "stats": {"total_time": priced.get_total_time()}}


def executions(devices, samples, blocks):
    for tensor, pipeline, size in product((1, 2, 4), (1, 2, 4, 8), (1, 2, 4, 8, 16)):
        data = devices // tensor // pipeline
        if data == 0 or samples % (data * size):
            continue
        stages = [v for v in (1, 2, 4, 8) if blocks % (pipeline * v) == 0]
        for count in stages if pipeline > 1 else (1,):
            for mode, is_sharded in product(("none", "attn_only", "full"), (0, 1)):
                degrees = dict(zip(NAMES, (tensor, pipeline, data, size)))
                yield {
                    **REST, **degrees, "num_procs": devices, "batch_size": samples,
                    "activation_recompute": mode, "pipeline_interleaving": count,
                    "optimizer_sharding": bool(is_sharded and data > 1),
                }


class OptimalExecution:
    @staticmethod
    def create_parser(subparsers):
        parser = subparsers.add_parser("llm-optimal-execution")
        parser.set_defaults(func=OptimalExecution.run_command)
        for name in ("model", "devices", "samples", "datatype", "system", "output"):
            parser.add_argument(name)
        for flag in ("--noneok", "--no-tp-overlap", "--no-dp-overlap"):
            parser.add_argument(flag, action="store_true")

    @staticmethod
    def run_command(logger, arguments):
        application = json.loads(Path(arguments.model).read_text())
        system = System(json.loads(Path(arguments.system).read_text()))
        sizes = (int(arguments.devices), int(arguments.samples))
        every = executions(*sizes, application["num_blocks"])
        with mp.Pool(1) as pool:
            found = pool.starmap(price, [(application, system, one) for one in every])
        good = [one for one in found if one is not None]
        best = sorted(good, key=lambda one: one["stats"]["total_time"])[:1]
        text = json.dumps({str(place): one for place, one in enumerate(best)})
        Path(arguments.output).write_text(text)
'''


@pytest.fixture
def checkout(tmp_path: Path) -> Iterator[Path]:
    """A checkout of a stand-in for Calculon, with a model and a system."""
    before = set(sys.modules), list(sys.path)
    files = {
        "calculon/__init__.py": "from calculon.llm import llm\n"
        "from calculon.llm.llm import System\n",
        "calculon/llm/__init__.py": "",
        "calculon/llm/llm.py": LLM,
        "calculon/llm/optimal_execution.py": SEARCH,
        "models/tiny.json": json.dumps(MODEL),
        "systems/a100_80g.json": json.dumps(SYSTEM),
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    yield tmp_path
    sys.path[:] = before[1]
    for name in set(sys.modules) - before[0]:
        if name.split(".")[0] in ("calculon", "psutil", "pandas"):
            del sys.modules[name]


def test_our_plan_is_as_fast_as_every_execution(checkout: Path) -> None:
    """Under the other model, which enumerates all of its executions."""
    theirs = calculon.their_search(CASE, checkout, limit=inf)
    ours = calculon.our_plan(CASE, checkout)
    assert theirs.note == ""
    assert theirs.step_seconds is not None
    assert ours.step_seconds == pytest.approx(theirs.step_seconds)


def test_less_memory_makes_both_slower(checkout: Path) -> None:
    """Where devices are smaller, both steps are slower, and equal."""
    roomy = calculon.our_plan(CASE, checkout)
    system = {**SYSTEM, "mem1": {"GiB": 0.125}}
    (checkout / "systems" / "a100_80g.json").write_text(json.dumps(system))
    theirs = calculon.their_search(CASE, checkout, limit=inf)
    ours = calculon.our_plan(CASE, checkout)
    assert ours.step_seconds is not None
    assert roomy.step_seconds is not None
    assert ours.step_seconds > roomy.step_seconds
    assert theirs.step_seconds == pytest.approx(ours.step_seconds)


def test_a_search_that_its_limit_stops_says_so(checkout: Path) -> None:
    """Its row has no step of its own, and a note."""
    outcome = calculon.their_search(CASE, checkout, limit=0.0)
    assert outcome.step_seconds is None
    assert outcome.note.startswith("still searching: 0 of ")


def test_executions_differ_in_what_a_layout_does_not_say() -> None:
    """Choices of the other model that no layout has are enumerated."""
    model = calculon.Model(None, None, None, CASE._replace(has_overlap=True))
    layout = Layout(
        tensor_parallel_degree=2, data_parallel_degree=4, sequence_parallel=True
    )
    executions = list(calculon.executions_of(model, layout))
    overlaps = {
        (one["tensor_par_overlap"], one["data_par_overlap"]) for one in executions
    }
    assert len(overlaps) == 6
    assert {one["tensor_par_comm_type"] for one in executions} == {"rs_ag"}
    assert {one["num_procs"] for one in executions} == {8}


def galvatron_engine() -> SimpleNamespace:
    """What our conversion reads of Galvatron's engine; sizes in MB, times in ms."""
    halves = {1: 64.0, 2: 32.0, 4: 16.0, 8: 8.0}
    ends = {"model_states": halves, "activation": halves}
    return SimpleNamespace(
        param_sizes=[512.0],
        act_sizes=[{**halves, "checkpoint": 4.0}],
        other_memory_pp_on={"first_stage": ends, "last_stage": ends},
        other_time_profiled_list=[(1.0, 0.5)],
        allreduce_bandwidth={"8": 100.0},
        train_args_list=[SimpleNamespace(pytorch_context_mem=1024)],
    )


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """An engine whose layers take 2 ms per sample, and exchange for 3 ms if split."""

    def priced(engine: SimpleNamespace, size: galvatron.Size) -> SimpleNamespace:
        return SimpleNamespace(
            fct=2.0 * galvatron.LAYERS * size.samples / size.ranks,
            tp_communication_time=3.0 * galvatron.LAYERS * (size.ranks > 1),
        )

    monkeypatch.setattr(galvatron, "_time_model", priced)
    return galvatron_engine()


def test_layers_have_galvatrons_seconds_and_bytes(engine: SimpleNamespace) -> None:
    """Rows of the profile have the measured times and activations."""
    case = galvatron.Case(gigabytes=40, samples=8)
    profile = galvatron.profile_of(engine, case)
    block = profile.layers[1]
    rows = {
        (row.micro_batch_size, row.tensor_parallel_degree, row.recompute): row
        for row in block.measurements
        if row.context_parallel_degree == 1
    }
    plain, split = rows[4, 1, "none"], rows[4, 2, "full"]
    assert len(profile.layers) == galvatron.LAYERS + 2
    assert plain.forward_seconds == pytest.approx(8e-3)
    assert plain.activation_bytes == 4 * 64 * galvatron.MEGABYTE
    assert block.parameters == 512 * galvatron.MEGABYTE // 4
    assert split.forward_seconds == pytest.approx(5e-3)
    assert split.backward_input_seconds == pytest.approx(5e-3)
    assert split.recompute_seconds == pytest.approx(5.5e-3)
    assert split.activation_bytes == 4 * 2 * galvatron.MEGABYTE


def test_less_memory_makes_galvatrons_layers_recompute(engine: SimpleNamespace) -> None:
    """The less memory, the slower the step."""
    steps = []
    for gigabytes in (80, 24):
        case = galvatron.Case(gigabytes, samples=8)
        assumption = galvatron.ASSUMPTIONS[0]
        plan = search(
            galvatron.profile_of(engine, case),
            galvatron.cluster_of(engine, case),
            galvatron.job_of(case, assumption),
            assumption.constants,
        )
        assert plan is not None
        peak = max(row.peak_bytes for row in plan.prediction.memory)
        assert peak <= 0.8 * gigabytes * 2**30
        steps.append(plan.prediction.step_seconds)
    assert steps[0] < steps[1]


def test_a_neutral_calibration_changes_no_prediction() -> None:
    """Its constants are those that leave every price as it is, but the given ones."""
    table = neutral_calibration({"transfer_seconds": 1e-3})
    assert table.constants == {"transfer_seconds": 1e-3}
    assert {row.time.low for row in table.intervals.values()} == {0.0}


def test_the_table_has_ratios_and_notes() -> None:
    """Steps and CPU seconds are compared, and notes are numbered."""
    theirs = Outcome(2.0, "tensor 8", "still searching", cpu_seconds=100.0)
    ours = Outcome(1.9, "tensor 4", cpu_seconds=4.0)
    row = Row(PlannerCase("calculon", "tiny"), theirs, ours)
    text = table_text([row])
    assert not row.is_slower
    cells = "| calculon: tiny | 2 s | 1.9 s | 0.9500 | 100.0 | 4.0 | 25x |"
    assert cells in text
    assert "theirs: tensor 8 (still searching)" in text


@pytest.mark.parametrize(("ours", "is_slower"), [(2.0, False), (2.01, True)])
def test_a_slower_plan_fails(ours: float, is_slower: bool) -> None:
    """A plan that is slower under the other model sets the exit code."""
    theirs = Outcome(2.0, "")
    row = Row(PlannerCase("calculon", "tiny"), theirs, Outcome(ours, ""))
    assert row.is_slower is is_slower


def test_no_plan_is_slower() -> None:
    """A case that our search finds no plan for counts as slower."""
    theirs = Outcome(2.0, "")
    assert Row(PlannerCase("calculon", "tiny"), theirs, Outcome(None, "")).is_slower


def metis_profile(milliseconds: float) -> str:
    """Return a profile file of Metis whose layers take equally long."""
    layers = metis.LAYERS
    times = {
        "forward_backward_time_ms": layers * milliseconds + 1,
        "batch_generator_time_ms": 1.0,
        "optimizer_time_ms": 5.0,
        "layer_compute_total_ms": [milliseconds] * layers,
    }
    sizes = {"parameters_per_layer_bytes": [4096] * layers}
    return json.dumps({"model": {"parameters": sizes}, "execution_time": times})


@pytest.fixture
def metis_checkout(tmp_path: Path) -> Path:
    """A checkout of Metis with profiles of one sample, split over 1, 2 and 4 devices."""
    folder = tmp_path / "profile_data_samples"
    folder.mkdir()
    for degree in (1, 2, 4):
        path = folder / f"DeviceType.A100_tp{degree}_bs1.json"
        path.write_text(metis_profile(12.0 / degree))
    return tmp_path


def test_metis_profiles_price_every_device(metis_checkout: Path) -> None:
    """Rows have the seconds of the device's own file."""
    split = metis.Split(degree=2, size=1)
    case = metis.Case({metis.T4: 1, metis.A100: 1}, samples=4)
    profile = metis.profile_of(case, metis_checkout, split, head_seconds=0.5)
    slow = profile.layers[0].measurements[0]
    fast = profile.other_devices[0].measurements["layers.0"][0]
    last = profile.layers[-1].measurements[0]
    assert slow.forward_seconds == pytest.approx(312 / 65 * 2e-3)
    assert fast.forward_seconds == pytest.approx(2e-3)
    assert last.forward_seconds == pytest.approx(312 / 65 * 2e-3 + 0.5 / 3)
    assert slow.local_parameters == 512
    assert slow.optimizer_seconds == pytest.approx(5e-4)


def test_faster_devices_get_more_layers(metis_checkout: Path) -> None:
    """The cut follows the speeds of unlike devices."""
    case = metis.Case({metis.T4: 1, metis.A100: 1}, samples=64)
    split = metis.Split(degree=4, size=1)
    plan = search(
        metis.profile_of(case, metis_checkout, split, head_seconds=0.0),
        metis.cluster_of(case),
        metis.job_of(case, split, is_pipeline=True),
    )
    assert plan is not None
    layers = {
        case.devices[plan.placement[stage.ranks[0]].node]: len(stage.layers)
        for stage in plan.stages
    }
    assert layers == {metis.T4: 1, metis.A100: 9}


def test_plans_are_read_from_metis_output() -> None:
    """Device groups, layers and degrees of its printed plans."""
    line = (
        "1, 4460.5, (<DeviceType.T4: 't4'>, <DeviceType.A100: 'a100'>), [8, 8], "
        "[(8, 1), [4, 2]], 16, [0, 2, 10]"
    )
    match = metis.RANKED.search(f"rank, cost, node_sequence\n{line}\n")
    assert match is not None
    assert match["milliseconds"] == "4460.5"
    stages = metis._ranked_stages(match)
    assert stages.nodes == ["T4", "A100"]
    assert stages.strategies == [(8, 1), (4, 2)]
    assert stages.partition == [0, 2, 10]


PARAMETERS_BYTES = 4e6
PLAIN_SECONDS, RECOMPUTED_SECONDS = 0.04, 0.052


def piper_nodes(memory_bytes: float = 1e6) -> list[dict[str, Any]]:
    """BERT with Piper's numbers: layers of 40 ms, recomputed in 52 ms."""
    nodes = []
    for number in range(piper.POOLER + 1):
        has_time = number not in piper.INPUTS_OF_EMBEDDING
        plain = {
            "timePerSample": PLAIN_SECONDS * has_time,
            "parameterSize": PARAMETERS_BYTES * has_time,
            "memoryUsageA": memory_bytes * has_time,
            "memoryUsageB": 2 * PARAMETERS_BYTES * has_time,
        }
        recomputed = plain | {
            "timePerSample": RECOMPUTED_SECONDS * has_time,
            "memoryUsageA": 0.1 * memory_bytes * has_time,
            "memoryUsageB": plain["memoryUsageB"] + memory_bytes * has_time,
        }
        name = "ParallelTransformerLayer" if has_time else "tensor"
        modes = {piper.TENSOR: [plain, recomputed]}
        nodes.append({"id": number, "name": name, "TMPCs": modes})
    return nodes


def settled_plan(nodes: list[dict[str, Any]]) -> Plan:
    """Our plan on 4 devices, by the prices that hold in this very plan."""
    case = piper.Case(devices=4, samples=32, batches=60)
    expected = piper.Expected.at_first(nodes)
    for _ in range(piper.SEARCHES):
        plan = piper.plan_of(case, piper.profile_of(nodes, expected))
        assert plan is not None
        before, expected = expected, piper.Expected.of(plan)
    assert before == expected
    return plan


def piper_load(stage: Stage, plan: Plan) -> float:
    """Seconds per sample of a stage, by the closed form of Piper's paper."""
    data = plan.layout.data_parallel_degree
    first = plan.stages[0].layers
    masked = sum(layer.name not in ("layers.1", "layers.36") for layer in first)
    busy = 0.0
    for layer in stage.layers:
        is_plain = layer.recompute == "none"
        busy += PLAIN_SECONDS if is_plain else RECOMPUTED_SECONDS
    boundaries = (stage.index > 0) + (stage.index < len(plan.stages) - 1)
    busy += boundaries * piper.TRANSFER_SECONDS / 2
    if stage.index == 0:
        busy += (piper.TRANSFORMER_LAYERS - masked) * piper.MASK_SECONDS
    else:
        received = sum(layer.name != "layers.36" for layer in stage.layers)
        busy += received * piper.MASK_SECONDS
    reduced = 4 * (data - 1) * PARAMETERS_BYTES * len(stage.layers) / data
    return busy / data + reduced / 32 / piper.BANDWIDTH


@pytest.mark.parametrize("memory_bytes", [4e8, 6e8])
def test_our_plan_has_pipers_steady_state(memory_bytes: float) -> None:
    """The step of many batches in a row is the load of the slowest stage."""
    plan = settled_plan(piper_nodes(memory_bytes))
    assert len(plan.stages) > 1
    seconds = plan.prediction.step_seconds / (32 * 60)
    loads = [piper_load(stage, plan) for stage in plan.stages]
    assert seconds == pytest.approx(max(loads), rel=0.005)


def test_our_plan_is_written_as_pipers() -> None:
    """Every node is in one stage; those without time go with the embedding."""
    plan = settled_plan(piper_nodes(4e8))
    stages = piper.as_piper_has_it(plan)["stages"]
    nodes = [node for stage in stages for node, _ in stage["TMPCids"]]
    assert sorted(nodes) == list(range(piper.POOLER + 1))
    assert [node for node, _ in stages[0]["TMPCids"]][:3] == [0, 1, 2]
    modes = {mode for stage in stages for _, mode in stage["TMPCids"]}
    assert modes == {piper.PLAIN, piper.RECOMPUTED}
    assert {stage["tensorParallelDegree"] for stage in stages} == {1}


def test_recomputed_activations_count_once() -> None:
    """A recomputed node needs room for its activations of one micro-batch at a time."""
    nodes = piper_nodes(4e8)
    held = {node["id"]: 8 for node in nodes}
    profile = piper.profile_of(nodes, piper.Expected(frozenset(), held))
    plain, recomputed = profile.layers[5].measurements
    assert plain.activation_bytes == pytest.approx(4e8, abs=1)
    assert recomputed.activation_bytes == pytest.approx(0.4e8 + 4e8 / 8, abs=1)
    assert recomputed.recompute_seconds == pytest.approx(0.012)


PIPER = os.environ.get("PIPER_CHECKOUT", "")
"""A checkout of Piper, for the test of its own code."""


@pytest.mark.skipif(
    not PIPER or shutil.which("g++") is None, reason="PIPER_CHECKOUT or g++ is missing"
)
def test_our_plan_is_as_fast_as_equal_degrees_in_piper() -> None:
    """Piper's code prices its own plan as its search does, and ours as its best."""
    case = piper.Case(devices=8, samples=1920, batches=15)
    with piper.Piper(Path(PIPER)) as program:
        best = program.ask("best", case)
        again = program.ask("price", case, best)
        equal = program.ask("equal", case)
    ours = piper.our_plan(case, Path(PIPER))
    assert again["seconds"] == pytest.approx(best["seconds"])
    assert equal["seconds"] >= best["seconds"] * (1 - 1e-9)
    assert ours.step_seconds == pytest.approx(equal["seconds"] * case.samples)
