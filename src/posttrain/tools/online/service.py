"""A JSON or XML service behind a tool: address, key, one request, and typed failures.

Keys come from environment variables only. They travel in headers or bodies, never in URLs, which land in logs; and
they are struck out of every answer and every error text, should a service repeat them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator

from posttrain.boundary.foreign_json import read_json
from posttrain.boundary.urls import VariableName, server_url
from posttrain.tools.online.net import Answer, Net, NetOptions
from posttrain.tools.protocol import ToolError
from posttrain.trajectory import CallStatus

STRUCK_OUT = "[key]"
_DETAIL_KEYS = ("error", "message", "detail", "errorMessage")


class NotConfigured(Exception):
    """A tool lacks what only the operator can give: a key in an environment variable, the address of a server."""


class ServiceOptions(BaseModel):
    """Where a service is and whose key opens it. `None` = the service's own."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    base_url: str | None = None  # reached even where it is not public
    key_env: VariableName | None = None  # the environment variable with the key
    usd_per_request: float = Field(default=0.0, ge=0)  # counted in the cost of a call
    net: NetOptions = Field(default_factory=NetOptions)

    @field_validator("base_url")
    @classmethod
    def _is_a_url(cls, url: str | None) -> str | None:
        if url is not None:
            server_url(url, "http://127.0.0.1:8000", keys="the variable that key_env names")
        return url


@dataclass(frozen=True, slots=True)
class Key:
    """A secret from the environment; its text form does not show it."""

    env: str
    value: str | None

    def __repr__(self) -> str:
        return f"Key({self.env}, {'set' if self.value else 'not set'})"

    def strike(self, text: str) -> str:
        return text.replace(self.value, STRUCK_OUT) if self.value else text


def read_key(tool: str, env: str, *, required: bool = True, about: str = "a key") -> Key:
    """Raises `NotConfigured`, which names the variable."""
    value = os.environ.get(env, "").strip() or None
    if value is None and required:
        raise NotConfigured(f"the tool {tool} needs {about}: set the environment variable {env}")
    return Key(env, value)


class Service:
    """Requests to `base_url`, which is trusted: the operator set it, and no redirect leads away from it."""

    def __init__(self, tool: str, base_url: str, options: ServiceOptions, keys: tuple[Key, ...] = ()) -> None:
        self.tool = tool
        self.base_url = (options.base_url or base_url).rstrip("/")
        self.usd_per_request = options.usd_per_request
        self.net = Net(options.net, [self.base_url])
        self._keys = keys

    async def get(self, path: str, params: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> Any:
        """The JSON of a GET; parameters that are None are left out."""
        sent = {key: value for key, value in params.items() if value is not None}
        return self._json(await self._request("GET", path, headers, params=sent))

    async def post(self, path: str, body: Any, headers: Mapping[str, str] | None = None) -> Any:
        """The JSON of a POST of JSON."""
        return self._json(await self._request("POST", path, headers, json=body))

    async def post_form(self, path: str, form: Mapping[str, Any]) -> str:
        """The text of a POST of form fields; those that are None are left out."""
        sent = {key: str(value) for key, value in form.items() if value is not None}
        return self._text(await self._request("POST", path, None, form=sent))

    def cost(self, requests: int = 1) -> dict[str, float]:
        usd = {"usd": requests * self.usd_per_request} if self.usd_per_request else {}
        return {"requests": float(requests), **usd}

    def fail(self, detail: str, *, transient: bool = False) -> ToolError:
        """The error of an answer that cannot be used."""
        return ToolError(CallStatus.FAILED, self._strike(f"{self.tool}: {detail}"), transient=transient)

    async def close(self) -> None:
        await self.net.close()

    async def _request(self, method: str, path: str, headers: Mapping[str, str] | None, **sent: Any) -> Answer:
        try:
            answer = await self.net.fetch(method, self.base_url + path, headers=headers, **sent)
        except ToolError as error:
            message = self._strike(f"{self.tool}: {error.message}")
            raise ToolError(error.status, message, transient=error.transient) from error
        if 200 <= answer.status < 300:
            return answer
        raise status_error(self.tool, answer, self._strike(_detail(answer)))

    def _text(self, answer: Answer) -> str:
        return self._strike(answer.body.decode("utf-8", "replace"))

    def _json(self, answer: Answer) -> Any:
        try:
            return read_json(self._text(answer))
        except ValueError as error:
            kind = answer.content_type or "no content type"
            raise self.fail(f"answered with something else than JSON ({kind})", transient=True) from error

    def _strike(self, text: str) -> str:
        for key in self._keys:
            text = key.strike(text)
        return text


def status_error(tool: str, answer: Answer, detail: str = "") -> ToolError:
    """The error of an HTTP status: 400 and 422 blame the arguments, 408, 425, 429 and 5xx may pass."""
    status = answer.status
    known = {401: "the key was not accepted", 403: "access refused", 404: "not found", 410: "gone", 429: "too many"}
    said = ": ".join(part for part in (f"{tool}: HTTP {status}", known.get(status, ""), detail) if part)
    transient = status in (408, 425, 429) or status >= 500
    kind = CallStatus.BAD_ARGUMENTS if status in (400, 422) else CallStatus.FAILED
    return ToolError(kind, said, transient=transient, retry_after=answer.retry_after if transient else None)


def _detail(answer: Answer) -> str:
    """What a JSON answer says of its error; pages of HTML say nothing to anybody."""
    try:
        said = read_json(answer.body)
    except ValueError:
        return ""
    while isinstance(said, dict):
        said = next((said[key] for key in _DETAIL_KEYS if said.get(key)), "")
    return " ".join(str(said).split())[:200] if isinstance(said, str) else ""


def items(service: Service, answer: Any, *path: str) -> list[dict[str, Any]]:
    """The objects in the list at `path` of an answer: [] where it is absent, without the nulls that services put there.

    Raises ToolError where something else is found.
    """
    for key in path:
        if not isinstance(answer, dict):
            raise service.fail(f"expected an object with {'.'.join(path)!r}, got {type(answer).__name__}")
        answer = answer.get(key)
        if answer is None:
            return []
    if not isinstance(answer, list):
        raise service.fail(f"expected a list at {'.'.join(path)!r}, got {type(answer).__name__}")
    return [entry for entry in answer if isinstance(entry, dict)]


def field(entry: Mapping[str, Any], *path: str) -> Any:
    """entry[a][b]...; None where a part is missing or no object."""
    found: Any = entry
    for key in path:
        found = found.get(key) if isinstance(found, Mapping) else None
    return found
