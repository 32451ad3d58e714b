"""Cause 18: modules that run as Python were tried with quiet values only; what they decide by values did not happen."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import kvcompile
from kvcompile.errors import CaptureError, DetectionError
from tests.support.models import NanoBlock, TinyConfig

SIZES = TinyConfig()
WIDTH = SIZES.num_heads * SIZES.head_dim
TOKENS = 120


class Quiet(nn.Module):
    """A part whose Python looks at values, and which treats each token alone."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        out = x.clone()
        for number, part in enumerate(self.parts):
            rows = (x.argmax(-1) % 3 == number).nonzero(as_tuple=True)
            if len(rows[0]):
                out[rows] = part(x[rows])
        return out


class Loud(Quiet):
    """Adds up all tokens where one is loud, which is seldom."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.cumsum(1) if float(x.abs().max()) > 9 else x)


class Early(Quiet):
    """Ends where every token has changed little."""

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            change = part(x)
            if bool((change.norm(dim=-1) < 0.6 * x.norm(dim=-1)).all()):
                break
            x = x + change
        return x


class Counting(Quiet):
    """Counts calls with a loud token, and is louder for each."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += int(float(x.max()) > 9)
        return super().forward(x) * (1 + self.calls)


class Long(Quiet):
    """Is quieter where there are many tokens."""

    def forward(self, x: Tensor) -> Tensor:
        count = int((x == x).sum()) // WIDTH // x.shape[0]
        return super().forward(x) * (1.0 if count < 100 else 0.5)


class Flat(Quiet):
    """Is given all tokens as one list, and each one's choice as rows."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.flatten(0, 1)).view(x.shape)


class Decoder(nn.Module):
    def __init__(self, part: type[Quiet]):
        super().__init__()
        self.wte, self.block = nn.Embedding(61, WIDTH), NanoBlock(SIZES, eager=False)
        self.part, self.head = part(), nn.Linear(WIDTH, 61)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.part(self.block(self.wte(input_ids))))  # type: ignore[no-any-return]


def made(part: type[Quiet]) -> Decoder:
    torch.manual_seed(0)
    return Decoder(part).eval()


@pytest.mark.few(2)
@pytest.mark.parametrize("part", [Loud, Early, Counting, Long])
def test_what_python_decides_by_many_tokens(part: type[Quiet]) -> None:
    with pytest.raises(DetectionError, match=r"mix|keeps something"):
        kvcompile.optimize(made(part), verify="off")


class Caught(Quiet):
    """Does without the number of tokens that are loud, where it cannot be had."""

    def forward(self, x: Tensor) -> Tensor:
        try:
            loud = int((x.abs().amax(-1) > 9).sum())
        except Exception:
            loud = 0
        return x * (1 + (loud > 0))


def test_an_error_of_tracing_that_python_catches() -> None:
    """The graph would have what happens where the value is not known."""
    with pytest.raises(CaptureError, match=r"asks for the value of a tensor \(test_18_python.py"):
        kvcompile.optimize(made(Caught), verify="off")


@pytest.mark.parametrize("part", [Quiet, Flat])
def test_what_python_decides_token_by_token(part: type[Quiet]) -> None:
    fast = kvcompile.optimize(made(part), max_tokens=TOKENS, compile={"mode": "none"}, verify="off")
    ids = torch.randint(0, 61, (2, TOKENS), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        wanted = made(part)(ids)
    found = torch.cat([fast(piece) for piece in ids.split((40, 1, TOKENS - 41), 1)], 1)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
