"""One run of an agent, from its start to its trajectories: what it asks is sampled, recorded and answered.

Loop contract of `AgentEpisode.play`
  consumes      a ticket: task, sample number, seeds
  waits for     the agent to end, while the endpoint hands its requests to `answer`
  unblocked by  the agent's end, the episode's deadline, or a failure that no answer can express
  produces      trajectories with the rewards that were posted; `Invalid` with the reason when the run cannot be judged
"""

from __future__ import annotations

import asyncio
import traceback
from typing import Any

from posttrain.deadline import GRACE_SECONDS, DeadlinePassed, ends_in, leave, within
from posttrain.endpoint.agent import ExternalAgent
from posttrain.endpoint.answer import Tell
from posttrain.endpoint.desk import Desk
from posttrain.endpoint.recording import Thread
from posttrain.endpoint.serving import EndpointError, Host
from posttrain.endpoint.wire import CompletionRequest, Refusal, Reply
from posttrain.rollout import RolloutSpec, Ticket
from posttrain.task import EpisodeInvalid, Invalid, Score, as_outcome
from posttrain.trajectory import Source, StopReason, Trajectory, TrajectoryError, Turn


class AgentEpisode:
    """One episode played by an agent that asks for completions. `posttrain.rollout` drives it as any other episode."""

    def __init__(self, ticket: Ticket, spec: RolloutSpec, agent: ExternalAgent, host: Host) -> None:
        self.invalid: Invalid | None = None
        self.desk = Desk(ticket, spec, agent, self._fail)
        self._task, self._limits, self._agent, self._host = ticket.task, spec.limits, agent, host
        self._failure: asyncio.Future[None] | None = None
        self._answer: str | None = None
        self._info: dict[str, Any] = {}

    # Played by the rollout --------------------------------------------------------------------------------------------

    async def play(self) -> None:
        """Runs the agent to its end. Raises only for broken contracts and on cancellation."""
        self._failure = asyncio.get_running_loop().create_future()
        try:
            async with self._host.open(self) as address, self._host.seat(self._agent.concurrency):
                self.desk.ends = ends_in(self._limits.episode_seconds)
                run = self._agent.run(self._task, address.base_url, address.api_key)
                self._take(await within(self._unless_broken(run), self.desk.ends))
            if self.desk.recording.turns == 0:
                raise EpisodeInvalid("no_call", "the agent ended without asking the policy for anything")
        except DeadlinePassed:
            self.give_up("timeout", "episode_seconds passed in the agent")
        except EpisodeInvalid as failure:
            self.invalid = Invalid(failure.reason, failure.detail)
        except (TrajectoryError, EndpointError):
            raise
        except Exception as error:
            self._crashed(error)
        finally:
            self._close()

    def give_up(self, reason: str, detail: str) -> None:
        """Ends an episode whose time is over."""
        self.invalid = Invalid(reason, detail)
        self._end(StopReason.DEADLINE)
        self._close()

    def finished(self) -> list[Trajectory]:
        """The trajectories, the one that the policy wrote in last at the end; at least one."""
        threads = self.desk.recording.threads or [Thread(self.desk.recording.empty(), "")]
        for thread in threads:
            trajectory, rewards = thread.trajectory, thread.rewards
            if rewards:
                trajectory.rewards = [rewards.get(i, 0.0) for i in range(len(trajectory))]
            if self.invalid is not None:
                trajectory.outcome = self.invalid
        last = threads[-1].trajectory
        last.info |= self._info | ({} if self._answer is None else {"answer": self._answer})
        if self.desk.abandoned:
            last.info["abandoned"] = self.desk.abandoned
        return [thread.trajectory for thread in threads]

    async def _unless_broken(self, run: Any) -> Any:
        """The agent's result, or the failure that ended its episode meanwhile."""
        assert self._failure is not None
        job = asyncio.ensure_future(run)
        try:
            await asyncio.wait({job, self._failure}, return_when=asyncio.FIRST_COMPLETED)
            return self._failure.result() if self._failure.done() else job.result()
        finally:
            leave(job)
            await asyncio.wait({job}, timeout=GRACE_SECONDS)

    def _take(self, result: Any) -> None:
        """What the agent returned: a reward, an answer, or nothing."""
        if isinstance(result, str):
            self._answer = result
        elif result is not None and self.desk.recording.turns:
            self._add_reward(result)

    def _add_reward(self, value: Any) -> None:
        """Credits a number to the last token that the policy wrote. Raises EpisodeInvalid, or TypeError."""
        outcome = as_outcome(value)
        if isinstance(outcome, Invalid):
            raise EpisodeInvalid(outcome.reason, outcome.detail)
        if isinstance(outcome, Score):
            thread = self.desk.recording.threads[-1]
            last = thread.trajectory.turns[-1].end - 1
            thread.rewards[last] = thread.rewards.get(last, 0.0) + outcome.value

    def _crashed(self, error: Exception) -> None:
        """An agent that fails is Invalid; one that was refused another call for a limit has come to its end."""
        self._info["traceback"] = "".join(traceback.format_exception(error))
        if self.desk.refused_for is None:
            self.invalid = Invalid("agent_error", f"{type(error).__name__}: {error}")

    def _close(self) -> None:
        self.desk.close()
        if self._failure is not None and self._failure.done():
            self._failure.exception()  # seen
        if self.desk.refused_for is not None and self.invalid is None:
            self._end(self.desk.refused_for)

    def _end(self, reason: StopReason) -> None:
        """A policy turn of no tokens that says why no more was sampled."""
        if self.desk.recording.threads:
            trajectory = self.desk.recording.threads[-1].trajectory
            end = len(trajectory)
            trajectory.turns.append(Turn(who=Source.POLICY, start=end, end=end, stop_reason=reason))

    def post(self, body: Any) -> None:
        """{"reward": number}, any number of times: each is credited to what the policy wrote last, and they add up.

        {"invalid": reason, "detail": text} ends the episode as one that cannot be judged.
        """
        self.desk.check_open()
        reason = body.get("invalid") if isinstance(body, dict) else None
        if isinstance(reason, str) and reason.strip():
            self._fail(EpisodeInvalid(reason, str(body.get("detail") or "")))
            return
        value = body.get("reward") if isinstance(body, dict) else None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise Refusal(f"the body must be {{'reward': number}}, got {body!r:.100}", param="reward")
        if self.desk.recording.turns == 0:
            raise Refusal("nothing was asked of the policy yet: there is nothing to reward", status=409)
        try:
            self._add_reward(value)
        except EpisodeInvalid as failure:
            self._fail(failure)

    async def answer(self, request: CompletionRequest, tell: Tell | None = None) -> Reply:
        """The policy's answer to a request of the agent. Raises Refusal."""
        return await self.desk.answer(request, tell)

    def _fail(self, failure: Exception) -> None:
        if self._failure is not None and not self._failure.done():
            self._failure.set_exception(failure)
