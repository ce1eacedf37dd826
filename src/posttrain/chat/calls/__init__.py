"""Tool calls in the policy's text: how they are found, checked, written, asked for and answered.

Start at `SYNTAXES`, `Signatures` and `parse`.
"""

from posttrain.chat.calls.attempt import Attempt, Framed, NotExpressible, Parsed, Spec
from posttrain.chat.calls.parser import CallParser, over_budget, parse, parse_turn
from posttrain.chat.calls.signature import Signature, Signatures
from posttrain.chat.calls.syntax import Syntax
from posttrain.chat.calls.table import SYNTAXES, stop_ids
from posttrain.chat.calls.tags import AttributeTags, PlainTags

__all__ = [
    "SYNTAXES",
    "Attempt",
    "AttributeTags",
    "CallParser",
    "Framed",
    "NotExpressible",
    "Parsed",
    "PlainTags",
    "Signature",
    "Signatures",
    "Spec",
    "Syntax",
    "over_budget",
    "parse",
    "parse_turn",
    "stop_ids",
]
