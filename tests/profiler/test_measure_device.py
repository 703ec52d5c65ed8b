"""The data sheet of this machine, and the catalogue entry of a GPU by the name torch gives it."""

from __future__ import annotations

import pytest
import torch

from planner.errors import SpecError, UnsupportedError
from planner.profiler.local_devices import match_catalogue
from planner.profiler.measure_device import (
    COPY_BYTES,
    Copy,
    Matmul,
    device_spec,
    find_device,
    is_in_catalogue,
)
from planner.profiler.measure_memory import available_memory_bytes
from planner.spec.devices import catalogue

GIB = 1 << 30
MIB = 1 << 20


@pytest.mark.parametrize(
    ("name", "memory_bytes", "identifier"),
    [
        ("NVIDIA H100 80GB HBM3", 79 * GIB, "h100-sxm5-80gb"),
        ("NVIDIA H100 80GB HBM3", 81_559 * MIB, "h100-sxm5-80gb"),
        ("NVIDIA H100", 97_270 * MIB, "h100-sxm5-96gb"),
        ("NVIDIA H100 PCIe", 79 * GIB, "h100-pcie-80gb"),
        ("NVIDIA H100 NVL", 93 * GIB, "h100-nvl-94gb"),
        ("NVIDIA H200", 139 * GIB, "h200-sxm-141gb"),
        ("NVIDIA A100-SXM4-40GB", 39 * GIB, "a100-sxm4-40gb"),
        ("NVIDIA A100-SXM4-80GB", 79 * GIB, "a100-sxm4-80gb"),
        ("NVIDIA A100 80GB PCIe", 79 * GIB, "a100-pcie-80gb"),
        ("NVIDIA A100-PCIE-40GB", 39 * GIB, "a100-pcie-40gb"),
        ("Tesla V100-SXM2-16GB", 15 * GIB, "v100-sxm2-16gb"),
        ("Tesla V100-SXM2-32GB", 31 * GIB, "v100-sxm2-32gb"),
        ("NVIDIA L4", 22 * GIB, "l4-24gb"),
        ("NVIDIA L40S", 44 * GIB, "l40s-48gb"),
        ("NVIDIA L40S", 47 * GIB, "l40s-48gb"),
        ("NVIDIA A10G", 22 * GIB, "a10g-24gb"),
        ("NVIDIA GeForce RTX 4090", 23 * GIB, "rtx4090-24gb"),
        ("NVIDIA B200", 183_359 * MIB, "b200-sxm-180gb"),
        ("NVIDIA GB200", 187 * GIB, "gb200-nvl72-186gb"),
        ("NVIDIA GH200 480GB", 97_871 * MIB, "gh200-96gb"),
        ("AMD Instinct MI300X", 191 * GIB, "mi300x-192gb"),
        ("NVIDIA GB300", 284_208 * MIB, "gb300-nvl72-279gb"),
        ("NVIDIA H800", 81_559 * MIB, "h800-sxm5-80gb"),
        ("NVIDIA A800-SXM4-80GB", 79 * GIB, "a800-sxm4-80gb"),
        ("NVIDIA RTX A6000", 47 * GIB, "a6000-48gb"),
        ("NVIDIA H200 NVL", 143_771 * MIB, "h200-nvl-141gb"),
        ("AMD Instinct MI350X", 287 * GIB, "mi350x-288gb"),
    ],
)
def test_gpus_are_found_by_name_form_and_memory(
    name: str, memory_bytes: int, identifier: str
) -> None:
    """What torch calls a GPU leads to its entry, with the memory of torch or of nvidia-smi, with or without ECC; form
    factor and memory tell sizes of one model apart."""
    found = match_catalogue(name, memory_bytes)
    assert found == catalogue()[identifier].spec
    assert is_in_catalogue(found)


@pytest.mark.parametrize(
    ("name", "memory_bytes"),
    [
        ("NVIDIA GeForce GTX 1080", 8 * GIB),
        ("NVIDIA H100 80GB HBM3", 40 * GIB),
        ("NVIDIA GeForce RTX 4090", 47 * GIB),
    ],
)
def test_unknown_gpus_are_not_guessed(name: str, memory_bytes: int) -> None:
    """A GPU of no entry, or one with half the memory of its entry (a MIG slice), has no data sheet."""
    assert match_catalogue(name, memory_bytes) is None


@pytest.mark.parametrize(
    ("device", "concurrency"),
    [("tpu", 1), ("cpu:0", 1), ("cuda:x", 1), ("", 1), ("cpu", 0)],
)
def test_wrong_devices_are_refused(device: str, concurrency: int) -> None:
    """A name that is no device, and no positive number of ranks, are the user's mistakes."""
    with pytest.raises(SpecError):
        find_device(device, concurrency)


def test_missing_gpus_are_refused() -> None:
    """A GPU beyond those that torch sees is named, with what there is."""
    with pytest.raises(
        UnsupportedError, match=f"sees {torch.cuda.device_count()} GPUs"
    ):
        find_device("cuda:99", 1)


def test_gpus_are_not_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several ranks on one GPU are refused; one is fine."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert find_device("cuda", 1) == torch.device("cuda", 0)
    with pytest.raises(UnsupportedError, match="share one GPU"):
        find_device("cuda", 2)


@pytest.mark.torchrun
def test_a_cpu_rank_has_its_part_of_the_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two ranks have half the memory each, measured peaks, and a bare worker takes a part of that memory."""
    available = available_memory_bytes()
    monkeypatch.setattr(
        "planner.profiler.measure_device.available_memory_bytes", lambda: available
    )  # others take some, too
    spec = device_spec("cpu", 2)
    assert spec.id == "cpu"
    assert not is_in_catalogue(spec)
    assert spec.memory_bytes == available // 2
    assert spec.peak_flops_per_second["fp32"] > 1e8
    assert spec.memory_bandwidth_bytes_per_second is not None
    assert spec.memory_bandwidth_bytes_per_second > 1e7
    assert spec.reserved_bytes is not None
    assert 100e6 < spec.reserved_bytes < spec.memory_bytes


def test_workloads_do_the_work_they_are_priced_by() -> None:
    """The product multiplies its square matrix by itself, and the copy copies all of its bytes."""
    matmul, copy = (
        Matmul(8, torch.float32, torch.device("cpu")),
        Copy(1024, torch.device("cpu")),
    )
    marks: list[None] = []
    for workload in (matmul, copy):
        workload.run(lambda: marks.append(None))
    assert matmul._matrix is not None
    assert matmul._matrix.shape == (8, 8)
    assert copy._tensors is not None
    assert [tensor.nbytes for tensor in copy._tensors] == [1024, 1024]
    assert len(marks) == 4
    assert COPY_BYTES.keys() == {"cpu", "cuda"}
