"""Messages <-> token ids: the only room that reads chat templates.

Start at `renderer.Renderer`. Nothing here ever encodes text that the policy sampled in order to train on it.
"""

from posttrain.chat.errors import ChatError, NotAppendOnly
from posttrain.chat.probe import ProbeReport
from posttrain.chat.renderer import Renderer, StartupReport

__all__ = ["ChatError", "NotAppendOnly", "ProbeReport", "Renderer", "StartupReport"]
