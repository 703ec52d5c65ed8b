"""A TrainJob of Kubeflow Trainer that starts the planner's own executor, with the plan in a ConfigMap beside it.

Trainer's `torch-distributed` runtime tells torchrun by PET_NNODES, PET_NPROC_PER_NODE, PET_NODE_RANK, PET_MASTER_ADDR
and PET_MASTER_PORT which node of how many it is (kubeflow/trainer, pkg/runtime/framework/plugins/torch). Volumes of
pods are patches of the runtime's own pod template, which Trainer knows since 2.2.
"""

from __future__ import annotations

import base64
import gzip
import json
import textwrap

from planner.export.launcher import WORKER, Nodes, model_of, nodes_of, threads
from planner.export.target import Export, Target, header, refuse
from planner.spec import Plan

_TRAINER = "Kubeflow Trainer"
_VERSION = "2.3.0"
_LARGEST_CONFIG_MAP_BYTES = 2**20
"""kubernetes.io/docs/concepts/configuration/configmap: at most 1 MiB."""
_UNNAMED_MODEL = "package.module:callable"
_NAME_IT = (
    "The plan does not tell how to build its model: write its reference where MODEL is."
)
_GPU_RESOURCES = {"NVIDIA": "nvidia.com/gpu", "AMD": "amd.com/gpu"}
"""What the vendors' device plugins call a GPU."""


def write(plan: Plan) -> Export:
    """The ConfigMap and the TrainJob, as two documents of YAML.

    Raises:
        UnsupportedError: nodes differ, of which a TrainJob has one kind; or the plan is too large for a ConfigMap.
    """
    nodes = _like_nodes(plan)
    warnings = () if model_of(plan) is not None else (_NAME_IT,)
    name = f"planner-{plan.id[:12]}"
    text = f"""\
{header(plan, _TRAINER, _VERSION, warnings)}#
# kubectl apply --server-side -f FILE
# Server-side, since the other way keeps a copy of everything in an annotation of at most 256 KiB.
apiVersion: v1
kind: ConfigMap
metadata:
  name: {name}
binaryData:
  plan.json.gz: {_packed(plan)}
---
apiVersion: trainer.kubeflow.org/v1alpha1
kind: TrainJob
metadata:
  name: {name}
spec:
  runtimeRef:
    apiGroup: trainer.kubeflow.org
    kind: ClusterTrainingRuntime
    name: torch-distributed
  trainer:
    image: planner-executor # as docker/Dockerfile.executor builds it, from where the cluster pulls
    numNodes: {nodes.count} # {nodes}
    numProcPerNode: {nodes.ranks}
{textwrap.indent(_resources(nodes), "    ")}\
    env:
{textwrap.indent(_environment(plan), "      ")}\
    command:
      - bash
      - -ec
      - |
        gunzip -c /plan/plan.json.gz > /tmp/plan.json
        exec torchrun -m {WORKER} /tmp/plan.json --model "$MODEL" "$@"
      - torchrun
    # Options of {WORKER}. To keep checkpoints, give the pods a volume that all of them share, and add
    # --checkpoint-dir, --checkpoint-every and --resume.
    args:
      - --steps=20
      - --output=/tmp/measured.json
{_pods(name, nodes)}"""
    return Export(text, warnings)


def _like_nodes(plan: Plan) -> Nodes:
    """The plan's nodes, all of one kind."""
    nodes = nodes_of(plan, _TRAINER)
    if any(each.group != nodes[0].group for each in nodes):
        refuse(
            _TRAINER,
            f"gives a job nodes of one kind, the plan uses {' and '.join(dict.fromkeys(each.name for each in nodes))}",
            field="request.cluster.node_groups",
            hint="plan for one of its node groups",
        )
    if len(nodes) > 1:
        refuse(
            _TRAINER,
            f"starts as many ranks on every node, the plan {', '.join(str(each.ranks) for each in nodes)}",
            field="placement",
            hint="plan for whole nodes",
        )
    return nodes[0]


def _packed(plan: Plan) -> str:
    """The plan's JSON, compressed: that of thousands of devices is too large for a ConfigMap otherwise."""
    packed = base64.b64encode(
        gzip.compress(plan.model_dump_json(by_alias=True).encode(), mtime=0)
    ).decode()
    if len(packed) > _LARGEST_CONFIG_MAP_BYTES:
        refuse(
            _TRAINER,
            f"is given the plan by a ConfigMap of at most 1 MiB, and this plan takes {len(packed)} bytes there",
            field="request.profile",
            hint="keep plan.json on a volume that the pods share, and start there what --to torchrun writes",
        )
    return packed


def _resources(nodes: Nodes) -> str:
    """What a node's pod gets; nothing where the ranks stand on CPUs."""
    if nodes.vendor is None:
        return ""
    gpus = f"{_GPU_RESOURCES[nodes.vendor]}: {nodes.ranks}"
    return f"resourcesPerNode:\n  requests:\n    {gpus}\n  limits:\n    {gpus}\n"


def _environment(plan: Plan) -> str:
    found = {
        "MODEL": model_of(plan) or _UNNAMED_MODEL,
        "OMP_NUM_THREADS": threads(plan),
    }
    return "".join(
        f"- name: {name}\n  value: {json.dumps(value)}\n"
        for name, value in found.items()
        if value is not None
    )


def _pods(name: str, nodes: Nodes) -> str:
    """Patches of the pods: the plan, and memory that NCCL's ranks share."""
    return f"""\
  runtimePatches:
    - manager: planner
      trainingRuntimeSpec:
        template:
          spec:
            replicatedJobs:
              - name: node
                template:
                  spec:
                    template:
                      spec:
                        # nodeSelector: of nodes with {nodes.device_id}, where the cluster has others too
                        volumes:
                          - name: plan
                            configMap:
                              name: {name}
                          - name: shared-memory
                            emptyDir:
                              medium: Memory
                        containers:
                          - name: node
                            volumeMounts:
                              - name: plan
                                mountPath: /plan
                                readOnly: true
                              - name: shared-memory
                                mountPath: /dev/shm
"""


TARGET = Target(
    name="kubernetes",
    title="a TrainJob of Kubeflow Trainer, with the planner's own executor",
    version=f"{_TRAINER} {_VERSION}",
    suffix=".yaml",
    media_type="application/yaml",
    write=write,
)
