"""Every sample once, counted per episode, invalid ones beside the mean and not in it; and the same again next time."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cases.parts import DownShelf, Shelf, byte_tokenizer, spec
from posttrain.chat import Renderer
from posttrain.config import ConfigError, EvalConfig, EvalRunConfig, load_config, parse_config
from posttrain.data import load_tasks
from posttrain.envs import SearchEnv
from posttrain.loops import rl
from posttrain.loops.build import eval_params, load_renderer, make_collector, make_stage
from posttrain.loops.collect import Collector, TooManyInvalid
from posttrain.loops.eval_run import default_folder, evaluate_target
from posttrain.loops.evaluate import Evaluation, evaluate
from posttrain.loops.samplers import ready_sampler
from posttrain.loops.summary import shown_ks
from posttrain.loops.target import find_target
from posttrain.rewards.config import load_reward
from posttrain.runs.metrics import Metrics
from posttrain.runs.trajectories import read_trajectories
from posttrain.sampler.protocol import SamplingParams
from posttrain.sampler.scripted import ScriptedCall, ScriptedSampler
from posttrain.task import Abstain, Invalid, Score, Task
from posttrain.trainer.policy import Policy
from posttrain.trajectory import Source, Trajectory, Turn

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "tiny_search.yaml"


def tasks_named(*names: str, source: str = "default") -> list[Task]:
    return [
        Task(id=name, prompt=({"role": "user", "content": name},), ground_truth=("Paris",), source=source)
        for name in names
    ]


def scripted(script: Any, *, reward: Any = "em", shelf: Any = None) -> Collector:
    """A collector whose turns come from a script; the env searches `shelf`."""
    sampler = ScriptedSampler(script, byte_tokenizer())
    world = shelf or Shelf('"Tower"\nThe tower is in Paris.')
    rollout = spec(None, lambda task: SearchEnv(retriever=world, max_turns=2), sampler=sampler)
    return Collector(spec=rollout, rewards={None: load_reward(reward)}, seed=0)


def run(tasks: list[Task], collector: Collector, **settings: Any) -> Evaluation:
    if settings.get("samples_per_prompt", 1) > 1:
        settings.setdefault("temperature", 1.0)
    return asyncio.run(evaluate(tasks, collector, EvalConfig(**settings)))


def measured(evaluation: Evaluation) -> dict[str, float]:
    metrics = Metrics()
    evaluation.record(metrics)
    return metrics.reduce()


def sample_number(call: ScriptedCall) -> int:
    assert call.session is not None
    return int(call.session.rsplit("/", 1)[1])


def answers(*texts: str) -> Any:
    """Sample i of every task answers texts[i]."""
    return lambda call: f"<answer>{texts[sample_number(call)]}</answer>"


# ---------------------------------------------------------------- counting


def test_every_sample_exactly_once():
    collector = scripted(answers("Paris", "Rome", "Oslo"))
    done = run(tasks_named("a", "b"), collector, samples_per_prompt=3)
    assert Counter(episode.task.id for episode in done.episodes) == {"a": 3, "b": 3}
    assert len({episode.id for episode in done.episodes}) == 6
    seeds = [call.seed for call in collector.spec.sampler.calls]  # type: ignore[attr-defined]
    assert len(set(seeds)) == len(seeds) == 6


def test_max_tasks_takes_the_first_of_the_set():
    done = run(tasks_named("a", "b", "c"), scripted(answers("Paris")), max_tasks=2)
    assert [task.id for task in done.tasks] == ["a", "b"]
    assert done.total.tasks == 2


def test_p124_a_long_episode_weighs_no_more_than_a_short_one():
    """A answers at once and is right; B searches twice and is wrong: .5, not .25."""

    def script(call: ScriptedCall) -> str:
        assert call.session is not None
        if "/a/" in f"/{call.session}/":
            return "<answer>Paris</answer>"
        return "<search>tower</search>" if call.turn < 2 else "<answer>Rome</answer>"

    done = run(tasks_named("a", "b"), scripted(script))
    assert [episode.turns for episode in done.episodes] == [1, 3]
    values = measured(done)
    assert values["eval/reward"] == 0.5
    assert values["eval/searches"] == 1.0
    assert values["eval/turns"] == 2.0
    assert done.total.reward is not None
    assert done.total.reward.mean == 0.5


def test_p124_an_episode_of_three_trajectories_counts_once():
    def trajectory(task: str, outcome: Any) -> Trajectory:
        made = Trajectory(task_id=task, group_id=task, episode_id=f"{task}/0", outcome=outcome)
        made.add_context([1], Source.PROMPT)
        made.add_sampled([2, 3], [-1.0, -1.0], 0)
        made.turns.append(Turn(who=Source.POLICY, start=1, end=3))
        return made

    rows = [trajectory("a", Score(1.0)), *(trajectory("b", Score(0.0)) for _ in range(3))]
    done = Evaluation(tasks=tuple(tasks_named("a", "b")), trajectories=tuple(rows))
    values = measured(done)
    assert values["eval/reward"] == 0.5
    assert values["eval/scored"] == 2
    assert values["eval/turns"] == 2.0  # 1 and 3: turns of rewritten histories are turns, too
    assert values["eval/policy_tokens"] == 4.0
    assert done.total.pass_at[1].mean == 0.5


def test_pass_mean_and_majority_of_several_samples():
    """a: Paris, Rome, Paris, Paris (3 right); b: Rome, Rome, Oslo, Paris (1 right, the majority is wrong)."""

    def script(call: ScriptedCall) -> str:
        assert call.session is not None
        texts = ("Paris Rome Paris paris." if "/a/" in f"/{call.session}" else "Rome Rome Oslo Paris").split()
        return f"<answer>{texts[sample_number(call)]}</answer>"

    done = run(tasks_named("a", "b"), scripted(script), samples_per_prompt=4)
    total = done.total
    assert {k: e.mean for k, e in total.pass_at.items()} == pytest.approx(
        {1: 0.5, 2: (1 + 0.5) / 2, 3: (1 + 0.75) / 2, 4: 1.0}
    )
    assert total.mean_at is not None
    assert total.maj_at is not None
    assert (total.mean_at.mean, total.maj_at.mean) == (0.5, 0.5)
    values = measured(done)
    assert {key: value for key, value in values.items() if "_at_" in key} == pytest.approx(
        {
            "eval/pass_at_1": 0.5,
            "eval/pass_at_2": 0.75,
            "eval/pass_at_4": 1.0,
            "eval/mean_at_4": 0.5,
            "eval/maj_at_4": 0.5,
        }
    )


def test_one_sample_has_no_pass_at_k_metrics():
    assert not [key for key in measured(run(tasks_named("a"), scripted(answers("Paris")))) if "_at_" in key]


def test_the_ks_shown_are_powers_of_two_and_all():
    assert shown_ks(1) == [1]
    assert shown_ks(6) == [1, 2, 4, 6]
    assert shown_ks(8) == [1, 2, 4, 8]


def test_invalid_samples_are_no_zeros():
    """Of b's two samples the one that searches meets a dead server: mean 1 over three, pass@2 from a alone."""

    def script(call: ScriptedCall) -> str:
        assert call.session is not None
        if "/b/" in f"/{call.session}" and sample_number(call) == 1:
            return "<search>tower</search>"
        return "<answer>Paris</answer>"

    done = run(tasks_named("a", "b"), scripted(script, shelf=DownShelf()), samples_per_prompt=2)
    values = measured(done)
    assert (values["eval/scored"], values["eval/invalid"], values["eval/abstained"]) == (3, 1, 0)
    assert values["eval/invalid/tool_down"] == 1
    assert values["eval/reward"] == 1.0
    assert done.total.invalid == {"tool_down": 1}
    assert (done.total.pass_at[1].tasks, done.total.pass_at[2].tasks) == (2, 1)
    assert done.total.pass_at[2].mean == 1.0


