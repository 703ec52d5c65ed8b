"""Reading a cluster document, whose devices and links may be documents of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from planner.errors import DocumentError
from planner.spec.cluster import Cluster, DeviceSpec, Link, Links
from planner.spec.document import parse, read, read_data

LINK_FIELDS = ("intra_node", "inter_node")
DOCUMENT_SUFFIXES = (".yaml", ".yml", ".toml", ".json")


def read_cluster(path: str | Path) -> Cluster:
    """The cluster of a document.

    A device or link that names a file is read from that file, relative to the document.

    Raises:
        DocumentError: a document is missing or has a wrong field.
    """
    data = read_data(path)
    groups = data.get("node_groups") if isinstance(data, dict) else None
    for group in groups if isinstance(groups, list) else ():
        if isinstance(group, dict):
            _read_named_documents(group, Path(path).parent)
    return parse(Cluster, data, where=str(path))


def _read_named_documents(group: dict[str, Any], folder: Path) -> None:
    """Replace the file names in a node group by the documents that they name."""
    for field in ("device", *LINK_FIELDS):
        named = group.get(field)
        if isinstance(named, str) and named.endswith(DOCUMENT_SUFFIXES):
            group[field] = _read_document(field, folder / named)


def _read_document(field: str, path: Path) -> Any:
    """A device, a link, or that link of `planner links` which the field needs."""
    if field == "device":
        return read(DeviceSpec, path).model_dump(mode="json")
    data = read_data(path)
    has_both_links = isinstance(data, dict) and bool(set(LINK_FIELDS) & set(data))
    if not has_both_links:
        return parse(Link, data, where=str(path)).model_dump(mode="json")
    link = getattr(parse(Links, data, where=str(path)), field)
    if link is None:
        raise DocumentError(
            "the file has no such link.",
            field=f"{path}: {field}",
            hint="measure it: run `planner links` on these nodes.",
        )
    return link.model_dump(mode="json")
