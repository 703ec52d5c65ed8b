"""Do the documents behind a plan belong together?"""

from __future__ import annotations

from planner.spec.document import digest
from planner.spec.job import COMPUTE_TYPE
from planner.spec.plan import Plan
from planner.validate.facts import Facts
from planner.validate.findings import Findings


def check_documents(plan: Plan, facts: Facts, findings: Findings) -> bool:
    """Ids are digests, and profile, job and cluster fit together. False: nothing can be recomputed."""
    findings.equal("id", plan.id, plan.request.id)
    findings.checked.append("the plan's id is the sha256 of its request")
    before = len(findings.problems)
    _check_profile(plan, facts, findings)
    _check_types(facts, findings)
    findings.checked.append(
        "the profile is the one that the request names, of the job's precision and the device"
    )
    return len(findings.problems) == before


def _check_profile(plan: Plan, facts: Facts, findings: Findings) -> None:
    findings.equal("request.profile_id", plan.request.profile_id, digest(facts.profile))
    if plan.request.profile is not None:
        findings.equal(
            "request.profile", digest(plan.request.profile), plan.request.profile_id
        )


def _check_types(facts: Facts, findings: Findings) -> None:
    profile = facts.profile
    findings.equal(
        "request.job.precision", COMPUTE_TYPE[facts.job.precision], profile.dtype
    )
    is_low = facts.job.precision == "fp8"
    if profile.device != "counted" and (profile.precision == "fp8") != is_low:
        wanted = "in fp8" if is_low else f"in {profile.dtype} alone"
        findings.wrong(
            "profile.precision",
            f"seconds were not measured {wanted}, as the job's precision asks.",
        )
    for device in {group.device.id: group.device for group in facts.groups}.values():
        if profile.on(device.id).device not in ("counted", device.id):
            message = f"seconds were measured on {profile.device}, the cluster has {device.id}."
            findings.wrong("profile.device", message)
        if profile.device != "counted":
            continue
        for kind in (profile.dtype, *(("fp8",) if is_low else ())):
            if kind not in device.peak_flops_per_second:
                findings.wrong(
                    "profile.device",
                    f"FLOPs were counted, but {device.id} has no peak for {kind}.",
                )
        if device.memory_bandwidth_bytes_per_second is None:
            findings.wrong(
                "profile.device",
                f"bytes were counted, but {device.id} has no memory bandwidth.",
            )
