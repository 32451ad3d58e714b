"""transformers' continuous batching as serving.py asks it: `<model folder> <threads>`, then requests on stdin.

A request is a line of JSON, {"asks": [[ids, new], ..]}; the answer says how many tokens came, and after how many
seconds. The pool has room for all of them, so that nothing is computed twice.
"""

from __future__ import annotations

import json
import os
import sys
import time


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the library says goes with its errors
    import torch
    import transformers
    from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

    folder, threads = sys.argv[1:]
    torch.set_num_threads(int(threads))
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="sdpa"
    ).eval()
    how = GenerationConfig(do_sample=False, max_new_tokens=128, eos_token_id=-1, pad_token_id=0)
    config = ContinuousBatchingConfig(num_blocks=128, max_batch_tokens=544, allow_block_sharing=True)
    print(json.dumps({"ready": transformers.__version__}), file=answers, flush=True)
    for line in sys.stdin:
        asks = json.loads(line)["asks"]
        with (
            torch.no_grad(),
            model.continuous_batching_context_manager(
                generation_config=how, continuous_batching_config=config
            ) as manager,
        ):
            began = time.perf_counter()
            for ids, new in asks:
                manager.add_request(ids, max_new_tokens=new)
            came, done = 0, 0
            while done < len(asks):
                result = manager.get_result(timeout=1)
                if result is None and not manager.is_running():
                    sys.exit("the manager stopped")
                if result is not None and result.is_finished():
                    if result.error:
                        sys.exit(result.error)
                    came, done = came + len(result.generated_tokens), done + 1
            took = time.perf_counter() - began
        print(json.dumps({"tokens": came, "seconds": took}), file=answers, flush=True)


if __name__ == "__main__":
    main()
