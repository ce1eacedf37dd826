"""The contract of tools."""

from __future__ import annotations

import pickle

import pytest

from posttrain.tools import ToolError, ToolSpec
from posttrain.trajectory import CallStatus


def test_a_tool_error_is_a_failure():
    with pytest.raises(ValueError, match="got ok"):
        ToolError(CallStatus.OK, "fine")


def test_its_status_may_be_written_as_text():
    assert ToolError("timeout", "busy").status is CallStatus.TIMEOUT


def test_a_tool_error_survives_the_way_between_processes():
    error = pickle.loads(pickle.dumps(ToolError(CallStatus.FAILED, "busy", transient=True, retry_after=3.0)))
    assert (error.status, error.message, error.transient, error.retry_after) == (CallStatus.FAILED, "busy", True, 3.0)
    assert str(error) == "busy"


def test_a_spec_gives_the_form_that_chat_templates_take():
    spec = ToolSpec(name="add", description="Adds.", parameters={"type": "object", "properties": {}})
    assert spec.schema() == {
        "type": "function",
        "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {}}},
    }
