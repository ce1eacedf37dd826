"""A reward model: a Hugging Face sequence classifier, in this process, on a device of its own."""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.models.auto.configuration_auto import AutoConfig
from transformers.models.auto.modeling_auto import AutoModelForSequenceClassification
from transformers.models.auto.tokenization_auto import AutoTokenizer

from posttrain.deadline import in_thread
from posttrain.location import at_home, did_you_mean
from posttrain.rewards.functions import RewardError
from posttrain.rewards.model_options import ModelRewardConfig
from posttrain.task import Invalid, Outcome, Score, Task
from posttrain.thought import outside_thoughts
from posttrain.trajectory import Episode, Source

_HUB_ID = re.compile(r"^[\w.-]+(/[\w.-]+)?$")
_SHOWN = 5  # names that an error lists


class ModelReward:
    """Scores conversations in batches. The reward model's own chat template is applied once, to the messages.

    The model loads when the first episode is judged. Raises RewardError when it is no sequence classifier.
    """

    def __init__(self, config: ModelRewardConfig, name: str = "model") -> None:
        self.name = name
        self.config = config
        self._lock = threading.Lock()
        self._loaded: tuple[Any, Any] | None = None
        labels: int = _config_at(config.path).num_labels or 1
        if labels > 1 and config.label is None:
            raise RewardError(f"{config.path} has {labels} classes: whose probability is the reward? (options.label)")
        if config.label is not None and config.label >= max(labels, 2):
            raise RewardError(f"options.label = {config.label}, but {config.path} has {labels} classes")

    async def outcomes(self, episodes: Sequence[Episode], task: Task) -> list[Outcome]:
        conversations = [messages_of(episode, task, self.config.reads) for episode in episodes]
        return await in_thread(lambda: self.score(conversations))

    def close(self) -> None:
        self._loaded = None

    def score(self, conversations: Sequence[Sequence[dict[str, str]]]) -> list[Outcome]:
        """One outcome per conversation. Blocks; one caller at a time."""
        return self._score(lambda tokenizer: [encode(tokenizer, messages) for messages in conversations])

    def score_texts(self, texts: Sequence[str]) -> list[Outcome]:
        """The same for texts that carry their special tokens already, or want none."""
        return self._score(lambda tokenizer: [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts])

    def _score(self, encoded: Callable[[Any], list[list[int]]]) -> list[Outcome]:
        with self._lock:
            tokenizer, model = self._load()
            ids = encoded(tokenizer)
            limit = self.config.max_tokens
            fitting = [i for i, tokens in enumerate(ids) if 0 < len(tokens) <= limit]
            values = dict(zip(fitting, self._forward(model, [ids[i] for i in fitting]), strict=True))
        return [
            self._outcome(values[i])
            if i in values
            else Invalid("too_long_for_reward_model", f"{len(ids[i])} tokens, max_tokens is {limit}")
            for i in range(len(ids))
        ]

    def _outcome(self, value: float) -> Outcome:
        if not math.isfinite(value):
            return Invalid("non_finite_reward", f"the reward model gave {value}")
        return Score(value, {self.name: value})

    def _load(self) -> tuple[Any, Any]:
        if self._loaded is None:
            tokenizer = AutoTokenizer.from_pretrained(self.config.path)
            dtype = getattr(torch, self.config.dtype)
            model: Any = AutoModelForSequenceClassification.from_pretrained(self.config.path, dtype=dtype)
            self._loaded = tokenizer, model.to(self.config.device).eval()
        return self._loaded

    @torch.inference_mode()
    def _forward(self, model: Any, ids: Sequence[list[int]]) -> list[float]:
        """Longest first, so that a batch pads little and what does not fit in memory fails at once."""
        values: dict[int, float] = {}
        order = sorted(range(len(ids)), key=lambda i: -len(ids[i]))
        while order:
            room = max(1, self.config.tokens_per_batch // len(ids[order[0]]))
            taken, order = order[:room], order[room:]
            found = self._values(model(**_padded([ids[i] for i in taken], model)).logits.float())
            values.update(zip(taken, found.tolist(), strict=True))
        return [values[i] for i in range(len(ids))]

    def _values(self, logits: Tensor) -> Tensor:
        """[B, classes] -> [B]."""
        if self.config.label is not None and logits.shape[1] > 1:
            return logits.softmax(-1)[:, self.config.label]
        return logits[:, 0].sigmoid() if self.config.squash else logits[:, 0]


def _config_at(path: str) -> Any:
    """The config of a sequence classifier. Raises RewardError that says what was looked for, where, and what to do."""
    folder = at_home(Path(path))
    here = f"options.path of the reward model is {path}"
    fix = "give a folder that save_pretrained wrote (config.json, *.safetensors, tokenizer.json), or a hub id"
    if folder.is_dir() and not (folder / "config.json").is_file():
        inside = ", ".join(sorted(entry.name for entry in folder.iterdir())[:_SHOWN]) or "nothing"
        raise RewardError(f"{here}: that folder has no config.json (it holds {inside}); {fix}")
    if not folder.exists() and ((folder.parent != Path() and folder.parent.is_dir()) or not _HUB_ID.match(path)):
        beside = sorted(entry.name for entry in folder.parent.iterdir()) if folder.parent.is_dir() else []
        near = did_you_mean(folder.name, beside)
        raise RewardError(f"{here}: there is no such folder (looked from {Path.cwd()}).{near} Else {fix}")
    try:
        found = AutoConfig.from_pretrained(path)
    except (OSError, ValueError) as error:
        first = str(error).strip().splitlines()[0]
        looked = "" if folder.exists() else f"no folder of that name under {Path.cwd()}, and not on the hub: "
        raise RewardError(f"{here}: {looked}{first.split(chr(39) + '[Errno')[0]}; {fix}") from error
    kinds = found.architectures or []
    if kinds and not any(kind.endswith("ForSequenceClassification") for kind in kinds):
        raise RewardError(
            f"{here}: it is a {kinds[0]}, and its scores would come from an untrained head; {fix}, of a "
            "...ForSequenceClassification"
        )
    return found


def messages_of(episode: Episode, task: Task, reads: str) -> list[dict[str, str]]:
    """The prompt's messages and one reply. `whole`: all that came after the prompt, tool output included."""
    if reads == "final":
        reply = outside_thoughts(episode.final_text).strip()
    else:
        after = [segment for segment in episode.segments if segment.source is not Source.PROMPT]
        reply = "".join(segment.text for segment in after if segment.source is not Source.TEMPLATE).strip()
    prompt = [{"role": str(m["role"]), "content": str(m.get("content") or "")} for m in task.prompt]
    return [*prompt, {"role": "assistant", "content": reply}]


def encode(tokenizer: Any, messages: Sequence[dict[str, str]]) -> list[int]:
    """The ids of a conversation, special tokens once: those of the template, or else those of the tokenizer."""
    if tokenizer.chat_template:
        text = tokenizer.apply_chat_template(list(messages), tokenize=False)
        return tokenizer(text, add_special_tokens=False)["input_ids"]
    return tokenizer("\n\n".join(message["content"] for message in messages))["input_ids"]


def _padded(ids: Sequence[list[int]], model: Any) -> dict[str, Tensor]:
    """Right-padded ids and mask, [B, longest].

    A decoder's head reads the last token that is not the padding id: an end-of-turn token that is also the padding
    token would be passed over. So the padding id is one that no row ends with.
    """
    width, ends = max(map(len, ids)), {row[-1] for row in ids}
    pad = model.config.pad_token_id = next(i for i in range(len(ids) + 1) if i not in ends)
    tokens = torch.tensor([row + [pad] * (width - len(row)) for row in ids], device=model.device)
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in ids], device=model.device)
    return {"input_ids": tokens, "attention_mask": mask}
