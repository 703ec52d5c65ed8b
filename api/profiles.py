"""The profile of a request: from its body, from the store, or of a catalogue model."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from functools import lru_cache

from cachetools import LRUCache

from planner.api.documents import CatalogueProfile, LongPlanCreate, LongPredictionCreate
from planner.api.errors import LimitError, NotFoundError
from planner.api.settings import Settings
from planner.api.storage.store import Store
from planner.api.storage.stored import read_stored
from planner.errors import UnknownNameError
from planner.profiler.catalogue import names
from planner.profiler.resolve import catalogue_profile
from planner.spec import Cluster, Job, ModelProfile, digest
from planner.spec.devices import find_device
from planner.spec.job import Precision
from planner.spec.profile import DataType
from planner.spec.words import suggestion

CACHED_PROFILES = 16
"""Parsed profiles that stay in memory, because large ones are slow to parse and hash."""
PRECISIONS: dict[DataType, Precision] = {
    "fp32": "fp32",
    "fp16": "fp16-mixed",
    "bf16": "bf16-mixed",
}
"""A precision that computes in this data type."""


@dataclass(frozen=True, slots=True)
class ResolvedProfile:
    """A profile with its id and the catalogue model it was counted from."""

    id: str
    """sha256 of the profile."""
    profile: ModelProfile
    model: str | None
    """Catalogue name; None: the client sent the profile."""


class Profiles:
    """Profiles by id and by catalogue name. Thread-safe."""

    def __init__(self, store: Store, settings: Settings) -> None:
        self._store, self._settings = store, settings
        self._recent = LRUCache[str, ModelProfile](CACHED_PROFILES)
        self._lock = threading.Lock()
        self._count = lru_cache(CACHED_PROFILES)(_counted)

    def add(self, resolved: ResolvedProfile) -> bool:
        """Store a profile; False if it is stored already."""
        self._remember(resolved.id, resolved.profile)
        # Checked first, because a large profile is slow to serialize.
        if self._store.touch_profile(resolved.id):
            return False
        return self._store.add_profile(
            resolved.id, resolved.profile.model_dump_json(by_alias=True)
        )

    def get(self, profile_id: str) -> ModelProfile:
        """A stored profile.

        Raises:
            NotFoundError: there is no such profile.
            OutdatedError: an earlier version stored it, and this one refuses it.
        """
        with self._lock:
            profile = self._recent.get(profile_id)
        if profile is None:
            profile = read_stored(
                ModelProfile,
                self.document(profile_id),
                name=f"the profile {profile_id}",
                hint="make the profile again, and store it: POST /v1/profiles.",
            )
            self._remember(profile_id, profile)
        return profile

    def document(self, profile_id: str) -> str:
        """JSON of a stored profile.

        Raises:
            NotFoundError: there is no such profile.
        """
        document = self._store.profile(profile_id)
        if document is None:
            raise NotFoundError(
                f"there is no profile {profile_id!r}.",
                field="profile_id",
                hint="store it first: POST /v1/profiles.",
            )
        return document

    def of_client(
        self, profile: ModelProfile, *, field: str = "layers"
    ) -> ResolvedProfile:
        """A profile that a client sent.

        Raises:
            LimitError: it has too many layers.
        """
        if len(profile.layers) > self._settings.max_layers:
            raise LimitError(
                f"the profile has {len(profile.layers)} layers.",
                field=field,
                hint=f"send at most {self._settings.max_layers}: "
                "put several modules into one layer.",
                limits={"max_layers": self._settings.max_layers},
            )
        return ResolvedProfile(digest(profile), profile, None)

    def of_catalogue(self, model: CatalogueProfile) -> ResolvedProfile:
        """The counted profile of a catalogue model.

        Raises:
            SpecError: there is no such model, or it does not support the sequence length.
        """
        return self._count(model.model, model.sequence_length, PRECISIONS[model.dtype])

    def resolve(
        self, request: LongPlanCreate | LongPredictionCreate
    ) -> ResolvedProfile:
        """The profile of a request.

        Raises:
            LimitError: the request has too many devices or layers.
            NotFoundError: there is no profile with this id.
            SpecError: there is no such model or device, or the model does not support
                the sequence length.
        """
        self._check_cluster(request.cluster)
        if request.profile is not None:
            return self.of_client(request.profile, field="profile.layers")
        if request.profile_id is not None:
            return ResolvedProfile(
                request.profile_id, self.get(request.profile_id), None
            )
        assert request.model is not None
        job = request.job
        return self._count(request.model, job.sequence_length, job.precision)

    def _check_cluster(self, cluster: Cluster) -> None:
        for index, group in enumerate(cluster.node_groups):
            find_device(group.device, field=f"cluster.node_groups[{index}].device")
        if cluster.devices > self._settings.max_devices:
            raise LimitError(
                f"the cluster has {cluster.devices} devices.",
                field="cluster.node_groups",
                hint=f"send at most {self._settings.max_devices}.",
                limits={"max_devices": self._settings.max_devices},
            )

    def _remember(self, profile_id: str, profile: ModelProfile) -> None:
        with self._lock:
            self._recent[profile_id] = profile


def _counted(model: str, sequence_length: int, precision: Precision) -> ResolvedProfile:
    if model not in names():
        raise _unknown_model(model)
    job = Job(global_batch_size=1, sequence_length=sequence_length, precision=precision)
    profile = catalogue_profile(model, job)
    return ResolvedProfile(digest(profile), profile, model)


def _unknown_model(model: str) -> UnknownNameError:
    return UnknownNameError(
        f"no model {model!r} in the catalogue.",
        field="model",
        hint=f"{suggestion(model, names())}GET /v1/models lists all.",
    )
