"""`posttrain chat`: a question, answered by the config's agent where a person can watch; see `loops.watch`.

The question is put as the data would put it; or a task of the data is played, with its answer, its env and its
simulated user, and then it is judged too.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Self

from posttrain.chat import Renderer
from posttrain.config import WORLDS, ConfigError, EvalRunConfig, unknown_name
from posttrain.data.config import SourceConfig, template_columns
from posttrain.data.load import tasks_from_rows
from posttrain.episodes import episode_of
from posttrain.location import did_you_mean
from posttrain.loops.build import (
    Stage,
    check_search,
    env_to_look_at,
    eval_params,
    load_part,
    load_renderer,
    make_spec,
    make_stage,
    schemas_of,
)
from posttrain.loops.collect import attach_outcome, origin_of
from posttrain.loops.person import Person, check_has_user, with_person
from posttrain.loops.samplers import close_sampler, ready_sampler
from posttrain.loops.target import Target, check_place
from posttrain.loops.watch import Show, Watched, WatchedEnv, cited, documents_read
from posttrain.rewards import score
from posttrain.rewards.answers import tagged_answer
from posttrain.rewards.scoring import for_evaluation
from posttrain.rollout import RolloutSpec, rollout_episode
from posttrain.runs.trajectories import write_file
from posttrain.sampler.protocol import Sampler
from posttrain.task import Abstain, Invalid, Outcome, Score, Task
from posttrain.thought import outside_thoughts
from posttrain.trajectory import CallStatus, Episode, StopReason, Trajectory

ANSWERING = ("answer", "finish")  # actions that are recorded among the calls, but ask nobody for anything
IDS_SHOWN = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What came of a question. `answer` is None when the policy gave none that counts; `outcome` abstains unless the
    task has an accepted answer."""

    question: str
    answer: str | None
    episode: Episode
    outcome: Outcome

    @property
    def invalid(self) -> Invalid | None:
        return self.outcome if isinstance(self.outcome, Invalid) else None

    @property
    def verdict(self) -> str:
        """A line for people, one for the reward, and one for each document that the answer cites."""
        if self.invalid is not None:
            return f"invalid: {self.invalid.reason}: {self.invalid.detail}"
        counts = Counter(call.name for call in self.episode.calls if call.name not in ANSWERING)
        used = ", ".join([f"calls: {n} {name}" for name, n in counts.items()] or ["calls: 0"])
        used = f"({used}, tokens: {self.episode.policy_token_count})"
        ended = f", ended by {self.episode.stop_reason}" if self.episode.stop_reason else ""
        lines = [f"no answer{ended} {used}" if self.answer is None else f"answer: {self.answer} {used}"]
        if isinstance(self.outcome, Score):
            parts = "".join(f", {name} {value:g}" for name, value in self.outcome.components.items() if value)
            lines.append(f"reward: {self.outcome.value:g}{parts}")
        elif self.episode.env_reward is not None:
            lines.append(f"the env gave {self.episode.env_reward:g}")
        named = cited(self.episode)
        return "\n".join([*lines, *(f"cited: {d.line()}" for d in documents_read(self.episode) if d.id in named)])

    def as_dict(self) -> dict[str, Any]:
        """JSON values."""
        episode, named = self.episode, cited(self.episode)
        return {
            "question": self.question,
            "answer": self.answer,
            "reward": self.outcome.value if isinstance(self.outcome, Score) else None,
            "env_reward": episode.env_reward,
            "searches": [call.arguments.get("query", "") for call in episode.calls if call.name == "search"],
            "calls": [
                {"name": c.name, "arguments": c.arguments, "status": c.status.value, "detail": c.detail}
                for c in episode.calls
            ],
            "documents": [
                {"id": d.id, "title": d.title, "url": d.url, "cited": d.id in named} for d in documents_read(episode)
            ],
            "segments": [{"source": s.source.name.lower(), "text": s.text} for s in episode.segments],
            "stop_reason": None if episode.stop_reason is None else episode.stop_reason.value,
            "policy_tokens": episode.policy_token_count,
            "invalid": None if self.invalid is None else f"{self.invalid.reason}: {self.invalid.detail}",
        }


