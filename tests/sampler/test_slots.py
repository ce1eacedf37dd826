from __future__ import annotations

import random

import pytest

from posttrain.sampler.slots import Move, Slot, SlotTable, common_prefix


class Rows:
    """What really stands in the rows, moved as the table says."""

    def __init__(self, table: SlotTable) -> None:
        self.table = table
        self.content: dict[int, list[int]] = {}

    def apply(self, moves: list[Move]) -> None:
        read = {move.target: self.content.get(move.source, [])[: move.tokens] for move in moves}
        self.content.update(read)

    def fill(self, slot: Slot, count: int) -> None:
        """The model has written `count` more tokens of the slot."""
        slot.cached += count
        self.content[slot.row] = slot.ids[: slot.cached]

    def check(self) -> None:
        for row, slot in enumerate(self.table.slots):
            assert slot.row == row
            assert self.content.get(row, [])[: slot.cached] == slot.ids[: slot.cached]
            if slot.session is not None and not slot.busy:
                assert self.table.of_session(slot.session) is slot


def kept_sessions(table: SlotTable) -> int:
    return sum(slot.session is not None and (slot.busy or slot.cached > 0) for slot in table.slots)


@pytest.mark.parametrize("seed", range(30))
def test_rows_always_hold_what_the_table_says(seed: int) -> None:
    """A thousand random admissions, ends, releases, regroupings and losses of memory."""
    rng = random.Random(seed)
    table = SlotTable()
    rows = Rows(table)
    limit = 8
    for _ in range(1000):
        busy = [slot for slot in table.slots if slot.busy]
        action = rng.random()
        if action < 0.35:
            acquired = table.acquire(limit)
            assert (acquired is None) == (len(busy) == limit)
            if acquired is not None:
                ids = [rng.randrange(3) for _ in range(rng.randrange(2, 9))]
                table.occupy(acquired[0], rng.choice([None, "a", "b", "c", "d"]), ids, 0)
                rows.fill(acquired[0], rng.randrange(1, len(ids) + 1))
        elif action < 0.65 and busy:
            table.leave(rng.choice(busy))
        elif action < 0.7:
            table.release(rng.choice("abcd"))
        elif action < 0.9:
            rows.apply(table.gather_busy(slack=0))
            assert [slot.busy for slot in table.slots] == sorted((slot.busy for slot in table.slots), reverse=True)
        elif action < 0.97:
            limit = rng.randrange(max(1, len(busy)), 9)
            before = kept_sessions(table)
            moves, evicted = table.shrink(limit)
            rows.apply(moves)
            assert len(table) <= limit
            assert sum(slot.busy for slot in table.slots) == len(busy)
            assert kept_sessions(table) == before - evicted
        else:
            table.invalidate()
        rows.check()


def test_rows_are_taken_empty_first_then_left_over_then_new_then_idle() -> None:
    table = SlotTable()

    def take(session: str | None) -> tuple[Slot, bool]:
        acquired = table.acquire(3)
        assert acquired is not None
        table.occupy(acquired[0], session, [1, 2], 2)
        return acquired

    first, _ = take("a")
    second, _ = take(None)
    table.leave(first)
    table.leave(second)
    assert take("b") == (second, False)  # left over, before a new row
    assert take("c")[0].row == 2
    assert take("d") == (first, True)  # the idle session lost its row
    assert table.of_session("a") is None
    assert table.acquire(3) is None


def test_after_an_update_rows_are_handed_out_as_in_a_table_that_is_new() -> None:
    table = SlotTable()
    for row in range(4):
        assert _taken(table) == row
    for row in (2, 0, 3, 1):
        table.leave(table.slots[row])
    table.invalidate()
    assert [_taken(table) for _ in range(4)] == [0, 1, 2, 3]


def _taken(table: SlotTable) -> int:
    acquired = table.acquire(4)
    assert acquired is not None
    table.occupy(acquired[0], None, [1, 2], 2)
    return acquired[0].row


def test_the_best_prefix_is_the_longest_cached_one() -> None:
    table = SlotTable()
    for ids, cached in (([1, 2, 3, 4], 2), ([1, 2, 3, 9], 4), ([7, 2, 3, 4], 4)):
        acquired = table.acquire(3)
        assert acquired is not None
        table.occupy(acquired[0], None, ids, cached)
    found = table.best_prefix([1, 2, 3, 4, 5], 4)
    assert found is not None
    assert (found[0].row, found[1]) == (1, 3)
    assert table.best_prefix([1, 2, 3], 1) == (table.slots[0], 1)
    assert table.best_prefix([8], 0) is None


def test_common_prefix_is_the_plain_loop() -> None:
    rng = random.Random(0)
    for _ in range(500):
        a = [rng.randrange(2) for _ in range(rng.randrange(12))]
        b = a[: rng.randrange(12)] + [rng.randrange(2) for _ in range(rng.randrange(4))]
        bound = rng.randrange(14)
        plain = 0
        while plain < min(bound, len(a), len(b)) and a[plain] == b[plain]:
            plain += 1
        assert common_prefix(a, b, bound) == plain
