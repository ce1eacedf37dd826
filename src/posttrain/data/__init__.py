"""Rows of files -> validated tasks, and the order in which a run meets them."""

from posttrain.data.config import Columns, DataConfig, SourceConfig
from posttrain.data.cursor import TaskStream
from posttrain.data.load import load_tasks, tasks_from_rows
from posttrain.data.problems import DataError, Problem
from posttrain.data.taskset import SourceReport, TaskSet, TaskSource

__all__ = [
    "Columns",
    "DataConfig",
    "DataError",
    "Problem",
    "SourceConfig",
    "SourceReport",
    "TaskSet",
    "TaskSource",
    "TaskStream",
    "load_tasks",
    "tasks_from_rows",
]
