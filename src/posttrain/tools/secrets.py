"""Keeps secrets of the environment out of what a policy, a log or a stored trajectory shows."""

from __future__ import annotations

import os
import re

SECRET_NAME = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL|AUTH", re.IGNORECASE)
MIN_CHARACTERS = 8  # a shorter value would match by chance


def redacted(text: str) -> str:
    """The text with the values of environment variables that are called KEY, TOKEN, ... replaced by their names."""
    for name, value in os.environ.items():
        if len(value) >= MIN_CHARACTERS and value in text and SECRET_NAME.search(name):
            text = text.replace(value, f"[{name}]")
    return text
