"""What is to be priced: a profile, a cluster and a job that have been checked to belong together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from planner.cost.compute import Computation, computation
from planner.cost.derived import DerivedRows, Rows, Size
from planner.cost.fp8 import check_fp8, mark_fp8
from planner.cost.interval import usable_bytes, with_headroom
from planner.cost.polynomial_rows import (
    PolynomialRows,
    enumerated_sizes,
    polynomial_splits,
)
from planner.errors import DocumentError, MismatchError
from planner.runtimes import Runtime, planned
from planner.spec.calibration import (
    DEFAULT,
    CalibrationTable,
    Constants,
    constants_for,
    shipped,
)
from planner.spec.cluster import Cluster, DeviceSpec, Link
from planner.spec.devices import catalogue, domain_of, find_device, links_of
from planner.spec.fp8 import Fp8Casts
from planner.spec.job import COMPUTE_TYPE, OURS, Job
from planner.spec.profile import LayerProfile, Measurement, ModelProfile, RecomputeMode
from planner.spec.recipes import OgpRecipe, recipe
from planner.spec.recompute import MODES

COUNTED = "counted"
"""`ModelProfile.device` of a profile without seconds."""
RecomputeModes = tuple[RecomputeMode, ...]
_RowTable = dict[Size, dict[RecomputeMode, Measurement]]


@dataclass(frozen=True)
class Workload:
    """A profile, cluster and job that belong together."""

    profile: ModelProfile
    cluster: Cluster
    job: Job
    device: DeviceSpec
    intra_node: Link
    inter_node: Link | None
    nodes: int
    devices_per_node: int
    framework: Runtime = field(default_factory=lambda: planned(OURS))
    constants: Constants = DEFAULT
    groups: tuple[Workload, ...] = ()
    """Of a heterogeneous cluster: the same on each of its node groups alone, in order. Device, links, nodes and
    constants of the whole are then those of the first group, and price nothing: `planner.cost.mixed` does."""
    calibration: CalibrationTable | None = None
    """Source of the constants and of the uncertainty; None: the constants were given."""
    is_rearranged: bool = False
    """Its node groups stand in another order than the cluster's own."""

    @property
    def devices(self) -> int:
        """Number of devices of the cluster."""
        return sum(self.devices_of_nodes)

    @cached_property
    def devices_of_nodes(self) -> tuple[int, ...]:
        """Devices of every node, in the order in which ranks fill them."""
        return tuple(
            group.devices_per_node
            for group in self.cluster.node_groups
            for _ in range(group.nodes)
        )

    @cached_property
    def domain_devices(self) -> int:
        """Devices that reach each other by `intra_node`: a node's, or those of several nodes (NVL72)."""
        return domain_of(self.cluster.node_groups[0])

    @cached_property
    def recipe(self) -> OgpRecipe:
        """Bytes per parameter of this precision and optimizer under the runtime."""
        framework = self.framework
        is_mixed = self.job.precision in ("bf16-mixed", "fp8")
        is_bf16 = framework.is_pure and is_mixed
        found = recipe("bf16" if is_bf16 else self.job.precision, self.job.optimizer)
        if framework.optimizer_state_bytes is not None:
            found = replace(found, state_bytes=framework.optimizer_state_bytes // 2)
        if not found.master_bytes:
            return found
        if not framework.fp32_master:
            return replace(found, parameter_bytes=4, gradient_bytes=4, master_bytes=0)
        if framework.fp32_gradients and is_mixed:
            return replace(found, gradient_bytes=4)
        return found

    @property
    def capacity_bytes(self) -> int:
        """What the job may use of a device, its memory less the headroom; of several kinds, the largest."""
        if self.groups:
            return max(group.capacity_bytes for group in self.groups)
        return usable_bytes(self.device.memory_bytes, self.headroom)

    @property
    def headroom(self) -> float:
        """Memory left free on every device: a fraction if below 1, else bytes."""
        return self.job.memory_headroom or 0.0

    @property
    def host_capacity_bytes(self) -> int | None:
        """A device's part of its node's memory (O8), of several kinds the largest; None: not known. The job's headroom
        is one of devices."""
        if self.groups:
            known = (group.host_capacity_bytes for group in self.groups)
            return max((each for each in known if each is not None), default=None)
        group = self.cluster.node_groups[0]
        return (
            None
            if group.host_memory_bytes is None
            else group.host_memory_bytes // group.devices_per_node
        )

    @cached_property
    def rows(
        self,
    ) -> dict[tuple[int, int], tuple[dict[RecomputeMode, Measurement], ...]]:
        """By (micro-batch size, tensor-parallel degree): every layer's measurements by recompute mode.

        Only combinations that all layers have, at the job's sequence length, not split in any other way. Identical
        layers share one dict.
        """
        return {
            size[:2]: rows
            for size, rows in self.sizes.items()
            if size[2:] == (1, 1, False)
        }

    @cached_property
    def sizes(self) -> Mapping[Size, tuple[dict[RecomputeMode, Measurement], ...]]:
        """Rows by all degrees that split a layer.

        For a decoder whose sizes are known they are those that the runtime launches;
        else those of the profile, and those that its polynomials give.
        """
        profiled = self.profiled_sizes
        if not self.derives_rows:
            has_polynomials = bool(polynomial_splits(self.profile))
            return self._polynomial_rows if has_polynomials else profiled
        transformer = self.profile.transformer
        assert transformer is not None
        rows = DerivedRows(
            model=transformer,
            runtime=self.framework,
            sequence_length=self.job.sequence_length,
            dtype=self.profile.dtype,
            casts=self.casts,
            listed=tuple(profiled),
            whole=tuple(map(_unsplit, self.profile.layers)),
        )
        if self.framework.name == OURS:
            rows.profiled = profiled
        else:
            rows.listed = tuple(size for size in profiled if rows.divides(size))
        return rows

    def rows_at(self, size: Size, expert_tensor: int | None = None) -> Rows:
        """Return the measurements of every layer of a size.

        Args:
            size: a key of `sizes`.
            expert_tensor: tensor degree of the experts; None: that of all layers.
        """
        if isinstance(self.sizes, DerivedRows):
            return self.sizes.at(size, expert_tensor)
        return self.sizes[size]

    @property
    def derives_rows(self) -> bool:
        """Whether rows follow from the sizes of the model instead of the profile.

        Measured rows are the profile's; our own runtime takes the sizes that a
        profile lists from it, since they are equal, and derives all others.
        """
        if self.profile.transformer is None:
            return False
        rows = self.profile.layers[-1].measurements
        return all(row.source == "counted" for row in rows)

    @cached_property
    def profiled_sizes(
        self,
    ) -> dict[Size, tuple[dict[RecomputeMode, Measurement], ...]]:
        """The profile's rows by all degrees that split a layer."""
        known: dict[tuple[str, bool], tuple[LayerProfile | None, _RowTable]] = {}
        tables = []
        for place, layer in enumerate(self.profile.layers, 1):
            is_last = self.casts is not None and place == len(self.profile.layers)
            equal, table = known.get((layer.kind, is_last), (None, {}))
            if equal is None or equal.measurements != layer.measurements:
                table = self._rows_by_size(layer, is_last)
                known[layer.kind, is_last] = (layer, table)
            tables.append(table)
        sizes = set(tables[0]).intersection(*tables[1:])
        return {size: tuple(table[size] for table in tables) for size in sorted(sizes)}

    @property
    def _polynomial_rows(self) -> PolynomialRows:
        """The profile's rows, and those of other sizes by its polynomials."""
        length = self.job.sequence_length
        profiled = self.profiled_sizes
        return PolynomialRows(
            profile=self.profile,
            sequence_length=length,
            listed=enumerated_sizes(
                self.profile,
                sequence_length=length,
                global_batch_size=self.job.global_batch_size,
                profiled=profiled,
            ),
            profiled=profiled,
            modes=self.framework.modes,
            price=self._compute_seconds if self._has_prices else None,
            marked=self._marked if self.casts else None,
        )

    @property
    def _has_prices(self) -> bool:
        """Whether the device has the figures that operations are priced with."""
        device = self.device
        types = {self.profile.dtype, "fp8"} if self.casts else {self.profile.dtype}
        has_peaks = types <= device.peak_flops_per_second.keys()
        return has_peaks and device.memory_bandwidth_bytes_per_second is not None

    def _compute_seconds(self, row: Measurement) -> Computation:
        """Return the seconds of a counted row on the device, without communication."""
        return computation(
            row,
            self.device,
            self.profile.dtype,
            self.constants,
            self.casts,
            graphs=self.framework.cuda_graphs,
            blocking=self.framework.launch_blocking,
        )

    def _marked(self, row: Measurement, is_last: bool) -> Measurement:
        """Return the row with what runs in fp8, for a job in that precision."""
        if self.casts is None:
            return row
        return mark_fp8(row, self.profile.dtype, self.casts, is_last=is_last)

    def _rows_by_size(self, layer: LayerProfile, is_last: bool) -> _RowTable:
        """Return a layer's rows by size; for precision fp8, with its products marked."""
        table: _RowTable = {}
        for row in layer.measurements:
            has_mode = row.recompute in self.framework.modes
            if has_mode and row.sequence_length == self.job.sequence_length:
                priced = self._marked(row, is_last)
                table.setdefault(_size(row), {})[row.recompute] = priced
        return table

    @property
    def casts(self) -> Fp8Casts | None:
        """What the framework casts for precision fp8; None: the job has another."""
        return self.framework.fp8 if self.job.precision == "fp8" else None

    @cached_property
    def order(self) -> dict[str, int]:
        """Place of every layer by its name."""
        return {layer.name: index for index, layer in enumerate(self.profile.layers)}

    def alike(
        self, rows: tuple[dict[RecomputeMode, Measurement], ...]
    ) -> tuple[int, ...]:
        """By layer: the first one that is priced as it is.

        Args:
            rows: of all layers; one of the values of `sizes`.
        """
        if id(rows) not in self._alike:
            first: dict[tuple[int, int, int], int] = {}
            keys = [
                (id(options), layer.parameters, layer.frozen_parameters)
                for options, layer in zip(rows, self.profile.layers, strict=True)
            ]
            self._alike[id(rows)] = tuple(
                first.setdefault(key, index) for index, key in enumerate(keys)
            )
        return self._alike[id(rows)]

    @cached_property
    def _alike(self) -> dict[int, tuple[int, ...]]:
        """By the identity of `sizes`' rows."""
        return {}

    @cached_property
    def spent(self) -> dict[Any, Any]:
        """What `planner.cost.pricing` has priced already."""
        return {}

    @cached_property
    def communicators(self) -> dict[Any, Any]:
        """Those of the layouts that `planner.cost.layout` has priced."""
        return {}

    @cached_property
    def latest(self) -> dict[Any, Any]:
        """What `planner.cost.layout` has priced last."""
        return {}


def _size(row: Measurement) -> Size:
    degrees = (
        row.tensor_parallel_degree,
        row.context_parallel_degree,
        row.expert_parallel_degree,
    )
    return (row.micro_batch_size, *degrees, row.sequence_parallel)


def _unsplit(layer: LayerProfile) -> Measurement | None:
    """A row whose parameters are not split; None: the profile has none."""
    for row in layer.measurements:
        if row.tensor_parallel_degree == row.expert_parallel_degree == 1:
            return row
    return None


def workload(
    profile: ModelProfile,
    cluster: Cluster,
    job: Job,
    *,
    framework: str | Runtime | None = None,
    constants: Constants | None = None,
    calibration: CalibrationTable | None = None,
) -> Workload:
    """Check that the three documents belong together.

    Args:
        profile: of the model.
        cluster: what the job may use.
        job: what is to be trained.
        framework: whose traits the prediction is for; None: the job's runtime.
        constants: None: those of the calibration for this framework and device.
        calibration: None: the one of this release, unless constants are given.

    Raises:
        MismatchError: the profile was taken at another precision, sequence length or device.
        UnknownNameError, DocumentError: a device or link that the catalogue does not have.
    """
    traits = framework or job.runtime
    if isinstance(traits, str):
        traits = planned(traits)
    if constants is None:
        calibration = calibration or shipped()
    job = with_headroom(
        job, cluster, runtime=traits.calibration_owner, calibration=calibration
    )
    if len(cluster.node_groups) > 1:
        return _mixed(profile, cluster, job, traits, constants, calibration)
    return _on_group(profile, cluster, job, traits, constants, calibration, 0)


def _is_effective(link: Link | None) -> bool:
    """Return whether a cluster's link has figures that collectives reach."""
    return link is not None and not link.is_nominal


def _mixed(
    profile: ModelProfile,
    cluster: Cluster,
    job: Job,
    framework: Runtime,
    constants: Constants | None,
    calibration: CalibrationTable | None,
) -> Workload:
    """Of a heterogeneous cluster: every node group by itself, and all together."""
    groups = tuple(
        _on_group(profile, cluster, job, framework, constants, calibration, place)
        for place in range(len(cluster.node_groups))
    )
    return replace(groups[0], cluster=cluster, groups=groups)


def _on_group(
    profile: ModelProfile,
    cluster: Cluster,
    job: Job,
    framework: Runtime,
    constants: Constants | None,
    calibration: CalibrationTable | None,
    place: int,
) -> Workload:
    group, field = cluster.node_groups[place], f"cluster.node_groups[{place}]"
    device = find_device(group.device, field=f"{field}.device")
    intra_node, inter_node = links_of(
        group, field=field, is_alone=len(cluster.node_groups) == 1
    )
    known = catalogue().get(device.id)
    constants = constants or constants_for(
        framework.calibration_owner,
        known.architecture if known else "",
        calibration=calibration,
        has_intra_node=_is_effective(group.intra_node),
        has_inter_node=_is_effective(group.inter_node),
        data_format=data_format(framework, job),
    )
    result = Workload(
        profile=profile.on(device.id),
        cluster=cluster.model_copy(update={"node_groups": (group,)}),
        job=job,
        device=device,
        intra_node=_reached(intra_node, constants.intra_node_fraction),
        inter_node=_reached(inter_node, constants.inter_node_fraction)
        if inter_node
        else None,
        nodes=group.nodes,
        devices_per_node=group.devices_per_node,
        framework=framework,
        constants=constants,
        calibration=calibration,
    )
    _check_precision(result)
    _check_device(result, f"{field}.device")
    _check_headroom(result)
    _check_rows(result)
    return result


def data_format(runtime: Runtime, job: Job) -> str:
    """Return the format of matrix products, such as ``bf16-mixed`` or ``fp8-current``.

    Args:
        runtime: casts to fp8 in its own way.
        job: has the precision.
    """
    if job.precision != "fp8":
        return job.precision
    return f"fp8-{runtime.fp8_scaling}"


def rearranged(work: Workload, cluster: Cluster, order: Sequence[int]) -> Workload:
    """A heterogeneous workload on several of its node groups, in another order; what is known of them stays known.

    Args:
        work: on all node groups.
        cluster: the node groups to use, in order.
        order: their places in `work`.
    """
    groups = tuple(work.groups[place] for place in order)
    found = replace(
        groups[0],
        cluster=cluster,
        groups=groups,
        is_rearranged=list(order) != sorted(order),
    )
    found.__dict__["sizes"] = (
        work.sizes
    )  # read once: where ranks stand does not change which rows there are
    return found


def on_part(work: Workload, cluster: Cluster) -> Workload:
    """A workload of one node group on some of its devices.

    What is known of the layers stays known, as far as it depends on the links alone that both have.

    Args:
        work: on all devices.
        cluster: those to use.
    """
    (group,) = cluster.node_groups
    intra, inter = links_of(group)
    found = replace(
        work,
        cluster=cluster,
        intra_node=_reached(intra, work.constants.intra_node_fraction),
        inter_node=_reached(inter, work.constants.inter_node_fraction)
        if inter
        else None,
        nodes=group.nodes,
        devices_per_node=group.devices_per_node,
    )
    found.__dict__["sizes"] = work.sizes
    found.__dict__["_alike"] = work._alike
    if (found.intra_node, found.inter_node, found.domain_devices) == (
        work.intra_node,
        work.inter_node,
        work.domain_devices,
    ):
        found.__dict__["spent"] = work.spent
    return found


def with_constants(work: Workload, constants: Constants) -> Workload:
    """The same workload under other constants; `work` has the default ones, whose links are the cluster's own."""
    between = (
        _reached(work.inter_node, constants.inter_node_fraction)
        if work.inter_node
        else None
    )
    found = replace(
        work,
        intra_node=_reached(work.intra_node, constants.intra_node_fraction),
        inter_node=between,
        constants=constants,
    )
    found.__dict__["sizes"] = (
        work.sizes
    )  # read once: constants do not change which rows there are
    found.__dict__["_alike"] = work._alike
    return found


def _reached(link: Link, fraction: float) -> Link:
    """The link as collectives find it: equation (K3)."""
    if fraction == 1:
        return link
    return link.model_copy(
        update={
            "bandwidth_bytes_per_second": link.bandwidth_bytes_per_second * fraction
        }
    )


def _check_precision(work: Workload) -> None:
    wanted = COMPUTE_TYPE[work.job.precision]
    if work.profile.dtype != wanted:
        raise MismatchError(
            f"precision {work.job.precision!r} computes in {wanted}, the profile was taken in {work.profile.dtype}.",
            field="job.precision",
            hint=f"profile the model in {wanted}, or choose a precision of {work.profile.dtype}.",
        )
    if work.profile.device != COUNTED and (work.profile.precision == "fp8") != (
        work.job.precision == "fp8"
    ):
        raise MismatchError(
            f"the profile's seconds were measured in {work.profile.precision or work.profile.dtype}, and do not tell "
            f"those of precision {work.job.precision!r}.",
            field="job.precision",
            hint="measure it with `planner profile MODEL --precision fp8` for precision fp8, without for another; or "
            "use counts, which serve both: planner plan --model.",
        )


def _check_device(work: Workload, field: str) -> None:
    measured_on = work.profile.device
    if measured_on not in (COUNTED, work.device.id):
        raise MismatchError(
            f"the profile has seconds of device {measured_on!r}, but the cluster has {work.device.id!r}.",
            field=field,
            hint=f"profile the model on that device, or for analytic:{work.device.id}.",
        )
    compute_type = work.profile.dtype
    if measured_on == COUNTED and compute_type not in work.device.peak_flops_per_second:
        known = ", ".join(work.device.peak_flops_per_second) or "none"
        raise MismatchError(
            f"device {work.device.id!r} has no peak for {compute_type} (known: {known}) to price counted FLOPs with.",
            field="job.precision",
            hint="choose a precision that the device has, measure a profile on it, or give the peak inline.",
        )
    if measured_on == COUNTED and work.casts:
        check_fp8(work.device, field="job.precision")
    if measured_on == COUNTED and work.device.memory_bandwidth_bytes_per_second is None:
        raise DocumentError(
            "the device has no memory bandwidth, so memory-bound operations have no price.",
            field=f"{field}.memory_bandwidth_bytes_per_second",
            hint="add it, or measure a profile on the device.",
        )


def _check_headroom(work: Workload) -> None:
    if work.capacity_bytes <= 0:
        raise DocumentError(
            f"leaves nothing of the device's {work.device.memory_bytes} bytes, got {work.job.memory_headroom}.",
            field="job.memory_headroom",
            hint="give a fraction below 1, or fewer bytes than the device has.",
        )


def _check_rows(work: Workload) -> None:
    lengths = sorted(
        {
            row.sequence_length
            for layer in work.profile.layers
            for row in layer.measurements
        }
    )
    if not work.sizes:
        raise MismatchError(
            f"the profile of {work.profile.model!r} has no measurements that all layers share at sequence length "
            f"{work.job.sequence_length}; it has {', '.join(map(str, lengths))}.",
            field="job.sequence_length",
            hint="profile the model at this length, or choose one that the profile has.",
        )


def modes_of(rows: dict[RecomputeMode, Measurement]) -> RecomputeModes:
    """Recompute modes that a layer offers, from least to most recomputation."""
    return tuple([mode for mode in MODES if mode in rows])