class Chat:
    """A model in its world, ready for questions. Use `with`; one event loop serves all questions.

    task: of the data, where one was asked for by its id. Played trajectories are kept for `save`.
    """

    def __init__(
        self,
        config: EvalRunConfig,
        stage: Stage,
        sampler: Sampler,
        *,
        task: Task | None = None,
        step: int = 0,
        person: Person | None = None,
    ) -> None:
        self.task = task
        self._person = person
        self._config = config
        self._stage = stage
        self._sampler = sampler
        self._step = step
        self._played: list[Trajectory] = []
        self._questions = 0
        self._runner = asyncio.Runner()

    @classmethod
    def open(
        cls,
        target: Target,
        *,
        task: str | None = None,
        env: str | None = None,
        judged: bool = False,
        person: Person | None = None,
    ) -> Self:
        """Loads retriever, tools and model. Raises each room's own error for what is wrong.

        task: id of a task of the data to be played. env: the one that questions are put to, where there are several.
        judged: load the rewards, for questions that come with an answer; a task of the data is judged anyway.
        person: sits in the place of the simulated user.
        """
        config = target.config if env is None else _in_env(target.config, env)
        renderer = load_renderer(config)
        found = None if task is None else find_task(task, config, renderer)
        known = task_of("?", config) if found is None else found
        looked_at = env_to_look_at(known.env or config.env.name, config)
        schemas_of(known.env or config.env.name, looked_at, renderer)
        if person is not None:
            check_has_user(looked_at, known.env or config.env.name)
        stage = make_stage(config, renderer, [known], judged=judged or found is not None)
        try:
            check_search(stage)
            sampler = ready_sampler(config, stage.tokenizer, target.load_policy)
            return cls(config, stage, sampler, task=found, step=target.step, person=person)
        except BaseException:
            stage.close()
            raise

    def ask(self, question: str, show: Show | None = None, *, answer: str | None = None) -> Reply:
        """Plays one episode; `show` gets its text piece by piece, in colours. answer: what would be right."""
        return self.play(task_of(question, self._config, answer), show, question=question)

    def play(self, task: Task, show: Show | None = None, *, question: str | None = None) -> Reply:
        """The same for a task."""
        spec = make_spec(self._config, self._stage, self._sampler, eval_params(self._config))
        if self._person is not None:
            spec = with_person(spec, self._person)
        if show is not None:
            spec = watched(spec, show)
        self._questions += 1
        parts, episode = self._runner.run(self._play(task, spec))
        self._played += parts
        asked = question if question is not None else str(task.prompt[-1].get("content")) if task.prompt else ""
        outcome = explained(parts[-1], task)
        open_end = "</answer>" not in self._stop_strings(task)
        return Reply(question=asked, answer=answer_of(episode, untagged=open_end), episode=episode, outcome=outcome)

    def save(self, path: Path) -> None:
        """All trajectories so far, as a run keeps them (`runs.trajectories`)."""
        texts = [self._stage.renderer.decode(trajectory.token_ids) for trajectory in self._played]
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, self._step, self._played, texts)

    def close(self) -> None:
        self._runner.run(self._stage.release())
        self._runner.close()
        close_sampler(self._sampler)
        self._stage.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def _play(self, task: Task, spec: RolloutSpec) -> tuple[list[Trajectory], Episode]:
        group = f"chat/{self._questions}"
        parts = await rollout_episode(task, spec, group_id=group, sample=0, run_seed=self._config.run.seed, step=0)
        episode = episode_of(parts, spec.renderer)
        for part in parts:
            part.info |= origin_of(task)
        if isinstance(parts[-1].outcome, Invalid):
            return parts, episode
        outcome = await self._judge(task, episode)
        if isinstance(outcome, Abstain):  # what env or person gave to turns stays as it is
            for part in parts:
                part.outcome = outcome
        else:
            attach_outcome(parts, outcome)
        return parts, episode

    async def _judge(self, task: Task, episode: Episode) -> Outcome:
        if task is not self.task and not task.ground_truth:
            return Abstain("a question without an accepted answer")
        return await score(for_evaluation(self._stage.rewards[task.reward]), episode, task)

    def _stop_strings(self, task: Task) -> Sequence[str]:
        return getattr(self._stage.envs[task.env or self._config.env.name](), "stop_strings", ())


