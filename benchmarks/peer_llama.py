"""llama.cpp (by xllamacpp) as decode.py asks it: `<file.gguf> <storage> <threads> <tokens>`, then requests on stdin.

It runs in an environment of its own and knows nothing of this project. A request is a line of JSON, {"ids": [...],
"new": n}; the answer says what was computed, and the seconds that llama.cpp itself gives.
"""

from __future__ import annotations

import json
import os
import sys


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the library says goes with its errors
    import xllamacpp

    path, storage, threads, tokens = sys.argv[1:]
    params = xllamacpp.CommonParams()
    params.model.path = path
    params.n_ctx = int(tokens)
    params.n_parallel = 1
    params.cache_type_k = params.cache_type_v = getattr(xllamacpp.ggml_type, f"GGML_TYPE_{storage.upper()}")
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_ENABLED
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = int(threads)
    server = xllamacpp.Server(params)
    print(json.dumps({"ready": xllamacpp.__version__}), file=answers, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        given = server.handle_completions(
            {
                "prompt": asked["ids"],
                "n_predict": asked["new"] + 1,
                "temperature": 0,
                "ignore_eos": True,
                "cache_prompt": True,
            }
        )
        times = given["timings"]
        # Its clock for new tokens starts when the first one is there: of n + 1 it is that of n.
        found = {"prompt_tokens": times["prompt_n"], "prompt_s": times["prompt_ms"] / 1e3}
        found |= {"steps": times["predicted_n"] - 1, "steps_s": times["predicted_ms"] / 1e3}
        print(json.dumps(found), file=answers, flush=True)


if __name__ == "__main__":
    main()