def test_nothing_scored_gives_no_number_instead_of_zero():
    done = run(tasks_named("a"), scripted(["<search>tower</search>"], shelf=DownShelf()))
    assert done.total.reward is None
    assert done.total.pass_at == {}
    assert "eval/reward" not in measured(done)


def no_opinion(episode: Any, task: Task) -> float | None:
    return None if task.id == "b" else 0.25


def test_abstentions_are_counted_and_a_reward_without_predictions_has_no_majority():
    done = run(tasks_named("a", "b"), scripted(answers("x", "y"), reward=no_opinion), samples_per_prompt=2)
    values = measured(done)
    assert (values["eval/scored"], values["eval/abstained"], values["eval/reward"]) == (2, 2, 0.25)
    assert done.total.maj_at is None
    assert "eval/maj_at_2" not in values
    assert all(isinstance(e.outcome, Abstain) for e in done.episodes if e.task.id == "b")


def test_what_counts_as_right_is_a_setting_and_forgives_rounding():
    def nearly(episode: Any, task: Task) -> float:
        return 0.7 + 0.2 + 0.1  # 0.9999999999999999

    assert run(tasks_named("a"), scripted(answers("x"), reward=nearly)).total.pass_at[1].mean == 1.0
    quarter = scripted(answers("x"), reward=no_opinion)
    assert run(tasks_named("a"), quarter).total.pass_at[1].mean == 0.0
    assert run(tasks_named("a"), quarter, right_from=0.25).total.pass_at[1].mean == 1.0


