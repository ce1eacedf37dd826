"""Which MCP servers a run takes tools from: URLs, commands, or files that list servers."""

from __future__ import annotations

import json
import os
import re
import shlex
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from posttrain.boundary.redaction import SECRET_NAME
from posttrain.boundary.urls import VariableName, server_url
from posttrain.location import at_home
from posttrain.tools.config import CacheConfig, ToolLimits
from posttrain.tools.online.service import NotConfigured

_URL = re.compile(r"^https?://[^/?#]+")
_FROM_ENVIRONMENT = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]*)\}")  # in a URL: {EXA_API_KEY}
_NAME = re.compile(r"^[A-Za-z0-9_-]{1,32}$")

HomePath = Annotated[Path, AfterValidator(at_home)]


class McpServerConfig(BaseModel):
    """One server: `url` (streamable HTTP), or `command` with `args`, which is started as a child process.

    A text is either a URL or a command line. A child sees PATH, HOME, USER, LANG and what `env` and `pass_env` say.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str | None = None  # put before tool names that clash; default: the server's own name
    url: str | None = None  # {NAME} in it stands for the environment variable NAME, for servers that want a key there
    token_env: VariableName | None = None  # the environment variable with a bearer token for `url`
    command: str | None = None
    args: tuple[str, ...] = ()
    env: dict[str, str] = {}  # settings, no secrets: they are stored with the run's config
    pass_env: tuple[VariableName, ...] = ()  # environment variables that the child may see, such as keys
    cwd: HomePath | None = None
    tools: tuple[str, ...] | None = None  # the tools to take; all by default
    start_seconds: float = Field(default=60.0, gt=0)  # from starting or connecting to the list of tools
    call_seconds: float = Field(default=60.0, gt=0)  # one call, tried once
    limits: ToolLimits | None = None  # as of a tool; left out: one call and its retries take call_seconds together
    cache: CacheConfig = CacheConfig()  # as of a tool
    max_restarts: int = Field(default=5, ge=0)  # in a row; a minute without a failure clears the count
    backoff_seconds: float = Field(default=0.5, ge=0)  # before the second restart in a row, doubling up to 8 s
    log: HomePath | None = None  # where a child's stderr goes; by default only its end is kept, for error messages

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, given: Any) -> Any:
        if not isinstance(given, str):
            return given
        if _URL.match(given):
            return {"url": given}
        words = shlex.split(given)
        if not words:
            raise ValueError("expected a URL or a command, got an empty text")
        return {"command": words[0], "args": tuple(words[1:])}

    @field_validator("name")
    @classmethod
    def _is_a_name(cls, name: str | None) -> str | None:
        if name is not None and not _NAME.match(name):
            raise ValueError(f"letters, digits, _ and - only, at most 32; got {name!r}")
        return name

    @field_validator("url")
    @classmethod
    def _is_a_url(cls, url: str | None) -> str | None:
        if url is None:
            return None
        for name in _FROM_ENVIRONMENT.findall(url):
            if not SECRET_NAME.search(name):
                raise ValueError(f"{{{name}}} in a URL is for keys: call the variable ..._KEY or ..._TOKEN")
        keys = "token_env, or {NAME} for the environment variable NAME"
        server_url(_FROM_ENVIRONMENT.sub("", url), "http://127.0.0.1:8000/mcp", keys=keys)
        return url

    @model_validator(mode="after")
    def _one_way_in(self) -> McpServerConfig:
        if (self.url is None) == (self.command is None):
            raise ValueError("an MCP server has either a url or a command")
        child_only = [key for key in ("args", "env", "pass_env", "cwd", "log") if getattr(self, key)]
        if self.url is not None and child_only:
            raise ValueError(f"{child_only[0]} belongs to a command; {self.url} is reached by URL")
        if self.command is not None and self.token_env is not None:
            raise ValueError("token_env belongs to a url; give a command its keys with pass_env")
        return self

    @property
    def label(self) -> str:
        """How messages for the policy name the server: no address, no path."""
        return f"the MCP server {self.name}" if self.name else "the MCP server"

    @property
    def shown(self) -> str:
        """How messages for the operator name it."""
        return self.name or self.url or shlex.join((self.command or "", *self.args))

    def child_environment(self) -> dict[str, str]:
        """Raises `NotConfigured` for a variable of `pass_env` that is not set."""
        return {**self.env, **{name: variable(name, self.shown) for name in self.pass_env}}

    def address(self) -> str:
        """The URL with its keys: for the connection only. Raises `NotConfigured` for a variable that is not set."""
        assert self.url is not None, "a server that is reached by URL"
        return _FROM_ENVIRONMENT.sub(lambda found: quote(variable(found[1], self.shown), safe=""), self.url)

    def limits_of_a_call(self) -> ToolLimits:
        return ToolLimits(seconds=self.call_seconds) if self.limits is None else self.limits

    def token(self) -> str | None:
        return None if self.token_env is None else variable(self.token_env, self.shown)


def variable(name: str, server: str) -> str:
    value = os.environ.get(name, "").strip()
    if not value:
        raise NotConfigured(f"the MCP server {server} needs the environment variable {name}, which is not set")
    return value


class ServerList(Exception):
    """A file of servers that is none."""


def read_server_list(path: Path) -> list[McpServerConfig]:
    """The servers of a file as other programs have it: {"mcpServers": {name: {"command": ..., "args": [...]}}}.

    Keys that only other programs know ("type", "disabled") are left out; `disabled` servers are too.
    """
    try:
        servers = json.loads(path.read_text(encoding="utf-8"))["mcpServers"]
        entries = [(name, dict(entry)) for name, entry in servers.items()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ServerList(f'{path}: expected {{"mcpServers": {{name: {{...}}}}}} ({type(error).__name__})') from error
    found = []
    for name, entry in entries:
        if entry.pop("disabled", False):
            continue
        entry.pop("type", None)
        try:
            found.append(McpServerConfig.model_validate({"name": re.sub(r"[^\w-]", "_", name)[:32], **entry}))
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(map(str, first["loc"]))
            raise ServerList(f"{path}: {name}: {where}: {first['msg']}") from error
    return found
