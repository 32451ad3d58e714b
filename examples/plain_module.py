"""A decoder of your own, not from transformers: an nn.Module from token ids to logits is all that is needed.

python examples/plain_module.py
python examples/plain_module.py --recipe streaming --compile default
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import kvcompile

WIDTH, HEADS, LAYERS, VOCABULARY, LONGEST = 128, 4, 3, 256, 512


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, size, _ = x.shape
        q, k, v = self.qkv(self.norm_1(x)).view(batch, size, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, size, WIDTH))
        out: Tensor = x + self.down(F.gelu(self.up(self.norm_2(x))))
        return out


class Decoder(nn.Module):
    """Bytes in, logits out. It knows nothing of a cache, nor of what came before its input."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LONGEST, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.tokens(input_ids) + self.positions(torch.arange(input_ids.shape[1], device=input_ids.device))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recipe", default="baseline")
    parser.add_argument("--max-new-tokens", type=int, default=24)
    parser.add_argument("--compile", default="none", help="none, default, cudagraphs, max-autotune")
    options = parser.parse_args(argv)
    torch.manual_seed(0)
    model = Decoder().eval()
    prompt = torch.tensor([list(b"The weights are random")])
    try:
        # The position table ends at LONGEST, which nothing in a plain module says: so max_tokens does.
        fast: Any = kvcompile.optimize(
            model, recipe=options.recipe, max_tokens=LONGEST, compile={"mode": options.compile}
        )
        tokens = fast.generate(prompt, max_new_tokens=options.max_new_tokens)
    except kvcompile.KVCompileError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(kvcompile.explain(fast))

    # The same, from the original, which computes every token again at every step.
    expected = prompt
    with torch.no_grad():
        for _ in range(options.max_new_tokens):
            expected = torch.cat([expected, model(expected)[:, -1:].argmax(-1)], dim=1)
    same = int((tokens == expected).long().cumprod(1).sum()) - prompt.shape[1]
    print(f"\nnew tokens: {tokens[0, prompt.shape[1] :].tolist()}")
    print(f"the first {same} of {options.max_new_tokens} are those of the model without a cache")
    return 0


if __name__ == "__main__":
    sys.exit(main())
