"""The search services against a stub that replays recorded answers, and misbehaves in every way they do."""

from __future__ import annotations

import gzip
import json
import logging
from pathlib import Path
from typing import Any

import pytest

from posttrain.tools.online.render import NOTHING_FOUND, shown_ids
from posttrain.tools.online.service import NotConfigured
from posttrain.trajectory import CallStatus

from .calls import call, failure, tool
from .stub import Reply, Request, Stub

KEYS = ("SERPER_API_KEY", "GOOGLE_API_KEY", "GOOGLE_CSE_ID", "BING_SUBSCRIPTION_KEY")
SECRET = "sk-0123456789abcdef"


@pytest.fixture(autouse=True)
def keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in KEYS:
        monkeypatch.setenv(name, SECRET)
    for name in ("S2_API_KEY", "NCBI_API_KEY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="session")
def papers(shared_data: Path) -> dict[str, list[dict[str, Any]]]:
    """Recorded exchanges with Semantic Scholar by test case."""
    rows: dict[str, list[dict[str, Any]]] = {}
    text = (shared_data / "api_fixtures" / "semantic_scholar.jsonl").read_text(encoding="utf-8")
    for row in map(json.loads, text.strip().split("\n")):  # splitlines() also cuts at U+0085, which is inside a title
        rows.setdefault(row["case"], []).append(row)
    return rows


@pytest.fixture(scope="session")
def serper(shared_data: Path) -> list[dict[str, Any]]:
    return [row["response"] for row in json.loads((shared_data / "api_fixtures" / "serper_search.json").read_text())]


def replay(row: dict[str, Any]) -> Reply:
    return Reply(row["response"], status=row["status"])


class TestSemanticScholar:
    def test_snippets(self, stub: Stub, papers: dict[str, Any]):
        stub.on("/snippet/search", replay(papers["test_search_snippet"][0]))
        arguments = {"query": "turing test", "limit": "2", "year": "1950-", "fieldsOfStudy": "Computer Science"}
        result = call(tool("snippet_search", base_url=stub.url), paper_ids="a, b", **arguments)
        assert stub.last.query == {
            "query": "turing test", "limit": "2", "year": "1950-", "fieldsOfStudy": "Computer Science",
            "paperIds": "a,b",
        }  # fmt: skip
        assert [entry["title"] for entry in result.data] == [
            "Computing Machinery and Intelligence",
            "Evaluating Machine Intelligence",
        ]
        assert result.text.startswith(f"<snippet id={result.data[0]['id']}>\nTitle: Computing Machinery")
        assert "Snippet: The Turing test, originally called the imitation game" in result.text
        assert result.data[0]["score"] == 0.89
        assert result.cost == {"requests": 1.0}

    def test_a_snippet_that_repeats_the_title_has_no_text(self, stub: Stub):
        entry = {"snippet": {"text": "T", "snippetKind": "title"}, "paper": {"title": "T"}}
        stub.on("/snippet/search", Reply({"data": [entry, None, {"snippet": None, "paper": None}, {}]}))
        (found,) = call(tool("snippet_search", base_url=stub.url), query="q").data
        assert (found["title"], found["text"]) == ("T", "")

    @pytest.mark.parametrize("case", ["test_search_paper", "test_search_paper_next_page", "test_search_paper_venue"])
    def test_papers(self, stub: Stub, papers: dict[str, Any], case: str):
        row = papers[case][0]
        stub.on("/paper/search", replay(row))
        result = call(tool("semantic_scholar_search", base_url=stub.url), query="turing", limit=3, min_citation_count=5)
        assert len(shown_ids(result.text)) == len(result.data) <= 3
        assert stub.last.query["minCitationCount"] == "5"
        assert "abstract" in stub.last.query["fields"]
        if "title" in row["response"]["data"][0]:
            assert result.data[0]["title"] == row["response"]["data"][0]["title"]

    def test_an_answer_without_data_found_nothing(self, stub: Stub, papers: dict[str, Any]):
        stub.on("/paper/search", replay(papers["test_empty_paginated_results"][0]))
        result = call(tool("semantic_scholar_search", base_url=stub.url), query="n0 r3sult")
        assert (result.text, result.data) == (NOTHING_FOUND, [])

    def test_nulls_in_a_list_are_skipped(self, stub: Stub, papers: dict[str, Any]):
        (row,) = papers["test_get_papers_not_found_warning"]
        assert row["response"][0] is None
        stub.on("/paper/search", Reply({"data": row["response"]}))
        result = call(tool("semantic_scholar_search", base_url=stub.url), query="q")
        assert len(result.data) == sum(entry is not None for entry in row["response"])
        assert all(entry["authors"] for entry in result.data)

    def test_what_arxiv_and_acl_ids_tell(self, stub: Stub):
        rows = [{"title": "a", "externalIds": {"ArXiv": "1706.03762"}}, {"title": "b", "externalIds": {"ACL": "P18-1"}}]
        stub.on("/paper/search", Reply({"data": [*rows, {"title": "c", "externalIds": None, "openAccessPdf": None}]}))
        result = call(tool("semantic_scholar_search", base_url=stub.url), query="q")
        assert [entry["url"] for entry in result.data] == [
            "https://arxiv.org/pdf/1706.03762", "https://www.aclweb.org/anthology/P18-1.pdf", "",
        ]  # fmt: skip

    @pytest.mark.parametrize(
        ("case", "status", "kind", "said"),
        [
            ("test_bad_query_parameters", 400, CallStatus.BAD_ARGUMENTS, r"Unrecognized or unsupported fields"),
            ("test_debug", 403, CallStatus.FAILED, "Forbidden"),
            ("test_not_found", 404, CallStatus.FAILED, "Paper with id 0 not found"),
        ],
    )
    def test_recorded_refusals(
        self, stub: Stub, papers: dict[str, Any], case: str, status: int, kind: CallStatus, said: str
    ):
        stub.on("/paper/search", replay(papers[case][0]))
        error = failure(tool("semantic_scholar_search", base_url=stub.url), query="q")
        assert (error.status, error.transient) == (kind, False)
        assert f"HTTP {status}" in error.message
        assert said in error.message

    def test_the_key_is_optional_and_sent_in_a_header(self, stub: Stub, monkeypatch: pytest.MonkeyPatch):
        stub.on("/snippet/search", Reply({"data": []}))
        call(tool("snippet_search", base_url=stub.url), query="q")
        assert "x-api-key" not in stub.last.headers
        monkeypatch.setenv("S2_API_KEY", SECRET)
        call(tool("snippet_search", base_url=stub.url), query="q")
        assert stub.last.headers["x-api-key"] == SECRET
        assert SECRET not in str(stub.last.query)


class TestSerper:
    def test_web_pages(self, stub: Stub, serper: list[dict[str, Any]]):
        stub.on("/search", *map(Reply, serper))
        for answer in serper:
            result = call(tool("google_search", base_url=stub.url, usd_per_request=0.001), query="x", num_results=4)
            expected = [entry["title"] for entry in answer["organic"][:4]]
            assert [entry["title"] for entry in result.data] == expected
            assert result.data[0]["url"] == answer["organic"][0]["link"]
            assert result.cost["usd"] == 0.001
            assert result.cost.get("credits") == answer.get("credits")
        assert stub.last.json == {"q": "x", "num": 4, "gl": "us", "hl": "en", "type": "search"}
        assert stub.last.headers["x-api-key"] == SECRET

    def test_long_queries_are_cut_as_dr_tulu_does(self, stub: Stub):
        stub.on("/search", Reply({"organic": []}))
        call(tool("google_search", base_url=stub.url), query="x" * 5000)
        assert len(stub.last.json["q"]) == 2048

    def test_scholar(self, stub: Stub):
        paper = {"title": "T", "link": "https://p.example/", "snippet": "s", "year": 2017, "citedBy": 9}
        stub.on("/scholar", Reply({"organic": [paper]}))
        (found,) = call(tool("google_scholar", base_url=stub.url), query="attention").data
        assert (found["year"], found["citedBy"], found["url"]) == (2017, 9, "https://p.example/")
        assert stub.last.json == {"q": "attention", "num": 10}


def pages_of(text: str) -> list[str]:
    """The snippets of a recorded search: "Page 1: ...\nPage 2: ..."."""
    return [part.partition(": ")[2].strip() for part in text.split("\nPage ")]


class TestBingAndGoogle:
    def test_bing_over_recorded_searches(self, stub: Stub, shared_data: Path):
        with gzip.open(shared_data / "search_cache" / "bing_cache_first800.json.gz") as file:
            cache = json.load(file)

        def search(request: Request) -> Reply:
            pages = pages_of(cache[request.query["q"]])
            value = [{"name": f"Page {at}", "snippet": text, "url": f"https://p.example/{at}"} for at, text in
                     enumerate(pages, 1)]  # fmt: skip
            return Reply({"webPages": {"value": value[: int(request.query["count"])]}} if value else {})

        stub.routes["/search"] = search
        bing = tool("bing_search", base_url=stub.url)
        queries = [query for query in cache if query.strip() == query and 0 < len(query) < 500][:40]
        for query in queries:
            result = call(bing, query=query, num_results=5)
            assert [entry["text"] for entry in result.data] == pages_of(cache[query])[:5]
        assert stub.last.headers["ocp-apim-subscription-key"] == SECRET
        assert stub.last.query["cc"] == "us"

    def test_bing_without_pages_found_nothing(self, stub: Stub):
        stub.on("/search", Reply({"_type": "SearchResponse"}))
        assert call(tool("bing_search", base_url=stub.url), query="q").text == NOTHING_FOUND

    def test_google_pages_through_tens(self, stub: Stub):
        def search(request: Request) -> Reply:
            start, count = int(request.query["start"]), int(request.query["num"])
            numbers = range(start, min(start + count, 26))
            return Reply({"items": [{"title": f"t{n}", "link": f"https://p.example/{n}", "snippet": "s"} for n in
                                    numbers]})  # fmt: skip

        stub.routes["/"] = search
        google = tool("google_custom_search", base_url=stub.url)
        result = call(google, query="q", num_results=23)
        assert [entry["title"] for entry in result.data] == [f"t{n}" for n in range(1, 24)]
        assert result.cost == {"requests": 3.0}
        assert stub.last.headers["x-goog-api-key"] == SECRET
        assert len(call(google, query="q", num_results=100).data) == 25  # the service has no more


class TestPubmed:
    @pytest.fixture
    def folder(self, shared_data: Path) -> Path:
        return shared_data / "api_fixtures" / "pubmed"

    def xml(self, folder: Path, name: str) -> Reply:
        return Reply((folder / f"{name}.xml").read_bytes(), type="text/xml")

    def test_a_search_and_a_fetch(self, stub: Stub, folder: Path):
        (article,) = [text for text in ["12091962"] if text in (folder / "pubmed1.xml").read_text()]
        found = f"<eSearchResult><Count>1</Count><IdList><Id>{article}</Id><Id>999</Id></IdList></eSearchResult>"
        stub.on("/esearch.fcgi", Reply(found, type="text/xml"))
        stub.on("/efetch.fcgi", self.xml(folder, "pubmed1"))
        result = call(tool("pubmed_search", base_url=stub.url), query="AIDS prisons", limit=5, offset=10)
        search, fetch = stub.requests
        assert search.form["term"] == "AIDS prisons"
        assert (search.form["retmax"], search.form["retstart"]) == ("5", "10")
        assert fetch.form["id"] == "12091962,999"
        (paper,) = result.data
        assert paper["title"] == "The treatment of AIDS behind the walls of correctional facilities."
        assert paper["url"] == "https://pubmed.ncbi.nlm.nih.gov/12091962/"
        assert (paper["year"], paper["venue"]) == ("1990", "Social justice (San Francisco, Calif.)")
        assert paper["authors"] == ["Olivero, J Michael"]
        assert result.cost == {"requests": 2.0}

    @pytest.mark.parametrize("name", ["pubmed1", "pubmed2", "pubmed5", "pubmed7"])
    def test_real_records(self, stub: Stub, folder: Path, name: str):
        text = (folder / f"{name}.xml").read_text(encoding="utf-8")
        number = text.split("<PMID", 1)[1].split(">", 1)[1].split("<", 1)[0]
        found = f"<eSearchResult><IdList><Id>{number}</Id></IdList></eSearchResult>"
        stub.on("/esearch.fcgi", Reply(found, type="text/xml"))
        stub.on("/efetch.fcgi", self.xml(folder, name))
        (paper,) = call(tool("pubmed_search", base_url=stub.url), query="q").data
        assert paper["title"]
        assert "<" not in paper["title"]
        assert paper["paper_id"] == number

    @pytest.mark.parametrize(("name", "count"), [("esearch1", 20), ("esearch3", 6), ("esearch8", 0)])
    def test_real_searches(self, stub: Stub, folder: Path, name: str, count: int):
        stub.on("/esearch.fcgi", self.xml(folder, name))
        stub.on("/efetch.fcgi", Reply("<PubmedArticleSet></PubmedArticleSet>", type="text/xml"))
        assert call(tool("pubmed_search", base_url=stub.url), query="q", limit=20).text == NOTHING_FOUND
        fetched = [request.form["id"].split(",") for request in stub.requests if request.path == "/efetch.fcgi"]
        assert [len(ids) for ids in fetched] == ([count] if count else [])

    def test_abstracts_keep_labels_and_lose_markup(self, stub: Stub):
        stub.on("/esearch.fcgi", Reply("<eSearchResult><IdList><Id>1</Id></IdList></eSearchResult>"))
        article = (
            "<Article><ArticleTitle><i>LRP1</i> by SNAIL</ArticleTitle><Abstract>"
            '<AbstractText Label="AIM">To see H<sub>2</sub>O.</AbstractText><AbstractText>More.</AbstractText>'
            "</Abstract></Article>"
        )
        record = f"<PubmedArticle><MedlineCitation><PMID>1</PMID>{article}</MedlineCitation></PubmedArticle>"
        stub.on("/efetch.fcgi", Reply(f"<PubmedArticleSet><PubmedBookArticle/>{record}</PubmedArticleSet>"))
        (paper,) = call(tool("pubmed_search", base_url=stub.url), query="q").data
        assert (paper["title"], paper["text"]) == ("LRP1 by SNAIL", "AIM: To see H2O.\nMore.")

    @pytest.mark.parametrize(
        ("body", "said", "transient"),
        [
            ("<eSearchResult><IdList><Id>1", "something else than XML", True),
            ("<html><body>busy</body></html>", "expected eSearchResult", False),
            ('<!DOCTYPE x [<!ENTITY a "b">]><eSearchResult>&a;</eSearchResult>', "entities", False),
            ("<eSearchResult><ERROR>API rate limit exceeded</ERROR></eSearchResult>", "rate limit", True),
            ("", "something else than XML", True),
        ],
    )
    def test_what_is_no_answer(self, stub: Stub, body: str, said: str, transient: bool):
        stub.on("/esearch.fcgi", Reply(body, type="text/xml"))
        error = failure(tool("pubmed_search", base_url=stub.url), query="q")
        assert said in error.message
        assert error.transient is transient

    def test_the_key_travels_in_the_body(self, stub: Stub, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setenv("NCBI_API_KEY", SECRET)
        stub.on("/esearch.fcgi", Reply("<eSearchResult><IdList/></eSearchResult>"))
        call(tool("pubmed_search", base_url=stub.url), query="q")
        assert stub.last.form["api_key"] == SECRET
        assert stub.last.query == {}


class TestMassiveServe:
    def test_passages(self, stub: Stub):
        results = {"IDs": [[[0, 1], [0, 2]]], "passages": [["first", "second"]], "scores": [[0.9, 0.8]]}
        stub.on("/search", Reply({"message": "ok", "results": results}))
        result = call(tool("massive_serve", base_url=stub.url), query="q", n_docs=2, nprobe=8)
        assert [(entry["text"], entry["score"], entry["doc_id"]) for entry in result.data] == [
            ("first", 0.9, [0, 1]), ("second", 0.8, [0, 2]),
        ]  # fmt: skip
        assert stub.last.json == {"query": "q", "n_docs": 2, "domains": "dpr_wiki_contriever_ivfpq", "nprobe": 8}

    @pytest.mark.parametrize(
        "answer",
        [
            {},
            {"results": None},
            {"results": {"IDs": [[1]], "passages": [["a", "b"]], "scores": [[1, 2]]}},
            {"results": {"IDs": "x", "passages": [["a"]], "scores": [[1]]}},
            [1, 2],
        ],
    )
    def test_other_shapes_are_final_failures(self, stub: Stub, answer: Any):
        stub.on("/search", Reply(answer))
        error = failure(tool("massive_serve", base_url=stub.url), query="q")
        assert (error.status, error.transient) == (CallStatus.FAILED, False)

    def test_a_policy_does_not_choose_the_server(self, stub: Stub):
        made = tool("massive_serve", base_url=stub.url)
        error = failure(made, query="q", base_url="169.254.169.254")
        assert error.status is CallStatus.BAD_ARGUMENTS
        assert not stub.requests

    def test_it_needs_an_address(self):
        with pytest.raises(NotConfigured, match="base_url"):
            tool("massive_serve")


class TestReranker:
    DOCUMENTS = ("about cats", "about dogs", "about the moon")

    def test_rerank(self, stub: Stub):
        rows = [{"index": 2, "relevance_score": 0.1}, {"index": 1, "relevance_score": 0.9},
                {"index": 0, "relevance_score": 0.5}]  # fmt: skip
        stub.on("/rerank", Reply({"results": rows}))
        made = tool("vllm_hosted_reranker", base_url=stub.url, model="bge")
        result = call(made, query="dogs", documents=json.dumps(self.DOCUMENTS), top_n=2)
        assert [entry["text"] for entry in result.data] == ["about dogs", "about cats"]
        assert [entry["index"] for entry in result.data] == [1, 0]
        assert stub.last.json == {"model": "bge", "query": "dogs", "documents": list(self.DOCUMENTS)}

    def test_score(self, stub: Stub):
        stub.on("/score", Reply({"data": [{"index": at, "score": score} for at, score in enumerate((0.2, 0.7, 0.1))]}))
        made = tool("vllm_hosted_reranker", base_url=stub.url, endpoint="/score")
        result = call(made, query="dogs", documents=list(self.DOCUMENTS), model_name="m")
        assert [entry["index"] for entry in result.data] == [1, 0, 2]
        assert stub.last.json == {"model": "m", "text_1": "dogs", "text_2": list(self.DOCUMENTS)}

    @pytest.mark.parametrize(
        "rows",
        [
            [],
            [{"index": 0, "relevance_score": 1.0}],
            [{"index": at, "relevance_score": None} for at in range(3)],
            [{"index": 0, "relevance_score": 1.0}] * 3,
        ],
    )
    def test_p76_a_wrong_count_of_scores_is_an_error(self, stub: Stub, rows: list[Any]):
        stub.on("/rerank", Reply({"results": rows}))
        error = failure(tool("vllm_hosted_reranker", base_url=stub.url), query="q", documents=list(self.DOCUMENTS))
        assert "3 documents" in error.message


BAD_ANSWERS = [
    (
        Reply({"message": "slow down"}, status=429, headers={"retry-after": "7"}),
        "HTTP 429: too many: slow down",
        True,
        7.0,
    ),
    (Reply("<html>oops</html>", status=500, type="text/html"), "HTTP 500", True, None),
    (Reply({"error": {"message": "down"}}, status=503, headers={"retry-after": "2"}), "down", True, 2.0),
    (Reply({"message": "Unauthorized."}, status=401), "the key was not accepted: Unauthorized.", False, None),
    (Reply({}, status=403), "access refused", False, None),
    (Reply({}, status=404), "not found", False, None),
    (Reply(status=302, headers={"location": "http://127.0.0.1:1/"}), "HTTP 302", False, None),
    (Reply("<html>hello</html>", type="text/html"), "something else than JSON", True, None),
    (Reply('{"organic": [{"title"'), "something else than JSON", True, None),
    (Reply('{"organic": []', promise=400), "broke off", True, None),
    (Reply(""), "something else than JSON", True, None),
    (Reply({"organic": "no list"}), "expected a list", False, None),
    (Reply([1, 2]), "expected an object", False, None),
    (Reply("null"), "expected an object", False, None),
]


@pytest.mark.parametrize(("reply", "said", "transient", "wait"), BAD_ANSWERS, ids=lambda value: str(value)[:30])
def test_p59_every_bad_answer_is_a_typed_failure(
    stub: Stub, reply: Reply, said: str, transient: bool, wait: float | None
):
    stub.on("/search", reply)
    error = failure(tool("google_search", base_url=stub.url), query="q")
    assert error.status is CallStatus.FAILED
    assert said in error.message
    assert (error.transient, error.retry_after) == (transient, wait)
    assert len(stub.requests) == 1  # trying again is the guards' business


def test_a_slow_service_is_a_timeout(stub: Stub):
    stub.on("/search", Reply({"organic": []}, wait=0.6))
    error = failure(tool("google_search", base_url=stub.url, net={"seconds": 0.1}), query="q")
    assert (error.status, error.transient) == (CallStatus.TIMEOUT, True)
    assert error.message == "google_search: no complete answer within 0.1 s"


def test_a_service_that_is_down_is_transient():
    error = failure(tool("google_search", base_url="http://127.0.0.1:9"), query="q")
    assert (error.status, error.transient) == (CallStatus.FAILED, True)


@pytest.mark.parametrize(
    ("use", "env"),
    [
        ("google_search", "SERPER_API_KEY"),
        ("google_scholar", "SERPER_API_KEY"),
        ("google_custom_search", "GOOGLE_API_KEY"),
        ("google_custom_search", "GOOGLE_CSE_ID"),
        ("bing_search", "BING_SUBSCRIPTION_KEY"),
        ("jina_fetch_webpage_content", "JINA_API_KEY"),
        ("crawl4ai_fetch_webpage_content", "CRAWL4AI_API_URL"),
    ],
)
def test_a_missing_key_is_an_error_at_the_start_that_names_the_variable(
    use: str, env: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv(env, raising=False)
    with pytest.raises(NotConfigured, match=env):
        tool(use)


def test_another_variable_may_hold_the_key(stub: Stub, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("SERPER_API_KEY")
    with pytest.raises(NotConfigured, match="MY_KEY"):
        tool("google_search", key_env="MY_KEY")
    monkeypatch.setenv("MY_KEY", " mine \n")
    stub.on("/search", Reply({"organic": []}))
    call(tool("google_search", key_env="MY_KEY", base_url=stub.url), query="q")
    assert stub.last.headers["x-api-key"] == "mine"


def test_keys_are_in_no_log_no_error_and_no_result(stub: Stub, caplog: pytest.LogCaptureFixture):
    """Even where the service repeats them."""
    echo = {"organic": [{"title": f"key {SECRET}", "link": f"https://x.example/?k={SECRET}", "snippet": SECRET}]}
    stub.on("/search", Reply(echo), Reply({"message": f"bad key {SECRET}"}, status=401), Reply(SECRET))
    made = tool("google_search", base_url=stub.url)
    assert SECRET not in repr(vars(made)["_service"].__dict__["_keys"])
    with caplog.at_level(logging.DEBUG):
        result = call(made, query="q")
        errors = [failure(made, query="q") for _ in range(2)]
    assert SECRET not in result.text + repr(result.data)
    assert "key [key]" in result.text
    assert [SECRET in error.message for error in errors] == [False, False]
    assert SECRET not in caplog.text


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({}, "query is missing"),
        ({"query": ""}, "query is missing"),
        ({"query": None}, "query is missing"),
        ({"query": "q", "num_results": "many"}, "num_results"),
        ({"query": "q", "num_results": 0}, "num_results"),
        ({"query": "q", "page": 2}, "page is unknown; arguments are query, num_results, gl, hl"),
        ({"query": ["a"]}, "query"),
    ],
)
def test_bad_arguments_say_what_is_known(stub: Stub, arguments: dict[str, Any], said: str):
    error = failure(tool("google_search", base_url=stub.url), **arguments)
    assert error.status is CallStatus.BAD_ARGUMENTS
    assert said in error.message
    assert not stub.requests