def test_sources_are_apart_and_sorted():
    tasks = [*tasks_named("a", source="z"), *tasks_named("b", "c", source="nq")]
    done = run(tasks, scripted(answers("Paris")))
    assert [(source.name, source.tasks) for source in done.sources] == [("nq", 2), ("z", 1)]
    assert done.total.tasks == 3


def test_greedy_samples_are_refused_because_they_repeat():
    with pytest.raises(ConfigError, match=r"eval.temperature: 0 gives the same answer 4 times"):
        parse_config(
            EvalRunConfig, {"model": {"path": "m"}, "data": {"eval": "e.jsonl"}, "eval": {"samples_per_prompt": 4}}
        )


# ---------------------------------------------------------------- a real model


@pytest.fixture(scope="module")
def config() -> EvalRunConfig:
    settings = ["eval.temperature=1.0", "eval.samples_per_prompt=2", "eval.max_tasks=24"]
    return load_config(EvalRunConfig, RECIPE, settings)


@pytest.fixture(scope="module")
def tiny(config: EvalRunConfig) -> tuple[list[Task], Collector]:
    stage = make_stage(config, load_renderer(config))
    sampler = ready_sampler(config, stage.tokenizer, lambda: Policy.from_config(config.model))
    return list(load_tasks(config.data, "eval")), make_collector(config, stage, sampler, eval_params(config))


def written(done: Evaluation) -> dict[str, list[list[int]]]:
    """Task id -> the tokens of its samples."""
    found: dict[str, list[list[int]]] = {}
    for trajectory in done.trajectories:
        found.setdefault(trajectory.task_id, []).append(trajectory.token_ids)
    return found


def again(tasks: list[Task], collector: Collector, config: EvalRunConfig) -> Evaluation:
    return asyncio.run(evaluate(tasks, collector, config.eval))


def test_p123_a_second_evaluation_repeats_the_first(tiny, config):
    tasks, collector = tiny
    first, second = again(tasks, collector, config), again(tasks, collector, config)
    assert written(first) == written(second)
    assert [t.rollout_logprobs for t in first.trajectories] == [t.rollout_logprobs for t in second.trajectories]
    assert measured(first) == measured(second)
    assert len({tuple(ids) for samples in written(first).values() for ids in samples}) > 24  # it does sample


def test_neither_order_nor_company_changes_an_answer(tiny, config):
    tasks, collector = tiny
    together = written(again(tasks[:24], collector, config))
    assert written(again(tasks[23::-1], collector, config)) == together
    alone = again(tasks[5:6], collector, config)
    assert written(alone) == {tasks[5].id: together[tasks[5].id]}


def test_evaluation_has_its_own_sampling_settings(config):
    assert (eval_params(config).temperature, config.sampling.temperature) == (1.0, 1.0)
    greedy = load_config(EvalRunConfig, RECIPE)
    assert eval_params(greedy) == SamplingParams(max_new_tokens=48, temperature=0.0)
    assert greedy.sampling.temperature == 1.0


