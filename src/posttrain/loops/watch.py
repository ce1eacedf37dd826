"""An episode while it is played, for a person: what is written and read, what is called, what was found.

`Watched` stands between rollout and engine and sees every token at the moment it is needed; `WatchedEnv` stands between
rollout and env and sees every call. So nothing is rolled out in a second way.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.text import Text

from posttrain.envs import Action, Env, Observation, Step
from posttrain.envs.budget import TextCodec
from posttrain.loops.show import VISIBLE, colored
from posttrain.sampler.protocol import Sampled, Sampler, SamplingParams
from posttrain.task import Task
from posttrain.tools.online.render import cited_ids
from posttrain.trajectory import CallStatus, Episode, Source, ToolCall, Trajectory

Show = Callable[[Text], None]
HISTORY_REWRITTEN = "\n--- history was rewritten; the policy now sees ---\n"
OTHER_CONVERSATION = "\n--- another conversation of the same episode ---\n"
CALL_STYLE, FAILED_STYLE, READ_STYLE = "cyan", "bold red", "magenta"
LONGEST = 120  # characters of an argument or a title that are shown

_SNIPPET = re.compile(r"<(?:snippet|webpage) id=([^\s<>]+)>\nTitle: ([^\n]*)\n(?:URL: ([^\n]*)\n)?")
_DOC = re.compile(r"^(?:<\w+>)?Doc (\d+)\(Title: (\"[^\n]*?\"|[^\n]*?)\) ", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """What the policy was shown under a title. `id` is what a citation names it by; '' where it has none."""

    title: str
    id: str = ""
    url: str = ""

    def line(self) -> str:
        return " ".join(part for part in (f"[{self.id}]" if self.id else "", _short(self.title), self.url) if part)


class Watched:
    """A `Sampler` that passes everything on and shows it: first what is new in the context, then what was sampled."""

    def __init__(self, sampler: Sampler, renderer: TextCodec, show: Show) -> None:
        self._sampler = sampler
        self._renderer = renderer
        self._show = show
        self._seen: dict[str | None, Trajectory] = {}  # by session
        self._last: str | None = None

    @property
    def version(self) -> int:
        return self._sampler.version

    async def sample(
        self, ids: Sequence[int], params: SamplingParams, *, seed: int, session: str | None = None
    ) -> Sampled:
        if self._seen and self._last != session:
            self._show(Text(OTHER_CONVERSATION, style="dim italic"))
        self._last = session
        seen = self._seen.setdefault(session, _empty())
        if list(ids[: len(seen)]) != seen.token_ids:
            self._show(Text(HISTORY_REWRITTEN, style="dim italic"))
            seen = self._seen[session] = _empty()
        first = len(seen)
        seen.add_context(ids[first:], Source.ENV if first else Source.PROMPT)
        self._show(colored(seen, self._renderer, first=first))
        sampled = await self._sampler.sample(ids, params, seed=seed, session=session)
        first = len(seen)
        seen.add_sampled(sampled.ids, sampled.logprobs, sampled.versions)
        self._show(colored(seen, self._renderer, first=first))
        return sampled

    def release(self, session: str) -> None:
        """The token sequence is over, and so is what was seen of it."""
        self._seen.pop(session, None)
        self._sampler.release(session)


class WatchedEnv:
    """An `Env` that shows each call with what became of it, the documents that came back, and the turn's reward."""

    def __init__(self, env: Env, show: Show) -> None:
        self._env = env
        self._show = show
        self.stop_strings, self.max_turns = env.stop_strings, env.max_turns

    def __getattr__(self, name: str) -> Any:
        """`tools`, and what else it may have."""
        return getattr(self._env, name)

    async def reset(self, task: Task) -> Observation:
        return await self._env.reset(task)

    async def step(self, action: Action) -> Step:
        step = await self._env.step(action)
        for line in _lines(step):
            self._show(line)
        return step

    async def close(self) -> None:
        await self._env.close()


def _lines(step: Step) -> Iterator[Text]:
    for call in step.calls:
        yield call_line(call)
    for found in documents_in(_foreign(step.observation)):
        yield Text(f"\n     read {found.line()}".translate(VISIBLE), READ_STYLE)
    if step.reward is not None:
        yield Text(f"\n  => the env gives {step.reward:g}", CALL_STYLE)


def call_line(call: ToolCall) -> Text:
    """`-> search(query="tower") ok, 0.15 s`; what failed says why."""
    given = ", ".join(f"{key}={_short(repr(value))}" for key, value in call.arguments.items())
    end = f", {call.seconds:.2f} s" if call.seconds >= 0.01 else ""
    why = f": {_short(call.detail)}" if call.detail and call.status is not CallStatus.OK else ""
    text = f"-> {call.name}({given}) {call.status.value}{end}{why}"
    style = CALL_STYLE if call.status is CallStatus.OK else FAILED_STYLE
    return Text("\n  " + text.replace("\n", " ").translate(VISIBLE), style)


def documents_in(text: str) -> list[Document]:
    """Snippets and pages in their wrappers, and passages as the search env writes them; each once."""
    wrapped = (Document(id=found[1], title=found[2], url=found[3] or "") for found in _SNIPPET.finditer(text))
    passages = (Document(title=found[2].strip('"')) for found in _DOC.finditer(text))
    return list(dict.fromkeys((*wrapped, *passages)))


def documents_read(episode: Episode) -> list[Document]:
    """All that the environment showed; what the policy wrote itself is no document."""
    shown = (s.text for s in episode.segments if s.source in (Source.ENV, Source.TEMPLATE))
    return list(dict.fromkeys(found for text in shown for found in documents_in(text)))


def cited(episode: Episode) -> set[str]:
    """The ids that the last turn cites, or the answer of an external agent."""
    return set(cited_ids(episode.final_text if episode.answer is None else episode.answer))


def _foreign(observation: Observation | None) -> str:
    if observation is None:
        return ""
    messages: Iterable[Any] = (message.get("content") for message in observation.messages)
    return "\n".join([f"{observation.head}{observation.text}", *(str(content) for content in messages)])


def _short(text: str) -> str:
    return text if len(text) <= LONGEST else text[: LONGEST - 3] + "..."


def _empty() -> Trajectory:
    return Trajectory(task_id="", group_id="", episode_id="")
