"""Ray Serve's router, by where prompts begin: `affinity.py` behind the interface that Ray has for routers.

Ray's own one of this kind is in `ray.llm`, which imports with the extra `ray[llm]` only, that is with vLLM.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from kvcompile.serve.replicas.affinity import Places

BEGINNINGS = "beginnings"  # the argument of `Replica.answer` that this reads


class PrefixRouter(RequestRouter):
    """Asks replicas one after the other in the order of `Places`; requests that name no beginnings go to the idlest."""

    def initialize_state(self, load_factor: float = 1.25, slack: int = 4, **_: Any) -> None:
        """Called by Ray with `request_router_kwargs`.

        Args:
            load_factor: of the mean load, that a replica may have before its prompts go to the next one.
            slack: requests that it may have whatever the mean is.
        """
        self._places = Places()
        self._loads: Counter[str] = Counter()  # requests that were sent and have not ended
        self._factor, self._slack = load_factor, slack

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Groups of one replica each, in the order in which Ray asks them for room."""
        by_name = {str(replica.replica_id): replica for replica in candidate_replicas}
        loads = {name: self._loads[name] for name in by_name}
        order = self._places.order(_beginnings(pending_request), loads, self._factor, self._slack)
        return [[by_name[name]] for name in order]

    def on_send_request(self, replica_id: ReplicaID) -> None:
        """Called by Ray for all that is sent, whether the replica answers or not: one that hangs has its load, too."""
        super().on_send_request(replica_id)
        self._loads[str(replica_id)] += 1

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Called by Ray where a replica takes a request that a place was chosen for."""
        self._places.note(_beginnings(pending_request), str(replica_id))

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Called by Ray for all that was sent, and for what could not be."""
        name = str(replica_id)
        self._loads[name] = max(self._loads[name] - 1, 0)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        del self._loads[str(replica_id)]


def _beginnings(request: PendingRequest | None) -> tuple[str, ...]:
    return () if request is None else tuple(request.kwargs.get(BEGINNINGS, ()))
