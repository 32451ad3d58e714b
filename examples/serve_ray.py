"""Several replicas of one model behind one OpenAI interface, on Ray Serve; prompts that begin alike meet in one.

    pip install 'kvcompile[ray]'
    python examples/serve_ray.py --replicas 2 --port 8000
    python examples/serve_ray.py --replicas 1 --most 4        # Ray adds replicas while requests wait
    python examples/serve_ray.py --replicas 2 --tensor 3      # each replica is three ranks
    python examples/serve_ray.py --replicas 2 --demo          # asks a few questions, tells who answered, and ends

On many machines: start Ray on each (`ray start`), then run this on one of them with --address auto. Every replica is an
engine in a process of its own, with its own cache; see docs/serving_replicas.md.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
import time
import urllib.request
from functools import partial
from typing import Any

from kvcompile.errors import KVCompileError

TALKS = (
    "You are a librarian who answers in one short sentence. ",
    "You are a gardener who answers in one short sentence. ",
    "You are a sailor who answers in one short sentence. ",
)
QUESTIONS = ("What do you do first in the morning?", "What is your favourite tool?", "What do you fear?")
LENGTH = 6  # times that a talk's beginning is said: the prefix cache wants something to find


def make(
    model: str, recipe: str, memory: str | None, compiled: bool, tensor: int = 1, gpu: bool = False
) -> Any:
    """An engine that has compiled what it needs; called in each replica, and in each of its ranks."""
    import kvcompile
    from kvcompile.models import load_model
    from kvcompile.serve import Engine, follow

    rank = int(os.environ.get("RANK", 0)) if tensor > 1 else 0
    loaded = load_model(model, device=f"cuda:{rank}" if gpu else "cpu")
    mode = {"mode": "default" if compiled else "none"}
    parallel = {"tensor": tensor} if tensor > 1 else None
    fast = kvcompile.optimize(loaded.model, recipe, compile=mode, parallel=parallel)
    if rank:
        follow(fast)
        return None
    engine = Engine(fast, tokenizer=loaded.tokenizer, name=model, memory=memory)
    engine.warmup()
    return engine


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--recipe", default="paged", help="any; pages are what prompts share")
    parser.add_argument("--memory", help="of each replica's cache, such as 2GiB")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--most", type=int, help="replicas under load; by default --replicas")
    parser.add_argument("--tensor", type=int, default=1, help="ranks of one replica, a process each")
    parser.add_argument("--cpus", type=float, default=1, help="of one rank, as Ray counts them")
    parser.add_argument("--gpus", type=float, default=0, help="of one rank")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000, help="0: any free one")
    parser.add_argument("--address", help="of a Ray cluster; by default one is started here")
    parser.add_argument("--no-compile", action="store_true", help="slower, and starts at once")
    parser.add_argument("--demo", action="store_true", help="ask a few questions and end")
    options = parser.parse_args(argv)
    try:
        _serve(options)
    except KVCompileError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def _serve(options: argparse.Namespace) -> None:
    try:
        import ray
        from ray import serve
    except ImportError as error:
        raise KVCompileError("this example needs Ray; run: pip install 'kvcompile[ray]'") from error
    from kvcompile.serve.http import Options
    from kvcompile.serve.replicas import application

    most = options.most or options.replicas
    scaled = {"min_replicas": options.replicas, "max_replicas": most, "target_ongoing_requests": 8}
    ranks, gpu = options.tensor, options.gpus > 0
    cpus = None if options.address else max(2, round(most * ranks * options.cpus))
    ray.init(options.address, num_cpus=cpus, include_dashboard=False, log_to_driver=not options.demo)
    try:
        port = options.port or _free(options.host)
        serve.start(http_options={"host": options.host, "port": port})
        serve.run(
            application(
                partial(
                    make, options.model, options.recipe, options.memory, not options.no_compile, ranks, gpu
                ),
                options=Options(name=options.model),
                replicas=options.replicas if most == options.replicas else scaled,
                resources={"num_cpus": ranks * options.cpus, "num_gpus": ranks * options.gpus},
                ranks=ranks,
            )
        )
        url = f"http://{options.host}:{port}/v1"
        print(f"{options.replicas} replicas of {options.model} at {url}", flush=True)
        if options.demo:
            _demo(url, options.model)
        else:
            while True:
                time.sleep(3600)
    finally:
        serve.shutdown()
        ray.shutdown()


def _free(host: str) -> int:
    with socket.socket() as tried:
        tried.bind((host, 0))
        return int(tried.getsockname()[1])


def _demo(url: str, model: str) -> None:
    """Ask each talk's questions in turn: from the second on, a talk's beginning is in the cache of its replica."""
    for question in QUESTIONS:
        for talk in TALKS:
            messages = [{"role": "system", "content": talk * LENGTH}, {"role": "user", "content": question}]
            answer = _ask(url, {"model": model, "messages": messages, "max_tokens": 24, "temperature": 0})
            usage, said = answer["usage"], answer["choices"][0]["message"]["content"]
            found = usage["prompt_tokens_details"]["cached_tokens"]
            of, start = usage["prompt_tokens"], " ".join(said.split())[:60]
            print(f"{talk.split()[3]:<10} {found:>4} of {of} tokens found  {start}")


def _ask(url: str, body: dict[str, Any]) -> Any:
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=600) as answer:
        return json.load(answer)


if __name__ == "__main__":
    sys.exit(main())
