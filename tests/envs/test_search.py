import asyncio
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from posttrain.envs.protocol import Action, Step
from posttrain.envs.search import (
    EMPTY_QUERY,
    INVALID_ACTION,
    SEARCH_R1_PROMPT,
    SearchEnv,
    format_passages,
    parse_call,
    search_prompt,
)
from posttrain.retrieval.protocol import Passage, RetrievalError
from posttrain.task import EpisodeInvalid, Task
from posttrain.trajectory import CallStatus, StopReason

TASK = Task(id="t", prompt=({"role": "user", "content": "q"},))


class Shelf:
    def __init__(self, failure: BaseException | None = None, seconds: float = 0.0) -> None:
        self.failure, self.seconds, self.queries = failure, seconds, []

    async def retrieve(self, queries, top_k):
        self.queries += queries
        await asyncio.sleep(self.seconds)
        if self.failure is not None:
            raise self.failure
        found = [Passage("1", '"Tower"\nThe tower is in Paris.'), Passage("2", '"Bread"\nBread is baked.')]
        return [found[:top_k] for _ in queries]

    async def close(self):
        return None


def play(env: SearchEnv, *turns: str, stop: StopReason = StopReason.STOP_STRING) -> list[Step]:
    async def run() -> list[Step]:
        await env.reset(TASK)
        return [await env.step(Action(text=turn, stop_reason=stop)) for turn in turns]

    return asyncio.run(run())


def test_a_search_returns_search_r1s_information_block_exactly() -> None:
    shelf = Shelf()
    (step,) = play(SearchEnv(retriever=shelf, top_k=2), "I wonder. <search> tower\n</search>")
    assert shelf.queries == ["tower"]
    seen = step.observation
    assert seen is not None
    assert seen.head + seen.text + seen.tail == (
        '\n\n<information>Doc 1(Title: "Tower") The tower is in Paris.\nDoc 2(Title: "Bread") Bread is baked.'
        "</information>\n\n"
    )
    assert not step.done
    assert [(call.name, call.arguments, call.status) for call in step.calls] == [
        ("search", {"query": "tower"}, CallStatus.OK)
    ]


def test_top_k_is_passed_on() -> None:
    (step,) = play(SearchEnv(retriever=Shelf(), top_k=1), "<search>x</search>")
    assert step.observation is not None
    assert step.observation.text == 'Doc 1(Title: "Tower") The tower is in Paris.'


def test_passages_of_several_lines_keep_their_line_breaks() -> None:
    assert format_passages([Passage("1", '"A"\nb\nc'), Passage("2", "only a title")]) == (
        'Doc 1(Title: "A") b\nc\nDoc 2(Title: only a title)'
    )
    assert format_passages([]) == ""


def test_an_answer_ends_the_episode_without_observation() -> None:
    (step,) = play(SearchEnv(retriever=Shelf()), "<answer> Paris </answer>")
    assert step.done
    assert step.observation is None
    assert step.calls[0].arguments == {"answer": "Paris"}
    assert step.reward is None


def test_no_tag_gets_search_r1s_invalid_action_text_as_raw_text() -> None:
    (step,) = play(SearchEnv(retriever=Shelf()), "Paris, I think.", stop=StopReason.LENGTH)
    assert step.observation is not None
    assert step.observation.head == (
        "\nMy previous action is invalid. If I want to search, I should put the query between <search> and </search>. "
        "If I want to give the final answer, I should put the answer between <answer> and </answer>. "
        "Let me try again.\n"
    )
    assert step.calls == ()


def test_after_a_stop_id_the_correction_is_a_user_message() -> None:
    (step,) = play(SearchEnv(retriever=Shelf()), "Paris, I think.", stop=StopReason.STOP_ID)
    assert step.observation is not None
    assert step.observation.messages == ({"role": "user", "content": INVALID_ACTION},)


def test_p23_only_the_first_call_of_a_turn_is_run_and_the_others_are_on_record() -> None:
    shelf = Shelf()
    (step,) = play(SearchEnv(retriever=shelf), "<search>a</search><search>b</search>")
    assert shelf.queries == ["a"]
    assert [call.status for call in step.calls] == [CallStatus.OK, CallStatus.OVER_BUDGET]


def test_p24_calls_in_thinking_are_ignored_and_the_answer_behind_is_taken() -> None:
    shelf = Shelf()
    (step,) = play(SearchEnv(retriever=shelf), "<think>maybe <search>foo</search></think><answer>x</answer>")
    assert shelf.queries == []
    assert step.done
    assert step.calls[0].arguments == {"answer": "x"}


def test_p24_a_stop_string_in_a_thought_does_not_end_the_turn_nor_count_as_one() -> None:
    shelf = Shelf()
    thought = "<think>maybe <search>foo</search>"
    env = SearchEnv(retriever=shelf, max_turns=0)
    first, second = play(env, thought, thought + " or not</think><answer>x</answer>")
    assert (first.observation, first.done, first.calls) == (None, False, ())
    assert second.done
    assert second.calls[0].status is CallStatus.OK
    assert shelf.queries == []


@pytest.mark.parametrize("query", ["", " ", "\n\t "])
def test_p26_an_empty_query_is_corrected_without_a_call(query: str) -> None:
    shelf = Shelf()
    (step,) = play(SearchEnv(retriever=shelf), f"<search>{query}</search>")
    assert shelf.queries == []
    assert step.observation is not None
    assert step.observation.head == EMPTY_QUERY
    assert "empty query" in EMPTY_QUERY
    assert step.calls[0].status is CallStatus.EMPTY


