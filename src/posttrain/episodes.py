"""Trajectories -> episodes: what rewards and people see of tokens, as text by source."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from posttrain.envs.budget import TextCodec
from posttrain.trajectory import Episode, Segment, Source, StopReason, Trajectory, Turn


def episode_of(trajectories: Trajectory | Sequence[Trajectory], codec: TextCodec) -> Episode:
    """What rewards and people see of an episode: text by source, a policy turn per segment.

    Text is decoded per turn, so a character cut by a length stop is left out at the end of its turn. For an episode
    with rewritten history pass all its trajectories, in order.
    """
    return episodes_of([[trajectories] if isinstance(trajectories, Trajectory) else trajectories], codec)[0]


def episodes_of(group: Sequence[Sequence[Trajectory]], codec: TextCodec) -> list[Episode]:
    """`episode_of` each; a prompt that several have is read once."""
    reader = _Reader(codec)
    return [_episode(parts, reader) for parts in group]


def _episode(parts: Sequence[Trajectory], reader: _Reader) -> Episode:
    segments = tuple(segment for part in parts for segment in reader.segments(part))
    turns = [turn for part in parts for turn in part.turns]
    policy_turns = [turn for turn in turns if turn.who is Source.POLICY]
    env_rewards = [sum(part.rewards) for part in parts if part.rewards is not None]
    return Episode(
        task_id=parts[0].task_id,
        episode_id=parts[0].episode_id,
        segments=segments,
        stop_reason=policy_turns[-1].stop_reason if policy_turns else None,
        calls=tuple(call for turn in turns for call in turn.calls),
        policy_token_count=sum(part.policy_token_count for part in parts),
        answer=parts[-1].info.get("answer"),
        env_reward=sum(env_rewards) if env_rewards else None,
        turn_rewards=tuple(sum((part.rewards or [])[turn.start : turn.end]) for part, turn in written_turns(parts)),
    )


def written_turns(parts: Sequence[Trajectory]) -> list[tuple[Trajectory, Turn]]:
    """The policy's turns that hold a token, in order: those of `Episode.policy_texts`."""
    return [
        (part, turn) for part in parts for turn in part.turns if turn.who is Source.POLICY and turn.end > turn.start
    ]


class _Reader:
    """Trajectories of one group -> segments. Remembers the prompt that it read last."""

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
        self._prompt: tuple[list[int], list[Source]] = ([], [])
        self._read: list[Segment] = []

    def segments(self, trajectory: Trajectory) -> list[Segment]:
        """Policy turns one by one; the context between them by runs of one source."""
        segments: list[Segment] = []
        position = 0
        for _, turn in written_turns([trajectory]):
            segments += self._context(trajectory, position, turn.start)
            text = turn.text
            if text is None:
                text = text_of(trajectory.token_ids[turn.start : turn.end], turn.stop_reason, self._codec)
            segments.append(Segment(Source.POLICY, text))
            position = turn.end
        return segments + self._context(trajectory, position, len(trajectory))

    def _context(self, trajectory: Trajectory, start: int, end: int) -> list[Segment]:
        ids, source = trajectory.token_ids[start:end], trajectory.source[start:end]
        if start:
            return self._runs(ids, source)
        if (ids, source) != self._prompt:
            self._prompt, self._read = (ids, source), self._runs(ids, source)
        return self._read

    def _runs(self, ids: Sequence[int], sources: Sequence[Source]) -> list[Segment]:
        segments: list[Segment] = []
        start = 0
        for source, run in itertools.groupby(sources):
            end = start + len(list(run))
            segments.append(Segment(source, self._codec.decode(ids[start:end])))
            start = end
        return segments


def text_of(ids: Sequence[int], stop_reason: StopReason | None, codec: TextCodec) -> str:
    """What the policy wrote in a turn: without the id that stopped it, without a half character at the end."""
    return codec.complete_text(ids[:-1] if stop_reason is StopReason.STOP_ID else ids)
