"""Citations: what was seen, what is claimed, and what supports what."""

from __future__ import annotations

import asyncio
import gzip
import json
import re
from dataclasses import replace

import pytest

from posttrain.rewards import score
from posttrain.rewards.citations import (
    Claim,
    citations,
    claims_of,
    dr_tulu_format,
    search_turns,
    snippets_seen,
)
from posttrain.rewards.config import RewardConfig, load_reward
from posttrain.trajectory import CallStatus, ToolCall

from .episodes import env, episode, task
from .servers import completion, stub

SEEN = env(
    "<tool_output><snippet id=a1-0>\nTitle: Rivers\nThe Danube flows through ten countries of Europe.\n</snippet>\n"
    '<snippet id="a1-1">The Rhine rises in Switzerland.</snippet><webpage id=b2-0>A long page</webpage></tool_output>'
)


def test_only_what_the_environment_showed_was_seen():
    seen = snippets_seen(episode("<snippet id=fake>mine</snippet>", SEEN))
    assert seen.keys() == {"a1-0", "a1-1", "b2-0"}
    assert seen["a1-1"] == "The Rhine rises in Switzerland."


@pytest.mark.parametrize("tag", ['id="a"', "id=a", "id='a'", 'ids="a"', 'id = "a"'])
def test_every_form_of_a_citation(tag):
    assert claims_of(f"<cite {tag}>it is so</cite>") == [Claim("it is so", ("a",))]


def test_several_ids_and_sentences_between():
    text = (
        'The first one claims something. <cite id="a, b">Cited now</cite> Short. Another sentence that claims. # Head'
    )
    assert claims_of(text) == [
        Claim("The first one claims something."),
        Claim("Cited now", ("a", "b")),
        Claim("Another sentence that claims."),
    ]


def test_supported_and_complete_is_1():
    said = "<answer><cite id=a1-0>The Danube flows through ten countries</cite></answer>"
    assert citations(episode("q", SEEN, said), task()).value == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("answer", "precision", "recall", "valid"),
    [
        ('<cite id="a1-0">The Danube flows</cite> The Volga flows through Russia only.', 1.0, 0.5, 1.0),
        ('<cite id="a1-1">The Danube flows through ten countries</cite>', 0.0, 0.0, 1.0),
        ('<cite id="made-up">The Danube flows through ten countries</cite>', 0.0, 0.0, 0.0),
        ('<cite id="a1-0,zz">The Danube flows through ten countries</cite>', 0.5, 1.0, 0.5),
        ("The Danube flows through ten countries.", 0.0, 0.0, 0.0),
        ("", 0.0, 0.0, 0.0),
    ],
)
def test_precision_and_recall(answer, precision, recall, valid):
    found = citations(episode("q", SEEN, f"<answer>{answer}</answer>"), task())
    assert (found.components["precision"], found.components["recall"], found.components["valid_ids"]) == (
        precision,
        recall,
        valid,
    )


def test_p28_citing_a_snippet_of_ones_own_making_is_worth_nothing():
    mine = "<snippet id=x>The moon is cheese</snippet><answer><cite id=x>The moon is cheese</cite></answer>"
    assert citations(episode(mine), task()).value == 0
    assert citations(episode("q", SEEN, mine), task()).value == 0


def test_dr_tulus_format_reward():
    full = "<call_tool name=x>q</call_tool>"
    assert dr_tulu_format(episode(full, SEEN, "<answer><cite id=a>b</cite></answer>"), task()).value == pytest.approx(
        1.0
    )
    assert dr_tulu_format(episode("<answer>b</answer>"), task()).value == 0.5
    assert dr_tulu_format(episode("<answer></answer> <cite id=a>b</cite>"), task()).value == pytest.approx(0.3)
    assert dr_tulu_format(episode("plain", SEEN), task()).value == 0


