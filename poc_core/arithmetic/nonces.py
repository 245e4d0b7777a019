"""Which nonces a node tries in a round: its own arithmetic sequence (protocol.md, section 4)."""

from dataclasses import dataclass

# The largest nonce that JSON clients may send and that the sequence yields.
MAX_NONCE = 2**63 - 1


@dataclass(frozen=True)
class NonceSequence:
    """The nonces of one group of a node: offset + x * step for x = 0, 1, 2, ... up to MAX_NONCE.

    The sequences of a node's groups are disjoint and together are {node_id + x * node_count}.
    ValueError: a count below 1, or an id that is not below its count.
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
        """How many nonces there are up to MAX_NONCE. No __len__: Python limits that to 2^63 - 1."""
        return max(0, (MAX_NONCE - self.offset) // self.step + 1)

    def take(self, start: int, count: int) -> range:
        """The nonces at places start .. start + count - 1; fewer where the sequence ends before."""
        if start < 0 or count < 0:
            raise IndexError(f"start and count must not be negative, not {start} and {count}.")
        end = min(self.offset + (start + count) * self.step, MAX_NONCE + 1)
        return range(min(self.offset + start * self.step, end), end, self.step)

    def __contains__(self, nonce: int) -> bool:
        return self.offset <= nonce <= MAX_NONCE and (nonce - self.offset) % self.step == 0
