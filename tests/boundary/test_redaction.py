from __future__ import annotations

import pytest

from posttrain.boundary.redaction import redacted, secret_in, variable_name

SECRET = "s3cret-0123456789"


def test_secrets_are_replaced_by_their_names(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SERPER_API_KEY", SECRET)
    monkeypatch.setenv("SHORT_TOKEN", "abc")
    assert redacted(f"GET /?q={SECRET}&x=abc {SECRET}") == "GET /?q=[SERPER_API_KEY]&x=abc [SERPER_API_KEY]"


def test_what_is_surely_a_secret(monkeypatch: pytest.MonkeyPatch, tmp_path):
    """A config is refused for it, so a path, a short word and a variable of another name are none."""
    monkeypatch.setenv("GITHUB_TOKEN", SECRET)
    monkeypatch.setenv("TOKENIZER_PATH", "models/tokenizer")
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path))
    monkeypatch.setenv("MY_KEY", "short")
    assert secret_in(f"http://host/{SECRET}") == "GITHUB_TOKEN"
    assert secret_in(f"models/tokenizer {tmp_path} short") is None


@pytest.mark.parametrize("text", ["sk-proj-0123456789", "", "two words", "key=value"])
def test_a_key_in_the_place_of_a_name_is_refused_and_not_repeated(text: str):
    with pytest.raises(ValueError, match="not the key itself") as refused:
        variable_name(text)
    assert not text or text not in str(refused.value)
    assert variable_name("OPENAI_API_KEY") == "OPENAI_API_KEY"
