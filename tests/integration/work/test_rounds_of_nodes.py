"""Nodes that share a round's nonces: three whole stacks."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from tests.peers.receiver import Receiver
from tests.stacks.round_client import assert_complete, running_stack

pytestmark = [pytest.mark.integration, pytest.mark.slow]


def test_nodes_are_disjoint_and_leave_no_gap_between_them() -> None:
    with ExitStack() as stack, ThreadPoolExecutor(3) as pool:
        starting = [pool.submit(stack.enter_context, running_stack(workers=1)) for _ in range(3)]
        clients = [each.result() for each in starting]
        receivers = [stack.enter_context(Receiver()) for _ in clients]
        for node_id, (client, receiver) in enumerate(zip(clients, receivers, strict=True)):
            client.start(receiver, node_id=node_id, node_count=3)
        for client in clients:
            client.wait_progress(1000)
            client.stop()
        for node_id, (client, receiver) in enumerate(zip(clients, receivers, strict=True)):
            client.wait_delivered()
            assert_complete(client, receiver, range(node_id, 2**62, 3))
    everything = [receiver.nonces() for receiver in receivers]
    shared_until = min(max(nonces) for nonces in everything)
    union = sorted(nonce for nonces in everything for nonce in nonces if nonce <= shared_until)
    assert union == list(range(shared_until + 1))
