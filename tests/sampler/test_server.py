"""A server as a sampler, over real HTTP: the endpoint of `posttrain serve`."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest

from posttrain.chat import Renderer
from posttrain.endpoint.agent import ExternalAgent
from posttrain.endpoint.app import App
from posttrain.loops.serve import OpenDesk
from posttrain.rollout import Limits, RolloutSpec
from posttrain.sampler import server as module
from posttrain.sampler.native import NativeSampler
from posttrain.sampler.protocol import SamplingParams
from posttrain.sampler.requests import SamplerError
from posttrain.sampler.server import ServerSampler
from posttrain.sampler.vllm_server import VllmServerSampler
from posttrain.trajectory import StopReason

from .contract import Case, SamplerContract
from .listening import listening
from .tiny import END, play, policy, prompt, together, tokenizer

pytest.importorskip("uvicorn")
LENGTHS = dict.fromkeys(("max_turn_tokens", "max_episode_tokens", "max_prompt_tokens"), 400)


def endpoint() -> App:
    """As `posttrain serve` has it; the key is "key"."""
    spec = RolloutSpec(
        make_env=lambda task: None,  # type: ignore[arg-type, return-value]
        sampler=NativeSampler(policy(), tokenizer(), truncation="allow"),
        renderer=Renderer(tokenizer()),
        limits=Limits(**LENGTHS),
        params=SamplingParams(max_new_tokens=400),
    )
    desk = OpenDesk(spec, ExternalAgent(agent=print, other_sampling="exclude"), seed=0, folder=None)
    return App(lambda key: desk if key == "key" else None)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with listening(endpoint) as address:
        yield address


class TestContract(SamplerContract):
    @pytest.fixture
    def case(self, url: str) -> Case:
        sampler = ServerSampler(url, tokenizer(), token="key")
        return Case(sampler=sampler, tokenizer=tokenizer(), prompt=prompt(9), end_id=END, stop_string="a", reach=200)


@pytest.mark.parametrize(
    "options", [{}, {"temperature": 0.6}, {"temperature": 0}, {"top_p": 0.5}, {"top_k": 3}, {"stop_strings": ("a",)}]
)
def test_posttrain_serve_gives_what_the_sampler_in_process_gives(url: str, options: dict[str, Any]) -> None:
    """The same ids for the same seed, over several turns, and the same log-probs."""
    params = SamplingParams(**{"max_new_tokens": 9, "stop_ids": frozenset({END, 7})} | options)
    later = [prompt(5), prompt(12, seed=1)]
    far, near = (
        together(*(play(s, prompt(4 + i), params, seed=i, observations=later) for i in range(6)))
        for s in (
            ServerSampler(url, tokenizer(), token="key"),
            NativeSampler(policy(), tokenizer(), truncation="allow"),
        )
    )
    assert [e.sampled_ids for e in far] == [e.sampled_ids for e in near]
    for one, other in zip(far, near, strict=True):
        for (_, a), (_, b) in zip(one.turns, other.turns, strict=True):
            assert (a.stop_reason, a.stop) == (b.stop_reason, b.stop)
            assert a.logprobs == pytest.approx(b.logprobs, abs=1e-5)


def test_the_servers_own_limit_ends_a_turn_with_length(url: str) -> None:
    sampled = together(
        ServerSampler(url, tokenizer(), token="key").sample(prompt(390), SamplingParams(max_new_tokens=99), seed=0)
    )[0]
    assert (len(sampled.ids), sampled.stop_reason) == (10, StopReason.LENGTH)


def test_what_the_server_refuses_is_told_as_it_says_it(url: str) -> None:
    params = SamplingParams(max_new_tokens=1)
    with pytest.raises(SamplerError, match="status 401: this API key is of no open run"):
        together(ServerSampler(url, token="other").sample([1], params, seed=0))
    with pytest.raises(SamplerError, match="the conversation has 401 tokens"):
        together(ServerSampler(url, token="key").sample([1] * 401, params, seed=0))
    with pytest.raises(ValueError, match="the prompt has the id 264"):
        together(ServerSampler(url, tokenizer(), token="key").sample([264], params, seed=0))
    with pytest.raises(ValueError, match="concurrency"):
        ServerSampler(url, concurrency=0)


def test_posttrain_serve_takes_no_weights(url: str) -> None:
    with pytest.raises(SamplerError, match=r"no route /collective_rpc: start it with VLLM_SERVER_DEV_MODE=1"):
        VllmServerSampler(policy(), url, tokenizer(), token="key")


class Strange(BaseHTTPRequestHandler):
    """Answers what the test says."""

    answers: list[tuple[int, Any]] = []  # noqa: RUF012 - set by the tests
    bodies: list[Any] = []  # noqa: RUF012
    kind = "vllm"

    def do_GET(self) -> None:
        self._say(200, {"data": [{"id": "a", "owned_by": self.kind, "max_model_len": 50}, {"id": "b"}]})

    def do_POST(self) -> None:
        self.bodies.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        self._say(*self.answers.pop(0))

    def _say(self, status: int, body: Any) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        return


@pytest.fixture
def strange() -> Iterator[str]:
    http = ThreadingHTTPServer(("127.0.0.1", 0), Strange)
    Strange.answers, Strange.bodies, Strange.kind = [], [], "vllm"
    thread = threading.Thread(target=http.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{http.server_port}/v1"
    http.shutdown()
    thread.join()
    http.server_close()


def choice(**fields: Any) -> dict[str, Any]:
    usual = {"token_ids": [5, 6], "logprobs": {"token_logprobs": [-1.0, -2.0]}, "finish_reason": "length"}
    return {"choices": [usual | fields]}


def ask(url: str, **options: Any) -> Any:
    return together(ServerSampler(url, **options).sample([1], SamplingParams(max_new_tokens=2), seed=1 << 63))[0]


def test_a_busy_server_is_asked_again_with_the_same_seed(strange: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FIRST_PAUSE", 0.01)
    Strange.answers = [(503, {}), (429, {"error": {"message": "slow"}}), (200, choice())]
    assert ask(strange).ids == [5, 6]
    assert Strange.bodies[0] == Strange.bodies[2]
    assert Strange.bodies[0]["seed"] == 0
    assert (Strange.bodies[0]["model"], Strange.bodies[0]["ignore_eos"]) == ("a", True)
    Strange.answers = [(503, {"error": {"message": "still"}})] * 4
    with pytest.raises(SamplerError, match="status 503: still"):
        ask(strange)


def test_sglang_is_asked_in_its_own_words_and_asked_again_behind_the_models_end_token(strange: str) -> None:
    """With ignore_eos it would ignore our stops, too; without, it ends turns where the model's card says."""
    Strange.kind = "sglang"
    ended = {"finish_reason": "stop", "matched_stop": 9}
    Strange.answers = [
        (200, choice(token_ids=[5, 9], **ended)),
        (200, choice(token_ids=[6, 7], logprobs={"token_logprobs": [-3.0, -4.0]}, **ended)),
    ]
    params = SamplingParams(max_new_tokens=8, stop_ids=frozenset({7}))
    (sampled,) = together(ServerSampler(strange).sample([1], params, seed=3))
    assert (sampled.ids, sampled.logprobs, sampled.stop_reason) == ([5, 9, 6, 7], [-1, -2, -3, -4], StopReason.STOP_ID)
    first, second = Strange.bodies
    asked = ("prompt", "max_tokens", "seed", "stop_token_ids", "no_stop_trim", "skip_special_tokens", "top_k")
    assert [first[key] for key in asked] == [[1], 8, 3, [7], True, False, -1]
    assert [second[key] for key in asked] == [[1, 5, 9], 6, 5, [7], True, False, -1]
    assert "ignore_eos" not in first


