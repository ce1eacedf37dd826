"""`posttrain chat`: one question, answered where a person can watch: what the policy writes, what it is shown.

A `Watched` sampler stands between rollout and engine. It sees every token of the episode at the moment it is needed, so
that turns are shown as they come, without a second way of rolling out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from rich.text import Text

from posttrain.config import ConfigError, EvalRunConfig
from posttrain.data.config import SourceConfig, template_columns
from posttrain.data.load import tasks_from_rows
from posttrain.loops.build import Stage, check_search, eval_params, load_renderer, make_sampler, make_spec, make_stage
from posttrain.loops.show import colored
from posttrain.loops.target import Target
from posttrain.rewards.answers import tagged_answer
from posttrain.rollout import RolloutSpec, TextCodec, episode_of, rollout_episode
from posttrain.sampler.protocol import Sampled, Sampler, SamplingParams
from posttrain.task import Invalid, Task
from posttrain.trajectory import Episode, Source, Trajectory

Show = Callable[[Text], None]
HISTORY_REWRITTEN = "\n--- history was rewritten; the policy now sees ---\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What came of a question. `answer` is None when the policy gave none that counts."""

    question: str
    answer: str | None
    episode: Episode
    invalid: Invalid | None

    @property
    def verdict(self) -> str:
        """One line for people."""
        if self.invalid is not None:
            return f"invalid: {self.invalid.reason}: {self.invalid.detail}"
        searches = sum(call.name == "search" for call in self.episode.calls)
        used = f"(searches: {searches}, tokens: {self.episode.policy_token_count})"
        return f"no answer {used}" if self.answer is None else f"answer: {self.answer} {used}"

    def as_dict(self) -> dict[str, Any]:
        """JSON values."""
        calls = self.episode.calls
        return {
            "question": self.question,
            "answer": self.answer,
            "searches": [call.arguments.get("query", "") for call in calls if call.name == "search"],
            "calls": [{"name": c.name, "arguments": c.arguments, "status": c.status.value} for c in calls],
            "segments": [{"source": s.source.name.lower(), "text": s.text} for s in self.episode.segments],
            "stop_reason": None if self.episode.stop_reason is None else self.episode.stop_reason.value,
            "policy_tokens": self.episode.policy_token_count,
            "invalid": None if self.invalid is None else f"{self.invalid.reason}: {self.invalid.detail}",
        }


class Watched:
    """A `Sampler` that passes everything on and shows it: first what is new in the context, then what was sampled."""

    def __init__(self, sampler: Sampler, renderer: TextCodec, show: Show) -> None:
        self._sampler = sampler
        self._renderer = renderer
        self._show = show
        self._seen = _empty()

    @property
    def version(self) -> int:
        return self._sampler.version

    async def sample(
        self, ids: Sequence[int], params: SamplingParams, *, seed: int, session: str | None = None
    ) -> Sampled:
        known = self._seen.token_ids
        if known and list(ids[: len(known)]) != known:
            self._show(Text(HISTORY_REWRITTEN, style="dim italic"))
            self._seen = _empty()
        self._add_context(list(ids))
        sampled = await self._sampler.sample(ids, params, seed=seed, session=session)
        first = len(self._seen)
        self._seen.add_sampled(sampled.ids, sampled.logprobs, sampled.versions)
        self._show(colored(self._seen, self._renderer, first=first))
        return sampled

    def release(self, session: str) -> None:
        """The episode is over, and so is what was seen of it."""
        self._seen = _empty()
        self._sampler.release(session)

    def _add_context(self, ids: list[int]) -> None:
        first = len(self._seen)
        self._seen.add_context(ids[first:], Source.ENV if first else Source.PROMPT)
        self._show(colored(self._seen, self._renderer, first=first))


def _empty() -> Trajectory:
    return Trajectory(task_id="", group_id="", episode_id="")


class Chat:
    """A model in its world, ready for questions. Use `with`; one event loop serves all questions."""

    def __init__(self, config: EvalRunConfig, stage: Stage, sampler: Sampler) -> None:
        self._config = config
        self._stage = stage
        self._sampler = sampler
        self._runner = asyncio.Runner()

    @classmethod
    def open(cls, target: Target) -> Self:
        """Loads retriever and model. Raises each room's own error for what is wrong."""
        renderer = load_renderer(target.config)
        stage = make_stage(target.config, renderer)
        try:
            check_search(stage)
            return cls(target.config, stage, make_sampler(target.load_policy(), stage))
        except BaseException:
            stage.close()
            raise

    def ask(self, question: str, show: Show | None = None) -> Reply:
        """Plays one episode; `show` gets its text piece by piece, in colours."""
        task = task_of(question, self._config)
        spec = make_spec(self._config, self._stage, self._sampler, eval_params(self._config))
        if show is not None:
            spec = replace(spec, sampler=Watched(self._sampler, self._stage.renderer, show))
        return self._runner.run(_play(task, question, spec, seed=self._config.run.seed))

    def close(self) -> None:
        self._runner.run(self._stage.release())
        self._runner.close()
        self._stage.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


async def _play(task: Task, question: str, spec: RolloutSpec, *, seed: int) -> Reply:
    parts = await rollout_episode(task, spec, group_id=task.id, sample=0, run_seed=seed, step=0)
    episode, outcome = episode_of(parts, spec.renderer), parts[-1].outcome
    return Reply(
        question=question,
        answer=tagged_answer(episode).text or None,
        episode=episode,
        invalid=outcome if isinstance(outcome, Invalid) else None,
    )


def task_of(question: str, config: EvalRunConfig) -> Task:
    """The question as the first source of the evaluation data (else of the training data) would put it.

    Raises ConfigError when its prompt template needs more than a question.
    """
    source = next(iter((*config.data.eval, *config.data.train)), None)
    template = None if source is None else source.prompt_template
    columns = () if template is None else template_columns(template)
    if len(set(columns)) > 1:
        raise ConfigError(
            [f"the prompt template needs {', '.join(columns)}, and there is only a question: {template!r}"]
        )
    asked = SourceConfig(
        path=("chat",),
        prompt_template=template,
        system_prompt=None if source is None else source.system_prompt,
        env=None if source is None else source.env,
        ground_truth_required=False,
    )
    (task,) = tasks_from_rows([{columns[0] if columns else "question": question}], asked)
    return task