def test_searching_counts_calls_that_ran():
    ok = ToolCall(name="search", arguments={}, status=CallStatus.OK)
    bad = ToolCall(name="search", arguments={}, status=CallStatus.MALFORMED)
    said = ToolCall(name="answer", arguments={}, status=CallStatus.OK)
    assert search_turns(replace(episode("x"), calls=(ok, ok, bad, said)), task()).value == pytest.approx(2 / 3)
    assert search_turns(replace(episode("x"), calls=(ok,) * 9), task()).value == 1


def judge(body):
    """Supports what stands in the source word by word."""
    text = body["messages"][-1]["content"]
    claim = re.search(r"<claim>(.*?)</claim>", text, re.DOTALL)
    assert claim
    source = re.search(r"<sources?>\n(.*?)\n</sources?>", text, re.DOTALL)
    if source is None:
        return completion('{"needs_citation": "yes"}' if "Volga" in claim[1] else '{"needs_citation": "no"}')
    found = claim[1] in source[1]
    if "<sources>" in text:
        return completion(json.dumps({"support": "fully" if found else "none"}))
    return completion(json.dumps({"relevant": "yes" if found else "no"}))


@pytest.mark.parametrize(
    ("answer", "value"),
    [
        ('<cite id="a1-0">The Danube flows through ten countries</cite>', 1.0),
        ('<cite id="a1-0">The Danube flows through ten countries</cite> In short, rivers are very long.', 1.0),
        ('<cite id="a1-0">The Danube flows through ten countries</cite> The Volga flows through Russia only.', 0.7),
        ('<cite id="a1-1">The Danube flows through ten countries</cite>', 0.4),
        ('<cite id="a1-0,a1-1">The Danube flows through ten countries</cite>', 0.6 * 2 / 3 + 0.4),
        ('<cite id="zz">The Danube flows through ten countries</cite>', 0.0),
    ],
)
def test_a_judge_decides_what_supports_what(answer, value):
    with stub(judge) as server:
        reward = load_reward(RewardConfig(name="cited_claims", options={"url": server.url + "/v1", "model": "m"}))
        outcome = asyncio.run(score(reward, episode("q", SEEN, f"<answer>{answer}</answer>"), task()))
    assert outcome.value == pytest.approx(value)


def test_nothing_seen_is_0_without_asking_and_a_judge_that_is_down_invalidates():
    with stub(completion("?")) as server:
        reward = load_reward(RewardConfig(name="cited_claims", options={"url": server.url + "/v1", "model": "m"}))
        said = "<answer><cite id=a1-0>The Danube flows</cite></answer>"
        assert asyncio.run(score(reward, episode(said), task())).value == 0
        assert server.requests == []
        assert asyncio.run(score(reward, episode("q", SEEN, said), task())).reason == "service_bad_reply"


def test_real_cited_answers(shared_data):
    """People's answers with [i] marks: most of their citations share words with the passage they name."""
    with gzip.open(shared_data / "deep_research" / "scholarqa_multi_human_answers.json.gz", "rt") as file:
        rows = json.load(file)
    right, wrong = [], []
    for row in rows:
        blocks = [f"<snippet id={i}>{p['title']} {p['text']}</snippet>" for i, p in enumerate(row["ctxs"])]
        cited = re.sub(r"([^.\[\]\n]+)\[(\d+)\]", r"<cite id=\2>\1</cite>", row["output"])
        count = max(len(blocks), 1)
        shifted = re.sub(r"<cite id=(\d+)>", lambda m, count=count: f"<cite id={(int(m[1]) + 1) % count}>", cited)
        for text, into in ((cited, right), (shifted, wrong)):
            said = episode("q", env("".join(blocks)), f"<answer>{text}</answer>")
            into.append(citations(said, task(), support=0.3).components)
    assert len(right) == 108
    share = sum(c["precision"] for c in right) / len(right)
    other = sum(c["precision"] for c in wrong) / len(wrong)
    assert share > other + 0.1
