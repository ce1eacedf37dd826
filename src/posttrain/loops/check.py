"""`posttrain check`: would this config reward what is right, and nothing else? Without a model.

The accepted answers are played through the real env by a scripted sampler: tokenised, cut by the limits, stopped,
judged. Then the reward alone is shown answers of known worth (`rewards.audit`), and the prompts are searched for tags
that the env and the reward do not know.
"""

from __future__ import annotations

import asyncio
import difflib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from posttrain.config import ConfigError, RLConfig
from posttrain.data import TaskSet
from posttrain.envs import Env
from posttrain.episodes import episode_of
from posttrain.loops.build import Stage, load_part, load_renderer, make_spec, make_stage, training_params
from posttrain.rewards import Reward, score
from posttrain.rewards.audit import ACCEPTED_TRIED, TAGGED, Audit, Form, audit, frame_of
from posttrain.rewards.config import RewardConfig
from posttrain.rewards.program_audit import COLUMNS, judges_programs, programs
from posttrain.rewards.scoring import for_evaluation, leaves
from posttrain.rollout import rollout_group
from posttrain.sampler.scripted import ScriptedSampler
from posttrain.task import Invalid, Outcome, Score, Task
from posttrain.trainer.loading import ModelError
from posttrain.trajectory import StopReason

TAG = re.compile(r"</?([A-Za-z_][\w-]*)>")
USUAL_TAGS = frozenset({"answer", "search", "think", "tool_call", "tool_response"})
PLAYED = 32  # tasks whose answer is played through the env
PACKAGED = "tiny_search_base"
UNLIMITED = 1 << 20  # tokens
ASKING = 3  # tasks for rewards that ask servers


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """What was found. `problems` are faults of the config; `notes` are not."""

    played: int
    reached: int  # of these, how many got the full reward
    audit: Audit | None
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        return not self.problems

    def as_dict(self) -> dict[str, Any]:
        return {
            "passed": self.passed,
            "played": self.played,
            "reached": self.reached,
            "audit": None if self.audit is None else self.audit.as_dict(),
            "problems": list(self.problems),
            "notes": list(self.notes),
        }

    def render(self) -> str:
        lines = [f"accepted answers played through the env: {self.reached} of {self.played} get the full reward"]
        if self.audit is not None:
            lines += ["", *_table(self.audit)]
        lines += [f"note: {note}" for note in self.notes]
        lines += [f"problem: {problem}" for problem in self.problems]
        return "\n".join([*lines, "", "passed" if self.passed else "failed"])


def _check_frame(frame: str | None) -> None:
    """Raises ConfigError unless an answer can be put into it."""
    try:
        holds = frame is None or "\0" in frame.format(answer="\0")
    except (ValueError, LookupError, AttributeError):
        holds = False
    if not holds:
        fix = r"other braces are doubled, as in '\boxed{{{answer}}}'"
        raise ConfigError([f"the form of an answer must hold {{answer}}, got {frame!r}; {fix}"])


def check(config: RLConfig, *, tasks: int = 200, frame: str | None = None, solution: str | None = None) -> Check:
    """tasks: the first of `data.train` (of `data.eval` where there is none). frame: how an answer is written, with
    {answer}; by default as the rewards read it. solution: the column of the reference program, for the reward `code`.
    """
    _check_frame(frame)
    config, renderer, notes = _with_tokenizer(config)
    chosen = list(_tasks(config, renderer))[:tasks]
    stage = make_stage(config, renderer, chosen)
    try:
        asks = any(hasattr(leaf, "counters") for reward in stage.rewards.values() for leaf in leaves(reward))
        chosen = chosen[:ASKING] if asks else chosen
        form, more = _form(_names(config.reward, chosen), chosen, frame, solution)
        found = asyncio.run(_check(config, stage, chosen if form is None else chosen[: form.most_tasks], form))
        return replace(found, notes=(*notes, *found.notes, *more))
    finally:
        stage.close()


