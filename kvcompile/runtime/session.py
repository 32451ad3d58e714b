"""Session: an artifact that runs. The same for every target; how a graph is called is the subclass's.

    session = kvcompile.targets.onnx.session.Session("targets/")
    logits = session.prefill(input_ids)                  [B, 1, V]: of the last token
    logits = session.decode(next_ids)                    [B, 1, V]
    text   = session.generate("Why is the sky blue?", max_new_tokens=64, streamer=print)

No model, no PyTorch graph and no recipe is needed: all that is read is the artifact.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvcompile.errors import ArtifactError, InputError
from kvcompile.runtime.cache import SPAN_STEP, KVCache
from kvcompile.runtime.chunked_prefill import in_passes
from kvcompile.runtime.ids import check_ids, check_vocabulary
from kvcompile.runtime.padding import check_prompt, pads_of
from kvcompile.runtime.sampling import check_ends, check_names, check_sampling, pick
from kvcompile.runtime.turns import Turns, alone
from kvcompile.targets import folder as files
from kvcompile.targets.cache_spec import cache_shape
from kvcompile.targets.manifest import Graph, Manifest
from kvcompile.targets.registry import Target


class Session(ABC):
    """Base of the sessions; a subclass runs a graph in `_run`.

    name:    of what runs it, for messages
    targets: of the artifacts that it runs
    """

    name: ClassVar[str]
    targets: ClassVar[tuple[Target, ...]]

    def __init__(self, path: str | Path, *, device: torch.device | str = "cpu", check: bool = True):
        """
        path:  the artifact's folder
        check: whether every file is compared with its sha256 in the manifest; its size always is

        Raises:
            ArtifactError: no artifact, a damaged one, or one for another target.
        """
        self.path = Path(path).expanduser()
        self.manifest = Manifest.read(self.path)
        if self.manifest.target not in self.targets:
            raise ArtifactError(
                f"{self.path}: an artifact for {self.manifest.target}, and {self.name} runs those for "
                f"{' and '.join(self.targets)}; export with target={self.targets[0]!r}, or use "
                "kvcompile.load, which takes the right session"
            )
        files.check(self.path, self.manifest, contents=check)
        self.device = torch.device(device)
        # Engines take whole buffers.
        self.cache = KVCache(cache_shape(self.manifest), self.device, grows=False)
        self.turns = Turns()
        self._tokenizer: Any = None
        self._spare: dict[str, Tensor] = {}  # where new values go of caches that are not updated in place

    @abstractmethod
    def _run(self, graph: Graph, inputs: dict[str, Tensor], outputs: dict[str, Tensor]) -> None:
        """Run `graph`: every input and output by name, each a contiguous tensor of the session's device.

        The outputs are written in place; the cache of an alias in place is input and output at once.
        """

    @classmethod
    def may_fail(cls, dtype: str) -> bool:
        """Whether it may be missing on the machine that exports a model of `dtype`; an export goes on without it."""
        return False

    @property
    def vocab_size(self) -> int:
        return self.manifest.model.vocab_size

    @property
    def dtype(self) -> torch.dtype:
        """Of the logits."""
        return self.manifest.graphs[0].outputs[0].torch_dtype

    @alone
    def reset(self) -> None:
        """Forget all tokens; memory is kept."""
        self.cache.reset()

    def prefill(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, keep: int | None = 1
    ) -> Tensor:
        """Append tokens int64 [B, S] and return logits [B, K, V] of the last `keep` (None: of all).

        Args:
            attention_mask: [B, S] or [B, all tokens so far]: 0 is padding, on the left of a sequence's first token.

        Raises:
            InputError: wrong dtype, shape or padding, or another batch than the cache holds.
            LimitError: more tokens or sequences than the limits. In both cases the cache is as it was.
            InputError: another thread has begun a text since this thread's last call.
        """
        input_ids = self._checked(input_ids)
        if keep is not None and (not isinstance(keep, int) or isinstance(keep, bool) or keep < 0):
            raise InputError(f"keep: expected a count of last tokens, or None for all, got {keep!r}")
        batch, tokens = input_ids.shape
        with self.turns.alone():
            self.cache.writers.go_on()
            self.cache.check_room(batch, tokens)
            pads = pads_of(self.cache, input_ids, attention_mask, self.manifest.ragged)
            self.cache.allocate(batch, tokens, pads)
            with self.cache.whole(tokens):
                limits = self.manifest.limits
                most = None if limits.whole_prompts else limits.prefill_chunk
                kept = None if keep is None else max(1, keep)
                (logits,) = in_passes(input_ids, pads, kept, most, self._step)
                return logits

    def decode(self, input_ids: Tensor) -> Tensor:
        """Append one token of each sequence, int64 [B, 1], and return its logits [B, 1, V]."""
        if isinstance(input_ids, Tensor) and input_ids.dim() == 2 and input_ids.shape[1] != 1:
            raise InputError(
                f"input_ids: expected [batch, 1], got {list(input_ids.shape)}; prefill takes more"
            )
        return self.prefill(input_ids)

    @alone
    def generate(
        self,
        /,
        prompt: str | Tensor,
        attention_mask: Tensor | None = None,
        *,
        max_new_tokens: int | None = None,
        do_sample: bool = False,
        temperature: float = 1.0,
        top_k: int | None = None,
        eos_token_id: int | tuple[int, ...] | None = None,
        streamer: Callable[[str], Any] | None = None,
        generator: torch.Generator | None = None,
        **others: Any,
    ) -> Any:
        """Generate after a text (returns the new text) or after token ids [B, S] (returns [B, S + new]).

        Starts from an empty cache.

        Args:
            max_new_tokens: must be given.
            eos_token_id: where a row ends; it then goes on with it (with the first of several). None: as the manifest
                says.
            streamer: called with each piece of the text as it comes; for a text only.

        Raises:
            InputError, LimitError: as `prefill`; also a text without a tokenizer in the artifact, or a row that is
                all padding.
        """
        text = isinstance(prompt, str)
        if streamer is not None and not text:
            raise InputError("streamer: expected a prompt that is a text; pass one, or read the returned ids")
        check_names(others, Session.generate)
        max_new_tokens = check_sampling(max_new_tokens, do_sample, temperature, top_k)
        ids = self._encoded(prompt) if isinstance(prompt, str) else self._checked(prompt)
        ends = check_ends(self.manifest.model.eos_token_ids if eos_token_id is None else eos_token_id)
        cached = ids.shape[1] + max_new_tokens - 1
        self.cache.check_limits(len(ids), cached)
        check_prompt(self.cache, ids, attention_mask, self.manifest.ragged)
        self.cache.check_end(cached, len(ids), attention_mask)
        self.reset()
        logits = self.prefill(ids, attention_mask)[:, -1]
        ended = torch.zeros(len(ids), dtype=torch.bool, device=self.device)
        rows, shown = [ids], ""
        for number in range(max_new_tokens):
            token = pick(logits.float(), do_sample, temperature, top_k, generator)[:, 0]
            if ends:
                token = torch.where(ended, ends[0], token)
                ended |= torch.isin(token, torch.tensor(ends, device=self.device))
            rows.append(token[:, None])
            if streamer is not None:
                shown = self._streamed(torch.cat(rows[1:], 1)[0], shown, streamer, last=False)
            if bool(ended.all()) or number + 1 == max_new_tokens:
                break
            logits = self.decode(token[:, None])[:, -1]
        new = torch.cat(rows[1:], 1)
        if not text:
            return torch.cat(rows, 1)
        if streamer is not None:
            self._streamed(new[0], shown, streamer, last=True)
        return self.tokenizer.decode(new[0], skip_special_tokens=True)

    @property
    def tokenizer(self) -> Any:
        """The tokenizer that the artifact brings.

        Raises:
            InputError: it brings none.
        """
        if self.manifest.tokenizer is None:
            raise InputError(f"{self.path} has no tokenizer: pass token ids, or export with tokenizer=...")
        if self._tokenizer is None:
            from transformers import AutoTokenizer

            self._tokenizer = AutoTokenizer.from_pretrained(self.path / self.manifest.tokenizer)
        return self._tokenizer

    def report(self) -> dict[str, Any]:
        """JSON-ready: bytes of the cache, sequences, columns and pages; `swapped`: bytes of second places."""
        swapped = sum(tensor.nbytes for tensor in self._spare.values())
        return {**self.cache.report(), "swapped": swapped}

    def _step(self, input_ids: Tensor, pads: Tensor | None, kept: int) -> tuple[Tensor]:
        """One call of a graph: logits of the last `kept` tokens, of one at least."""
        cache = self.cache
        batch, tokens = input_ids.shape
        steps = torch.arange(tokens, device=self.device)
        first = cache.seq_lens if pads is None else cache.seq_lens - pads
        positions = first[:, None] + steps
        # A tensor of its own each, and no view into another one: TensorRT takes addresses of whole allocations only
        # (multiples of 256).
        inputs = {
            "input_ids": input_ids.clone(memory_format=torch.contiguous_format),
            "positions": positions,
            "seq_lens": cache.seq_lens,
            "keep": steps[tokens - max(kept, 1) :].clone(),
            **cache.buffers,
        }
        if cache.span:
            span = min(cache.span, -(-(cache.columns + tokens) // SPAN_STEP) * SPAN_STEP)
            inputs["slots"] = torch.arange(span, device=self.device)
        graph = self.manifest.graph(tokens, batch)
        logits = torch.empty(batch, max(kept, 1), self.vocab_size, dtype=self.dtype, device=self.device)
        outputs = {"logits": logits}
        for alias in graph.aliases:
            outputs[alias.output] = cache.buffers[alias.input] if alias.in_place else self._place(alias.input)
        cache.calls.begin()
        self._run(graph, {info.name: inputs[info.name] for info in graph.inputs}, outputs)
        for alias in graph.aliases:
            if not alias.in_place:
                self._spare[alias.input] = cache.swap(alias.input, outputs[alias.output])
        rows = cache.rows(pads) if cache.pools or cache.shape.state else None
        cache.advance(input_ids, positions[:, -1] + 1, rows)
        return (logits,)

    def _place(self, name: str) -> Tensor:
        """A tensor like the cache `name` that nothing is in."""
        like, spare = self.cache.buffers[name], self._spare.get(name)
        if spare is None or spare.shape != like.shape:
            spare = torch.empty_like(like)
        return spare

    def _checked(self, input_ids: Any) -> Tensor:
        check_ids(input_ids)
        check_vocabulary(input_ids, (0, self.vocab_size - 1))
        ids: Tensor = input_ids.to(self.device)
        return ids

    def _encoded(self, text: str) -> Tensor:
        ids = self.tokenizer(text, return_tensors="pt")["input_ids"]
        return self._checked(ids)

    def _streamed(self, ids: Tensor, shown: str, streamer: Callable[[str], Any], last: bool) -> str:
        """Give the streamer what is new of the text; a character that is not whole yet waits."""
        text: str = self.tokenizer.decode(ids, skip_special_tokens=True)
        if not last and text.endswith("\N{REPLACEMENT CHARACTER}"):
            return shown
        if len(text) > len(shown):
            streamer(text[len(shown) :])
        return text
