"""Requests to workers shared among HTTP clients, each with few connections."""

from contextlib import ExitStack

from api.chat.clients import Clients


async def test_no_client_has_more_requests_under_way_than_it_may() -> None:
    clients = Clients(most=2)
    with ExitStack() as under_way:
        lent = [under_way.enter_context(clients.lend()) for _ in range(5)]
        assert [lent.count(client) for client in dict.fromkeys(lent)] == [2, 2, 1]
    await clients.close()
    assert all(client.is_closed for client in lent)


async def test_a_client_that_has_room_again_is_lent_again() -> None:
    clients = Clients(most=1)
    with clients.lend() as first:
        with clients.lend() as second:
            assert second is not first
        with clients.lend() as third:
            assert third is second
    for _ in range(2):
        with clients.lend() as fourth, clients.lend() as fifth:
            assert (fourth, fifth) == (first, second)
    assert len(clients) == 2
    await clients.close()
