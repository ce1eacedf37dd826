"""A reward model: a real sequence classifier, tiny and seeded."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForSequenceClassification

from posttrain.rewards import RewardError, score_group
from posttrain.rewards.config import RewardConfig, load_reward
from posttrain.rewards.model import ModelReward, encode, messages_of
from posttrain.rewards.model_options import ModelRewardConfig
from posttrain.rewards.server import create_app
from posttrain.task import Invalid, Score, Task
from posttrain.trainer.loading import model_path
from retrieval.servers import app_server

from .episodes import PROMPT, env, episode

TASK = Task(id="t", prompt=({"role": "user", "content": "Where was Bafi Gole born?"},))
TEMPLATE = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"


def make(folder: Path, labels: int = 1, template: str | None = None, seed: int = 0) -> Path:
    tokenizer = AutoTokenizer.from_pretrained(model_path("tiny_search_base"))
    tokenizer.chat_template = template
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, num_labels=labels, max_position_embeddings=512,
    )  # fmt: skip
    LlamaForSequenceClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    return make(tmp_path_factory.mktemp("rm"))


def judged(path, texts, **options):
    reward = load_reward(RewardConfig(name="model", options={"path": str(path), **options}))
    return asyncio.run(score_group(reward, [episode(text) for text in texts], TASK))


TEXTS = ["Doli", "In Doli, I believe, because the page says so", "x", "I do not know where it was"]


def test_a_batch_scores_as_each_alone(path):
    together = judged(path, TEXTS)
    alone = [judged(path, [text])[0] for text in TEXTS]
    assert [o.value for o in together] == pytest.approx([o.value for o in alone], abs=1e-5)
    assert len({o.value for o in together}) == 4
    small = judged(path, TEXTS, tokens_per_batch=1)
    assert [o.value for o in small] == pytest.approx([o.value for o in together], abs=1e-5)


def test_scores_are_those_of_transformers_by_hand(path):
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = LlamaForSequenceClassification.from_pretrained(path).eval()
    ids = torch.tensor([encode(tokenizer, messages_of(episode("Doli"), TASK, "final"))])
    model.config.pad_token_id = None
    with torch.no_grad():
        expected = float(model(input_ids=ids).logits[0, 0])
    assert judged(path, ["Doli"])[0].value == pytest.approx(expected, abs=1e-5)


def test_the_template_is_applied_once(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(make(tmp_path, template=TEMPLATE))
    ids = encode(tokenizer, messages_of(episode("Doli"), TASK, "final"))
    text = tokenizer.decode(ids)
    assert text.count("[user]") == text.count("[assistant]") == 1
    if tokenizer.bos_token_id is not None:
        assert ids.count(tokenizer.bos_token_id) == 1


def test_an_end_token_that_is_also_the_padding_token_is_read(tmp_path):
    """The value head was trained on it; taken for padding, the token before it would be read."""
    path = make(tmp_path, template=TEMPLATE + "{{ eos_token }}")
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.save_pretrained(path)
    model = LlamaForSequenceClassification.from_pretrained(path).eval()
    ids = encode(tokenizer, messages_of(episode("Doli"), TASK, "final"))
    assert ids[-1] == tokenizer.eos_token_id == tokenizer.pad_token_id
    with torch.no_grad():
        hidden = model.model(input_ids=torch.tensor([ids])).last_hidden_state[0, -1]
        expected = float(model.score(hidden))
    both = judged(path, ["Doli", "a much longer reply than that"])
    assert both[0].value == pytest.approx(expected, abs=1e-5)


def test_what_is_read(path):
    said = episode("<think>hm</think>one", env("<information>seen</information>"), "<think>so</think> two")
    assert messages_of(said, TASK, "final")[-1] == {"role": "assistant", "content": "two"}
    whole = messages_of(said, TASK, "whole")[-1]["content"]
    assert whole == "<think>hm</think>one<information>seen</information><think>so</think> two"


def test_a_conversation_that_is_too_long_is_invalid_never_cut(path):
    first, second = judged(path, ["Doli", "word " * 300], max_tokens=100)
    assert isinstance(first, Score)
    assert isinstance(second, Invalid)
    assert second.reason == "too_long_for_reward_model"


def test_squash_and_classes(path, tmp_path):
    raw, squashed = judged(path, ["Doli"])[0].value, judged(path, ["Doli"], squash=True)[0].value
    assert squashed == pytest.approx(1 / (1 + pow(2.718281828, -raw)), abs=1e-5)
    classes = make(tmp_path, labels=3)
    with pytest.raises(RewardError, match="has 3 classes"):
        judged(classes, ["Doli"])
    shares = [judged(classes, ["Doli"], label=label)[0].value for label in range(3)]
    assert sum(shares) == pytest.approx(1.0, abs=1e-5)
    with pytest.raises(RewardError, match="label = 3"):
        judged(classes, ["Doli"], label=3)


def refused(path: object) -> str:
    with pytest.raises(RewardError) as caught:
        load_reward(RewardConfig(name="model", options={"path": str(path)}))
    return str(caught.value)


def test_no_model_is_found_before_anything_starts(path, tmp_path, monkeypatch):
    """What was looked for, where, and what to do."""
    (tmp_path / "judge-7b").mkdir()
    said = refused(tmp_path / "judge7b")
    assert f"options.path of the reward model is {tmp_path}/judge7b: there is no such folder (looked from" in said
    assert "Did you mean 'judge-7b'?" in said
    assert said.endswith("give a folder that save_pretrained wrote (config.json, *.safetensors, tokenizer.json), "
                         "or a hub id")  # fmt: skip
    assert "has no config.json (it holds nothing)" in refused(tmp_path / "judge-7b")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    said = refused("nobody/has-this-model")
    assert "no folder of that name under" in said
    assert "not on the hub" in said


def test_a_model_that_writes_is_no_reward_model():
    """Its scores would come from a head that nobody has trained."""
    assert "it is a Qwen3ForCausalLM" in refused(model_path("tiny_search_base"))


def test_a_score_that_is_not_finite_is_invalid(path):
    reward = ModelReward(ModelRewardConfig(path=str(path)))
    reward.score([messages_of(episode("Doli"), TASK, "final")])
    assert reward._loaded is not None
    _, model = reward._loaded
    model.score.weight.data.fill_(float("nan"))
    (outcome,) = reward.score([messages_of(episode("Doli"), TASK, "final")])
    assert outcome.reason == "non_finite_reward"


def test_reading_a_reward_section_takes_no_deep_learning_library():
    code = "import sys, posttrain.rewards.config; assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_served_as_openrlhf_does_it_scores_the_same(path):
    model = ModelReward(ModelRewardConfig(path=str(path), max_tokens=100))
    texts = ["Where? Doli", "Where? In Doli, it says", "word " * 300]
    direct = model.score_texts(texts)
    with app_server(create_app(model, token="s3cret")) as url:
        answer = httpx.post(f"{url}/get_reward", json={"query": texts}, headers={"Authorization": "Bearer s3cret"})
        assert answer.json()["rewards"] == [direct[0].value, direct[1].value, None]
        assert httpx.post(f"{url}/get_reward", json={"query": texts}).status_code == 401
        for bad in (b"x", b"[]", b'{"query": "text"}', b'{"query": [1]}', b"[" * 100_000):
            done = httpx.post(f"{url}/get_reward", content=bad, headers={"Authorization": "Bearer s3cret"})
            assert done.status_code == 400
        assert httpx.get(f"{url}/healthz").json()["status"] == "ok"


def test_the_http_reward_is_its_client(path, monkeypatch):
    monkeypatch.setenv("RM_TOKEN", "s3cret")
    model = ModelReward(ModelRewardConfig(path=str(path)))
    with app_server(create_app(model, token="s3cret")) as url:
        options = {"url": f"{url}/get_reward", "key_env": "RM_TOKEN"}
        reward = load_reward(RewardConfig(name="http", options=options))
        outcomes = asyncio.run(score_group(reward, [episode(text) for text in TEXTS], TASK))
    expected = model.score_texts([PROMPT.text + text for text in TEXTS])
    assert [o.value for o in outcomes] == pytest.approx([o.value for o in expected], abs=1e-5)