def explained(last: Trajectory, task: Task) -> Outcome:
    """A person who tries an env sees at once where it raised, and that a bare question has no accepted answer."""
    outcome, raised = last.outcome, last.info.get("traceback")
    if not isinstance(outcome, Invalid) or raised is None:
        return outcome
    lines = [outcome.detail, raised.rstrip()]
    if not task.ground_truth:
        lines.append("The question has no accepted answer; --answer gives one to an env that reads it.")
    return replace(outcome, detail="\n".join(lines))


def check_request(
    question: str | None, task: str | None, env: str | None, save: Path | None, answer: str | None = None
) -> None:
    """Raises ConfigError for wishes that are empty or contradict each other, before a model is loaded."""
    if task is not None and (question, env, answer) != (None, None, None):
        raise ConfigError(
            ["--task names a task of the data, which has its own question, answer and env; leave these out"]
        )
    for given, what in ((question, "the question"), (answer, "--answer")):
        if given is not None and not given.strip():
            raise ConfigError([f"{what} is empty; say it, or leave it out"])
    if save is not None and save.suffix != ".parquet":
        raise ConfigError([f"--save writes parquet, so its file must end in .parquet, got {save}"])
    if save is not None and save.exists():
        raise ConfigError([f"{save} is there already; choose another file for --save"])
    if save is not None:
        check_place(save.parent, "--save")


def watched(spec: RolloutSpec, show: Show) -> RolloutSpec:
    """The same rollout, shown while it goes on."""

    def make_env(task: Task) -> Any:
        return WatchedEnv(spec.make_env(task), show)

    return replace(spec, sampler=Watched(spec.sampler, spec.renderer, show), make_env=make_env)


def answer_of(episode: Episode, *, untagged: bool = True) -> str | None:
    """What the policy answered: between answer tags, as the argument of ReAct's `finish`, or (untagged) its last turn
    as a whole where that turn calls nothing and was not cut off."""
    if text := tagged_answer(episode).text:
        return text
    finish = next((c for c in reversed(episode.calls) if c.name == "finish" and c.status is CallStatus.OK), None)
    if finish is not None:
        return str(finish.arguments.get("answer", "")) or None
    ended = episode.stop_reason in (StopReason.STOP_ID, StopReason.STOP_STRING)
    return (outside_thoughts(episode.final_text).strip() or None) if untagged and ended else None


def find_task(task_id: str, config: EvalRunConfig, renderer: Renderer) -> Task:
    """The task of the evaluation data, else of the training data, with this id, or with an id that ends with `/` and
    this. Raises ConfigError."""
    known: dict[str, Task] = {}
    for part in ("eval", "train"):
        tasks: Iterable[Task] = load_part(config, part, renderer) if getattr(config.data, part) else ()
        mine = {task.id: task for task in tasks}
        alike = [task for name, task in mine.items() if name.endswith(f"/{task_id}")]
        if task_id in mine or len(alike) == 1:
            return mine.get(task_id) or alike[0]
        known |= mine
    first = ", ".join(map(repr, islice(known, IDS_SHOWN)))
    raise ConfigError(
        [f"the data has no task {task_id!r}.{did_you_mean(task_id, known)} It has {len(known):,}, such as {first}"]
    )


def _in_env(config: EvalRunConfig, env: str) -> EvalRunConfig:
    """The same config, in which questions are put to the env that rows call `env`."""
    sources = (*config.data.eval, *config.data.train)
    names = {config.env.name, *config.envs, *(source.env for source in sources if source.env is not None)}
    if env not in names | WORLDS.keys():
        raise ConfigError([unknown_name("env", env, sorted(names))])
    mine = [source for source in sources if (source.env or config.env.name) == env]
    put = [source.model_copy(update={"env": env}) for source in mine or sources[:1]]
    if not put:
        put = [SourceConfig(path=("chat",), env=env)]
    return config.model_copy(update={"data": config.data.model_copy(update={"eval": tuple(put)})})


def task_of(question: str, config: EvalRunConfig, answer: str | None = None) -> Task:
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
        reward=None if source is None else source.reward,
        ground_truth_required=False,
    )
    row = {columns[0] if columns else "question": question} | ({} if answer is None else {"answer": answer})
    (task,) = tasks_from_rows([row], asked)
    return task
