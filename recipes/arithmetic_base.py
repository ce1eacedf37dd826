"""Makes the small base model of arithmetic.yaml: it writes expressions of the given numbers, with any operator.

    python recipes/arithmetic_base.py --out models/arithmetic

A two-layer model with random weights learns the form from demonstrations in half a minute of one core. Which
operator is right it is never told; that is left to reinforcement learning.
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config

sys.path.insert(0, str(Path(__file__).parent))
from arithmetic import SIGNS, rows

from posttrain.algorithms.aggregates import token_mean
from posttrain.packing import pack
from posttrain.trainer.optimizer import Optimizer, OptimizerConfig
from posttrain.trainer.policy import Policy
from posttrain.trajectory import Source, Trajectory

CONTROL = ("<pad>", "<|end|>", "<|user|>", "<|assistant|>")
TAGS = ("<answer>", "</answer>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def build_tokenizer() -> Any:
    """Bytes, the two tags and four control tokens."""
    pieces = [*CONTROL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    core = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in CONTROL])
    core.add_tokens([AddedToken(tag, normalized=False) for tag in TAGS])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", eos_token="<|end|>", extra_special_tokens=list(CONTROL[2:])
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def model_config(vocabulary_size: int) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=vocabulary_size,
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=24,
        tie_word_embeddings=True,
        max_position_embeddings=1024,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )


def demonstration(rng: random.Random, row: dict[str, Any], tokenizer: Any, turns: int) -> Trajectory:
    """The given numbers with any operators; some are corrected by as blind a guess."""
    made = Trajectory(task_id=row["id"], group_id=row["id"], episode_id=f"{rng.getrandbits(64):x}")
    prompt = [{"role": "user", "content": row["question"]}]
    made.add_context(
        tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False), Source.PROMPT
    )
    for turn in range(turns):
        if turn:
            said = f"\nThat makes {rng.randint(1, 81)}.\n"
            made.add_context(tokenizer.encode(said, add_special_tokens=False), Source.ENV)
        given = [str(number) for number in row["numbers"]]
        written = given[0] + "".join(f" {rng.choice(SIGNS)} {number}" for number in given[1:])
        ids = tokenizer.encode(f"<answer>{written}</answer>", add_special_tokens=False)
        made.add_sampled(ids, [0.0] * len(ids), 0)  # the demonstrator is certain of every token
    return made


def train(policy: Policy, tokenizer: Any, *, steps: int, batch_size: int) -> float:
    """Returns the last loss."""
    config = OptimizerConfig(lr=4e-3, warmup_optimizer_steps=min(20, steps), schedule="cosine", betas=(0.9, 0.98))
    optimizer, rng, loss = Optimizer(policy.parameters(), config, steps), random.Random(0), torch.zeros(())
    tasks = rows("train", seed=1, count=2048)
    for step in range(steps):
        longest = 1 if step < 0.4 * steps else 3  # turns; copying is learnt sooner from short ones
        shown = (demonstration(rng, rng.choice(tasks), tokenizer, rng.randint(1, longest)) for _ in range(batch_size))
        batch = pack(list(shown))
        weights = token_mean(batch.loss_mask, batch.episode_index).to(policy.device)
        loss = -(policy.logprobs(batch) * weights).sum()
        loss.backward()
        optimizer.step()
        if step % 50 == 0 or step == steps - 1:
            print(f"step {step:4d}  loss {loss.item():.3f}", flush=True)
    return loss.item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=64)
    args = parser.parse_args()
    tokenizer = build_tokenizer()
    policy = Policy.random(model_config(len(tokenizer)), seed=0, device="cpu")
    train(policy, tokenizer, steps=args.steps, batch_size=args.batch_size)
    policy.save(args.out, tokenizer)


if __name__ == "__main__":
    main()
