"""The nonces that a node computes in a round: an arithmetic sequence (protocol.md, section 4)."""

from dataclasses import dataclass

# The largest nonce of requests and of a sequence.
MAX_NONCE = 2**63 - 1


@dataclass(frozen=True)
class NonceSequence:
    """The nonces of one group of a node: offset + x * step for x = 0, 1, 2, ... up to MAX_NONCE.

    The groups of a node have disjoint sequences. Together these sequences have the nonces node_id +
    x * node_count for all x. ValueError unless 0 <= node_id < node_count and 0 <= group_id <
    n_groups.
    """

    node_id: int
    node_count: int
    group_id: int = 0
    n_groups: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.node_id < self.node_count:
            raise ValueError(
                f"node_id must be from 0 to node_count - 1, not {self.node_id} of"
                f" {self.node_count}."
            )
        if not 0 <= self.group_id < self.n_groups:
            raise ValueError(
                f"group_id must be from 0 to n_groups - 1, not {self.group_id} of {self.n_groups}."
            )

    @property
    def offset(self) -> int:
        return self.node_id + self.group_id * self.node_count

    @property
    def step(self) -> int:
        return self.n_groups * self.node_count

    @property
    def count(self) -> int:
        """The number of nonces in the sequence. `len` cannot return this number, because Python
        limits lengths to 2^63 - 1.
        """
        return max(0, (MAX_NONCE - self.offset) // self.step + 1)

    def take(self, start: int, count: int) -> range:
        """Returns `count` consecutive nonces, beginning with the nonce at index `start` of the
        sequence.

        Returns fewer nonces if the sequence ends earlier. IndexError if `start` or `count` is
        negative.
        """
        if start < 0 or count < 0:
            raise IndexError(f"start and count must not be negative, not {start} and {count}.")
        end = min(self.offset + (start + count) * self.step, MAX_NONCE + 1)
        return range(min(self.offset + start * self.step, end), end, self.step)

    def __contains__(self, nonce: int) -> bool:
        return self.offset <= nonce <= MAX_NONCE and (nonce - self.offset) % self.step == 0
