"""The documents: profile, cluster, job, layout, plan, prediction and measured run."""

from planner.spec.calibration import CalibrationTable
from planner.spec.cluster import (
    Cluster,
    DeviceSpec,
    Link,
    LinkFit,
    LinkMeasurement,
    Links,
    NodeGroup,
    ScaleUp,
)
from planner.spec.device_curves import DeviceCurves
from planner.spec.document import (
    Document,
    canonical_json,
    digest,
    parse,
    read,
    read_data,
)
from planner.spec.job import Job
from planner.spec.layout import Layout, PredictionLayout
from planner.spec.measured import MeasuredRun
from planner.spec.plan import (
    Forecast,
    Infeasible,
    Options,
    Plan,
    PlanRequest,
    Prediction,
)
from planner.spec.profile import LayerProfile, Measurement, ModelProfile
from planner.spec.run import Run
from planner.spec.short_form import ShortForm
from planner.spec.transformer import Transformer

SCHEMAS: dict[str, type[Document]] = {
    "profile": ModelProfile,
    "cluster": Cluster,
    "job": Job,
    "layout": PredictionLayout,
    "plan": Plan,
    "infeasible": Infeasible,
    "forecast": Forecast,
    "measured": MeasuredRun,
    "run": Run,
    "transformer": Transformer,
    "calibration": CalibrationTable,
    "options": Options,
    "device": DeviceSpec,
    "curves": DeviceCurves,
    "link": Link,
    "links": Links,
}
"""Documents that `planner schema NAME` prints."""

__all__ = [
    "SCHEMAS",
    "CalibrationTable",
    "Cluster",
    "DeviceCurves",
    "DeviceSpec",
    "Document",
    "Forecast",
    "Infeasible",
    "Job",
    "LayerProfile",
    "Layout",
    "Link",
    "LinkFit",
    "LinkMeasurement",
    "Links",
    "MeasuredRun",
    "Measurement",
    "ModelProfile",
    "NodeGroup",
    "Options",
    "Plan",
    "PlanRequest",
    "Prediction",
    "PredictionLayout",
    "Run",
    "ScaleUp",
    "ShortForm",
    "Transformer",
    "canonical_json",
    "digest",
    "parse",
    "read",
    "read_data",
]
