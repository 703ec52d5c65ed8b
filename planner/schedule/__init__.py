"""Who runs which micro-batch when: schedules by name, their exact simulation, and their pictures."""

from planner.schedule.actions import Action, ActionKind, Schedule
from planner.schedule.catalogue import build, canonical_name, find, names
from planner.schedule.entry import ScheduleEntry

__all__ = ["Action", "ActionKind", "Schedule", "ScheduleEntry", "build", "canonical_name", "find", "names"]
