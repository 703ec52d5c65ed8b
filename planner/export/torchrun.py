"""A script that starts the planner's own executor on one of a plan's nodes, under torchrun."""

from __future__ import annotations

from planner.export.launcher import (
    MASTER_PORT,
    WORKER,
    bash_plan_and_model,
    bash_ranks,
    bash_threads,
    count_of,
    model_warnings,
    nodes_of,
)
from planner.export.target import Export, Target, header
from planner.spec import Plan

_VERSION = "torch 2.13"
_USAGE = """\
#
# On every node: bash SCRIPT {words}[--steps N and further options of {worker}]
# {whence}
"""
_WHENCE_ONE = "PLAN (plan.json), MODEL and MASTER_PORT may come from the environment."
_WHENCE = "Both may come from the environment, as may PLAN (plan.json), MODEL and MASTER_PORT."


def write(plan: Plan) -> Export:
    """The script; all of its nodes run the same one.

    Raises:
        UnsupportedError: torchrun counts the ranks otherwise than the placement.
    """
    nodes, warnings = nodes_of(plan, "torchrun"), model_warnings(plan)
    count = count_of(nodes)
    usage = _USAGE.format(
        words="[NODE_RANK [MASTER_ADDR]] " if count > 1 else "",
        worker=WORKER,
        whence=f"MASTER_ADDR is the address of node 0. {_WHENCE}"
        if count > 1
        else _WHENCE_ONE,
    )
    listed = "".join(f"#   {each}\n" for each in nodes)
    line, ranks = bash_ranks(nodes, "NODE_RANK")
    text = f"""\
#!/usr/bin/env bash
{header(plan, "torchrun", _VERSION, warnings)}{usage}{listed}set -euo pipefail

{bash_plan_and_model(plan)}{_which_node(count)}{bash_threads(plan)}{line}
exec torchrun --nnodes={count} --node-rank="$NODE_RANK" --nproc-per-node={ranks} \\
  --master-addr="$MASTER_ADDR" --master-port="${{MASTER_PORT:-{MASTER_PORT}}}" \\
  -m {WORKER} "$PLAN" --model "$MODEL" --output measured.json "$@"
"""
    return Export(text, warnings)


def _which_node(count: int) -> str:
    """Lines that set NODE_RANK and MASTER_ADDR."""
    if count == 1:
        return "NODE_RANK=0\nMASTER_ADDR=127.0.0.1\n"
    return f"""\
for name in NODE_RANK MASTER_ADDR; do
  if [[ $# -gt 0 && $1 != -* ]]; then
    printf -v "$name" %s "$1"
    shift
  fi
done
: "${{MASTER_ADDR:?give the address of node 0}}"
if [[ ! ${{NODE_RANK:-}} =~ ^(0|[1-9][0-9]*)$ ]] || ((NODE_RANK >= {count})); then
  echo "NODE_RANK is '${{NODE_RANK:-}}': give this node's number, 0 to {count - 1}" >&2
  exit 2
fi
"""


TARGET = Target(
    name="torchrun",
    title="a script that starts the planner's own executor on one node",
    version=_VERSION,
    suffix=".sh",
    media_type="application/x-sh",
    write=write,
)
