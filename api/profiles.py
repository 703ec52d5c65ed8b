"""Where a request's profile comes from: its body, the store, or the counted figures of a catalogue model."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass
from functools import lru_cache
from typing import cast

from planner.api.documents import PlanCreate, PredictionCreate
from planner.api.errors import LimitError, NotFoundError
from planner.api.settings import Settings
from planner.api.store import Store
from planner.spec import Cluster, Job, ModelProfile, digest
from planner.spec.job import COMPUTE_TYPE
from planner.spec.profile import DataType

KEPT_PROFILES = 16
"""Parsed profiles kept in memory: large ones take a while to parse and to hash."""


@dataclass(frozen=True, slots=True)
class ResolvedProfile:
    """A profile and its names."""

    id: str
    """sha256 of the profile."""
    profile: ModelProfile
    model: str | None
    """Catalogue name that it was derived from."""


class Profiles:
    """Profiles by id and by catalogue name. Thread-safe."""

    def __init__(self, store: Store, settings: Settings) -> None:
        self._store, self._settings = store, settings
        self._recent: OrderedDict[str, ModelProfile] = OrderedDict()
        self._lock = threading.Lock()
        self._derive = lru_cache(KEPT_PROFILES)(_counted)

    def add(self, resolved: ResolvedProfile) -> bool:
        """Store a profile; False when it is already there."""
        self._keep(resolved.id, resolved.profile)
        if self._store.touch_profile(
            resolved.id
        ):  # asked first: a large profile takes a while to write out
            return False
        return self._store.add_profile(
            resolved.id, resolved.profile.model_dump_json(by_alias=True)
        )

    def get(self, profile_id: str) -> ModelProfile:
        """A stored profile.

        Raises:
            NotFoundError: there is no such profile.
        """
        with self._lock:
            kept = self._recent.get(profile_id)
        if kept is None:
            kept = ModelProfile.model_validate_json(self.document(profile_id))
        self._keep(profile_id, kept)
        return kept

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

    def given(self, profile: ModelProfile, *, field: str = "layers") -> ResolvedProfile:
        """A profile that a client sent.

        Raises:
            LimitError: it has too many layers.
        """
        if len(profile.layers) > self._settings.max_layers:
            raise LimitError(
                f"the profile has {len(profile.layers)} layers.",
                field=field,
                hint=f"send at most {self._settings.max_layers}: put several modules into one layer.",
                limits={"max_layers": self._settings.max_layers},
            )
        return ResolvedProfile(digest(profile), profile, None)

    def derived(
        self, model: str, *, sequence_length: int, dtype: DataType
    ) -> ResolvedProfile:
        """The counted profile of a catalogue model.

        Raises:
            SpecError: the catalogue has no such model, or the model does not take this sequence length.
        """
        return self._derive(model, sequence_length, dtype)

    def resolve(self, request: PlanCreate | PredictionCreate) -> ResolvedProfile:
        """The profile that a request is about, within the service's limits."""
        self._check_devices(request.cluster)
        if request.profile is not None:
            return self.given(request.profile, field="profile.layers")
        if request.profile_id is not None:
            return ResolvedProfile(
                request.profile_id, self.get(request.profile_id), None
            )
        assert request.model is not None
        return self._of_job(request.model, request.job)

    def _of_job(self, model: str, job: Job) -> ResolvedProfile:
        dtype = cast(DataType, COMPUTE_TYPE[job.precision])
        return self.derived(model, sequence_length=job.sequence_length, dtype=dtype)

    def _check_devices(self, cluster: Cluster) -> None:
        if cluster.devices > self._settings.max_devices:
            raise LimitError(
                f"the cluster has {cluster.devices} devices.",
                field="cluster.node_groups",
                hint=f"ask for at most {self._settings.max_devices}.",
                limits={"max_devices": self._settings.max_devices},
            )

    def _keep(self, profile_id: str, profile: ModelProfile) -> None:
        with self._lock:
            self._recent[profile_id] = profile
            self._recent.move_to_end(profile_id)
            if len(self._recent) > KEPT_PROFILES:
                self._recent.popitem(last=False)


def _counted(model: str, sequence_length: int, dtype: DataType) -> ResolvedProfile:
    from planner.profiler.counted import counted_profile

    profile = counted_profile(model, sequence_length=sequence_length, dtype=dtype)
    return ResolvedProfile(digest(profile), profile, model)