def _form(
    names: Sequence[str], tasks: Sequence[Task], frame: str | None, solution: str | None
) -> tuple[Form | None, list[str]]:
    """What is shown to the rewards, and notes about it. None where nothing right can be made of the rows."""
    if judges_programs(names):
        form = programs(solution)
        form = form if frame is None else replace(form, frame=frame)
        lacking = sum(not form.golds(task) for task in tasks)
        if solution is not None and lacking == len(tasks):
            raise ConfigError([f"no row has a program in the column {solution!r} (--solution)"])
        most = form.most_tasks or len(tasks)
        notes = [f"each test of a program is a process: of {len(tasks)} tasks, {most} are judged"]
        notes = notes if most < len(tasks) else []
        if lacking:
            known = f"the column {solution}" if solution else f"a column {', '.join(COLUMNS)}"
            notes.append(f"{lacking} of {len(tasks)} rows have no reference solution (in {known}; or say --solution)")
        return form, notes
    if solution is not None:
        raise ConfigError([f"--solution is for rows that the reward `code` judges; here it is {', '.join(names)}"])
    frame = frame or frame_of(names)
    if frame is not None:
        return Form(frame=frame), []
    return None, ["what is judged here is no answer (rubrics, citations), so none could be made and played"]


async def _check(config: RLConfig, stage: Stage, tasks: Sequence[Task], form: Form | None) -> Check:
    rewards = {name: for_evaluation(reward) for name, reward in stage.rewards.items()}

    def reward_of(task: Task) -> Reward:
        return rewards[task.reward]

    lint_problems, notes = lint_tags(tasks, _made_env(config, stage), TAGGED if form is None else form.frame)
    if form is None:
        return Check(played=0, reached=0, audit=None, problems=tuple(lint_problems), notes=tuple(notes))
    full = config.eval.right_from
    played = [task for task in tasks if form.golds(task)][:PLAYED]
    verdicts = [await _in_env(config, stage, task, reward_of(task), form) for task in played]
    failed = [refused for refused, _ in verdicts if refused]
    passed = [wrong for _, wrong in verdicts if wrong]
    found = await audit(tasks, reward_of, form=form, accept_from=full)
    of_reward = _audit_problems(found, form)
    problems = list(lint_problems)
    if of_reward and played and not failed and found.false_reject_rate == 1.0:
        notes.append("the reward alone accepts nothing, it needs what the env gives: only what was played counts")
    else:
        problems += of_reward
    if passed:
        problems.append(f"{len(passed)} of {len(played)} wrong answers get {full:g} in the env: {passed[0]}")
    if failed:
        problems.append(f"{len(failed)} of {len(played)} accepted answers do not get {full:g} in the env: {failed[0]}")
    if not played and not form.gold_optional:
        problems.append("no task has an accepted answer")
    return Check(
        played=len(played),
        reached=len(played) - len(failed),
        audit=found,
        problems=tuple(problems),
        notes=(*notes, *_audit_notes(found, form)),
    )


def _with_tokenizer(config: RLConfig) -> tuple[RLConfig, Any, tuple[str, ...]]:
    """The config and its tokenizer; without one, the packaged one, limits that do not bind, and a note about it."""
    try:
        return config, load_renderer(config), ()
    except ModelError as error:
        model = config.model.model_copy(update={"path": PACKAGED})
        limits = config.limits.model_copy(
            update={name: UNLIMITED for name in type(config.limits).model_fields if name.endswith("_tokens")}
        )
        data = config.data.model_copy(update={"max_prompt_tokens": None})
        config = config.model_copy(update={"model": model, "limits": limits, "data": data})
        first = str(error).splitlines()[0]
        return (
            config,
            load_renderer(config),
            (f"played with the packaged tokenizer, without limits of length: {first}",),
        )


def _tasks(config: RLConfig, renderer: Any) -> TaskSet:
    if config.data.train:
        return load_part(config, "train", renderer)
    if config.data.eval:
        return load_part(config, "eval", renderer)
    raise ConfigError(["there is nothing to check: set data.train or data.eval"])


async def _in_env(config: RLConfig, stage: Stage, task: Task, reward: Reward, form: Form) -> tuple[str, str]:
    """What is wrong with the verdicts on a real rollout: an accepted answer that does not get the full reward, a wrong
    one that does; "" for each that is as it should be."""
    written_as: dict[str, str] = {}  # answer -> the turn, and whether it was cut

    async def judge(answer: str, task: Task) -> Outcome:
        text = form.frame.format(answer=answer)
        spec = make_spec(config, stage, ScriptedSampler(lambda call: text, stage.tokenizer), training_params(config))
        found = await rollout_group(task, spec, group_id="check", group_size=1, run_seed=0, step=0)
        episode, outcome = episode_of(found, stage.renderer), found[-1].outcome
        stops = {turn.stop_reason for one in found for turn in one.turns}
        cut = " (a turn was cut by limits.max_turn_tokens)" if StopReason.LENGTH in stops else ""
        written_as[answer] = f"task {task.id} with {text!r:.160}{cut} got "
        return outcome if isinstance(outcome, Invalid) else await score(reward, episode, task)

    right = form.golds(task)[:ACCEPTED_TRIED]
    verdicts = await task.verdicts(judge, (*right, *form.wrong))
    full = [
        answer for answer, said in verdicts.items() if isinstance(said, Score) and said.value >= config.eval.right_from
    ]
    told = {answer: written_as[answer] + _said(outcome) for answer, outcome in verdicts.items()}
    refused = next((told[answer] for answer in right if answer not in full), "")
    return refused, next((told[answer] for answer in form.wrong if answer in full and answer not in right), "")


