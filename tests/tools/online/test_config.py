"""Names, options and specs of the online tools."""

from __future__ import annotations

from typing import Any

import pytest

from posttrain.tools.online.config import ONLINE, OnlineToolConfig, make_online_tool
from posttrain.tools.protocol import Tool

ENV = {
    "SERPER_API_KEY": "x" * 10, "GOOGLE_API_KEY": "x" * 10, "GOOGLE_CSE_ID": "x" * 10, "JINA_API_KEY": "x" * 10,
    "BING_SUBSCRIPTION_KEY": "x" * 10, "CRAWL4AI_API_URL": "http://127.0.0.1:1",
}  # fmt: skip
DR_TULU = {  # the parameters of its MCP tools, as its server declares them; without `base_url` of its Docker form
    "semantic_scholar_search": {"query", "year", "min_citation_count", "sort", "venue", "limit"},
    "semantic_scholar_snippet_search": {"query", "year", "paper_ids", "venue", "limit"},
    "pubmed_search": {"query", "limit", "offset"},
    "massive_serve_search": {"query", "n_docs", "domains", "base_url", "nprobe"},
    "serper_google_webpage_search": {"query", "num_results", "gl", "hl"},
    "serper_google_scholar_search": {"query", "num_results"},
    "crawl4ai_fetch_webpage_content": {
        "url", "ignore_links", "use_pruning", "bypass_cache", "timeout_ms", "include_html",
    },
    "vllm_hosted_reranker": {"query", "documents", "top_n", "model_name", "api_url"},
}  # fmt: skip
DEFAULTS = {
    ("semantic_scholar_search", "limit"): 25,
    ("semantic_scholar_snippet_search", "limit"): 10,
    ("pubmed_search", "limit"): 10,
    ("massive_serve_search", "n_docs"): 10,
    ("massive_serve_search", "domains"): "dpr_wiki_contriever_ivfpq",
    ("serper_google_webpage_search", "num_results"): 10,
    ("serper_google_webpage_search", "gl"): "us",
    ("crawl4ai_fetch_webpage_content", "ignore_links"): True,
    ("crawl4ai_fetch_webpage_content", "use_pruning"): False,
}


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ENV.items():
        monkeypatch.setenv(name, value)


def made(use: str) -> Tool:
    needs_address = use.startswith(("massive", "vllm"))
    return make_online_tool(
        OnlineToolConfig(use=use, options={"base_url": "http://127.0.0.1:1"} if needs_address else {})
    )


@pytest.mark.parametrize("use", ONLINE)
def test_every_name_makes_a_tool_with_a_schema(use: str):
    tool = made(use)
    assert isinstance(tool, Tool)
    assert tool.spec.name == use
    assert tool.spec.description
    parameters = tool.spec.parameters
    assert parameters["type"] == "object"
    assert set(parameters["required"]) <= set(parameters["properties"])
    for schema in parameters["properties"].values():
        assert "type" in schema
        assert "title" not in schema
        assert "anyOf" not in schema


@pytest.mark.parametrize("use", DR_TULU)
def test_parameters_are_dr_tulus(use: str):
    assert set(made(use).spec.parameters["properties"]) >= DR_TULU[use]


@pytest.mark.parametrize(("place", "value"), DEFAULTS.items(), ids=str)
def test_defaults_are_dr_tulus(place: tuple[str, str], value: Any):
    assert made(place[0]).spec.parameters["properties"][place[1]]["default"] == value


def test_a_tool_may_have_another_name():
    tool = make_online_tool(OnlineToolConfig(use="serper_google_webpage_search", name="search"))
    assert tool.spec.name == "search"


def test_a_name_alone_is_a_config():
    assert OnlineToolConfig.model_validate("pubmed_search").use == "pubmed_search"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"use": "gogle_search"}, "did you mean google_search"),
        ({"use": "xyz"}, "known are snippet_search"),
        ({"use": "google_search", "key": "sk-1"}, "extra"),
        ({"use": "google_search", "options": {"api_key": "sk-1"}}, r"options\.api_key.*base_url, key_env"),
        ({"use": "google_search", "options": {"base_url": "ftp://x"}}, r"options\.base_url"),
        ({"use": "google_search", "options": {"net": {"seconds": 0}}}, r"options\.net\.seconds"),
        ({"use": "browse_webpage", "options": {"fetcher": "curl"}}, r"options\.fetcher.*jina"),
        ({"use": "vllm_hosted_reranker", "options": {"endpoint": "/x"}}, r"options\.endpoint"),
    ],
)
def test_mistakes_are_named(given: dict[str, Any], said: str):
    with pytest.raises(ValueError, match=said):
        OnlineToolConfig.model_validate(given)
