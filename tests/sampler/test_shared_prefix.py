"""Reading the keys of common first tokens once: who shares what, and the same numbers as reading every row's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from posttrain.sampler import cached_attention, shared_prefix
from posttrain.sampler.native import NativeSampler
from posttrain.sampler.protocol import SamplingParams
from posttrain.sampler.requests import Request
from posttrain.sampler.shared_prefix import families, grouping, leaders
from posttrain.sampler.slots import Slot
from posttrain.sampler.stopping import StopRule

from .tiny import CONFIGS, Played, gap, play, policy, prompt, together

ATTEND = cached_attention._DecodeRows.attend


def request(row: int, ids: list[int]) -> Request:
    """Decoded in `row`: all but the last token are cached."""
    params, rule = SamplingParams(max_new_tokens=9), StopRule(frozenset(), (), frozenset(), None)
    slot = Slot(row, ids=ids, cached=len(ids) - 1, busy=True)
    return Request(ids=ids, prompt_length=1, params=params, stream=0, rule=rule, limit=999, slot=slot)


def rows_of(requests: list[list[int]]) -> list[tuple[list[int], int]]:
    """([rows], shared) of every family."""
    found = families([request(row, ids) for row, ids in enumerate(requests)])
    return sorted((sorted(shared_prefix.row_of(r) for r in family.members), family.shared) for family in found)


def test_a_family_is_who_begins_alike() -> None:
    a, b = list(range(20)), list(range(100, 130))
    assert rows_of([[*a, 1], [*b, 2], [*a, 3, 4], [*b, 5], [*a, 6]]) == [([0, 2, 4], 20), ([1, 3], 30)]
    assert rows_of([[1, 2, 3], [2, 2, 3]]) == []
    assert rows_of([[1, 2, 3]]) == []
    assert rows_of([[*a, 7], [*a, 7]]) == [([0, 1], 20)]  # the last token is not cached yet


def test_a_common_system_prompt_gives_way_to_questions_that_save_more() -> None:
    system, question = list(range(40)), [list(range(100 * k, 100 * k + 30)) for k in (1, 2)]
    groups = [[*system, *question[i % 2], i] for i in range(4)]
    assert rows_of(groups) == [([0, 2], 70), ([1, 3], 70)]  # 2 x 70 keys saved rather than 3 x 40
    short = [[*system, *question[i % 2][:5], i] for i in range(4)]
    assert rows_of(short) == [([0, 1, 2, 3], 40)]  # 3 x 40 rather than 2 x 45


def test_every_member_is_told_whose_row_it_can_read() -> None:
    a, b = list(range(20)), list(range(100, 130))
    told = leaders([request(3, [*a, 1]), request(5, [*b, 2]), request(8, [*a, 3])])
    assert told[1] == (5, 0)
    assert told[0] == told[2]
    assert told[0] in [(3, 20), (8, 20)]


def test_a_grouping_holds_everyone_at_one_length_and_is_made_only_when_it_pays() -> None:
    a, b = list(range(400)), list(range(1000, 1500))
    many = [request(i, [*(a if i % 2 else b), i, i]) for i in range(8)]
    alone = request(8, [7] * 600)
    found = grouping([*many, alone])
    assert found is not None
    assert found.tokens == 400
    assert sorted(map(len, found.members)) == [1, 4, 4]
    assert grouping([*many, request(8, [7] * 30)]) is None  # 29 keys are all that the shortest could share
    assert grouping([request(i, [*a[:50], i, i]) for i in range(4)]) is None


def played(family: str, worth: int, monkeypatch: pytest.MonkeyPatch) -> tuple[list[Played], list[bool], float]:
    """Several tool turns of groups of 1, 2, 5 and 7 with prompts of their own lengths behind a common beginning; (what
    was played, for every attention of decode rows whether it read shared keys, gap to the trainer)."""
    monkeypatch.setattr(shared_prefix, "WORTH_SHARING", worth)
    shared: list[bool] = []

    def attend(self: Any, *arguments: Any) -> torch.Tensor:
        shared.append(self._shared is not None)
        return ATTEND(self, *arguments)

    monkeypatch.setattr(cached_attention._DecodeRows, "attend", attend)
    model = policy(family)
    sampler = NativeSampler(model)
    groups = [(1, 21), (2, 4), (5, 40), (7, 9)]
    episodes = [
        play(
            sampler,
            prompt(17) + prompt(own),
            SamplingParams(max_new_tokens=3 + (i * own) % 7),
            seed=100 * own + i,
            session=f"{own}/{i}",
            observations=[prompt(6 + i, seed=i), prompt(11)],
        )
        for size, own in groups
        for i in range(size)
    ]
    found = together(*episodes)
    return found, shared, gap(model, found)


@pytest.mark.parametrize("family", list(CONFIGS))
def test_shared_keys_give_the_numbers_of_own_keys(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, never, plain_gap = played(family, 1 << 40, monkeypatch)
    ours, some, our_gap = played(family, 1, monkeypatch)
    assert not any(never)
    assert sum(some) > len(some) / 2
    assert max(plain_gap, our_gap) < 1e-5
    assert [e.ids for e in ours] == [e.ids for e in plain]
    differences = [
        abs(a - b)
        for mine, other in zip(ours, plain, strict=True)
        for (_, one), (_, two) in zip(mine.turns, other.turns, strict=True)
        for a, b in zip(one.logprobs, two.logprobs, strict=True)
    ]
    assert max(differences) < 1e-5


def test_new_weights_are_never_read_through_old_shared_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_prefix, "WORTH_SHARING", 1)
    model = policy()
    sampler = NativeSampler(model)

    def group() -> list[Played]:
        return together(*(play(sampler, prompt(60), SamplingParams(max_new_tokens=6), seed=i) for i in range(4)))

    group()
    with torch.no_grad():
        for weight in model.module.parameters():
            weight.mul_(1.1)
    model.version += 1
    assert gap(model, group()) < 1e-5