def _said(outcome: Outcome) -> str:
    return f"{outcome.value:g}" if isinstance(outcome, Score) else f"{type(outcome).__name__}: {outcome.reason}"


def lint_tags(tasks: Sequence[Task], env: Env | None, frame: str) -> tuple[list[str], list[str]]:
    """(problems, notes): tags that most prompts name but that only resemble known ones, and needed ones that no prompt
    names. Known are the tags of the env's stop strings, of its attribute `tags`, and of the form of an answer."""
    needed = {tag for stop in getattr(env, "stop_strings", ()) for tag in TAG.findall(stop)} | set(TAG.findall(frame))
    known = needed | USUAL_TAGS | set(getattr(env, "tags", ()))
    named = Counter(tag for task in tasks for tag in {t for m in task.prompt for t in TAG.findall(str(m["content"]))})
    problems = [
        f"the prompts name <{tag}>, which nothing reads; did you mean <{near[0]}>?"
        for tag, count in sorted(named.items())
        if tag not in known
        and 2 * count > len(tasks)
        and (near := difflib.get_close_matches(tag.lower(), sorted(known), n=1))
    ]
    missing = sorted(needed - named.keys() - {"think"})
    notes = [f"no prompt names <{tag}>: the policy must know it already" for tag in missing]
    return problems, notes


def _made_env(config: RLConfig, stage: Stage) -> Env | None:
    make: Callable[[], Env] | None = stage.envs.get(config.env.name)
    return None if make is None else make()


def _names(reward: RewardConfig, tasks: Iterable[Task]) -> list[str]:
    """The rewards that decide how an answer is written: those of the rows, and the config's for rows that name none."""
    rows = [task.reward for task in tasks]
    names = sorted({name.strip() for named in rows if named for name in named.split(",")})
    return names if rows and all(rows) else [*names, *_names_of_config(reward)]


def _names_of_config(reward: RewardConfig) -> list[str]:
    if reward.by is not None:
        default = [] if reward.by.default is None else [reward.by.default]
        return [part.name for part in (*reward.by.rewards.values(), *default)]
    return [part.name for part in reward.parts.values()] or [reward.name]


def _audit_problems(found: Audit, form: Form) -> list[str]:
    refused = [
        f"the reward refuses {tally.wrong} of {tally.count} accepted answers: {tally.examples[0]}"
        for tally in found.tallies.values()
        if tally.right and tally.wrong
    ]
    return refused + _accepted(found, lambda kind: kind in form.never_right)


def _audit_notes(found: Audit, form: Form) -> list[str]:
    return _accepted(found, lambda kind: kind not in form.never_right)


def _accepted(found: Audit, of_interest: Callable[[str], bool]) -> list[str]:
    return [
        f"the reward accepts {tally.wrong} of {tally.count} candidates of kind {kind}: {tally.examples[0]}"
        for kind, tally in found.tallies.items()
        if not tally.right and tally.wrong and of_interest(kind)
    ]


def _table(found: Audit) -> list[str]:
    head = f"{'candidate':<24}{'deserves it':>12}{'judged':>8}{'accepted':>10}{'invalid':>9}{'mean':>8}"
    rows = [
        f"{kind:<24}{'yes' if t.right else 'no':>12}{t.count:>8}{t.accepted:>10}{t.invalid:>9}"
        f"{(f'{t.total / t.scored:.3f}' if t.scored else '-'):>8}"
        for kind, t in found.tallies.items()
    ]
    rates = [
        f"false accepts: {found.false_accepts} ({_percent(found.false_accept_rate)}), "
        f"false rejects: {found.false_rejects} ({_percent(found.false_reject_rate)}), {found.tasks} tasks"
        + (f", {found.skipped} without an accepted answer" if found.skipped else "")
    ]
    return [head, *rows, "", *rates]


def _percent(rate: float | None) -> str:
    return "-" if rate is None else f"{100 * rate:.2f} %"
