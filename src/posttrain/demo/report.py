"""What came of a demo: the numbers, the table for people, episodes side by side."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from statistics import fmean

from rich.table import Table
from rich.text import Text

from posttrain.demo.train import Trained
from posttrain.envs.budget import TextCodec
from posttrain.loops.evaluate import Evaluation
from posttrain.loops.show import colored
from posttrain.task import Score, Task
from posttrain.trajectory import Source, Trajectory

ONE_HOP, TWO_HOP = "1-hop", "2-hop"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One evaluation: exact match over all questions and by kind, searches per question; None = none was asked."""

    questions: int
    em: float | None
    em_1hop: float | None
    em_2hop: float | None
    searches: float | None


def measured(evaluation: Evaluation) -> Measured:
    """Means over the scored episodes; the demo's world leaves none unscored."""
    values: dict[str, list[float]] = {ONE_HOP: [], TWO_HOP: []}
    for episode in evaluation.episodes:
        if isinstance(episode.outcome, Score):
            values[episode.task.source].append(episode.outcome.value)
    every = [value for part in values.values() for value in part]
    return Measured(
        questions=len(every),
        em=_mean(every),
        em_1hop=_mean(values[ONE_HOP]),
        em_2hop=_mean(values[TWO_HOP]),
        searches=_mean([float(episode.searches) for episode in evaluation.episodes]),
    )


def _mean(values: list[float]) -> float | None:
    return fmean(values) if values else None


def _shown(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The numbers of a demo."""

    seed: int
    steps: int
    before: Measured
    before_sampled: Measured
    after: Measured
    search_off: Measured
    seconds: float  # from the start of the process

    def as_dict(self) -> dict[str, object]:
        """Flat, for the JSON line; `columns` holds every cell of the table."""
        columns = {name: asdict(column) for name, column in self._columns.items()}
        return {
            "seed": self.seed,
            "steps": self.steps,
            "em_before": self.before.em,
            "em_before_sampled": self.before_sampled.em,
            "em_after": self.after.em,
            "em_1hop": self.after.em_1hop,
            "em_2hop": self.after.em_2hop,
            "em_after_search_off": self.search_off.em,
            "searches_per_question": self.after.searches,
            "seconds": round(self.seconds, 1),
            "columns": columns,
        }

    @property
    def _columns(self) -> Mapping[str, Measured]:
        return {
            "before": self.before,
            "before, sampled": self.before_sampled,
            "after": self.after,
            "after, search off": self.search_off,
        }

    def table(self) -> Table:
        title = f"{self.after.questions} questions about people, places and firms that training never named"
        caption = f"seed {self.seed}, {self.steps} steps, {self.seconds:.0f} s in all; greedy unless it says sampled"
        table = Table(title=title, caption=caption, title_style="bold")
        table.add_column("exact match")
        for name in self._columns:
            table.add_column(name, justify="right", style="bold green" if name == "after" else None)
        for label, field in (("all questions", "em"), ("one hop", "em_1hop"), ("two hops", "em_2hop")):
            table.add_row(label, *[_shown(getattr(column, field), ".3f") for column in self._columns.values()])
        table.add_section()
        table.add_row("searches per question", *[_shown(column.searches, ".2f") for column in self._columns.values()])
        return table


def report_of(trained: Trained, seconds: float) -> Report:
    config = trained.run.config.run
    return Report(
        seed=config.seed,
        steps=config.steps,
        before=measured(trained.before),
        before_sampled=measured(trained.before_sampled),
        after=measured(trained.after),
        search_off=measured(trained.search_off),
        seconds=seconds,
    )


def side_by_side(trained: Trained, renderer: TextCodec, count: int = 3) -> Iterator[Text]:
    """`count` questions, each with its episode before and after training, coloured by who wrote what."""
    before, after = (_by_task(evaluation) for evaluation in (trained.before, trained.after))
    for task in telling_tasks(trained, count):
        yield Text.assemble(("\nquestion  ", "bold"), task.prompt[-1]["content"])
        for when, found in (("before", before), ("after", after)):
            parts = found[task.id]
            text = Text.assemble(
                *[colored(part, renderer, first=_length_of_prompt(part)) for part in parts], _verdict(parts)
            )
            yield Text.assemble((f"{when:<10}", "bold"), text)


def telling_tasks(trained: Trained, count: int) -> list[Task]:
    """Questions that training has turned from wrong to right, two hops first, one kind of question after the other."""
    was, is_now = (
        {episode.task.id: episode.outcome for episode in evaluation.episodes}
        for evaluation in (trained.before, trained.after)
    )
    learnt = [task for task in trained.after.tasks if _right(is_now[task.id]) and not _right(was[task.id])]
    two, one = ([task for task in learnt if task.source == source] for source in (TWO_HOP, ONE_HOP))
    others = [task for task in trained.after.tasks if task not in learnt]
    return [*one[:1], *two[: count - 1], *one[1:], *two[count - 1 :], *others][:count]


def _right(outcome: object) -> bool:
    return isinstance(outcome, Score) and outcome.value >= 1.0


def _verdict(parts: list[Trajectory]) -> tuple[str, str]:
    return ("  right", "bold green") if _right(parts[-1].outcome) else ("  wrong", "bold red")


def _by_task(evaluation: Evaluation) -> dict[str, list[Trajectory]]:
    found: dict[str, list[Trajectory]] = {}
    for trajectory in evaluation.trajectories:
        found.setdefault(trajectory.task_id, []).append(trajectory)
    return found


def _length_of_prompt(trajectory: Trajectory) -> int:
    return next((i for i, source in enumerate(trajectory.source) if source is not Source.PROMPT), len(trajectory))