@pytest.mark.parametrize(
    "text",
    [
        "<SEARCH>q</SEARCH>",
        "<search>q</answer>",
        "<answer>q</search>",
        "<search>a<search>b</search>",
        "<answer>a <search>b</search>",
        "q</search>",
        "<Search>q</search>",
        "<search>q</SEARCH>",
        "<search>q",
    ],
)
def test_p27_mismatched_nested_or_wrongly_written_tags_are_malformed(text: str) -> None:
    shelf = Shelf()
    (step,) = play(SearchEnv(retriever=shelf), text)
    assert shelf.queries == []
    assert [call.status for call in step.calls] == [CallStatus.MALFORMED]
    assert step.calls[0].detail
    assert step.observation is not None
    assert step.observation.head == INVALID_ACTION
    assert not step.done


@pytest.mark.parametrize("text", ["<search>half a que", "<think>x</think> <answer>Par", "<search>"])
def test_p45_a_call_cut_by_length_is_not_run_and_ends_the_episode(text: str) -> None:
    shelf = Shelf()
    (step,) = play(SearchEnv(retriever=shelf), text, stop=StopReason.LENGTH)
    assert shelf.queries == []
    assert step.done
    assert step.calls[0].status is CallStatus.TRUNCATED


def test_the_last_turn_runs_no_search_and_ends() -> None:
    shelf = Shelf()
    env = SearchEnv(retriever=shelf, max_turns=1)
    assert env.max_turns == 2
    first, last = play(env, "<search>a</search>", "<search>b</search>")
    assert shelf.queries == ["a"]
    assert not first.done
    assert last.done
    assert last.observation is None
    assert last.calls[0].status is CallStatus.OVER_BUDGET


def test_the_last_turn_keeps_the_status_of_a_malformed_call() -> None:
    (step,) = play(SearchEnv(retriever=Shelf(), max_turns=0), "<search>q</answer>")
    assert step.done
    assert step.calls[0].status is CallStatus.MALFORMED


def test_reset_starts_the_turns_anew() -> None:
    env = SearchEnv(retriever=Shelf(), max_turns=1)
    assert not play(env, "<search>a</search>")[0].done
    assert not play(env, "<search>a</search>")[0].done


def test_p59_a_failing_retriever_makes_the_episode_invalid() -> None:
    with pytest.raises(EpisodeInvalid) as caught:
        play(SearchEnv(retriever=Shelf(ConnectionError("refused"))), "<search>a</search>")
    assert caught.value.reason == "tool_down"
    assert "ConnectionError" in caught.value.detail


def test_p59_a_retrieval_error_keeps_its_kind() -> None:
    failure = RetrievalError("bad_payload", "HTML instead of JSON")
    with pytest.raises(RetrievalError) as caught:
        play(SearchEnv(retriever=Shelf(failure)), "<search>a</search>")
    assert caught.value is failure


def test_p54_a_search_past_its_deadline_is_a_timeout_the_policy_reads() -> None:
    (step,) = play(SearchEnv(retriever=Shelf(seconds=60), search_seconds=0.01), "<search>a</search>")
    assert step.calls[0].status is CallStatus.TIMEOUT
    assert step.calls[0].seconds > 0
    assert step.observation is not None
    assert "too long" in step.observation.text


def test_a_timeout_inside_the_retriever_is_not_taken_for_the_deadline() -> None:
    with pytest.raises(EpisodeInvalid, match="tool_down"):
        play(SearchEnv(retriever=Shelf(TimeoutError("its own")), search_seconds=60), "<search>a</search>")


def test_search_switched_off_shows_an_empty_block_and_asks_nobody() -> None:
    shelf = Shelf()
    (step,) = play(SearchEnv(retriever=shelf, search_enabled=False), "<search>a</search>")
    assert shelf.queries == []
    seen = step.observation
    assert seen is not None
    assert seen.head + seen.text + seen.tail == "\n\n<information></information>\n\n"


@pytest.mark.parametrize("options", [{"top_k": 0}, {"max_turns": -1}])
def test_impossible_options_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        SearchEnv(retriever=Shelf(), **options)


@given(st.text(alphabet="<>/searchanwtik \n", max_size=80), st.sampled_from(StopReason))
def test_any_text_gets_a_typed_call_and_only_well_formed_ones_are_ok(text: str, stop: StopReason) -> None:
    call = parse_call(text, stop)
    if call.status is CallStatus.OK and call.name:
        assert f"<{call.name}>" in text
        assert f"</{call.name}>" in text
        assert call.content == call.content.strip()
        assert "<search>" not in call.content
    else:
        assert call == replace(call, status=call.status)
        assert call.name in ("", "search", "answer")


def test_prompt_names_every_tag_and_adds_the_question_mark() -> None:
    text = search_prompt(" where is {it} ")
    assert text.endswith("Question: where is {it}?\n")
    assert search_prompt("who?").endswith("Question: who?\n")
    assert "{question}" in SEARCH_R1_PROMPT
    for tag in ("think", "search", "information", "answer"):
        assert f"<{tag}>" in text
        assert f"</{tag}>" in text
