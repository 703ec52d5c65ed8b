"""How much memory a process finds on a device: what the driver reports, not the round number of the data sheet.

Data sheets count decimal gigabytes of a smaller round number than the memory chips hold; firmware and page tables take
a part of these. torch's out-of-memory message tells the rest ("total capacity of 79.25 GiB"). Whether a published run
fitted is judged by that; a plan keeps to the data sheet, and so has a margin beside its headroom.

Source: `torch.cuda.get_device_properties(0).total_memory`, as issues of public repositories quote it; the lowest where
driver versions differ. Devices that nobody quotes count by their data sheet.
"""

from __future__ import annotations

from planner.spec.devices import find_device

REPORTED_GIB = {
    "v100-sxm2-16gb": 15.75,
    "v100-sxm2-32gb": 31.74,
    "v100-pcie-32gb": 31.74,
    "a100-sxm4-40gb": 39.39,
    "a100-pcie-40gb": 39.39,
    "a100-sxm4-80gb": 79.14,
    "a100-pcie-80gb": 79.14,
    "h100-sxm5-80gb": 79.1,
    "h100-sxm5-96gb": 94.99,
    "h100-pcie-80gb": 79.1,
    "h100-nvl-94gb": 93.0,
    "h200-sxm-141gb": 139.7,
    "gh200-96gb": 94.5,
    "b200-sxm-180gb": 178.3,
    "l4-24gb": 22.0,
    "l40s-48gb": 44.4,
    "a10g-24gb": 22.0,
    "rtx4090-24gb": 23.6,
    "mi250x-gcd-64gb": 63.98,
    "mi300x-192gb": 191.98,
}
"""By catalogue id, GiB."""


def reported_bytes(device: str) -> int:
    """Memory of a catalogue device, as its driver reports it."""
    known = REPORTED_GIB.get(device)
    return find_device(device).memory_bytes if known is None else int(known * 2**30)
