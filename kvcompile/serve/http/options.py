"""What the server is told: the name that it answers to, its key, and the limits of what it takes."""

from __future__ import annotations

from dataclasses import dataclass, field

LOOPBACK = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True)
class Limits:
    """What one request may ask for, and how long things may take.

    body_bytes:        of a request's body
    body_seconds:      until all of a body is there
    texts:             of one request: prompts times n
    prompt_tokens:     of one prompt; None: as many as the engine takes
    completion_tokens: of one text, also where the engine has no limit of its own
    seconds:           of one request, the queue included; what is not done then is cancelled
    drain_seconds:     how long running requests may go on once the server is told to stop
    ping_seconds:      a stream says that it lives where nothing came for so long
    """

    body_bytes: int = 8 << 20
    body_seconds: float = 30.0
    texts: int = 128
    prompt_tokens: int | None = None
    completion_tokens: int = 16384
    seconds: float = 600.0
    drain_seconds: float = 30.0
    ping_seconds: float = 10.0


@dataclass(frozen=True)
class Options:
    """How the server answers.

    name:    of the model, as requests give it; None: the engine's
    api_key: that requests must bring as `Authorization: Bearer ...`; None: everybody may ask
    hosts:   names that a request may give as its `Host`; None: any. A server on loopback should know only loopback's:
             a page in a browser could otherwise reach it by a name that resolves to it (DNS rebinding)
    """

    name: str | None = None
    api_key: str | None = field(default=None, repr=False)
    hosts: tuple[str, ...] | None = None
    limits: Limits = Limits()
