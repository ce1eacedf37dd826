from __future__ import annotations

import pytest

from posttrain.boundary.foreign_json import read_json


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"a":' * 100_000, b"[" * 100_000, "", "nul", "9" * 5000, b"\xff\xfe\xfd"]
)
def test_whatever_is_wrong_is_a_value_error(text: str | bytes):
    with pytest.raises(ValueError):  # noqa: PT011  (every message is fine)
        read_json(text)


def test_values_are_read():
    assert read_json(bytearray(b'{"a": [1, null]}')) == {"a": [1, None]}
