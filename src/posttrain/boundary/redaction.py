"""Keeps secrets of the environment out of what a policy, a log, a config or a stored trajectory shows."""

from __future__ import annotations

import os
import re

SECRET_NAME = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL|AUTH", re.IGNORECASE)
_SURELY_SECRET = re.compile(r"(KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?)(_|$)", re.IGNORECASE)
MIN_CHARACTERS = 8  # a shorter value would match by chance


def redacted(text: str) -> str:
    """The text with the values of environment variables that are called KEY, TOKEN, ... replaced by their names."""
    for name, value in os.environ.items():
        if len(value) >= MIN_CHARACTERS and value in text and SECRET_NAME.search(name):
            text = text.replace(value, f"[{name}]")
    return text


def variable_name(name: str) -> str:
    """The name of an environment variable. Raises ValueError, which does not repeat it, for what may be a key."""
    if not name.isidentifier():
        raise ValueError("expected the name of an environment variable, such as OPENAI_API_KEY, not the key itself")
    return name


def secret_in(text: str) -> str | None:
    """The environment variable whose secret stands in the text. Stricter than `redacted`: a wrong hit here refuses
    something, there it only hides a word; so the name must end a word in KEY, TOKEN, ..., and a path is no secret."""
    for name, value in os.environ.items():
        if len(value) >= MIN_CHARACTERS and value in text and _SURELY_SECRET.search(name) and not os.path.exists(value):
            return name
    return None
