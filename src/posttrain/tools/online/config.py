"""Which online tools a run or a server has: `{use: google_search, options: {usd_per_request: 0.001}}`."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from posttrain.tools.online.browse import BrowseWebpage
from posttrain.tools.online.fetchers import BrowseOptions
from posttrain.tools.online.massive_serve import MassiveServe
from posttrain.tools.online.pubmed import PubmedSearch
from posttrain.tools.online.rerank import Reranker, RerankOptions
from posttrain.tools.online.semantic_scholar import PaperSearch, SnippetSearch
from posttrain.tools.online.service import ServiceOptions
from posttrain.tools.online.web_search import BingSearch, GoogleCustomSearch, SerperScholar, SerperSearch
from posttrain.tools.protocol import Tool


@dataclass(frozen=True, slots=True)
class Kind:
    """How a tool is made: `make(name, options)`; `fixed` are options that its name implies."""

    make: Callable[[str, Any], Tool]
    options: type[ServiceOptions] = ServiceOptions
    fixed: tuple[tuple[str, Any], ...] = ()


_CRAWL4AI = Kind(BrowseWebpage, BrowseOptions, (("fetcher", "crawl4ai"),))
BUILT_IN: dict[str, Kind] = {
    "snippet_search": Kind(SnippetSearch),
    "semantic_scholar_search": Kind(PaperSearch),
    "google_search": Kind(SerperSearch),
    "google_scholar": Kind(SerperScholar),
    "google_custom_search": Kind(GoogleCustomSearch),
    "bing_search": Kind(BingSearch),
    "pubmed_search": Kind(PubmedSearch),
    "massive_serve": Kind(MassiveServe),
    "browse_webpage": Kind(BrowseWebpage, BrowseOptions),
    "vllm_hosted_reranker": Kind(Reranker, RerankOptions),
}
DR_TULU: dict[str, Kind] = {  # the names that its MCP server gives to the same tools
    "semantic_scholar_snippet_search": Kind(SnippetSearch),
    "serper_google_webpage_search": Kind(SerperSearch),
    "serper_google_scholar_search": Kind(SerperScholar),
    "massive_serve_search": Kind(MassiveServe),
    "serper_fetch_webpage_content": Kind(BrowseWebpage, BrowseOptions, (("fetcher", "serper"),)),
    "jina_fetch_webpage_content": Kind(BrowseWebpage, BrowseOptions, (("fetcher", "jina"),)),
    "crawl4ai_fetch_webpage_content": _CRAWL4AI,
    "crawl4ai_docker_fetch_webpage_content": _CRAWL4AI,
}
ONLINE = BUILT_IN | DR_TULU


class OnlineToolConfig(BaseModel):
    """One tool. `options` are those of its kind: base_url, key_env, usd_per_request, net, and its own."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    use: str  # a name of ONLINE
    name: str | None = Field(default=None, min_length=1)  # what the policy calls it; default `use`
    options: dict[str, Any] = {}

    @model_validator(mode="before")
    @classmethod
    def _from_name(cls, given: Any) -> Any:
        return {"use": given} if isinstance(given, str) else given

    @field_validator("use")
    @classmethod
    def _is_known(cls, use: str) -> str:
        if use not in ONLINE:
            near = difflib.get_close_matches(use, ONLINE, 1)
            hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(ONLINE)}"
            raise ValueError(f"there is no online tool {use!r}; {hint}")
        return use

    @model_validator(mode="after")
    def _options_are_valid(self) -> OnlineToolConfig:
        try:
            self.checked_options()
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(map(str, first["loc"]))
            known = ", ".join(ONLINE[self.use].options.model_fields)
            raise ValueError(f"options.{where}: {first['msg']} (options of {self.use}: {known})") from error
        return self

    def checked_options(self) -> ServiceOptions:
        kind = ONLINE[self.use]
        return kind.options.model_validate({**dict(kind.fixed), **self.options})


def make_online_tool(config: OnlineToolConfig) -> Tool:
    """Raises `NotConfigured`, which names the environment variable, when a key is missing."""
    return ONLINE[config.use].make(config.name or config.use, config.checked_options())
