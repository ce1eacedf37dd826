"""One step of TRL's GRPOTrainer per question, on the work of `benchmarks.work`. Runs in an environment of its own:

    python3.11 -m venv DIR && DIR/bin/pip install 'trl==1.16.0' torch 'transformers<5.20'
    DIR/bin/python benchmarks/peers/trl_step.py --model FOLDER --work 64+64

Everything that could be faster is on: no KL term, no gradient checkpointing, one optimizer step per rollout in the
largest micro-batch that fits (`--micro` episodes), float32 on a CPU as for everyone, weights and optimizer in bfloat16
without autocast on a GPU. The tool loop is TRL's own; what is forced is the calls and the lengths.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch
import trl.trainer.grpo_trainer as grpo
from datasets import Dataset
from transformers import LogitsProcessor, PreTrainedTokenizerFast, TrainerCallback

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.peers.line import Line
from benchmarks.work import EOS, WORKS, Work

ROUNDS = 100
TEMPLATE = """{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %} call {{ c.function.name }} \
{{ c.function.arguments | tojson }}{% endfor %} {% endfor %}"""


class ForcedLengths(LogitsProcessor):
    """The end token is drawn at the planned length and not before."""

    def __init__(self, lengths: list[int], prompt_tokens: int) -> None:
        self.last = torch.tensor(lengths) + prompt_tokens - 1

    def __call__(self, input_ids, scores):
        self.last = self.last.to(scores.device)
        ends = self.last == input_ids.shape[1]
        end_scores = torch.where(ends, 0.0, -torch.inf)
        scores = scores.masked_fill(ends[:, None], -torch.inf)
        scores[:, EOS] = end_scores
        return scores


class Forced:
    """Plays the plan: lengths for `generate`, calls for the parser, answers for the tool."""

    def __init__(self, work: Work) -> None:
        self.work = work
        self.round = 0
        self.turn = 0
        self.parsed = 0

    def begin(self, round_: int) -> None:
        self.round, self.turn, self.parsed = round_, 0, 0

    def wrap(self, generate):
        def forced(*args, input_ids, **kwargs):
            lengths = [self.work.length(self.round, episode, self.turn) for episode in range(len(input_ids))]
            self.turn += 1
            processor = [ForcedLengths(lengths, input_ids.shape[1])]
            return generate(*args, input_ids=input_ids, logits_processor=processor, **kwargs)

        return forced

    def parse(self, tokenizer, ids, *, prefix, tools):
        turn, episode = divmod(self.parsed, self.work.episodes)
        self.parsed += 1
        message = {"role": "assistant", "content": tokenizer.decode(ids)}
        if turn < self.work.tool_turns:
            call = {"name": "search", "arguments": {"episode": episode, "turn": turn}}
            message["tool_calls"] = [{"type": "function", "function": call}]
        return message

    def search(self, episode: int, turn: int) -> str:
        """Answers.

        Args:
            episode: which.
            turn: which.
        """
        time.sleep(self.work.latency(self.round, episode, turn))
        return self.work.observation(self.round, episode, turn)


class Stopwatch(TrainerCallback):
    """Waits for a question before every step and answers after it."""

    def __init__(self, line: Line, forced: Forced) -> None:
        self.line, self.forced = line, forced
        self.rollout = 0.0

    def watch(self, generate):
        def timed(prompts):
            started = time.perf_counter()
            out = generate(prompts)
            self.rollout = time.perf_counter() - started  # its last act is to copy the tokens to the host
            if torch.cuda.is_available():
                torch.cuda.reset_peak_memory_stats()
            self.tokens = sum(sum(mask) for mask in out[2]) if out[2] else sum(map(len, out[1]))
            return out

        return timed

    def on_step_begin(self, args, state, control, **kwargs):
        question = self.line.ask()
        if question is None:
            sys.exit(0)
        self.forced.begin(question["round"])
        assert question["round"] == state.global_step, "rounds are asked for in order: the data is"
        self.started = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds = time.perf_counter() - self.started
        self.line.answer(
            step=seconds,
            rollout=self.rollout,
            train=seconds - self.rollout,
            tokens=self.tokens,
            train_peak_bytes=torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0,
        )


def coin(completions, **kwargs) -> list[float]:
    texts = [c if isinstance(c, str) else c[-1]["content"] for c in completions]
    return [float(sum(map(ord, text[-8:])) % 5) for text in texts]


def trainer_of(options: argparse.Namespace, line: Line):
    folder, work, on_cpu = options.model, WORKS[options.work], options.device == "cpu"
    micro = options.micro or work.episodes
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, padding_side="left")  # as saved
    forced = Forced(work)
    texts = [work.prompt(round_, place) for round_ in range(ROUNDS) for place in range(work.prompts)]
    tools = None
    if work.tool_turns:
        tokenizer.chat_template = TEMPLATE
        tokenizer.response_template = {"forced": True}
        grpo.parse_response = forced.parse
        texts = [[{"role": "user", "content": text}] for text in texts]
        tools = [forced.search]
    stopwatch = Stopwatch(line, forced)
    trainer = grpo.GRPOTrainer(
        model=folder,
        reward_funcs=coin,
        args=grpo.GRPOConfig(
            output_dir="/tmp/trl_out",
            per_device_train_batch_size=micro,
            gradient_accumulation_steps=work.episodes // micro,
            num_generations=work.samples,
            max_completion_length=work.most_tokens,
            learning_rate=1e-5,
            lr_scheduler_type="constant",
            max_steps=ROUNDS,
            beta=0.0,
            bf16=False,  # on a GPU the weights are; autocast besides would cost time
            use_cpu=on_cpu,
            gradient_checkpointing=False,
            shuffle_dataset=False,
            save_strategy="no",
            report_to="none",
            logging_strategy="no",
            disable_tqdm=True,
            model_init_kwargs={"dtype": "float32" if on_cpu else "bfloat16"},
        ),
        train_dataset=Dataset.from_dict({"prompt": texts}),
        processing_class=tokenizer,
        tools=tools,
        callbacks=[stopwatch],
    )
    trainer.model.generate = forced.wrap(trainer.model.generate)
    trainer._generate = stopwatch.watch(trainer._generate)
    return trainer


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--work", required=True, choices=WORKS)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--micro", type=int, help="episodes of a micro-batch; default: all")
    options = parser.parse_args()
    line = Line()
    trainer = trainer_of(options, line)
    line.answer(ready=True, version=grpo.__name__.split(".")[0] + " " + __import__("trl").__version__)
    trainer.train()
