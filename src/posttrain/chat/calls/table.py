"""The syntaxes by name, and the control tokens that end a turn in each."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from posttrain.chat.calls.deepseek import DeepSeek
from posttrain.chat.calls.llama import LlamaJson, LlamaPythonic
from posttrain.chat.calls.mistral import Mistral
from posttrain.chat.calls.objects import HermesJson
from posttrain.chat.calls.parameters import Qwen3Coder
from posttrain.chat.calls.react import ReAct
from posttrain.chat.calls.syntax import Syntax
from posttrain.chat.calls.tags import AttributeTags, PlainTags

SYNTAXES: Mapping[str, Syntax] = {
    "dr_tulu": AttributeTags("dr_tulu", "call_tool", also_closed_by=("call",)),
    "dr_tulu_unified": AttributeTags("dr_tulu_unified", "tool"),
    "search_r1": PlainTags("search_r1", {"search": "search"}),
    "hermes": HermesJson(),
    "qwen3_coder": Qwen3Coder(),
    "llama3_json": LlamaJson(),
    "llama_pythonic": LlamaPythonic(),
    "mistral": Mistral("mistral", v11=False),
    "mistral_v11": Mistral("mistral_v11", v11=True),
    "deepseek_v3": DeepSeek("deepseek_v3", v31=False),
    "deepseek_v31": DeepSeek("deepseek_v31", v31=True),
    "react": ReAct(),
}


def stop_ids(syntax: Syntax, token_id: Callable[[str], int | None] | Mapping[str, int]) -> frozenset[int]:
    """Ids of the syntax's stop tokens that this vocabulary has: `tokenizer.get_vocab()`, or a function."""
    look = token_id.get if isinstance(token_id, Mapping) else token_id
    return frozenset(found for token in syntax.stop_tokens if (found := look(token)) is not None)
