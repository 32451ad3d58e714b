"""The roles, listed once: the module that generates each kernel, and what the kernel does.

To add a role, add its line here: `generate`, the header of a kernel's file and `kvcompile kernels` read it.
"""

from __future__ import annotations

from dataclasses import dataclass

_TRITON = "kvcompile.kernels.triton"


@dataclass(frozen=True)
class KernelRole:
    """One role.

    module: has `generate(spec: KernelSpec) -> KernelSource`; it is imported when it is first asked for
    does:   a line, which also stands in the header of its kernels' files
    tiled:  whether the sizes of its tiles are looked up (`config.py`), so that `tuned.json` has an entry for it
    of_site: whether it is of an attention site; else a spec's site, heads and dims say nothing
    """

    module: str
    does: str
    tiled: bool = False
    of_site: bool = True


# Behind each: what its programs are counted by.
ROLES: dict[str, KernelRole] = {
    "append": KernelRole(  # batch x heads x new tokens
        f"{_TRITON}.append.append", "new tokens of a layer to their slots, encoded"
    ),
    "group": KernelRole(  # batch x KV heads x groups
        f"{_TRITON}.append.group", "groups of tokens that share scales per channel, encoded"
    ),
    "decode": KernelRole(  # splits x KV heads x batch, or shares of a list
        f"{_TRITON}.attend", "one query per sequence against a share of the slots", tiled=True
    ),
    "combine": KernelRole(  # query heads x batch x pieces of the channels
        f"{_TRITON}.attend.combine", "the shares of decode to the output, and the log-sum-exp"
    ),
    "prefill": KernelRole(  # query tiles x KV heads x batch
        f"{_TRITON}.attend", "many queries against the cache, and against themselves", tiled=True
    ),
    "decoded_rows": KernelRole(  # slot tiles x KV heads x batch
        f"{_TRITON}.attend.decoded_rows", "slots of tokens before a prompt's to rows of numbers"
    ),
    "columns": KernelRole(  # key tiles x score heads x batch
        f"{_TRITON}.retention.score_sums", "each key's share of the probabilities of many queries", tiled=True
    ),
    "score": KernelRole(  # slot tiles x score heads x batch
        f"{_TRITON}.retention.score", "what one query adds to the scores of the slots"
    ),
    "page_bounds": KernelRole(  # page tiles x KV heads x batch
        f"{_TRITON}.selection.page_bounds", "the most that a page's keys can score with a step's queries"
    ),
    "page_copy": KernelRole(  # copies x tiles of a page
        f"{_TRITON}.append.page_copy", "pages of a pool onto others", of_site=False
    ),
    "linear": KernelRole(  # tiles of rows, of all layers
        f"{_TRITON}.linear.linear", "one token by the weights of linear layers", of_site=False
    ),
}
