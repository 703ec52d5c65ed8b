"""Who runs which micro-batch when: schedules by name, their exact simulation, and their pictures."""

from planner.schedule.actions import Action, ActionKind, Schedule
from planner.schedule.catalogue import build, canonical_name, find, names
from planner.schedule.critical_path import CriticalPath, critical_path
from planner.schedule.durations import Durations
from planner.schedule.entry import ScheduleEntry
from planner.schedule.in_flight import in_flight, in_flight_per_stage, in_flight_vectors
from planner.schedule.memory import HeldBytes, memory_curves, peak_bytes
from planner.schedule.order_problem import Objective
from planner.schedule.requirements import Requirement, requirements
from planner.schedule.simulate import Event, Simulation, simulate
from planner.schedule.synthesize import Placement, Synthesis, synthesize
from planner.schedule.transfers import Transfer, TransferMode

__all__ = [
    "Action",
    "ActionKind",
    "CriticalPath",
    "Durations",
    "Event",
    "HeldBytes",
    "Objective",
    "Placement",
    "Requirement",
    "Schedule",
    "ScheduleEntry",
    "Simulation",
    "Synthesis",
    "Transfer",
    "TransferMode",
    "build",
    "canonical_name",
    "critical_path",
    "find",
    "in_flight",
    "in_flight_per_stage",
    "in_flight_vectors",
    "memory_curves",
    "names",
    "peak_bytes",
    "requirements",
    "simulate",
    "synthesize",
]
