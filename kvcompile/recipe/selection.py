"""`cache.selection` as YAML has it: which of the tokens that are kept a decode step reads.

| kind | keys |
|---|---|
| full | - |
| top_pages | page_size, pages, dense_layers |
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from kvcompile import layouts
from kvcompile.recipe.retention import Count, LayerContext, Positive, Strict


class AllTokensConfig(Strict):
    kind: Literal["full"] = "full"

    def build(self, place: LayerContext) -> layouts.Selection:
        return layouts.AllTokens()


class TopPagesConfig(Strict):
    kind: Literal["top_pages"] = "top_pages"
    page_size: Annotated[int, Field(ge=2, le=1024)] = Field(16, description="tokens of a page")
    pages: Positive = Field(
        64, description="pages that a decode step reads, that of its own token among them"
    )
    dense_layers: Count = Field(2, description="first layers, whose steps read all tokens")

    def build(self, place: LayerContext) -> layouts.Selection:
        if place.layer < self.dense_layers:
            return layouts.AllTokens()
        return layouts.TopPages(self.page_size, self.pages)


SelectionConfig = Annotated[AllTokensConfig | TopPagesConfig, Field(discriminator="kind")]
KINDS = ("full", "top_pages")
