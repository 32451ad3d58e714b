"""Arguments that a model's users leave out are given to its graph only where a forward is the same without them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kvcompile.passes.capture.capture import capture
from kvcompile.passes.capture.captured import Captured
from kvcompile.passes.capture.shown import NOT_SHOWN
from tests.support.models import NanoBlock, TinyConfig

SIZES = TinyConfig()
WIDTH = SIZES.num_heads * SIZES.head_dim
BOTH = ("input_ids", "position_ids", "logits_to_keep")


class Asks(nn.Module):
    """A decoder that takes both arguments; `own` changes its hidden states, given which of them came."""

    def __init__(self, own: Any):
        super().__init__()
        self.own, self.calls = own, 0
        self.wte, self.wpe = nn.Embedding(61, WIDTH), nn.Embedding(512, WIDTH)
        self.block, self.head = NanoBlock(SIZES, eager=False), nn.Linear(WIDTH, 61)

    def forward(
        self, input_ids: Tensor, position_ids: Tensor | None = None, logits_to_keep: Tensor | None = None
    ) -> Tensor:
        came = (position_ids is not None, logits_to_keep is not None)
        positions = torch.arange(input_ids.shape[1])[None] if position_ids is None else position_ids
        x = self.block(self.own(self.wte(input_ids) + self.wpe(positions), *came))
        return self.head(x if logits_to_keep is None else x[:, logits_to_keep])  # type: ignore[no-any-return]


OWN: dict[str, tuple[Any, tuple[str, ...]]] = {
    "the same": (lambda x, positions, keep: x, BOTH),
    "other positions": (
        lambda x, positions, keep: x * 2 if positions else x,
        ("input_ids", "logits_to_keep"),
    ),
    "other logits": (lambda x, positions, keep: x * 2 if keep else x, ("input_ids", "position_ids")),
    "both differ": (lambda x, positions, keep: x * 2 if positions or keep else x, ("input_ids",)),
    "other than each alone": (
        lambda x, positions, keep: x * 2 if positions and keep else x,
        ("input_ids", "position_ids"),
    ),
    # What is traced is the call with both, which does what the forward without does.
    "each alone differs": (lambda x, positions, keep: x * 2 if positions != keep else x, BOTH),
}


@pytest.mark.parametrize("what", OWN)
def test_what_is_left_out(what: str) -> None:
    own, names = OWN[what]
    torch.manual_seed(0)
    model = Asks(own).eval()
    captured = capture(model)
    assert captured.inputs.names == names
    ids = torch.randint(0, 61, (2, 19))
    given = {"position_ids": torch.arange(19).expand(2, 19), "logits_to_keep": torch.arange(19)}
    with torch.no_grad():
        found = captured.graph_module(ids, *(given[name] for name in names[1:]))[captured.logits_index]
        torch.testing.assert_close(found, model(ids))
    told = "\n".join(captured.reasons)
    assert ("own positions" in told) == (what in ("other positions", "both differ"))
    assert ("logits_to_keep only chooses" in told) == (what in ("other logits", "both differ"))


class Odd(nn.Module):
    """Python that depends on a value, where positions are given."""

    def forward(self, x: Tensor, positions: Tensor | None) -> Tensor:
        return x if positions is None or int(positions.max()) < 0 else x * 2


class Looks(Asks):
    """With positions of its caller, it needs a module that runs as Python; without, it does not."""

    def __init__(self) -> None:
        super().__init__(lambda x, positions, keep: x)
        self.odd = Odd()

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:  # type: ignore[override]
        positions = torch.arange(input_ids.shape[1])[None]
        x = self.block(self.odd(self.wte(input_ids) + self.wpe(positions), position_ids))
        return self.head(x)  # type: ignore[no-any-return]


def test_an_attempt_that_is_not_shown_leaves_nothing_behind() -> None:
    """What is given is asked for after the attempt: what that found out of the model may not hold without."""
    seen: list[Captured] = []
    captured = capture(Looks().eval(), seen.append)
    assert [attempt.inputs.names for attempt in seen] == [("input_ids", "position_ids"), ("input_ids",)]
    assert seen[0].opaques and "will run as Python" in "".join(seen[0].reasons)
    assert captured.graph_module is seen[1].graph_module and captured.opaques == ()
    assert captured.reasons == (NOT_SHOWN["position_ids"],)


def test_a_forward_without_is_run_once_for_each_length(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvcompile.passes.capture import own_positions

    came: list[tuple[int, tuple[str, ...]]] = []
    noted = own_positions._noted

    def counting(model: nn.Module, inputs: Any) -> Any:
        came.append((inputs["input_ids"].shape[1], tuple(inputs)[1:]))
        return noted(model, inputs)

    monkeypatch.setattr(own_positions, "_noted", counting)
    capture(Asks(OWN["the same"][0]).eval())
    assert came == [(8, ()), (8, BOTH[1:]), (12, ()), (12, BOTH[1:])]
    came.clear()
    capture(Asks(OWN["other logits"][0]).eval())
    assert [inputs for inputs in came if not inputs[1]] == [(8, ()), (12, ())]
