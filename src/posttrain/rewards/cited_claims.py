"""DR-Tulu's citation reward: a judge says of each claim whether what it cites supports it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from pydantic import Field

from posttrain.rewards.citations import (
    Claim,
    answer_with_citations,
    claims_of,
    harmonic,
    snippets_seen,
    valid_share,
)
from posttrain.rewards.judge import WARNING, EndpointConfig, Judge, fenced, question_of
from posttrain.rewards.service import ServiceError
from posttrain.rewards.verdicts import UnreadableReply, read_json, read_yes
from posttrain.task import Outcome, Score, Task
from posttrain.trajectory import Episode

SUPPORT = {"fully": 1.0, "partially": 0.5, "none": 0.0}
RECALL = (
    f"Do the sources support the claim? {WARNING}\n\n<claim>{{claim}}</claim>\n<sources>\n{{sources}}\n</sources>\n\n"
    'Reply with JSON: {{"support": "fully", "partially" or "none"}}'
)
RELEVANT = (
    f"Is the source relevant to the claim, even if it supports only a part of it? {WARNING}\n\n"
    "<claim>{claim}</claim>\n<source>\n{sources}\n</source>\n\n"
    'Reply with JSON: {{"relevant": "yes" or "no"}}'
)
NEEDS_CITATION = (
    f"Does this statement of an answer need a citation (a fact that is not common knowledge)? {WARNING}\n\n"
    "<question>{sources}</question>\n<claim>{claim}</claim>\n\n"
    'Reply with JSON: {{"needs_citation": "yes" or "no"}}'
)


class CitedClaimsConfig(EndpointConfig):
    """Options of the reward `cited_claims`."""

    claim_weight: float = Field(default=0.6, ge=0)
    valid_weight: float = Field(default=0.4, ge=0)
    max_claims: int = Field(default=30, ge=1, description="further ones are not judged; the cut is counted")


class CitedClaims:
    """claim_weight * mean F1 over claims + valid_weight * share of cited ids that were seen; 0 where nothing was seen.

    Recall of a cited claim: its sources support it fully 1, partially 0.5, not 0; of an uncited one: 1 unless it needs
    a citation. Precision: share of its sources that are relevant; 1 when uncited.
    """

    def __init__(self, config: CitedClaimsConfig, name: str = "cited_claims") -> None:
        self.name = name
        self.config = config
        self._judge = Judge(config)
        self.counters = self._judge.counters

    async def outcomes(self, episodes: Sequence[Episode], task: Task) -> list[Outcome]:
        return list(await asyncio.gather(*(self._one(episode, question_of(task)) for episode in episodes)))

    def close(self) -> None:
        self._judge.close()

    async def _one(self, episode: Episode, question: str) -> Outcome:
        seen, claims = snippets_seen(episode), claims_of(answer_with_citations(episode))
        judged = claims[: self.config.max_claims]
        if not seen or not judged:
            return Score(0.0, {"claims": float(len(claims)), "snippets": float(len(seen))})
        try:
            pairs = await asyncio.gather(*(self._claim(claim, seen, question) for claim in judged))
        except ServiceError as error:
            return error.as_invalid()
        f1 = sum(harmonic(precision, recall) for precision, recall in pairs) / len(pairs)
        valid = valid_share(claims, seen)
        components = {
            "precision": sum(precision for precision, _ in pairs) / len(pairs),
            "recall": sum(recall for _, recall in pairs) / len(pairs),
            "valid_ids": valid,
            "claims": float(len(claims)),
            "claims_not_judged": float(len(claims) - len(judged)),
        }
        return Score(self.config.claim_weight * f1 + self.config.valid_weight * valid, components)

    async def _claim(self, claim: Claim, seen: Mapping[str, str], question: str) -> tuple[float, float]:
        """(precision, recall)."""
        text = fenced(claim.text)
        if not claim.ids:
            needed = await self._judge.ask(NEEDS_CITATION.format(claim=text, sources=question), read_needs)
            return 1.0, 1.0 - needed
        sources = [seen[name] for name in claim.ids if name in seen]
        if not sources:
            return 0.0, 0.0
        together = RECALL.format(claim=text, sources="\n\n".join(sources))
        singly = [RELEVANT.format(claim=text, sources=source) for source in sources]
        recall, *relevant = await asyncio.gather(
            self._judge.ask(together, read_support), *(self._judge.ask(prompt, read_relevant) for prompt in singly)
        )
        return sum(relevant) / len(claim.ids), recall


def read_support(reply: str) -> float:
    word = str(read_json(reply, "support")["support"]).strip().lower()
    if word not in SUPPORT:
        raise UnreadableReply(f"support is one of {', '.join(SUPPORT)}, got {word!r:.100}")
    return SUPPORT[word]


def read_relevant(reply: str) -> float:
    return float(read_yes(reply, "relevant"))


def read_needs(reply: str) -> float:
    return float(read_yes(reply, "needs_citation"))
