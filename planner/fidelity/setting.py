"""The framework and the attention kernel of a run: the framework's traits, as far as its row does not say otherwise.

compiled, RMS kernel    norms, and what stands between matrix products, in one kernel each
Liger                   output layer and loss chunk by chunk: no logits are kept (Liger-Kernel's
                        FusedLinearCrossEntropy)
no reshard              gathered parameters stay until the backward
offload, Paged          optimizer states on the host (ZeRO-Offload; bitsandbytes' paged optimizers), not where the
                        notes say ``Opt Offl=N``
NeMo                    tensor-parallel exchanges beside products, gradients in bf16: its recipes for fp8
opt-in-bwd              the optimizer steps in the backward
ZB                      steps follow each other without a barrier (Qi et al. 2024, section 4)
PA_CPU=N                checkpoints of Megatron with ZeRO 3 stay on the device
Megatron-DeepSpeed      before DeepSpeed took gradients over in hooks (2023): copies of gradients in half precision.
                        A run without flash attention is taken to be of that time
Megatron's tests        what their arguments say (`planner.fidelity.arguments`)
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from planner.fidelity.arguments import Arguments, attention_with, framework_with
from planner.fidelity.names import attention_of, framework_of, is_nemo
from planner.runtimes import AttentionKernel
from planner.runtimes import Runtime as Framework
from planner.spec.devices import find_entry
from planner.spec.profile import DataType

COPIED_GRADIENTS: dict[DataType, int] = {"fp16": 2, "bf16": 4, "fp32": 0}
"""Bytes per parameter: of the flattened bucket-wise copies, and beside BF16_Optimizer's fp32 gradients also of those
that autograd leaves."""

NEMO: dict[str, Any] = {"overlaps_tensor_parallel": True, "fp32_gradients": False}
"""NeMo-Framework-Launcher, conf/training/gpt3/175b_fp8_performance.yaml and its like: ub_tp_comm_overlap,
grad_sync_dtype: bf16."""
HALF_LOSS: dict[str, Any] = {"fp32_softmax": False, "logit_bytes": 4, "loss_bytes": 6}
"""A model of Transformers in fp16: shifted logits and their logarithms are kept in half precision, beside the logits
and two gradients of them."""


def setting_of(
    row: Mapping[str, str], device: str, dtype: DataType, given: Arguments | None
) -> tuple[Framework, AttentionKernel]:
    """Framework and attention kernel of a row.

    Args:
        row: of a file of runs.
        device: catalogue id.
        dtype: of activations.
        given: Megatron-LM's arguments; None: not listed.
    """
    framework = framework_of(row["system"], row.get("source", ""))
    attention = attention_of(row["attention"], framework, device)
    if not row["attention"] and given is not None:
        attention = attention_with(attention, given)
    framework = replace(
        framework, **(_of_era(framework, attention, dtype) | _of_words(framework, row))
    )
    if given is not None:
        framework = framework_with(framework, given, find_entry(device).architecture)
    return framework, attention


def _of_era(
    framework: Framework, attention: AttentionKernel, dtype: DataType
) -> dict[str, Any]:
    """What precision and age of a run decide."""
    if framework.name == "megatron-deepspeed" and attention != "flash":
        return {"copied_gradient_bytes": COPIED_GRADIENTS[dtype]}
    return HALF_LOSS if framework.name == "deepspeed" and dtype == "fp16" else {}


def _of_words(framework: Framework, row: Mapping[str, str]) -> dict[str, Any]:
    """Kernels and places of states that the row names."""
    system, notes, sharding = row["system"], row["notes"], row["zero_fsdp"]
    is_compiled = bool(re.search(r"\bcompile", notes))
    offloads = "offload" in sharding.lower() and "Opt Offl=N" not in notes
    named = {
        "fuses_norm": is_compiled or "RMS kernel" in row["attention"],
        "fuses_elementwise": is_compiled,
        "steps_in_backward": "opt-in-bwd" in system,
        "staggers_steps": row["schedule"].lower().startswith("zb"),
        "offloads_states": offloads or "Paged" in system,
        "keeps_gathered": "no reshard" in sharding,
    }
    traits: dict[str, Any] = {
        name: getattr(framework, name) or said for name, said in named.items()
    }
    if "PA_CPU=N" in notes:
        traits["offloads_checkpoints"] = False
    if is_nemo(system):
        traits |= NEMO
    return traits | (
        {"logit_bytes": 0, "loss_bytes": 0} if "liger" in notes.lower() else {}
    )
