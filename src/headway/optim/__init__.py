"""Optimizers, schedules and parameter groups."""

from __future__ import annotations

from headway.optim.optimizer import GroupRecipe as GroupRecipe
from headway.optim.optimizer import OptimizerRecipe as OptimizerRecipe
from headway.optim.optimizer import build as build
from headway.optim.optimizer import set_lr as set_lr
from headway.optim.schedule import Schedule as Schedule
from headway.optim.schedule import ScheduleRecipe as ScheduleRecipe
