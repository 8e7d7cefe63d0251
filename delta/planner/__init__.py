"""Planning ahead: from one observed step to what becomes of every saved storage in the next."""

from delta.planner.forecast import Forecast, forecast
from delta.planner.foresight import foresee
from delta.planner.greedy import plan_step
from delta.planner.registry import BESIDE, BY_POSITION, FEEDBACK, PLANNERS
from delta.planner.steplog import Plan, StepGraph, StepLog
from delta.planner.task import Planner, Task

__all__ = [
    "BESIDE",
    "BY_POSITION",
    "FEEDBACK",
    "PLANNERS",
    "Forecast",
    "Plan",
    "Planner",
    "StepGraph",
    "StepLog",
    "Task",
    "forecast",
    "foresee",
    "plan_step",
]
