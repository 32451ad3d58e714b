"""Breaks of the engine and its scheduler (kvcompile/serve)."""

from __future__ import annotations

from tests.breaks.broken import broken

NUMERICS, ENGINE, SCHEDULE, SALTS, SOAK = (
    "tests/serve/test_numerics.py",
    "tests/serve/test_engine.py",
    "tests/serve/test_schedule.py",
    "tests/serve/http/test_engine.py",
    "tests/serve/test_soak.py",
)

BITS, DISK = "tests/serve/test_shared_bits.py", "tests/serve/test_disk.py"

SERVING = (
    broken(
        "a text comes back from the host without its pages",
        "kvcompile/serve/rows.py",
        "                indexable(self.buffers[name])[pages] = state[name].to(self.device)",
        "                pass",
        NUMERICS,
    ),
    broken(
        "a text comes back from the host without its row",
        "kvcompile/serve/rows.py",
        "            self._used(name, self.buffers[name][row], tokens).copy_(state[name])",
        "            pass",
        NUMERICS,
    ),
    broken(
        "a fork has an empty row",
        "kvcompile/serve/rows.py",
        "            parts[1].copy_(parts[0])",
        "            pass",
        NUMERICS,
    ),
    broken(
        "texts change places without their tables",
        "kvcompile/serve/rows.py",
        "            _exchange(self.buffers[name][one], self.buffers[name][other])",
        "            pass",
        NUMERICS,
    ),
    broken(
        "texts change places without what is beside pages",
        "kvcompile/serve/rows.py",
        "            _exchange(*parts)",
        "            pass",
        NUMERICS,
    ),
    broken(
        "a page is not copied before it is written",
        "kvcompile/serve/passes.py",
        "                    self.rows.copy_pages([move])",
        "                    pass",
        NUMERICS,
    ),
    broken(
        "texts of other lengths run together where they must not",
        "kvcompile/serve/passes.py",
        "program.takes_past_length or not program.ragged",
        "False",
        NUMERICS,
    ),
    broken(
        "a text that fails takes its batch along",
        "kvcompile/serve/engine.py",
        "            self._guarded([live.text.id], partial(self._took, live, token, logprob))",
        "            self._took(live, token, logprob)",
        ENGINE,
    ),
    broken(
        "a pass that fails is not told",
        "kvcompile/serve/engine.py",
        "        except Exception as error:\n            self._fail(texts, error)",
        "        except Exception:\n            pass",
        ENGINE,
    ),
    broken(
        "an old handle cancels whoever has its name",
        "kvcompile/serve/engine.py",
        "lambda: self._tell(request, self._cancel)",
        "lambda: self._tell(self._requests[name], self._cancel)",
        ENGINE,
    ),
    broken(
        "a thread that ends leaves its requests waiting",
        "kvcompile/serve/engine.py",
        '                    request.handle.fail(ServeError("the engine was closed before this request had ended"))',
        "                    pass",
        ENGINE,
    ),
    broken(
        "salts share their pages",
        "kvcompile/serve/engine.py",
        "self._identity.root(salt)",
        'self._identity.root("")',
        SALTS,
    ),
    broken(
        "a text computed again is forked as its prompt",
        "kvcompile/serve/schedule.py",
        "        if source.computed != source.prompt:",
        "        if False:",
        SCHEDULE,
    ),
    broken(
        "a ring is shared beyond its slots",
        "kvcompile/serve/pages.py",
        "        if self.scored or (self.sinks is not None and tokens > self.slots):",
        "        if self.scored:",
        SCHEDULE,
    ),
    broken(
        "the oldest gives up its pages",
        "kvcompile/serve/schedule.py",
        "            victim = self.running[-1]",
        "            victim = self.running[0]",
        SCHEDULE,
    ),
    broken(
        "a page that is written is still found",
        "kvcompile/serve/schedule.py",
        "                    pages.forget(page)",
        "                    pass",
        SCHEDULE,
    ),
    broken(
        "what a text has on the host stays there when it leaves",
        "kvcompile/serve/passes.py",
        "        self._on_host.pop(text, None)",
        "        pass",
        SOAK,
    ),
    broken(
        "room on the host is not given back by who leaves",
        "kvcompile/serve/schedule.py",
        "        self._give_back(text)\n        self._came_back(id)",
        "        self._give_back(text)",
        SOAK,
    ),
    broken(
        "a request that fails is never over",
        "kvcompile/serve/engine.py",
        """                self._counts["failed"] += 1
                self._over(request)
""",
        """                self._counts["failed"] += 1
""",
        SOAK,
    ),
    broken(
        "a text that gives up its pages keeps its tables",
        "kvcompile/serve/rows.py",
        "            self.buffers[name][row, : len(written)] = 0\n            written.clear()",
        "            written.clear()",
        SOAK,
    ),
    broken(
        "a snapshot is without what is beside pages",
        "kvcompile/serve/rows.py",
        "        unpack(row, self._fixed_parts(place, pages), self.device)",
        "        pass",
        BITS,
    ),
    broken(
        "a snapshot is without its slots in the order of tokens",
        "kvcompile/serve/rows.py",
        "            unpack(item, self._slots(place, number * size, (number + 1) * size), self.device)",
        "            pass",
        BITS,
    ),
    broken(
        "a page comes up empty",
        "kvcompile/serve/passes.py",
        "                    self.rows.fill_page(group, page, fetched(key))",
        "                    pass",
        BITS,
    ),
    broken(
        "pages are found before they have settled",
        "kvcompile/serve/pages.py",
        "        return max(tokens - self.unsettled, 0) // self.page_size",
        "        return tokens // self.page_size",
        SCHEDULE,
    ),
    broken(
        "weights that change in place are not seen",
        "kvcompile/serve/identity.py",
        "if self._weights is None or versions != self._versions:",
        "if self._weights is None:",
        BITS,
    ),
    broken(
        "a store does not ask in which passes",
        "kvcompile/serve/identity.py",
        'f"{chunk} alone" if alone else str(chunk)',
        "str(chunk)",
        BITS,
    ),
    broken(
        "a store does not ask whose weights it has",
        "kvcompile/serve/identity.py",
        "        return (module.weights_digest(), *how",
        "        return (*how",
        BITS,
    ),
    broken(
        "a file is taken without its signature",
        "kvcompile/serve/disk.py",
        "        if not hmac.compare_digest(",
        "        if False and not hmac.compare_digest(",
        DISK,
    ),
    broken(
        "a file is signed without its key",
        "kvcompile/serve/disk.py",
        '_FORMAT.encode() + b"\\0" + key, hashlib',
        '_FORMAT.encode() + b"\\0", hashlib',
        DISK,
    ),
    broken(
        "a file appears before it is whole",
        "kvcompile/serve/disk.py",
        '        beside = path.with_name(f"{path.stem}.{os.getpid()}.{threading.get_ident()}{_PART}")',
        "        beside = path",
        DISK,
    ),
    broken(
        "others may read the secret",
        "kvcompile/serve/disk.py",
        "os.O_EXCL, 0o600)",
        "os.O_EXCL, 0o644)",
        DISK,
    ),
)
