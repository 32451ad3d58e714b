"""llama.cpp (by xllamacpp) as serving.py asks it: `<file.gguf> <threads>`, then requests on stdin.

It runs in an environment of its own and knows nothing of this project. A request is a line of JSON,
{"asks": [[ids, new], ..]}; the answer says how many tokens came, and after how many seconds.
"""

from __future__ import annotations

import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor

TEXTS = 32  # at a time


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the library says goes with its errors
    import xllamacpp

    path, threads = sys.argv[1:]
    params = xllamacpp.CommonParams()
    params.model.path = path
    params.n_ctx = 640 * TEXTS
    params.n_parallel = TEXTS
    params.cont_batching = True
    params.n_batch = params.n_ubatch = 512
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_ENABLED
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = int(threads)
    server = xllamacpp.Server(params)

    def answer(ask: tuple[list[int], int]) -> int:
        given = server.handle_completions(
            {
                "prompt": ask[0],
                "n_predict": ask[1],
                "temperature": 0,
                "ignore_eos": True,
                "cache_prompt": False,
            }
        )
        return int(given["timings"]["predicted_n"])

    print(json.dumps({"ready": xllamacpp.__version__}), file=answers, flush=True)
    for line in sys.stdin:
        asks = json.loads(line)["asks"]
        began = time.perf_counter()
        with ThreadPoolExecutor(len(asks)) as pool:
            came = sum(pool.map(answer, asks))
        found = {"tokens": came, "seconds": time.perf_counter() - began}
        print(json.dumps(found), file=answers, flush=True)


if __name__ == "__main__":
    main()
