"""Values of a row -> prompt messages and accepted answers. Pure functions; a bad value raises `FieldError`."""

from __future__ import annotations

import datetime
import decimal
import json
import math
import string
from collections.abc import Iterable, Mapping
from typing import Any

from posttrain.boundary.foreign_json import read_json
from posttrain.data.config import SourceConfig
from posttrain.data.problems import FieldError, show
from posttrain.task import Message

MISSING = object()  # the column is absent, as opposed to null

# Looked for in this order when the config names no column.
USUAL_COLUMNS: dict[str, tuple[str, ...]] = {
    "prompt": ("prompt", "messages", "question", "problem", "input"),
    "ground_truth": ("reward_model.ground_truth", "ground_truth", "answers", "golden_answers", "answer", "label"),
    "id": ("id", "_id", "qid", "unique_id"),
    "source": ("data_source", "datasource", "dataset"),
}
# Supervised conversations end with the reply; an RL prompt is what comes before it.
COLUMNS_ENDING_IN_A_REPLY = frozenset({"messages"})
DEEPEST = 100  # levels of lists and objects in a row; what handles it later goes into each by a call
ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
NO_ANSWER_FIX = "give at least one accepted answer, or set ground_truth_required: false when the env scores by itself"


def lookup(row: Mapping[str, Any], column: str) -> Any:
    """The value under a column name or dotted path; `MISSING` when there is none. JSON text on the way is decoded."""
    if column in row:
        return row[column]
    head, _, rest = column.partition(".")
    inner = _decoded(row[head]) if rest and head in row else None
    return lookup(inner, rest) if isinstance(inner, Mapping) else MISSING


def is_null(value: Any) -> bool:
    """None and NaN: what table formats write where nothing is known."""
    return value is None or (isinstance(value, float) and math.isnan(value))


def plain(value: Any, depth: int = 0) -> Any:
    """The value in JSON's own types where possible, without null keys. FieldError for one that is nested too deeply.

    Columnar files give every row the union of all rows' keys, null where a row had none. Those keys would reach tools,
    templates and rewards; they are dropped at every depth. Nulls inside lists stay.
    """
    if depth > DEEPEST:
        raise FieldError("", "nested too deeply", f"has more than {DEEPEST} levels of lists and objects", "flatten it")
    if isinstance(value, Mapping):
        items = ((str(key), plain(item, depth + 1)) for key, item in value.items())
        return {key: item for key, item in items if not is_null(item)}
    if isinstance(value, list | tuple):
        return [plain(item, depth + 1) for item in value]
    if hasattr(value, "tolist"):  # numpy arrays and scalars
        return plain(value.tolist(), depth + 1)
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, decimal.Decimal):
        return str(value)
    return value


def fill_template(template: str, row: Mapping[str, Any]) -> str:
    """Replaces {column} by the column's text; nothing else of the row is reachable."""
    pieces: list[str] = []
    for literal, column, _, _ in string.Formatter().parse(template):
        pieces.append(literal)
        if column is not None:
            pieces.append(_template_value(row, column))
    return "".join(pieces)


def _template_value(row: Mapping[str, Any], column: str) -> str:
    value = lookup(row, column)
    if value is MISSING:
        raise FieldError(column, "missing column", f"the row has {columns_text(row)}", "correct the prompt_template")
    value = plain(value)
    if isinstance(value, str | int | float) and not is_null(value) and str(value).strip():
        return encodable(str(value), column, "bad prompt")
    raise FieldError(column, "bad prompt", f"is {show(value)}", "the prompt_template needs text or a number here")


def columns_text(row: Mapping[str, Any]) -> str:
    return "columns " + ", ".join(f"'{name}'" for name in row) if row else "no columns"


# --- prompts -------------------------------------------------------------------------------------------------------


def messages_of(value: Any, column: str) -> tuple[Message, ...]:
    """A prompt column -> chat messages ending where the policy is to write.

    Text becomes one user message; lists (also arrays, also as JSON text) of {role, content} are taken as they are.
    """
    value = plain(value)
    if value is MISSING or is_null(value):
        seen = "is missing" if value is MISSING else "is null"
        raise FieldError(column, "bad prompt", seen, "give every row a prompt")
    if isinstance(value, str):
        decoded = _decoded(value)
        if not _looks_like_messages(decoded):
            return (_text_message(value, column),)
        value = plain(decoded)
    if not isinstance(value, list):
        raise FieldError(column, "bad prompt", f"is {show(value)}", "a prompt is text or a list of chat messages")
    messages = tuple(_message(item, column, index) for index, item in enumerate(value))
    if messages and messages[-1]["role"] == "assistant" and column in COLUMNS_ENDING_IN_A_REPLY:
        messages = messages[:-1]
    if not any(message["content"].strip() for message in messages):
        seen = "has only empty messages" if messages else "has no messages"
        raise FieldError(column, "bad prompt", seen, "give every row a prompt")
    if messages[-1]["role"] == "assistant":
        raise FieldError(
            column, "bad prompt", "ends with an assistant message", "end it where the policy is to write (user or tool)"
        )
    return messages


def _text_message(text: str, column: str) -> Message:
    if not text.strip():
        raise FieldError(column, "bad prompt", "is empty text", "give every row a prompt")
    return {"role": "user", "content": encodable(text, column, "bad prompt")}


