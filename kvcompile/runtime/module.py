"""The optimized module: the original's call, with a cache inside."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kvcompile.compile.executor import Executor
from kvcompile.compile.inductor import Compiled, ShapeClass
from kvcompile.compile.sizes import Number, Symbolic
from kvcompile.errors import ExportError, InputError, KVCompileError
from kvcompile.original.adapters import Adapters
from kvcompile.original.digest import of_model
from kvcompile.original.python_state import PythonState
from kvcompile.passes.stages.stage import STAGE_IN
from kvcompile.pipeline import Analysis
from kvcompile.plan import Plan
from kvcompile.recipe import Recipe
from kvcompile.runtime.cache import SPAN_STEP, KVCache
from kvcompile.runtime.cache_spec import CacheShape
from kvcompile.runtime.chunked_prefill import in_passes
from kvcompile.runtime.fixed import Fixed
from kvcompile.runtime.handle import CacheHandle
from kvcompile.runtime.ids import check_ids, check_vocabulary, reads_at_once
from kvcompile.runtime.packed import PackedProgram
from kvcompile.runtime.padding import check_prompt, pads_of
from kvcompile.runtime.parallel.group import Group
from kvcompile.runtime.program import Program
from kvcompile.runtime.python_steps import tell_of_steps
from kvcompile.runtime.report import Report
from kvcompile.runtime.sampling import check_ends, check_names, check_sampling, pick
from kvcompile.runtime.turns import Turns, alone
from kvcompile.runtime.untraced import check_untraced, not_compiled_again
from kvcompile.runtime.weights import Weights
from kvcompile.util.progress import Progress, told
from kvcompile.util.serial import TRACING
from kvcompile.util.tracing import uncollected

_GRAPH_SPAN = 512  # the least span of a captured step


class CachedModel(Fixed):
    """A rewritten decoder: `forward` appends its tokens to the cache and returns what the original returns.

    Inference only (no gradients). The weights are the original's own tensors. Any thread may call it: a call, and a
    whole `generate`, keeps others waiting (see `Turns`).
    """

    def __init__(self, model: nn.Module, program: Program, plan: Plan, executor: Executor):
        super().__init__()
        # The weights are the original's own: parameters() gives them once, under "model.".
        self.model = model
        self.plan = plan
        self.program = program
        self.executor = executor
        self.report = Report()
        self.analysis: Analysis | None = None
        self.recipe: Recipe | None = None  # that it was optimized with
        self.whole_plan = plan if program.stage is None else program.stage.whole
        shape = CacheShape.of(plan, program.caches, program.device, program.states, self.whole_plan)
        self.cache = KVCache(shape, program.device)
        self.handle = CacheHandle(self, self.cache)
        self.turns = Turns()
        self.group: Group | None = None  # of the ranks that it is one of
        self.whole_weights: str | None = None  # a rank's: the digest of all of them
        self._weights: Weights | None = None
        self._adapters: Adapters | None = None
        self._python: PythonState | None = None
        self._prepared: set[ShapeClass] = set()
        self._packed: PackedProgram | None = None
        self.train(False)

    @property
    def device(self) -> torch.device:
        return self.program.device

    @property
    def dtype(self) -> torch.dtype:
        return self.plan.torch_dtype

    def packed(self) -> PackedProgram:
        """The program over tokens of several sequences in one row, made when it is first asked for.

        Raises:
            PlanError: there is none (`runtime/packed.py` says why).
        """
        if self._packed is None:
            self._packed = PackedProgram(self)
        return self._packed

    @not_compiled_again
    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        past_key_values: CacheHandle | None = None,
    ) -> Any:
        """Append `input_ids` and return the original's output for these tokens.

        Args:
            input_ids: int64 [B, S], any S >= 1; B stays the same until `reset()`.
            attention_mask: [B, S] or [B, all tokens so far], 1 for tokens, 0 for padding, which stands on the
                left of a sequence. None: no padding.
            past_key_values: `handle`, or a fork of it, whose text is then gone on with; None: this module's own.

        Raises:
            InputError: wrong dtype, shape, device or padding, or another batch size than the cache holds.
            LimitError: more tokens or sequences than the limits, or than a pool has pages for. In both cases the
                cache is as it was.
            InputError: another thread has begun a text since this thread's last call.
        """
        with self._at(past_key_values):
            keep = 1 if self.program.last else None
            return self.program.rebuild(self._call(input_ids, attention_mask, keep=keep))

    @contextmanager
    def _at(self, handle: Any) -> Iterator[CacheHandle]:
        """The cache of a handle in the place of this module's own, and no other caller meanwhile."""
        with self.turns.alone():
            own = self.handle if handle is None else self._checked_handle(handle)
            before, self.cache = self.cache, own.cache
            if own is not self.handle:
                own.cache.writers.take_over()  # whoever passes it says whose text it is
            try:
                yield own
            finally:
                self.cache = before

    def _checked_handle(self, handle: Any) -> CacheHandle:
        if not isinstance(handle, CacheHandle) or handle.module is not self:
            raise InputError(
                "past_key_values: this module has its own cache: expected its `handle`, a fork of it, or None, got "
                + ("another module's handle" if isinstance(handle, CacheHandle) else type(handle).__name__)
            )
        return handle

    def watch_original(self, changing: Collection[tuple[str, str]] = ()) -> None:
        """From now on, calls tell where the original has other weights or Python than this module computes with.

        Args:
            changing: what its forwards change by themselves (see `PythonState`).
        """
        read = self.program.reads(self.executor.regions.weights)
        self._weights = Weights(self.model, read)
        self._adapters = Adapters(self.model)
        self._python = PythonState(self.model, read, changing)

    def stamp(self) -> int:
        """Of the weights as they are: another number once something was written into them."""
        return 0 if self._weights is None else self._weights.stamp()

    def weights_digest(self) -> str:
        """A hash of every byte of the weights, and of the config: about a second for each GB."""
        return of_model(self.model) if self.whole_weights is None else self.whole_weights

    @alone
    def reset(self) -> None:
        """Forget all tokens of the module's own cache; its memory is kept."""
        self.cache.reset()

    @alone
    def release(self) -> None:
        """Forget all tokens and give the cache's memory back."""
        self.cache.release()
        self.executor.steps.clear()
        if self.executor.graphs is not None:
            self.executor.graphs.clear()

    @alone
    def warmup(self, batch: int = 1, progress: Progress | None = None) -> dict[str, float]:
        """Compile prompt and decode step for `batch` sequences now, instead of when they first come.

        Returns the seconds that each class of shapes took.

        Raises:
            InputError, LimitError: no number of sequences, or more than the limits.
        """
        if isinstance(batch, bool) or not isinstance(batch, int) or batch < 1:
            raise InputError(f"warmup: expected a number of sequences of at least 1, got {batch!r}")
        self.cache.check_limits(batch, 1)
        for tokens in (2, 1):
            self.prepare(batch, tokens, progress)
        return dict(self.executor.compile_seconds)

    def prepare(self, batch: int, tokens: int, progress: Progress | None = None) -> None:
        """Compile what a call of `batch` sequences and `tokens` new tokens needs; no more than whether each is one
        matters."""
        self._prepare(self._shapes(batch, tokens, keep=1), progress)

    @alone
    def save(self, folder: str | Path, *, weights: bool = True) -> None:
        """Write this module to a folder: `kvcompile.load(folder)` brings it back without the original's Python.

        The code of the classes of shapes that have come, or that `warmup` made, goes along. What the cache holds does
        not: see `handle.save`. A module that is there is replaced once the new one is complete.

        Args:
            weights: False leaves the weights out: they are given to `load`.

        Raises:
            ExportError: the module runs Python of the original, or `folder` cannot be written; it is as it was.
        """
        from kvcompile.runtime import saved_module

        self.check_alone("saved", ExportError)
        saved_module.save(self, folder, weights=weights)

    def check_alone(self, what: str, kind: type[KVCompileError]) -> None:
        """Raises an error of `kind` where this is one of several ranks."""
        if self.group is not None:
            raise kind(
                f"this module is rank {self.group.rank} of {self.group.size} and has a part of the model: it cannot be "
                f"{what}; do that with the model on one rank"
            )

    def take(self, shapes: ShapeClass, programs: Sequence[Compiled]) -> None:
        """Compiled code of another process for a class of shapes."""
        self.executor.take(shapes, programs)
        self._prepared.add(shapes)

    def _call(self, input_ids: Tensor, attention_mask: Tensor | None, keep: int | None) -> list[Tensor]:
        """forward's flat outputs; `keep`: for how many last tokens (None: all)."""
        self._check_ids(input_ids)
        batch, tokens = input_ids.shape
        self.check_call()
        with self.turns.alone():
            self.cache.writers.go_on()
            self.cache.check_room(batch, tokens)
            if self.group is not None:
                self.group.agree(input_ids, attention_mask)
            pads = pads_of(self.cache, input_ids, attention_mask, self.program.ragged)
            self.cache.allocate(batch, tokens, pads)
            if not self.cache.columns:
                self.cache.stamp = self.stamp()
            with self.cache.whole(tokens):
                captured = self.executor.graphs is not None
                self.cache.hold(self._span(self.cache.columns + tokens, captured), pads)
                most = None if self.whole_plan.whole_prompts else self.plan.limits.prefill_chunk
                return in_passes(input_ids, pads, keep, most, self._step)

    def _step(self, input_ids: Tensor, pads: Tensor | None, kept: int) -> list[Tensor]:
        """One pass over all regions; returns the flat outputs of the last `kept` tokens."""
        cache, tokens = self.cache, input_ids.shape[1]
        first = cache.seq_lens if pads is None else cache.seq_lens - pads
        positions = first[:, None] + torch.arange(tokens, device=self.device)
        rows = cache.rows(pads) if self.program.states or cache.pools else None
        # A compilation that fails, or is stopped, has written nothing.
        self._prepare(self._shapes(len(input_ids), tokens, max(kept, 1)), None)
        cache.calls.begin()
        flat = self.run_pass(
            input_ids,
            positions,
            cache.seq_lens,
            cache.inputs(),
            columns=cache.columns,
            kept=kept,
            padded=pads is not None,
            rows=rows,
            version=cache.version,
        )
        cache.advance(input_ids, positions[:, -1] + 1, rows)
        return flat

    def run_pass(
        self,
        input_ids: Tensor,
        positions: Tensor,
        seq_lens: Tensor,
        buffers: dict[str, Tensor],
        *,
        columns: int,
        kept: int,
        padded: bool = False,
        rows: list[list[int]] | None = None,
        version: int | None = None,
    ) -> list[Tensor]:
        """All regions over tokens [B, S] that are appended to `buffers`; the flat outputs of the last `kept` tokens.

        Nothing is checked, and nobody else may run meanwhile (`turns`).

        Args:
            positions: of the tokens, int64 [B, S], negative for padding.
            seq_lens: tokens that each row has in the buffers, int64 [B].
            buffers: as `KVCache.inputs` gives them.
            columns: tokens that the longest row has in the buffers, padding included.
            rows: as `KVCache.rows`; wanted where the program has states.
            version: of where the buffers stand; a step over them may be captured. None: it is not.
        """
        program, tokens = self.program, input_ids.shape[1]
        captured = self.executor.graphs is not None and tokens == 1 and version is not None
        fixed = {**program.constants, **buffers}
        inputs: dict[str, Any] = {"input_ids": input_ids, "positions": positions, "seq_lens": seq_lens}
        if program.takes_position_ids:
            inputs["position_ids"] = positions.clamp(min=0) if padded else positions
        if program.takes_past_length:
            # Filled there: a tensor made of a Python number would be copied, and a copy waits for the device.
            inputs["past_length"] = torch.full((), columns, dtype=torch.int64, device=self.device)
        shapes = self._shapes(len(input_ids), tokens, max(kept, 1))
        noted = tokens == 1 and version is not None and self._steps_on_cpu and self.executor.notes(shapes)
        inputs["span"] = self._span(columns + tokens, captured or noted)
        if program.states and not captured:  # what is captured has no modules that run as Python
            inputs["rows"] = torch.tensor(rows)
        # A chunk in the middle of a prompt still computes one row of logits: the graph has no form without.
        if program.takes_logits_to_keep:
            inputs["logits_to_keep"] = torch.arange(tokens - max(kept, 1), tokens, device=self.device)
        self._prepare(shapes, None)
        sizes = (len(input_ids), tokens, max(kept, 1))
        with self.group.used() if self.group is not None else nullcontext():
            inputs |= self._taken(sizes)
            if captured:
                assert version is not None
                outputs = self.executor.replay(shapes, inputs, fixed, version)
            elif noted:
                assert version is not None
                outputs = self.executor.step(shapes, inputs, fixed, version)
            else:
                outputs = self.executor.run(shapes, inputs | fixed)
            flat = self._given(outputs, sizes)
            if not program.takes_logits_to_keep and kept < tokens:
                flat = [value[:, tokens - max(kept, 1) :] for value in flat]
            return flat if program.stage is None or self.group is None else self.group.share(flat)

    @property
    def _steps_on_cpu(self) -> bool:
        """Whether a step may be by calls that were noted: no state is looked at by Python, no other rank waited for."""
        return self.device.type == "cpu" and not self.program.states and self.group is None

    def _taken(self, sizes: tuple[int, int, int]) -> dict[str, Tensor]:
        """What the stage before gives for sequences, tokens, and kept ones."""
        stage = self.program.stage
        if self.group is None or stage is None or stage.takes is None:
            return {}
        return {STAGE_IN: self.group.receive(stage.takes.shape(*sizes), stage.takes.dtype, self.device)}

    def _given(self, outputs: Sequence[Tensor], sizes: tuple[int, int, int]) -> list[Tensor]:
        """The flat outputs; on a stage that only passes something on, memory for those of the last one."""
        stage = self.program.stage
        if self.group is None or stage is None or stage.gives is None:
            return list(outputs)
        self.group.send(outputs[0])
        return [
            torch.empty(value.shape(*sizes), dtype=value.dtype, device=self.device) for value in stage.outputs
        ]

    def _span(self, tokens: int, captured: bool) -> int:
        """Slots to read of contiguous layers that have so many tokens; 0 where there are none.

        A step that is captured, or noted (`cpu_step.py`), has its span in it, so there are few: powers of two, and the
        capacity. What runs then reads as many slots as there are tokens, whatever the span.
        """
        step = max(_GRAPH_SPAN, 1 << (tokens - 1).bit_length()) if captured else SPAN_STEP
        return min(self.cache.span, -(-tokens // step) * step)

    def _shapes(self, batch: int, tokens: int, keep: int) -> ShapeClass:
        span = self.cache.span
        return ShapeClass(
            batch == 1,
            tokens == 1,
            not self.program.takes_logits_to_keep or keep == 1,
            # A cache no longer than one block has but one span; without contiguous layers nothing reads it.
            span=0 if span > SPAN_STEP else max(span, 1),
        )

    def _prepare(self, shapes: ShapeClass, progress: Progress | None) -> None:
        if shapes in self._prepared or not self.executor.compiled:
            return
        program = self.program
        device = self.device
        examples: dict[str, Any] = {
            "input_ids": Symbolic(("batch", "tokens"), torch.int64, device),
            "position_ids": Symbolic(("batch", "tokens"), torch.int64, device),
            "positions": Symbolic(("batch", "tokens"), torch.int64, device),
            "seq_lens": Symbolic(("batch",), torch.int64, device),
            "logits_to_keep": Symbolic(("keep",), torch.int64, device),
            "past_length": Symbolic((), torch.int64, device),
            "span": Number("span"),
            "rows": Symbolic((2, "batch"), torch.int64, torch.device("cpu")),
            **program.constants,
        }
        if program.stage is not None and program.stage.takes is not None:
            examples[STAGE_IN] = Symbolic(program.stage.takes.dims, program.stage.takes.dtype, device)
        for name, (shape, dtype, place) in self.cache.shapes().items():
            examples[name] = Symbolic(shape, dtype, place)
        with told(progress) as tell, TRACING, uncollected():
            self.executor.prepare(shapes, examples, tell)
        self._prepared.add(shapes)
        tell_of_steps(self, shapes)

    def _check_ids(self, input_ids: Any) -> None:
        check_untraced(input_ids)
        check_ids(input_ids)
        if input_ids.device != self.device:
            raise InputError(
                f"input_ids: expected device {self.device} (the model's), got {input_ids.device}; "
                f"pass input_ids.to({str(self.device)!r})"
            )
        # A decode step waits for no value of a GPU; there, a prompt's ids are looked at, and a step's come from logits.
        if input_ids.shape[1] > 1 or reads_at_once(self.device):
            check_vocabulary(input_ids, self.program.ids)

    def most_tokens(self, cache: KVCache) -> int | None:
        """How many tokens the text in `cache` may come to in the call that runs; None: that is not known."""
        return None

    def check_call(self) -> None:
        """Refuse a call that would compute something else than the original does now."""
        if torch.is_autocast_enabled(self.device.type):
            raise InputError(
                f"this call is under torch.autocast({self.device.type!r}), which changes the dtype that operators "
                "compute in: an optimized module computes as it was optimized; call it outside of autocast, or "
                "optimize the model in the dtype that you want (model.to(torch.bfloat16))"
            )
        if self._adapters is not None:
            self._adapters.check()
        if self._weights is not None and self._python is not None:
            self._weights.check()
            self._python.check(self.model, tensors=not self._weights.moved)


class PlainCachedModel(CachedModel):
    """A rewritten module that is no Hugging Face model: a tensor of logits in, tokens out."""

    @alone
    def generate(
        self,
        /,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        max_new_tokens: int | None = None,
        do_sample: bool = False,
        temperature: float = 1.0,
        top_k: int | None = None,
        eos_token_id: int | None = None,
        streamer: Any = None,
        generator: torch.Generator | None = None,
        past_key_values: CacheHandle | None = None,
        **others: Any,
    ) -> Tensor:
        """Generate after `input_ids` int64 [B, S], from an empty cache.

        Returns [B, S + new tokens], fewer where all rows end.

        Args:
            max_new_tokens: must be given.
            do_sample: draw from the softmax at `temperature` (of the `top_k` likeliest), else take the first.
            eos_token_id: a row that has produced it goes on with it.
            streamer: has put(tokens) and end(), as Hugging Face's; one sequence only.
            past_key_values: `handle`, or a fork of it: what the text has in common with what it holds is kept.

        Raises:
            InputError, LimitError: as `forward`; also an impossible max_new_tokens, temperature or top_k, or an
                argument that transformers' generate() may have and this one has not.
        """
        self._check_ids(input_ids)
        check_names(others, PlainCachedModel.generate)
        max_new_tokens = check_sampling(max_new_tokens, do_sample, temperature, top_k)
        if eos_token_id is not None:
            eos_token_id = check_ends(eos_token_id, most=1)[0]
        if self.group is not None and do_sample:
            self.group.share_randomness(generator)
        if streamer is not None and input_ids.shape[0] != 1:
            raise InputError(f"streamer: expected one sequence, got {input_ids.shape[0]}")
        with self._at(past_key_values) as handle:
            batch, cached = input_ids.shape[0], input_ids.shape[1] + max_new_tokens - 1
            self.cache.check_limits(batch, cached)
            check_prompt(self.cache, input_ids, attention_mask, self.program.ragged)
            kept = 0 if past_key_values is None else handle.common(input_ids, attention_mask)
            self.cache.check_end(cached, batch, attention_mask, kept == self.cache.columns > 0)
            handle.keep(kept)
            picked = (do_sample, temperature, top_k, generator)
            return self._generate(input_ids, attention_mask, max_new_tokens, picked, eos_token_id, streamer)

    def _generate(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        max_new_tokens: int,
        picked: tuple[bool, float, int | None, torch.Generator | None],
        eos_token_id: int | None,
        streamer: Any,
    ) -> Tensor:
        """Tokens after a text of which the cache holds the beginning, or nothing."""
        if streamer is not None:
            streamer.put(input_ids)
        tokens, new, mask = input_ids, input_ids[:, self.cache.columns :], attention_mask
        ended = torch.zeros(input_ids.shape[0], dtype=torch.bool, device=self.device)
        for _ in range(max_new_tokens):
            logits = self._call(new, mask, keep=1)[self.program.logits][:, -1].to(self.device).float()
            mask = None
            new = pick(logits, *picked)
            if eos_token_id is not None:
                new = torch.where(ended[:, None], eos_token_id, new)
                ended |= new[:, 0] == eos_token_id
            tokens = torch.cat([tokens, new], dim=1)
            if streamer is not None:
                streamer.put(new[0].cpu())
            if eos_token_id is not None and bool(ended.all()):
                break
        if streamer is not None:
            streamer.end()
        return tokens
