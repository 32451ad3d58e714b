"""OpenVINO GenAI's continuous batching as serving.py asks it: `<file.gguf> <threads>`, then requests on stdin.

It runs in an environment of its own and knows nothing of this project. A request is a line of JSON,
{"asks": [[ids, new], ..]}; the answer says how many tokens came, and after how many seconds. It makes its own model of
the .gguf file and keeps it beside that.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

TEXTS = 32  # at a time


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the library says goes with its errors
    import numpy
    import openvino
    import openvino_genai as genai

    path, threads = Path(sys.argv[1]), int(sys.argv[2])
    if not (path.parent / "openvino_model.xml").is_file():
        genai.LLMPipeline(str(path), "CPU", enable_save_ov_model=True)
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = 2  # GiB
    scheduler.max_num_seqs = TEXTS
    scheduler.max_num_batched_tokens = 512
    scheduler.dynamic_split_fuse = True
    options = {
        "INFERENCE_NUM_THREADS": threads,
        "INFERENCE_PRECISION_HINT": "f32",
        "KV_CACHE_PRECISION": "f32",
    }
    pipe = genai.ContinuousBatchingPipeline(str(path.parent), scheduler, "CPU", options)
    print(json.dumps({"ready": genai.__version__}), file=answers, flush=True)
    for line in sys.stdin:
        asks = json.loads(line)["asks"]
        prompts = [openvino.Tensor(numpy.array([ids], dtype=numpy.int64)) for ids, _ in asks]
        configs = []
        for _, new in asks:
            config = genai.GenerationConfig()
            config.ignore_eos = True
            config.do_sample = False
            config.max_new_tokens = new
            configs.append(config)
        began = time.perf_counter()
        given = pipe.generate(prompts, configs)
        took = time.perf_counter() - began
        came = sum(len(result.m_generation_ids[0]) for result in given)
        print(json.dumps({"tokens": came, "seconds": took}), file=answers, flush=True)


if __name__ == "__main__":
    main()
