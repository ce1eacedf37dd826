"""Whether trafilatura can be loaded here."""

from __future__ import annotations

import pytest

REASON = ""
try:
    import trafilatura  # noqa: F401
except ImportError as error:
    REASON = f"trafilatura cannot be loaded: {str(error).splitlines()[0]}"

needs_trafilatura = pytest.mark.skipif(bool(REASON), reason=REASON)
