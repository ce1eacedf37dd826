"""Citations: `<cite id="...">claim</cite>` in the answer against the snippets that the episode has really seen.

Only `<snippet id=...>` and `<webpage id=...>` blocks in the environment's text count as seen: a snippet that the policy
wrote itself supports nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from posttrain.rewards.normalize import normalize_answer
from posttrain.task import Score, Task
from posttrain.thought import outside_thoughts
from posttrain.trajectory import Episode, Source

_QUOTED = r"""(?:"([^"]*)"|'([^']*)'|([^\s>]+))"""
_CITE = re.compile(rf"<cite\s+ids?\s*=\s*{_QUOTED}\s*>(.*?)</cite>", re.DOTALL | re.IGNORECASE)
_SEEN = re.compile(rf"<(snippet|webpage)\s+id\s*=\s*{_QUOTED}\s*>(.*?)</\1>", re.DOTALL)
_ANSWER = re.compile(r"<answer>(.*?)(?:</answer>|\Z)", re.DOTALL)
_CALL = re.compile(r"<(?:call_tool|tool|tool_call|search)\b")
_SENTENCE = re.compile(r"(?<=[.!?])\s+|\n+")
_TAGS = re.compile(r"</?[a-zA-Z_][^>]*>")
_MIN_WORDS = 4  # of a sentence that claims something: headings and "See below." do not


@dataclass(frozen=True, slots=True)
class Claim:
    """A statement of the answer; `ids` is empty where nothing is cited for it."""

    text: str
    ids: tuple[str, ...] = ()


def snippets_seen(episode: Episode) -> dict[str, str]:
    """Id -> text of the snippets and pages in the environment's text."""
    read = "".join(segment.text for segment in episode.segments if segment.source in (Source.ENV, Source.TEMPLATE))
    return {_first(found.groups()[1:4]): found[5].strip() for found in _SEEN.finditer(read)}


def answer_with_citations(episode: Episode) -> str:
    """The content of the last turn's answer tag, else the last turn, without thoughts."""
    text = outside_thoughts(episode.final_text)
    found = _ANSWER.search(text)
    return (found[1] if found else text).strip()


def claims_of(text: str) -> list[Claim]:
    """Cited spans, and the sentences between them, in order. Ids in one tag are separated by commas."""
    claims: list[Claim] = []
    position = 0
    for found in _CITE.finditer(text):
        claims += _sentences(text[position : found.start()])
        ids = tuple(part.strip() for part in _first(found.groups()[:3]).split(",") if part.strip())
        claims.append(Claim(_TAGS.sub("", found[4]).strip(), ids))
        position = found.end()
    return claims + _sentences(text[position:])


def citations(
    episode: Episode, task: Task, *, support: float = 0.5, claim_weight: float = 0.6, valid_weight: float = 0.4
) -> Score:
    """claim_weight * F1 of claims + valid_weight * share of cited ids that were seen; 0 where nothing was seen.

    Precision: share of citations whose snippet holds at least `support` of the claim's words. Recall: share of claims
    (sentences of 4 words or more, and cited spans) with such a citation. Words stand in for a judge: the reward
    `cited_claims` asks one. Tags with `ids=` and several ids in one tag count, unlike in DR-Tulu's expressions.
    """
    seen = snippets_seen(episode)
    claims = claims_of(answer_with_citations(episode))
    cited = [(claim, snippet) for claim in claims for snippet in claim.ids]
    supported = [(c, s) for c, s in cited if s in seen and overlap(c.text, seen[s]) >= support]
    precision = len(supported) / len(cited) if cited else 0.0
    recall = len({id(claim) for claim, _ in supported}) / len(claims) if claims else 0.0
    valid = valid_share(claims, seen)
    value = claim_weight * harmonic(precision, recall) + valid_weight * valid if seen and cited else 0.0
    counts = {"claims": float(len(claims)), "citations": float(len(cited)), "snippets": float(len(seen))}
    return Score(value, {"precision": precision, "recall": recall, "valid_ids": valid, **counts})


def dr_tulu_format(episode: Episode, task: Task, *, answer: float = 0.5, cite: float = 0.3, call: float = 0.2) -> Score:
    """DR-Tulu's format reward: has an answer, has a citation, has called a tool; each worth its option."""
    text = outside_thoughts(episode.final_text)
    answered = bool((found := _ANSWER.search(text)) and found[1].strip())
    has_cite = bool(_CITE.search(text))
    has_call = bool(episode.calls) or any(_CALL.search(turn) for turn in episode.policy_texts)
    value = answer * answered + cite * has_cite + call * has_call
    return Score(value, {"has_answer": float(answered), "has_citation": float(has_cite), "has_call": float(has_call)})


def search_turns(episode: Episode, task: Task, *, enough: int = 3) -> Score:
    """min(calls that ran / enough, 1): DR-Tulu's reward for searching. Failed and refused calls do not count."""
    ran = sum(record.status == "ok" and record.name != "answer" for record in episode.calls)
    return Score(min(ran / enough, 1.0), {"calls": float(ran)})


def valid_share(claims: Iterable[Claim], seen: Mapping[str, str]) -> float:
    """Distinct cited ids that were seen / distinct cited ids; 0 without any."""
    ids = {snippet for claim in claims for snippet in claim.ids}
    return len(ids & seen.keys()) / len(ids) if ids else 0.0


def overlap(claim: str, source: str) -> float:
    """Share of the claim's distinct words that stand in the source."""
    words = set(normalize_answer(claim).split())
    return len(words & set(normalize_answer(source).split())) / len(words) if words else 0.0


def harmonic(precision: float, recall: float) -> float:
    return 2 * precision * recall / (precision + recall) if precision + recall else 0.0


def _sentences(text: str) -> list[Claim]:
    plain = _TAGS.sub(" ", text)
    return [Claim(s.strip()) for s in _SENTENCE.split(plain) if len(s.split()) >= _MIN_WORDS]


def _first(groups: Iterable[str | None]) -> str:
    return next((group for group in groups if group is not None), "")
