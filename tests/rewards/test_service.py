"""The HTTP client of rewards against servers that misbehave."""

from __future__ import annotations

import asyncio
import socket
import time

import pytest

from posttrain.rewards.functions import RewardError
from posttrain.rewards.service import JsonService, ServiceConfig, ServiceError, checked_url

from .servers import Reply, stub

QUICK = {"backoff_seconds": 0.01, "attempt_seconds": 2.0, "seconds": 5.0}


def post(url: str, body=None, **options):
    service = JsonService(url, ServiceConfig(**{**QUICK, **options}))
    return asyncio.run(service.post(body or {"a": 1})), service.counters


def failure(url: str, **options) -> tuple[ServiceError, JsonService]:
    service = JsonService(url, ServiceConfig(**{**QUICK, **options}))
    with pytest.raises(ServiceError) as caught:
        asyncio.run(service.post({}))
    return caught.value, service


def test_what_comes_back_is_the_json():
    with stub(Reply({"b": [1, None]})) as server:
        value, counters = post(server.url + "/get", {"text": "é"})
    assert value == {"b": [1, None]}
    assert server.requests == [{"text": "é"}]
    assert (counters.calls, counters.requests, counters.retries) == (1, 1, 0)


@pytest.mark.parametrize(
    "bad",
    [
        Reply({}, status=500),
        Reply({}, status=503),
        Reply({}, status=429),
        Reply(raw=b"<html>busy</html>"),
        Reply(raw=b'{"half": ', promise=100),
    ],
    ids=["500", "503", "429", "html", "truncated"],
)
def test_what_may_pass_is_tried_again(bad):
    with stub(bad, bad, Reply({"ok": 1})) as server:
        value, counters = post(server.url)
    assert value == {"ok": 1}
    assert (counters.requests, counters.retries, counters.failures.total()) == (3, 2, 0)


@pytest.mark.parametrize(
    ("status", "reason"), [(400, "service_refused"), (401, "service_refused"), (404, "service_refused")]
)
def test_a_refusal_is_final(status, reason):
    with stub(Reply({"error": "no"}, status=status)) as server:
        error, service = failure(server.url)
    assert error.reason == reason
    assert f"HTTP {status}" in error.detail
    assert len(server.requests) == 1
    assert service.counters.failures == {reason: 1}


def test_attempts_have_an_end_and_are_told():
    with stub(Reply({}, status=502)) as server:
        error, _ = failure(server.url, attempts=3)
    assert error.reason == "service_down"
    assert "gave up after 3 attempts" in error.detail
    assert len(server.requests) == 3


@pytest.mark.parametrize(
    ("bad", "reason", "seen"),
    [
        (Reply({}, status=500), "service_down", "HTTP 500"),
        (Reply({}, status=429, headers={"Retry-After": "60"}), "service_down", "HTTP 429"),
        (Reply(raw=b"<html>busy</html>"), "service_bad_reply", "the answer is no JSON: <html>busy"),
    ],
    ids=["500", "429", "html"],
)
def test_a_deadline_between_attempts_does_not_hide_what_the_server_said(bad, reason, seen):
    with stub(bad) as server:
        error, service = failure(server.url, seconds=1.0, backoff_seconds=0.3)
    assert error.reason == reason
    assert seen in error.detail
    assert service.counters.failures == {reason: 1}


def test_retry_after_is_respected():
    with stub(Reply({}, status=429, headers={"Retry-After": "1"}), Reply({})) as server:
        started = time.monotonic()
        post(server.url)
    assert time.monotonic() - started >= 1.0


@pytest.mark.alone
def test_a_server_that_hangs_ends_at_the_deadline():
    with stub(Reply({}, seconds=1.5)) as server:
        started = time.monotonic()
        error, service = failure(server.url, attempt_seconds=0.2, seconds=0.5)
        assert time.monotonic() - started < 1.2
    assert error.reason == "service_timeout"
    assert service.counters.failures == {"service_timeout": 1}


def test_a_server_that_is_not_there_is_down():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        error, _ = failure(f"http://127.0.0.1:{probe.getsockname()[1]}", attempts=2)
    assert error.reason == "service_down"


def test_an_answer_without_end_is_refused():
    with stub(Reply(raw=b'"' + b"x" * 10_000 + b'"')) as server:
        error, _ = failure(server.url, max_reply_bytes=1000)
    assert error.reason == "service_bad_reply"
    assert "longer than 1000 bytes" in error.detail


def test_no_more_requests_at_once_than_allowed_and_waiting_costs_no_deadline():
    async def many(service):
        return await asyncio.gather(*(service.post({"n": n}) for n in range(8)))

    with stub(Reply({}, seconds=0.1)) as server:
        service = JsonService(server.url, ServiceConfig(concurrency=2, seconds=0.35, attempt_seconds=0.35))
        assert asyncio.run(many(service)) == [{}] * 8
    assert server.most_at_once <= 2


def test_a_rate_limit_spreads_the_requests():
    async def many(service):
        return await asyncio.gather(*(service.post({}) for _ in range(4)))

    with stub(Reply({})) as server:
        service = JsonService(server.url, ServiceConfig(per_minute=600))
        started = time.monotonic()
        asyncio.run(many(service))
    assert time.monotonic() - started >= 0.28


def test_one_service_serves_several_event_loops():
    with stub(Reply({"x": 1})) as server:
        service = JsonService(server.url, ServiceConfig())
        assert [asyncio.run(service.post({})) for _ in range(3)] == [{"x": 1}] * 3


def test_the_key_comes_from_the_environment_and_is_never_shown(monkeypatch):
    monkeypatch.setenv("MY_KEY", "sk-very-secret")
    with stub(Reply({"error": "wrong key sk-very-secret"}, status=401)) as server:
        error, _ = failure(server.url, key_env="MY_KEY")
    assert server.headers[0]["Authorization"] == "Bearer sk-very-secret"
    assert "sk-very-secret" not in error.detail
    assert "[key]" in error.detail


def test_a_key_that_is_not_set_is_found_at_the_start(monkeypatch):
    monkeypatch.delenv("NO_KEY", raising=False)
    with pytest.raises(RewardError, match="NO_KEY, which is not set"):
        JsonService("http://127.0.0.1:1", ServiceConfig(key_env="NO_KEY"))


def test_a_key_in_the_config_is_refused():
    with pytest.raises(ValueError, match="not the key itself"):
        ServiceConfig(key_env="sk-proj-1234")


@pytest.mark.parametrize("url", ["ftp://x/y", "127.0.0.1:80", "", "http://", "http://user:word@host/"])
def test_what_is_no_address_is_refused(url):
    with pytest.raises(RewardError):
        checked_url(url)


def test_counters_are_taken_once():
    with stub(Reply({}, status=400)) as server:
        _, service = failure(server.url)
    taken = service.counters.take()
    assert taken["scorer/calls"] == 1
    assert taken["scorer/failures/service_refused"] == 1
    assert set(service.counters.take().values()) == {0.0}
