"""Planning ahead: from one observed step to what becomes of every saved storage in the next."""

from delta.planner.forecast import Forecast, forecast
from delta.planner.foresight import foresee
from delta.planner.greedy import plan_step
from delta.planner.steplog import Plan, StepGraph, StepLog

__all__ = ["Forecast", "Plan", "StepGraph", "StepLog", "forecast", "foresee", "plan_step"]
