"""Breaks of the server: what it lets through, whom it answers, and what it leaves running."""

from __future__ import annotations

from tests.breaks.broken import broken

_HTTP = "kvcompile/serve/http"
_LIFECYCLE = "tests/serve/http/test_lifecycle.py"
_GONE = "tests/serve/http/test_gone.py"
_ERRORS = "tests/serve/http/test_errors.py"
_ACCESS = "tests/serve/http/test_access.py"

_SUBMITTING = "kvcompile/serve/submitting.py"

HTTP = (
    broken(
        "a client that leaves while it is answered is a defect",
        f"{_HTTP}/gate.py",
        "gone = gone or _CLOSED in str(error)",
        "gone = False",
        _GONE,
    ),
    broken(
        "what nobody is told is in the log",
        _SUBMITTING,
        "        work.exception()",
        "        pass",
        _GONE,
    ),
    broken(
        "headers have no end",
        f"{_HTTP}/heads.py",
        "if self._bytes > MOST:",
        "if False:",
        _ERRORS,
    ),
    broken(
        "a body is taken for headers",
        f"{_HTTP}/heads.py",
        "            self._bytes = None\n",
        "            pass\n",
        _ERRORS,
    ),
    broken(
        "a client that leaves is not noticed",
        f"{_HTTP}/running.py",
        "    gone = asyncio.ensure_future(left(receive))",
        "    gone = asyncio.ensure_future(asyncio.sleep(60))",
        _LIFECYCLE,
    ),
    broken(
        "a request that ends early goes on in the engine",
        _SUBMITTING,
        "            handle.cancel()",
        "            pass",
        _LIFECYCLE,
    ),
    broken(
        "a client that leaves while its request is submitted leaves it there",
        _SUBMITTING,
        "work.add_done_callback(partial(_left, handles))",
        "_left(handles, work)",
        _LIFECYCLE,
    ),
    broken(
        "requests have all the time",
        f"{_HTTP}/running.py",
        "timeout=service.limits.seconds",
        "timeout=None",
        _LIFECYCLE,
    ),
    broken(
        "a client that does not read is waited for",
        f"{_HTTP}/stream.py",
        "asyncio.timeout(_LAST_SECONDS)",
        "asyncio.timeout(None)",
        _LIFECYCLE,
    ),
    broken(
        "a stopping server takes requests",
        f"{_HTTP}/gate.py",
        "        if self._service.stopping and",
        "        if False and",
        _LIFECYCLE,
    ),
    broken(
        "a stopping server does not wait for what runs",
        f"{_HTTP}/server.py",
        "(stopping and not running)",
        "stopping",
        _LIFECYCLE,
    ),
    broken(
        "a stopping server waits for ever",
        f"{_HTTP}/server.py",
        "time.monotonic() > self._deadline",
        "False",
        _LIFECYCLE,
    ),
    broken(
        "any key that the right one begins with is right",
        f"{_HTTP}/gate.py",
        "hmac.compare_digest(given.encode",
        "key.encode().startswith(given.encode",
        _ACCESS,
    ),
    broken(
        "metrics need no key",
        f"{_HTTP}/gate.py",
        'scope["path"] != "/health"',
        'scope["path"] not in ("/health", "/metrics")',
        _ACCESS,
    ),
    broken(
        "a host is known by its beginning",
        f"{_HTTP}/gate.py",
        'headers.get("host", "")) not in options.hosts',
        'headers.get("host", "")).split(".")[0] not in [one.split(".")[0] for one in options.hosts]',
        _ACCESS,
    ),
    broken(
        "bodies without a length have no limit",
        f"{_HTTP}/reading.py",
        "        if size > most:",
        "        if False:",
        _ERRORS,
    ),
    broken(
        "part of a list of prompts is taken",
        _SUBMITTING,
        "partial(_left, handles)",
        "lambda _: _left([] if work.exception() else handles, work)",
        _ERRORS,
    ),
    broken(
        "salts are dropped",
        f"{_HTTP}/admission.py",
        'salt=job.asked.cache_salt or ""',
        'salt=""',
        "tests/serve/http/test_completions.py",
    ),
    broken(
        "fields that are not supported are ignored",
        f"{_HTTP}/schemas/unsupported.py",
        "        if not any(",
        "        if False and not any(",
        _ERRORS,
    ),
    broken(
        "n of several prompts is not multiplied",
        f"{_HTTP}/admission.py",
        "texts = prompts * asked.texts",
        "texts = asked.texts",
        _ERRORS,
    ),
    broken(
        "the greedy text is the default",
        f"{_HTTP}/schemas/generation.py",
        "1.0 if self.temperature is None",
        "0.0 if self.temperature is None",
        "tests/serve/http/test_completions.py",
    ),
    broken(
        "texts of several prompts share their places",
        f"{_HTTP}/replies/reply.py",
        "return prompt * self.asked.texts + text",
        "return text",
        "tests/serve/http/test_completions.py",
    ),
    broken(
        "a token that cannot come is no JSON",
        f"{_HTTP}/replies/logprobs.py",
        "    return LEAST if logprob < LEAST else logprob",
        "    return logprob",
        "tests/serve/http/test_chat.py",
    ),
    broken(
        "every path is a label",
        f"{_HTTP}/gate.py",
        'if scope["path"] in ROUTES else "other"',
        'if True else "other"',
        "tests/serve/http/test_metrics.py",
    ),
    broken(
        "an empty key is no key",
        "kvcompile/cli/serve.py",
        'if api_key == "" or os.environ.get("KVCOMPILE_API_KEY") == "":',
        "if False:",
        "tests/cli/test_serve.py::test_what_is_refused_before_a_model_loads",
    ),
)
