"""OpenVINO GenAI as decode.py asks it: `<file.gguf> <storage> <threads> <tokens>`, then requests on stdin.

It runs in an environment of its own and knows nothing of this project. A request is a line of JSON, {"ids": [...],
"new": n}; the answer says what was computed, and the seconds that OpenVINO itself gives.
"""

from __future__ import annotations

import json
import os
import sys


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the library says goes with its errors
    import numpy
    import openvino
    import openvino_genai

    path, storage, threads, _ = sys.argv[1:]
    pipe = openvino_genai.LLMPipeline(
        path, "CPU", KV_CACHE_PRECISION=storage, INFERENCE_NUM_THREADS=int(threads)
    )
    config = openvino_genai.GenerationConfig()
    config.ignore_eos = True
    config.do_sample = False
    config.apply_chat_template = False
    print(json.dumps({"ready": openvino_genai.__version__}), file=answers, flush=True)
    before: list[int] = []
    for line in sys.stdin:
        asked = json.loads(line)
        config.max_new_tokens = asked["new"] + 1
        given = pipe.generate(openvino.Tensor(numpy.array([asked["ids"]], dtype=numpy.int64)), config)
        metrics = given.perf_metrics
        # Tokens that it has seen before are in its prefix cache.
        known = asked["ids"] == before
        before = asked["ids"]
        steps = metrics.get_num_generated_tokens() - 1
        found = {"prompt_tokens": 1 if known else len(before), "prompt_s": metrics.get_ttft().mean / 1e3}
        found |= {"steps": steps, "steps_s": metrics.get_tpot().mean * steps / 1e3}
        print(json.dumps(found), file=answers, flush=True)


if __name__ == "__main__":
    main()
