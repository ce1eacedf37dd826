from __future__ import annotations

import pytest

pytest.importorskip("fastmcp", reason="needs the extra `tools`")
