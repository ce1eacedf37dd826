from cases.parts import byte_tokenizer
from posttrain.chat import Renderer
from posttrain.envs.budget import CHARS_PER_TOKEN, ObservationCutter, TokenBudget
from posttrain.envs.protocol import Observation

CODEC = Renderer(byte_tokenizer())


def test_pieces_share_one_budget_and_nothing_fits_behind_a_cut() -> None:
    budget = TokenBudget(CODEC, 10, "")
    assert budget.text("wxyz") == "wxyz"
    assert budget.left == 6
    assert len(budget.ids("pq")) == 2
    assert budget.text("0123456789") == "0123"
    assert budget.left == 0
    assert budget.text("more") == ""
    assert budget.ids("more") == []
    assert (budget.tokens_cut, budget.bytes_cut) == (6 + 4 + 4, 6 + 4 + 4)


def test_the_marker_is_inside_the_budget_and_left_out_where_it_does_not_fit() -> None:
    assert TokenBudget(CODEC, 5, "..").text("0123456789") == "012.."
    assert TokenBudget(CODEC, 1, "..").text("0123456789") == "0"


def test_a_character_is_kept_whole_or_not_at_all() -> None:
    budget = TokenBudget(CODEC, 5, "")
    assert CODEC.decode(budget.ids("巴黎")) == "巴"
    assert budget.bytes_cut == 3
    assert budget.tokens_cut == 3


def test_text_too_long_to_be_encoded_is_cut_even_if_its_encoded_part_fits() -> None:
    merges = [("a" * 2**n, "a" * 2**n) for n in range(8)]  # up to one token for 256 letters
    codec = Renderer(byte_tokenizer(merges=merges))
    budget = TokenBudget(codec, 10, "")
    kept = budget.text("a" * 6400)
    assert len(kept) == 10 * CHARS_PER_TOKEN
    assert budget.bytes_cut == 6400 - len(kept)
    assert budget.left == 0


def test_messages_of_one_observation_share_its_budget() -> None:
    cutter = ObservationCutter(CODEC, max_tokens=6, cut_marker="")
    messages = tuple({"role": "tool", "name": name, "content": "wxyz"} for name in ("one", "two", "six"))
    cut = cutter.cut(Observation(messages=messages))
    assert [message["content"] for message in cut.messages] == ["wxyz", "wx", ""]
    assert [message["name"] for message in cut.messages] == ["one", "two", "six"]
    assert cut.tokens_cut == 6


def test_lists_of_content_parts_are_left_to_the_template() -> None:
    parts = [{"type": "text", "text": "long " * 50}]
    cut = ObservationCutter(CODEC, max_tokens=3, cut_marker="").cut(
        Observation(messages=({"role": "user", "content": parts},))
    )
    assert cut.messages[0]["content"] is parts