def test_servers_that_do_not_say_what_they_sampled_are_refused(strange: str) -> None:
    for answer, message in (
        (choice(token_ids=None), "does not tell which tokens"),
        (choice(logprobs=None), "does not tell which tokens"),
        (choice(logprobs={"token_logprobs": [-1.0]}), "does not tell which tokens"),
        ({"choices": []}, "answered in another form"),
        (choice(finish_reason="stop", token_ids=[5], logprobs={"token_logprobs": [-1.0]}), "none of the stops"),
    ):
        Strange.answers = [(200, answer)]
        with pytest.raises(SamplerError, match=message):
            ask(strange)
    with pytest.raises(SamplerError, match=r"no model 'c' .* it has: a, b"):
        ask(strange, model="c")
    with pytest.raises(ValueError, match="context is 50"):
        together(ServerSampler(strange).sample([1] * 50, SamplingParams(max_new_tokens=2), seed=0))


def test_nobody_there_is_an_error_with_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FIRST_PAUSE", 0.01)
    with pytest.raises(SamplerError, match=r"GET http://127\.0\.0\.1:9/v1/models failed: ConnectError"):
        ask("http://127.0.0.1:9/v1")


class Dying(BaseHTTPRequestHandler):
    """Goes in the midst of the first request; what is there next has no mark."""

    asked = 0

    def do_POST(self) -> None:
        Dying.asked += 1
        if Dying.asked == 1:
            self.close_connection = True
            return
        data = json.dumps({"results": [None]}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        return


def test_a_vllm_server_that_goes_while_it_is_asked_for_its_mark_is_asked_again() -> None:
    """What would change something on the server is asked once."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Dying) as http:
        threading.Thread(target=http.serve_forever).start()
        address = f"http://127.0.0.1:{http.server_port}"
        sampler = object.__new__(VllmServerSampler)  # it would ask for much more before
        sampler.url, sampler.patience_seconds = address, 30.0
        try:
            for again in (False, True):
                Dying.asked = 0
                with httpx.Client(base_url=address) as sampler._control:
                    if again:
                        assert sampler._marked() == {None}
                    else:
                        with pytest.raises(SamplerError, match="RemoteProtocolError"):
                            sampler._rpc("posttrain_mark", "a")
                assert Dying.asked == 1 + again
        finally:
            http.shutdown()