# ---------------------------------------------------------------- from a run, a checkpoint, a config, a model


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps of the tiny recipe, with a checkpoint and an evaluation after each."""
    folder = tmp_path_factory.mktemp("runs") / "a run"
    small = ["batch.prompts_per_step=4", "eval.max_tasks=16", "eval.every=1", "checkpoint.every=1", "run.steps=2"]
    config = load_config(
        rl.RLConfig, RECIPE, [*small, f"run.dir={json.dumps(str(folder))}", "checkpoint.keep_best=eval/searches"]
    )
    done = rl.train(rl.start(config))
    done.close()
    return folder


def logged(run_dir: Path) -> dict[int, dict[str, float]]:
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row for row in rows}


@pytest.mark.parametrize("step", [1, 2])
def test_a_checkpoint_evaluates_to_what_the_run_logged(run_dir, step):
    target = find_target(str(run_dir), checkpoint=str(step))
    assert (target.run, target.step) == (run_dir, step)
    values = measured(evaluate_target(target).evaluation)
    assert values == {key: value for key, value in logged(run_dir)[step].items() if key.startswith("eval/")}


def test_the_files_of_an_evaluation(run_dir, tmp_path):
    target = find_target(str(run_dir), ["eval.max_tasks=5"])
    assert target.step == 2
    seen: list[tuple[int, int]] = []
    made = evaluate_target(target, lambda done, count: seen.append((done, count)))
    assert seen == [(i, 5) for i in range(1, 6)]
    made.write(tmp_path)
    made.check()
    results = json.loads((tmp_path / "results.json").read_text())
    assert results == made.as_dict()
    assert (results["tasks"], results["scored"], results["step"], results["temperature"]) == (5, 5, 2, 0.0)
    assert results["reward"].keys() == {"mean", "low", "high", "tasks"}
    stored = read_trajectories(tmp_path / "trajectories" / "step-000002.parquet")
    assert [t.token_ids for t in stored] == [t.token_ids for t in made.evaluation.trajectories]
    assert set(stored[0].policy_versions) == {-1, target.version}
    assert "1-hop" in (tmp_path / "table.txt").read_text()
    assert load_config(EvalRunConfig, tmp_path / "config.yaml") == target.config


def test_by_default_an_evaluation_never_lands_on_an_earlier_one(run_dir):
    target = find_target(str(run_dir))
    first = default_folder(target)
    assert first == run_dir / "evaluations" / "step-2"
    first.mkdir(parents=True)
    assert default_folder(target) == run_dir / "evaluations" / "step-2.2"
    assert default_folder(replace(target, run=None)).parts[:2] == ("runs", "evaluations")


def test_targets(run_dir):
    latest = find_target(str(run_dir))
    assert latest.config.model.path == str(run_dir / "checkpoints" / "step-2")
    assert latest.version == 4  # optimizer steps: two steps of two epochs
    assert find_target(str(run_dir / "checkpoints" / "step-1")).step == 1
    values = {step: row["eval/searches"] for step, row in logged(run_dir).items() if step}
    best = max(values, key=lambda step: (values[step], -step))
    assert find_target(str(run_dir), checkpoint="best").step == best
    packaged = find_target("tiny_search_base", config=RECIPE)
    assert (packaged.config.model.path, packaged.run, packaged.version) == ("tiny_search_base", None, 0)
    replaced = find_target(str(run_dir), ["model.path=tiny_search_base"])
    assert (replaced.config.model.path, replaced.run) == ("tiny_search_base", None)
    assert find_target(str(RECIPE), ["data.train=[]"]).config.data.eval  # evaluation needs no training data


@pytest.mark.parametrize(
    ("named", "options", "message"),
    [
        ("tiny_search_base", {}, "tiny_search_base is neither a run directory nor a config file"),
        ("tiny_search_base", {"config": RECIPE, "checkpoint": "best"}, "is no run directory"),
        (str(RECIPE), {"checkpoint": "best"}, "--config and --checkpoint go with a run or a model"),
        ("nowhere.yaml", {}, "there is no such config file"),
    ],
)
def test_targets_that_are_none_say_so(named, options, message):
    with pytest.raises(ConfigError, match=message):
        find_target(named, **options)


def test_a_file_of_data_in_the_place_of_a_model_is_told(tmp_path):
    (tmp_path / "asked.jsonl").write_text('{"question": "Where?"}\n')
    with pytest.raises(ConfigError, match=r"asked.jsonl is a file of data; first comes a run directory"):
        find_target(str(tmp_path / "asked.jsonl"))


def test_a_checkpoint_that_is_not_there_is_told_with_those_that_are(run_dir, tmp_path):
    with pytest.raises(ConfigError, match=r"has no checkpoint '7'; there are: 1, 2"):
        find_target(str(run_dir), checkpoint="7")
    (tmp_path / "config.yaml").write_text((run_dir / "config.yaml").read_text())
    with pytest.raises(ConfigError, match="has no checkpoint yet"):
        find_target(str(tmp_path))


def test_no_evaluation_data_is_found_before_the_model_loads():
    with pytest.raises(ConfigError, match=r"set data\.eval"):
        evaluate_target(find_target("no/such-model", ["data.eval=[]"], config=RECIPE))


def test_too_many_invalid_episodes_fail_after_the_numbers_are_there(run_dir):
    made = evaluate_target(find_target(str(run_dir), ["eval.max_tasks=2", "limits.max_prompt_tokens=64"]))
    broken = [replace_outcome(t, Invalid("tool_down", "gone")) for t in made.evaluation.trajectories]
    with pytest.raises(TooManyInvalid, match="tool_down: 2"):
        replace(made, evaluation=replace(made.evaluation, trajectories=tuple(broken))).check()


def replace_outcome(trajectory: Trajectory, outcome: Any) -> Trajectory:
    trajectory.outcome = outcome
    return trajectory


def test_a_renderer_shows_what_was_evaluated(run_dir):
    target = find_target(str(run_dir), ["eval.max_tasks=1"])
    made = evaluate_target(target)
    renderer: Renderer = load_renderer(target.config)
    assert made.texts == tuple(renderer.decode(t.token_ids) for t in made.evaluation.trajectories)
    assert made.texts[0].startswith("<|user|>")
