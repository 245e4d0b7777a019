"""What a worker tells of the leases that it has in hand."""

from concurrent.futures import ThreadPoolExecutor

from poc_core.state.held_leases import HeldLeases


def test_leases_are_numbered_and_those_in_hand_are_told() -> None:
    hand = HeldLeases(lambda number: f"w1|5|n{number}")
    assert hand.summary() == "0:"
    leases = [hand.take() for _ in range(3)]
    assert leases == ["w1|5|n1", "w1|5|n2", "w1|5|n3"]
    assert hand.summary() == "3:1 2 3"
    hand.drop(leases[1])
    assert hand.summary() == "3:1 3"
    hand.drop(leases[0])
    hand.drop(leases[2])
    assert hand.summary() == "3:"


def test_no_two_threads_get_the_same_number() -> None:
    hand = HeldLeases(str)
    with ThreadPoolExecutor(4) as threads:
        leases = list(threads.map(lambda _: hand.take(), range(400)))
    assert sorted(map(int, leases)) == list(range(1, 401))
    for lease in leases:
        hand.drop(lease)
    assert hand.summary() == "400:"
