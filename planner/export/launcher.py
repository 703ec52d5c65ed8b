"""What launchers of the planner's own executor share: the nodes that a plan uses, and the command of a rank.

torchrun counts ranks node by node and device by device, and nodes in the order in which their first ranks come; so does
every launcher here.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from planner.export.target import refuse
from planner.spec import NodeGroup, Plan
from planner.spec.devices import catalogue
from planner.spec.words import counted

WORKER = "planner.executor.worker"
"""Module that torchrun starts on every rank: see `planner.executor.launch.node_commands`."""
MASTER_PORT = 29500
"""torchrun's default port."""
UNNAMED_MODEL = "The plan was made from a profile, which does not tell how to build its model: give it as MODEL."


@dataclass(frozen=True, slots=True)
class Nodes:
    """Equal nodes, one behind the other."""

    first: int
    """Their first node rank."""
    count: int
    group: NodeGroup
    ranks: int
    """Of each: devices that the plan uses, from the first on."""

    def __str__(self) -> str:
        """In one line, whatever the group is called."""
        last = self.first + self.count - 1
        numbers, each = (
            (f"node {last}", "")
            if self.count == 1
            else (f"nodes {self.first} to {last}", " each")
        )
        return f"{numbers}: {counted(self.ranks, 'rank')}{each} on {self.name} ({self.device_id})"

    @property
    def name(self) -> str:
        """Of their node group, on one line."""
        return " ".join(self.group.name.split())

    @property
    def device_id(self) -> str:
        """Of the catalogue, or as the cluster names its own device."""
        device = self.group.device
        return " ".join((device if isinstance(device, str) else device.id).split())

    @property
    def vendor(self) -> str | None:
        """Who made the devices, as the catalogue has it; of devices that it does not have, None for CPUs."""
        known = catalogue().get(self.device_id)
        return (
            known.vendor
            if known
            else None
            if self.device_id.startswith("cpu")
            else "NVIDIA"
        )


def nodes_of(plan: Plan, launcher: str) -> tuple[Nodes, ...]:
    """The nodes that the plan uses, by node rank; neighbours of one group and as many ranks together.

    Raises:
        UnsupportedError: the placement does not count the ranks node by node and device by device.
    """
    rows = sorted(plan.placement, key=lambda row: row.rank)
    counts = Counter(row.node for row in rows)  # in the order in which the nodes come
    counted_so = [
        (node, device) for node, count in counts.items() for device in range(count)
    ]
    if [(row.node, row.device) for row in rows] != counted_so:
        refuse(
            launcher,
            "counts the ranks of one node after the other, from device 0 on; this placement does not",
            field="placement",
            hint="plan again",
        )
    groups = [
        group for group in plan.request.cluster.node_groups for _ in range(group.nodes)
    ]
    used = [(groups[node], ranks) for node, ranks in counts.items()]
    found, first = [], 0
    for (group, ranks), neighbours in groupby(used):
        count = len(list(neighbours))
        found.append(Nodes(first, count, group, ranks))
        first += count
    return tuple(found)


def bash_ranks(nodes: Sequence[Nodes], rank: str) -> tuple[str, str]:
    """A line of bash to stand before, or nothing; and a word with the number of ranks of this node.

    Args:
        rank: variable that holds the node's rank.
    """
    if len({each.ranks for each in nodes}) == 1:
        return "", str(nodes[0].ranks)
    ranks = " ".join(str(each.ranks) for each in nodes for _ in range(each.count))
    return f"ranks_of_nodes=({ranks})", f'"${{ranks_of_nodes[{rank}]}}"'


def count_of(nodes: Sequence[Nodes]) -> int:
    """How many nodes there are."""
    return sum(each.count for each in nodes)


def model_of(plan: Plan) -> str | None:
    """Reference of the plan's model, where the plan has one that no shell would read otherwise."""
    model = plan.request.model
    return model if model is not None and shlex.quote(model) == model else None


def model_warnings(plan: Plan) -> tuple[str, ...]:
    """What is told where the plan does not name its model."""
    return () if model_of(plan) is not None else (UNNAMED_MODEL,)


def threads(plan: Plan) -> str | None:
    """Threads of a rank that the profile was measured with; None: the plan does not tell."""
    profile = plan.request.profile
    return None if profile is None else profile.environment.get("threads_per_rank")


def bash_plan_and_model(plan: Plan) -> str:
    """Lines of bash that set PLAN and MODEL, and refuse the file of another plan."""
    model = model_of(plan)
    default = f"-{model}" if model else "?give the model that was profiled"
    return f"""\
PLAN=${{PLAN:-plan.json}} # the same file on every node
PLAN_ID={plan.id}
MODEL=${{MODEL:{default}}}
if ! grep -qE '"id": ?"'$PLAN_ID'"' "$PLAN"; then
  echo "$PLAN is not plan $PLAN_ID, which this script was written for" >&2
  exit 2
fi
"""


def bash_threads(plan: Plan) -> str:
    """A line of bash that gives every rank the threads that were measured; nothing where they are not known."""
    found = threads(plan)
    return (
        ""
        if found is None
        else f"export OMP_NUM_THREADS=${{OMP_NUM_THREADS:-{int(found)}}}\n"
    )
