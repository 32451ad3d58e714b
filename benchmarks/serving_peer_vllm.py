"""vLLM for CPUs as serving.py asks it: `<model folder> <threads>`, then requests on stdin.

It runs in an environment of its own and knows nothing of this project. A request is a line of JSON,
{"asks": [[ids, new], ..]}; the answer says how many tokens came, and after how many seconds.
"""

from __future__ import annotations

import json
import os
import sys
import time


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the library says goes with its errors
    folder, threads = sys.argv[1:]
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")  # GiB
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{int(threads) - 1}")
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # a process that can be stopped as one
    # PyPI's torchvision is made for its CUDA torch, and transformers would import it.
    sys.modules["torchvision"] = None  # type: ignore[assignment]
    import vllm

    model = vllm.LLM(
        folder,
        dtype="float32",
        max_model_len=1024,
        max_num_seqs=32,
        max_num_batched_tokens=1024,
        enable_prefix_caching=True,
        seed=0,
    )
    print(json.dumps({"ready": vllm.__version__}), file=answers, flush=True)
    for line in sys.stdin:
        asks = json.loads(line)["asks"]
        prompts = [{"prompt_token_ids": ids} for ids, _ in asks]
        how = [vllm.SamplingParams(temperature=0, max_tokens=new, ignore_eos=True) for _, new in asks]
        began = time.perf_counter()
        given = model.generate(prompts, how, use_tqdm=False)
        took = time.perf_counter() - began
        came = sum(len(result.outputs[0].token_ids) for result in given)
        print(json.dumps({"tokens": came, "seconds": took}), file=answers, flush=True)


if __name__ == "__main__":
    main()