def ends_in_reply(value: Any, column: str) -> bool:
    """Whether `messages_of` leaves out a final assistant message."""
    if column not in COLUMNS_ENDING_IN_A_REPLY:
        return False
    value = _decoded(plain(value))
    return _looks_like_messages(value) and value[-1]["role"] == "assistant"


def encodable(text: str, column: str, kind: str) -> str:
    """The text itself; a lone surrogate (half of an emoji cut in two) could be neither tokenised nor stored."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        seen = f"holds half a character at position {error.start} ({show(text)})"
        raise FieldError(column, kind, seen, "repair the text: it has lone UTF-16 surrogates") from error
    return text


def _looks_like_messages(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, dict) and "role" in item for item in value)


def _message(message: Any, column: str, index: int) -> Message:
    if not isinstance(message, dict) or "role" not in message:
        keys = f"keys {sorted(message)}" if isinstance(message, dict) else show(message)
        raise FieldError(column, "bad prompt", f"message {index} has {keys}", "a message has 'role' and 'content'")
    if not isinstance(message["role"], str) or message["role"] not in ROLES:
        seen = f"message {index} has role {message['role']!r}"
        raise FieldError(column, "bad prompt", seen, f"roles are {', '.join(sorted(ROLES))}")
    return {**message, "content": encodable(_content(message, column, index), column, "bad prompt")}


def _content(message: Message, column: str, index: int) -> str:
    """Message text as one string: chat templates differ in whether they take lists of parts."""
    content = message.get("content")
    if content is None and message.get("tool_calls"):
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and content and all(_is_text_part(part) for part in content):
        return "".join(part["text"] for part in content)
    seen = f"message {index} has content {show(content)}"
    raise FieldError(column, "bad prompt", seen, "content is text, or a list of {type: text, text: ...} parts")


def _is_text_part(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type", "text") == "text" and isinstance(part.get("text"), str)


# --- ground truth --------------------------------------------------------------------------------------------------


def answers_of(row: Mapping[str, Any], columns: tuple[str, ...], source: SourceConfig) -> tuple[str, ...]:
    """The accepted answers of a row, from one or several columns; at least one unless none is required.

    Text, numbers, lists of these and {"target": ...} all become text. A whole number stored as a float (27.0, what
    table formats make of a column that also has nulls) becomes "27".
    """
    answers: list[str] = []
    for column in columns:
        value = plain(lookup(row, column))
        if value is not MISSING and not is_null(value):
            answers += _column_answers(value, column, source)
    if answers or not source.ground_truth_required:
        return tuple(answers)
    first = columns[0] if columns else "ground_truth"
    values = [lookup(row, column) for column in columns]
    seen = f"holds no answer ({_seen(values)})"
    if all(value is MISSING for value in values):
        seen = f"is missing; the row has {columns_text(row)}"
    raise FieldError(first, "no ground truth", seen, NO_ANSWER_FIX)


def _seen(values: Iterable[Any]) -> str:
    return ", ".join("missing" if value is MISSING else "null" if is_null(value) else show(value) for value in values)


def _column_answers(value: Any, column: str, source: SourceConfig) -> list[str]:
    if source.ground_truth_format == "opaque":
        return [value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, sort_keys=True, default=str)]
    if source.ground_truth_format == "json_answers":
        value = plain(_json_answer(value, column))
    if isinstance(value, dict) and "target" in value:
        value = value["target"]
    if value == {}:
        return []  # all its keys were null
    if isinstance(value, dict):
        fix = "name the key that holds the answer (columns.ground_truth: a.b), or set ground_truth_format: opaque"
        raise FieldError(column, "bad ground truth", f"is {show(value)}", fix)
    items = value if isinstance(value, list) else [value]
    return [_answer(item, column, source) for item in items]


def _json_answer(value: Any, column: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return read_json(value)
    except ValueError as error:
        fix = "ground_truth_format: json_answers wants JSON text; use `answers` for plain text"
        raise FieldError(column, "bad ground truth", f"{show(value)} is no JSON ({error})", fix) from error


def _answer(item: Any, column: str, source: SourceConfig) -> str:
    if isinstance(item, bool):
        if source.bool_answers is None:
            fix = "say what true and false stand for: bool_answers: [yes, no]"
            raise FieldError(column, "bad ground truth", f"is {item}", fix)
        return source.bool_answers[0 if item else 1]
    if is_null(item):
        raise FieldError(column, "bad ground truth", "has a null among its answers", "remove it")
    if isinstance(item, float):
        item = int(item) if item.is_integer() and abs(item) < 2**53 else item
    if not isinstance(item, str | int | float):
        raise FieldError(column, "bad ground truth", f"has {show(item)}", "an answer is text or a number")
    text = _after(str(item), column, source.answer_after)
    if not text.strip():
        raise FieldError(column, "bad ground truth", f"has an empty answer ({show(item)})", "remove it or fill it in")
    return encodable(text, column, "bad ground truth")


def _after(text: str, column: str, marker: str | None) -> str:
    if marker is None:
        return text
    _, found, tail = text.rpartition(marker)
    if not found:
        raise FieldError(
            column, "bad ground truth", f"{show(text)} lacks {marker!r}", "correct the row or answer_after"
        )
    return tail.strip()


def _decoded(value: Any) -> Any:
    """JSON text of an object or list -> its value; anything else unchanged."""
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        try:
            return read_json(value)
        except ValueError:
            return value
    return value
