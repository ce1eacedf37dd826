"""What other packages use of `chat`: prompts, deltas, foreign text, decoding and stop ids for one tokenizer.

Nothing here re-renders what the policy wrote: a prompt is rendered once, then every environment message is appended as
the delta that the template puts behind *any* policy turn.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from posttrain.chat.decoding import Decoder
from posttrain.chat.encoding import Encoder
from posttrain.chat.errors import ChatError
from posttrain.chat.probe import ProbeReport, Verdict, probe
from posttrain.chat.template import ChatTemplate, Continuation, Tools
from posttrain.chat.thinking import strip_thinking
from posttrain.task import Message
from posttrain.trajectory import Source

if TYPE_CHECKING:
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase

Thinking = Literal["keep", "strip_and_fork"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StartupReport:
    """What a run should know of its tokenizer before it starts.

    default_system: the text that the template puts before the first user message when no system message is given.
    reads_clock: prompts change with the date, so that a run resumed another day is not the same; pin the date with
    template_options (Llama: {"date_string": "26 Jul 2024"}).
    """

    has_template: bool
    bos_count: int
    default_system: str | None
    reads_clock: bool
    end_of_turn: str | None
    stop_tokens: Mapping[int, str]
    thinking: Thinking
    verdicts: Mapping[str, Verdict]


class Renderer:
    """Messages <-> token ids for one tokenizer.

    thinking: "keep" leaves earlier thinking in the history, whatever the template would do; "strip_and_fork" follows
    templates that drop it: see `fork`.
    generation_config: where further stop ids are (`eos_token_id`); by default the file beside the tokenizer is read.
    template_options: further variables of the template, such as {"enable_thinking": False}.
    A tokenizer without a chat template joins raw contents: put separators into them.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        thinking: Thinking = "keep",
        *,
        generation_config: Mapping[str, Any] | Any | None = None,
        template_options: Mapping[str, Any] | None = None,
    ) -> None:
        if thinking not in get_args(Thinking):
            raise ChatError(f"thinking must be one of {', '.join(get_args(Thinking))}; got {thinking!r}")
        self.tokenizer = tokenizer
        self.thinking: Thinking = thinking
        source = tokenizer.get_chat_template() if tokenizer.chat_template else None
        self._encoder = Encoder(tokenizer, source)
        self._template = ChatTemplate(tokenizer, self._encoder, template_options or {}) if source else None
        self._decoder = Decoder(tokenizer, self._encoder.special_ids)
        self._dropped: dict[str, bool] = {}
        self._opening_ids = self._encoder.ids(self._template.generation_thinking) if self._template else []
        self.stop_ids: frozenset[int] = self._find_stop_ids(generation_config)

    @property
    def end_of_turn_id(self) -> int | None:
        """The id that closes a policy turn; None without a template, or where the next header does."""
        text = self._template.end_of_turn if self._template else None
        return None if text is None else self._encoder.control[text]

    @property
    def shows_tools(self) -> bool:
        """Whether the template describes the tools that a prompt is given."""
        return self._template is not None and self._template.shows_tools

    def prompt(self, messages: Sequence[Message], tools: Tools | None = None) -> list[int]:
        """The beginning of a trajectory, up to where the policy writes; exactly one BOS where the model has one."""
        if not messages:
            raise ChatError("a prompt needs at least one message")
        if messages[-1].get("role") == "assistant" and self._template:
            raise ChatError("the prompt ends with an assistant message; the policy writes the next one, so drop it")
        return self.rendered(messages, tools, generation=True)

    def start(self, text: str) -> list[int]:
        """The beginning of a trajectory from bare text, with a BOS where the model has one. No template is used, and
        what spells a control token is encoded as ordinary characters."""
        return self._encoder.start(self.text(text))

    def rendered(self, messages: Sequence[Message], tools: Tools | None = None, *, generation: bool) -> list[int]:
        """A whole conversation as the template renders it at once, with or without the generation prompt."""
        if self._template is None:
            if tools:
                raise ChatError(
                    "this tokenizer has no chat template to describe tools; describe them in the prompt text"
                )
            return self._encoder.start(self._start_text("".join(_raw_text(message) for message in messages)))
        marked = self._template.prompt(messages, tools, generation=generation)
        self._refuse_dropped(messages)
        if tools and not self._template.shows_tools:
            raise ChatError("the chat template ignores `tools`; describe them in a system or user message")
        return self._encoder.start(self._encoder.ids(marked))

    def delta(self, messages: Sequence[Message], *, after: int | None = None) -> list[tuple[list[int], Source]]:
        """What follows a policy turn: separator, the messages (rendered jointly), the generation prompt.

        Pieces with their source, in order: TEMPLATE for the template's tokens, ENV where a token holds any content.
        The end-of-turn token itself is not in it; see `closing`. after: the last sampled id, needed only where the next
        header ends a turn (GLM), so that a header which the policy sampled is not written twice.
        """
        if not messages:
            raise ChatError("delta() needs at least one environment message")
        if self._template is None:
            pieces = [(self.text(_raw_text(message)), Source.ENV) for message in messages]
            return [piece for piece in pieces if piece[0]]
        pieces = self._labelled(self._template.continuation(messages))
        first = pieces[0][0][0]
        if first == self.end_of_turn_id or (self.end_of_turn_id is None and first == after):
            pieces[0] = (pieces[0][0][1:], pieces[0][1])
        return [piece for piece in pieces if piece[0]]

    def closing(self, last_id: int | None) -> list[int]:
        """What must be injected (Source.INJECTED) to close a turn that did not end with a stop id."""
        end = self.end_of_turn_id
        return [] if end is None or last_id in self.stop_ids else [end]

    def fork(self, token_ids: Sequence[int], source: Sequence[Source], messages: Sequence[Message]) -> list[int] | None:
        """The prompt ids of the new trajectory that `messages` must start, or None when they can be appended.

        A fork is needed under "strip_and_fork" when the template would forget, in front of these messages, thinking
        that the history (token_ids, source: [L], ending with a closed policy turn) still holds. What remains of the
        history keeps its ids; nothing is rendered again.
        """
        if self.thinking == "keep" or self._template is None:
            return None
        if not any(message.get("role") in self._template.forgets_thinking_after for message in messages):
            return None
        stripped = strip_thinking(
            token_ids,
            source,
            opening=self._opening_ids,
            opening_text=self._template.generation_thinking,
            decode=self.decode,
            encode=self.text,
        )
        return (
            None if stripped is None else stripped + [token_id for ids, _ in self.delta(messages) for token_id in ids]
        )

    def text(self, text: str) -> list[int]:
        """Foreign text in the middle of a trajectory; what spells a control token is encoded as ordinary characters."""
        return self._encoder.text(text)

    def decode(self, ids: Sequence[int]) -> str:
        """Everything, control tokens included; a character cut in the middle shows as U+FFFD."""
        return self._decoder.text(ids)

    def complete_text(self, ids: Sequence[int]) -> str:
        """What parsers and scorers read: no special tokens, and it ends with the last complete character."""
        return self._decoder.complete_text(ids)

    def probe(self, *, tools: bool = True) -> ProbeReport:
        """Refuses a template whose history is not append-only, naming the first differing token (NotAppendOnly).

        tools: whether the run may hold tool messages; without, those conversations are not probed.
        """
        return ProbeReport() if self._template is None else probe(self, tools=tools)

    def report(self, *, tools: bool = True) -> StartupReport:
        """BOS count, default system text, end of turn, stop ids and the probe's verdicts; raises as `probe` does."""
        ids = self.prompt([{"role": "user", "content": "Hello?"}])
        return StartupReport(
            has_template=self._template is not None,
            bos_count=ids.count(self._encoder.bos_id) if self._encoder.bos_id is not None else 0,
            default_system=self._default_system(),
            reads_clock=self._template is not None and self._template.reads_clock,
            end_of_turn=self._template.end_of_turn if self._template else None,
            stop_tokens={token_id: self.decode([token_id]) for token_id in sorted(self.stop_ids)},
            thinking=self.thinking,
            verdicts=self.probe(tools=tools).verdicts,
        )

    def _start_text(self, text: str) -> list[int]:
        return self._encoder.ids(self._encoder.guard(text, tags_allowed=True))

    def _labelled(self, continuation: Continuation) -> list[tuple[list[int], Source]]:
        encoded = self._encoder.encode(continuation.text)
        pieces: list[tuple[list[int], Source]] = []
        for token_id, (start, end) in zip(encoded.ids, encoded.spans, strict=True):
            holds_content = any(start < stop and end > begin for begin, stop in continuation.content)
            source = Source.ENV if holds_content else Source.TEMPLATE
            if not pieces or pieces[-1][1] is not source:
                pieces.append(([], source))
            pieces[-1][0].append(token_id)
        return pieces

    def _refuse_dropped(self, messages: Iterable[Message]) -> None:
        assert self._template is not None
        for role in {str(message.get("role")) for message in messages} - {"user", "assistant"}:
            if role not in self._dropped:
                self._dropped[role] = self._template.drops_role(role)
            if self._dropped[role]:
                raise ChatError(
                    f"the chat template silently drops messages of role {role!r}; use a role that it renders"
                )

    def _find_stop_ids(self, generation_config: Mapping[str, Any] | Any | None) -> frozenset[int]:
        found = set(_ids(self.tokenizer.eos_token_id))
        if generation_config is None:
            found.update(_eos_beside(self.tokenizer))
        elif isinstance(generation_config, Mapping):
            found.update(_ids(generation_config.get("eos_token_id")))
        else:
            found.update(_ids(generation_config.eos_token_id))
        if self._template:
            ends = self._template.turn_openers if self._template.end_of_turn is None else {self._template.end_of_turn}
            found.update(self._encoder.control[text] for text in ends)
        return frozenset(found)

    def _default_system(self) -> str | None:
        if self._template is None:
            return None
        opening = self._template.opening().removesuffix(self._template.user_header())
        for text in sorted(self._encoder.control, key=len, reverse=True):
            opening = opening.replace(text, "")
        return re.sub(r"^\s*system\s*\n", "", opening).strip() or None


def _raw_text(message: Message) -> str:
    content = message.get("content")
    if not isinstance(content, str):
        raise ChatError(f"without a chat template the content of a message must be text, got {content!r:.100}")
    return content


def _ids(eos: Any) -> list[int]:
    if eos is None:
        return []
    return [eos] if isinstance(eos, int) else [int(token_id) for token_id in eos]


def _eos_beside(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The end ids in the model files that the tokenizer was loaded from, if it came from a folder."""
    found: list[int] = []
    for name in ("generation_config.json", "config.json"):
        path = Path(str(tokenizer.name_or_path or "")) / name
        if tokenizer.name_or_path and path.is_file():
            found += _ids(json.loads(path.read_text(encoding="utf-8")).get("eos_token_id"))
    return found
