"""Profiles: of clients, or of catalogue models."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Request, Response

from planner.api.dependencies import RootDependency, ServicesDependency
from planner.api.documents import (
    CatalogueProfile,
    ProfileCreate,
)
from planner.api.http.bodies import DocumentRoute
from planner.api.http.caching import FOREVER, NOT_MODIFIED, cacheable
from planner.api.profiles import ResolvedProfile
from planner.spec import ModelProfile
from planner.spec.answers import ProfileSummary

router = APIRouter(prefix="/v1/profiles", tags=["profiles"], route_class=DocumentRoute)


@router.post(
    "",
    status_code=201,
    responses={
        200: {"model": ProfileSummary, "description": "The profile was stored before."}
    },
)
def create_profile(
    body: ProfileCreate,
    response: Response,
    parts: ServicesDependency,
    root: RootDependency,
) -> ProfileSummary:
    """Store a profile, or the counted profile of a catalogue model.

    The profile's id is its sha256, so that equal profiles have equal ids.
    """
    resolved = _resolve(body.root, parts)
    if not parts.profiles.add(resolved):
        response.status_code = 200
    response.headers["Location"] = f"/v1/profiles/{resolved.id}"
    return _summary(resolved, root)


@router.get("/{profile_id}", response_model=ModelProfile, responses=NOT_MODIFIED)
def get_profile(
    profile_id: Annotated[str, Path(description="Id of the profile, its sha256.")],
    request: Request,
    parts: ServicesDependency,
) -> Response:
    """Return a stored profile."""
    document = parts.profiles.document(profile_id)
    return cacheable(
        request, document, media_type="application/json", cache_control=FOREVER
    )


def _resolve(
    body: ModelProfile | CatalogueProfile, parts: ServicesDependency
) -> ResolvedProfile:
    if isinstance(body, ModelProfile):
        return parts.profiles.of_client(body)
    return parts.profiles.of_catalogue(body)


def _summary(resolved: ResolvedProfile, root: str) -> ProfileSummary:
    profile = resolved.profile
    copies = sum(
        shared.parameters * (len(shared.layers) - 1)
        for shared in profile.shared_parameters
    )
    return ProfileSummary(
        id=resolved.id,
        model=profile.model,
        device=profile.device,
        dtype=profile.dtype,
        layers=len(profile.layers),
        parameters=sum(layer.parameters for layer in profile.layers) - copies,
        url=f"{root}/v1/profiles/{resolved.id}",
    )
