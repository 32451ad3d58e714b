"""Where a tile's values come from: their own parts, or the first channels of the keys (MLA's latent)."""

from __future__ import annotations

from dataclasses import dataclass

from kvcompile.kernels.triton.spec import DotType
from kvcompile.kernels.triton.tile.channel_blocks import ChannelBlock
from kvcompile.kernels.triton.tile.tile_loader import Scales, TileLoader


@dataclass(frozen=True)
class Values:
    """What probabilities weigh.

    reader: of V's own parts; None: `keys` hold them
    """

    keys: TileLoader
    reader: TileLoader | None
    channels: int

    @property
    def of(self) -> TileLoader:
        return self.reader or self.keys

    @property
    def pieces(self) -> tuple[ChannelBlock, ...]:
        return tuple(self.of.pieces[index] for index in self.indices)

    @property
    def indices(self) -> tuple[int, ...]:
        """The reader's pieces that are values."""
        every = range(len(self.of.pieces))
        return tuple(i for i in every if self.reader or self.of.pieces[i].stop <= self.channels)

    @property
    def scales(self) -> tuple[Scales, ...]:
        found = []
        for group in self.of.scales():
            own = tuple(i for i in group.pieces if i in self.indices)
            if own:
                found.append(Scales(own, group.scale, group.minimum, group.groups))
        return tuple(found)

    @property
    def dot(self) -> DotType:
        return self.of.dot

    def name(self, index: int) -> str:
        return f"{self.of.letter}{index}"

    @property
    def normalized(self) -> bool:
        """Whether scales are divided by the largest one seen, so that float16 holds them times a probability."""
        return self.dot == "float16" and any(group.scale for group in self.scales)
