"""A reward that learns, in a real run: what it has learnt is logged, kept in checkpoints and found again."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from loops.toy import metric_rows, rows, toy_config, write_rows
from posttrain.loops import rl
from posttrain.rewards.scoring import states
from rewards.servers import Stub, completion, stub


def judge(body):
    """Grades by the length of the response; makes an item out of it."""
    text = body["messages"][-1]["content"]
    if "tell the good ones from the bad ones" not in text:
        return completion(json.dumps({"score": len(text) % 3}))
    made = [{"description": f"is like the one of {len(text)}", "title": ""}]
    return completion(json.dumps({"positive_rubrics": made, "negative_rubrics": []}))


def config(folder: Path, server: Stub, steps: int):
    write_rows(folder / "rubrics.jsonl", rows(rubrics=[{"description": "names a town", "weight": 1.0}]))
    source = {
        "path": str(folder / "rubrics.jsonl"),
        "columns": {"ground_truth": "rubrics"},
        "ground_truth_format": "opaque",
    }
    options = {"url": server.url + "/v1", "model": "m", "reads": "final", "max_active": 3}
    made = toy_config(folder, data={"train": [source]}, run={"steps": steps}, checkpoint={"every": 1})
    reward = type(made.reward).model_validate({"name": "evolving_rubric", "options": options})
    return made.model_copy(update={"reward": reward})


def test_an_evolving_rubric_survives_a_resume(tmp_path):
    with stub(judge) as server:
        run = rl.start(config(tmp_path, server, 2))
        with asyncio.Runner() as runner:
            rl._do_step(run, runner)
        first = states(run.parts.rewards)
        run.close()
        assert first["default/0/evolving_rubric"]["generated"] > 0

        resumed = rl.resume(tmp_path / "run")
        try:
            assert resumed.step == 1
            assert states(resumed.parts.rewards) == first
            rl.train(resumed)
        finally:
            resumed.close()
    after = states(resumed.parts.rewards)["default/0/evolving_rubric"]
    assert after["generated"] > first["default/0/evolving_rubric"]["generated"]
    logged = metric_rows(resumed)
    assert logged[1]["rubric/generated"] == first["default/0/evolving_rubric"]["generated"]
    assert logged[2]["rubric/generated"] == after["generated"]
    timing = [json.loads(line) for line in (tmp_path / "run" / "timing.jsonl").read_text().splitlines()]
    assert all(row["scorer/calls"] > 0 and row["scorer/failures"] == 0 for row in timing)
