"""Runs Python code that nobody has read: no network, no files, and limits on all it takes. Standard library only."""

from posttrain.sandbox.box import Isolation, Sandbox, SandboxError, SandboxLimits, SandboxResult
from posttrain.sandbox.checks import TestResult, run_tests

__all__ = ["Isolation", "Sandbox", "SandboxError", "SandboxLimits", "SandboxResult", "TestResult", "run_tests"]
