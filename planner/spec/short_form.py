"""A planning request in a few words: ``llama-3.1-70b`` on ``64xh100-sxm5-80gb``.

The short form expands to the same cluster and job documents that the long form reads,
so that both give the same plan with the same id.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from pydantic import Field, JsonValue

from planner.errors import DocumentError
from planner.spec.bounds import MOST_CHARACTERS
from planner.spec.cluster import Cluster, DeviceSpec, NodeGroup
from planner.spec.cluster_file import DOCUMENT_SUFFIXES
from planner.spec.constraint_words import with_full_names
from planner.spec.devices import find_entry, nearest_devices
from planner.spec.document import Document, parse, read
from planner.spec.job import MOST_SAMPLES, Job, OptimizerName, Precision

DEVICES_EXAMPLE = "64xh100-sxm5-80gb"
_COUNT_AND_DEVICE = re.compile(r"(\d+) *[x*] *(\S+)")


class ShortForm(Document):
    """Model, devices and batch: what a planning request needs at least."""

    model: str = Field(min_length=1, max_length=MOST_CHARACTERS)
    """Catalogue name (GET /v1/models, `planner models`)."""
    devices: str = Field(max_length=10_000)
    """``COUNTxDEVICE``, several separated by commas:
    ``16xh100-sxm5-80gb,32xa100-sxm4-80gb``."""
    batch: int = Field(ge=1, le=MOST_SAMPLES)
    """Samples per optimizer step, over all devices."""
    sequence: int = Field(default=0, ge=0)
    """Tokens per sample; 0 for models without a sequence."""
    devices_per_node: int | None = Field(default=None, ge=1)
    """None: the catalogue's number for each device."""
    precision: Precision = "bf16-mixed"
    """Number formats of parameters, gradients and optimizer states."""
    optimizer: OptimizerName = "adamw"
    """Optimizer, which decides the bytes per parameter."""
    runtime: str = "planner"
    """Framework that will run the plan."""
    fix: dict[str, JsonValue] = Field(default_factory=dict, max_length=64)
    """Layout fields fixed, bounded or listed; tp, pp, dp, cp, ep and mbs for short."""

    def cluster(self) -> Cluster:
        """The cluster document of `devices`.

        Raises:
            SpecError: no count, an unknown device, or nodes that are not full.
        """
        return cluster_of(self.devices, self.devices_per_node)

    def job(self) -> Job:
        """The job document of everything else.

        Raises:
            DocumentError: a field has a wrong value.
        """
        return job_of(
            self.batch,
            self.sequence,
            precision=self.precision,
            optimizer=self.optimizer,
            runtime=self.runtime,
            fix=self.fix,
        )


def cluster_of(
    devices: str,
    devices_per_node: int | None = None,
    *,
    field: str = "devices",
    reads_files: bool = False,
) -> Cluster:
    """The cluster of ``COUNTxDEVICE[,COUNTxDEVICE...]``; links are the catalogue's.

    Args:
        devices: number and catalogue id of every kind of device.
        devices_per_node: None: the catalogue's number for each device; all in one
            node for a device document.
        field: name of the argument in error messages.
        reads_files: DEVICE may be the path of a device document.

    Raises:
        DocumentError: the text has no count, or the last node is not full.
        UnknownNameError: the catalogue has no such device.
    """
    parts = [part.strip() for part in devices.split(",") if part.strip()]
    if not parts:
        raise DocumentError(
            "no devices.",
            field=field,
            hint=f"give COUNTxDEVICE, e.g. {DEVICES_EXAMPLE}.",
        )
    groups = tuple(
        _node_group(part, devices_per_node, field, reads_files) for part in parts
    )
    return Cluster(name=",".join(parts), node_groups=_named_apart(groups))


def _node_group(
    text: str, devices_per_node: int | None, field: str, reads_files: bool
) -> NodeGroup:
    found = _COUNT_AND_DEVICE.fullmatch(text)
    if found is None:
        near = nearest_devices(text, most=1) or ("h100-sxm5-80gb",)
        raise DocumentError(
            f"{text!r} is not COUNTxDEVICE.",
            field=field,
            hint=f"write e.g. 8x{near[0]}; see `planner devices`.",
        )
    count, device = int(found[1]), found[2]
    if reads_files and device.endswith(DOCUMENT_SUFFIXES):
        spec = read(DeviceSpec, device)
        per_node, known = min(count, devices_per_node or count), spec.id
    else:
        entry = find_entry(device, field=field)
        per_node = min(count, devices_per_node or entry.devices_per_node)
        spec, known = None, entry.spec.id
    if count == 0:
        raise DocumentError(
            f"{text!r} has no device.", field=field, hint="ask for 1 or more."
        )
    if count % per_node:
        below, above = count - count % per_node, count - count % per_node + per_node
        raise DocumentError(
            f"{count} {known} do not fill nodes of {per_node}.",
            field=field,
            hint=f"ask for {below} or {above}, or give the number of devices per node.",
        )
    return NodeGroup(
        name=known,
        device=spec or known,
        nodes=count // per_node,
        devices_per_node=per_node,
    )


def _named_apart(groups: tuple[NodeGroup, ...]) -> tuple[NodeGroup, ...]:
    """Number the names of groups that have the same device."""
    names = [group.name for group in groups]
    return tuple(
        group.model_copy(update={"name": f"{group.name}-{index}"})
        if names.count(group.name) > 1
        else group
        for index, group in enumerate(groups)
    )


def job_of(
    batch: int,
    sequence: int = 0,
    *,
    precision: str = "bf16-mixed",
    optimizer: str = "adamw",
    runtime: str = "planner",
    fix: Mapping[str, Any] | None = None,
    field: str = "",
) -> Job:
    """The job of a short request.

    Args:
        batch: samples per optimizer step.
        sequence: tokens per sample; 0 for models without a sequence.
        precision: see `Job.precision`.
        optimizer: see `Job.optimizer`.
        runtime: see `Job.runtime`.
        fix: constraints by long or short name of the layout field.
        field: precedes the field in error messages.

    Raises:
        DocumentError: one problem per wrong value.
    """
    return parse(
        Job,
        {
            "global_batch_size": batch,
            "sequence_length": sequence,
            "precision": precision,
            "optimizer": optimizer,
            "runtime": runtime,
            "constraints": with_full_names(fix or {}, where="fix"),
        },
        where=field,
    )
