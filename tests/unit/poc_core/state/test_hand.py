"""What a worker tells of the leases that it has in hand."""

from concurrent.futures import ThreadPoolExecutor

from poc_core.state.hand import Hand


def test_leases_are_numbered_and_those_in_hand_are_told() -> None:
    hand = Hand(lambda number: f"w1|5|n{number}")
    assert hand.told() == "0:"
    leases = [hand.take() for _ in range(3)]
    assert leases == ["w1|5|n1", "w1|5|n2", "w1|5|n3"]
    assert hand.told() == "3:1 2 3"
    hand.drop(leases[1])
    assert hand.told() == "3:1 3"
    hand.drop(leases[0])
    hand.drop(leases[2])
    assert hand.told() == "3:"


def test_no_two_threads_get_the_same_number() -> None:
    hand = Hand(str)
    with ThreadPoolExecutor(4) as threads:
        leases = list(threads.map(lambda _: hand.take(), range(400)))
    assert sorted(map(int, leases)) == list(range(1, 401))
    for lease in leases:
        hand.drop(lease)
    assert hand.told() == "400:"
