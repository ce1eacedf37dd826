"""The simulated schedule: cases worked by hand, and the bound that `loops/ahead.py` keeps."""

from __future__ import annotations

import random

import pytest

from posttrain.runs.schedule import Machine, Outcome, Turn, Work, simulate


def same(count: int, turns: tuple[Turn, ...], train: float, episodes: int = 1) -> list[Work]:
    return [Work([turns] * episodes, train) for _ in range(count)]


def run(works: list[Work], bound: int, **machine: float) -> Outcome:
    return simulate(works, Machine(**{"step_seconds": 0.1} | machine), bound)  # type: ignore[arg-type]


def test_in_turns_a_step_is_rollout_and_training():
    done = run(same(6, (Turn(10),), train=2.0), 0)
    assert done.step_seconds == pytest.approx([3.0] * 4)
    assert (done.trainer_idle, done.samplers_idle) == pytest.approx((1 / 3, 2 / 3))
    assert (done.staleness, done.staleness_max) == (0, 0)


def test_one_step_ahead_the_shorter_part_is_hidden():
    done = run(same(8, (Turn(10),), train=2.0), 1)
    assert done.step_seconds == pytest.approx([2.0] * 6)
    assert done.trainer_idle == pytest.approx(0.0)
    assert (done.staleness, done.staleness_max) == (1, 1)


@pytest.mark.parametrize(("bound", "seconds"), [(0, 6.0), (1, 3.0), (2, 2.0), (5, 1.0), (9, 1.0)])
def test_rollouts_overlap_as_many_as_the_bound_allows(bound: int, seconds: float):
    """A rollout of 5 s (1 of it sampled), training of 1: n + 1 of them every 6 s, until training is what takes time."""
    done = run(same(40, (Turn(5, 4.0), Turn(5)), train=1.0), bound)
    assert done.mean_step == pytest.approx(seconds, rel=0.05)
    assert done.staleness_max <= bound


def test_sequences_beyond_the_slots_wait_and_a_larger_batch_decodes_slower():
    assert run(same(4, (Turn(10),), 0.0, episodes=4), 0, slots=2).mean_step == pytest.approx(2.0)
    assert run(same(4, (Turn(10),), 0.0, episodes=4), 0, sequence_seconds=0.05).mean_step == pytest.approx(3.0)
    assert run(same(4, (Turn(10),), 0.0, episodes=4), 0, sequence_seconds=0.05, samplers=2).mean_step == pytest.approx(
        2.0
    )


def test_a_sequence_that_ends_makes_the_others_faster():
    """Two sequences of 10 and 20 tokens: 10 steps of 0.3 s, then 10 of 0.2 s."""
    works = [Work([(Turn(10),), (Turn(20),)], 0.0)] * 4
    assert run(works, 0, sequence_seconds=0.1).mean_step == pytest.approx(5.0)


def test_who_shares_cores_slows_down():
    """A sampler and two training threads on two cores: each has two thirds while both work."""
    done = run(same(12, (Turn(10),), train=2.0), 1, cores=2, trainer_threads=2)
    assert done.step_seconds[:-1] == pytest.approx([2.5] * 9)  # 1.5 s of both give 1 of 1 and 1 of 2; 1 s alone


def test_publishing_stops_everybody():
    assert run(same(6, (Turn(10),), train=2.0), 0, publish_seconds=0.5).mean_step == pytest.approx(3.5)


@pytest.mark.parametrize("bound", [0, 1, 3])
def test_the_bound_holds_whatever_happens(bound: int):
    chance = random.Random(bound)
    works = [
        Work(
            [
                tuple(Turn(chance.randint(1, 40), chance.choice([0.0, chance.expovariate(0.5)])) for _ in range(3))
                for _ in range(12)
            ],
            chance.expovariate(1.0),
        )
        for _ in range(30)
    ]
    first = run(works, bound, samplers=2, slots=4, sequence_seconds=0.01)
    assert first.staleness_max <= bound
    assert first.staleness <= bound
    assert 0 <= first.trainer_idle < 1
    assert first == run(works, bound, samplers=2, slots=4, sequence_seconds=0.01)
    slowest = run(works, 0, samplers=2, slots=4, sequence_seconds=0.01)
    assert first.mean_step <= slowest.mean_step * 1.02


def test_too_few_steps_say_nothing():
    with pytest.raises(ValueError, match="2 steps, of which the first 2 do not count"):
        run(same(2, (Turn(1),), 1.0), 0)
