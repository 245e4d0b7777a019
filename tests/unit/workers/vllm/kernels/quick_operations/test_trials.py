"""A kernel stands in for vLLM's operation where a trial finds the same bits."""

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor

from poc_core.arithmetic import fused
from tests.harness.marks import needs_vllm
from tests.planted.operations import CACHE, GROUP, QUANTISE, arguments, writing

pytestmark = [needs_vllm, pytest.mark.xdist_group("engines")]  # whose process has loaded vLLM

UNROTATE = "vllm::fused_inv_rope_fp8_quant_kernel"


class Computed:
    """Who computed: vLLM's own operation, or the kernel; each writes a number of its own."""

    def __init__(self) -> None:
        self.by: list[str] = []
        self.writes = {"own": 2, "kernel": 2}

    def write(self, who: str, out: Tensor, scales: Tensor) -> None:
        self.by.append(who)
        out.view(torch.uint8).fill_(self.writes[who])
        scales.fill_(self.writes[who])


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Computed]:
    from workers.vllm.kernels import quick_operations as quick  # here as below: it imports vLLM
    from workers.vllm.release import custom_ops

    found = Computed()
    monkeypatch.setattr(
        quick.Quantise, "by_kernel", lambda call: found.write("kernel", call.out, call.scales)
    )
    monkeypatch.setattr(quick, "LEAST", 4 * GROUP)
    monkeypatch.setattr(fused, "is_on", lambda _device: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    with custom_ops.in_place_of_operations(
        {QUANTISE: lambda _x, out, scales, *_rest: found.write("own", out, scales)}
    ):
        yield found


@pytest.fixture
def quick() -> Any:
    from workers.vllm.kernels.quick_operations import QuickOperations

    return QuickOperations()


def operation() -> Any:
    """What vLLM's model finds now."""
    from workers.vllm.release import custom_ops

    return custom_ops.operation(QUANTISE)


def quantise(quick: Any, rows: int = 4, **named: Any) -> None:
    """As vLLM's model calls the operation."""
    args, out, _scales = arguments(QUANTISE, torch.zeros(rows, GROUP, dtype=torch.bfloat16))
    with quick.bound():
        operation()(*args, **named)
    assert out.view(torch.uint8).eq(2).all()


def test_the_kernel_computes_after_a_trial_and_vllms_own_outside(
    computed: Computed, quick: Any
) -> None:
    quantise(quick)
    assert computed.by == ["own", "kernel"] * 2 + ["kernel"]
    quantise(quick)
    assert computed.by[5:] == ["kernel"]
    args, _out, _scales = arguments(QUANTISE, torch.zeros(4, GROUP, dtype=torch.bfloat16))
    operation()(*args)
    assert computed.by[6:] == ["own"]


def test_where_bits_differ_vllms_own_stays(
    computed: Computed, caplog: pytest.LogCaptureFixture, quick: Any
) -> None:
    computed.writes["kernel"] = 3
    quantise(quick)
    quantise(quick)
    assert computed.by == ["own", "kernel", "own", "own"]
    assert "gives other bits" in caplog.text


def test_a_kernel_that_cannot_run_leaves_vllms_own(
    computed: Computed, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from workers.vllm.kernels import quick_operations as quick

    def fails(_call: Any) -> None:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(quick.Quantise, "by_kernel", fails)
    quantise(quick.QuickOperations())
    assert "no compiler" in caplog.text


def test_small_calls_and_unknown_ones_and_those_being_recorded_are_vllms_own(
    computed: Computed, monkeypatch: pytest.MonkeyPatch, quick: Any
) -> None:
    quantise(quick, rows=3)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    quantise(quick)
    with pytest.raises(TypeError, match="unexpected keyword"):
        quantise(quick, other=1)
    assert computed.by == ["own", "own"]
    args, _out, _scales = arguments(QUANTISE, torch.zeros(4, GROUP, dtype=torch.bfloat16))
    with quick.bound():
        operation()(*args[:3])  # as another release may call it
    assert computed.by == ["own"] * 3


def test_an_operation_that_this_release_lacks_is_gone_afterwards() -> None:
    from workers.vllm.release import custom_ops

    with custom_ops.in_place_of_operations({"_C::no_such_operation": print}):
        assert custom_ops.operation("_C::no_such_operation") is print
    assert custom_ops.operation("_C::no_such_operation") is None


def test_a_slice_that_an_exception_ends_leaves_vllms_own(computed: Computed) -> None:
    from workers.vllm.kernels.quick_operations import QuickOperations

    own = operation()
    with suppress(RuntimeError), QuickOperations().bound():
        assert operation() is not own
        raise RuntimeError
    assert operation() is own


def plainly_rotated(
    positions: Tensor, query: Tensor, keys: Tensor, head: int, angles: Tensor, _in_halves: bool
) -> None:
    """As vLLM's operation: in place, float32, rounded once."""
    cos, sin = (one.float()[:, None] for one in angles[positions].chunk(2, -1))
    for one in (query, keys):
        pairs = one.view(len(one), -1, head)
        x, y = (half.float() for half in pairs.clone().chunk(2, -1))
        pairs.copy_(torch.cat([x * cos - y * sin, y * cos + x * sin], -1))


@pytest.mark.parametrize("more", [0.0, 1.0])
def test_queries_and_keys_are_turned_by_the_kernel_where_a_trial_finds_the_same(
    monkeypatch: pytest.MonkeyPatch, more: float
) -> None:
    from workers.vllm.kernels import quick_operations as quick
    from workers.vllm.release import custom_ops

    by = []

    def own(*args: Any) -> None:
        by.append("own")
        plainly_rotated(*args)

    def kernel(call: Any) -> None:
        by.append("kernel")
        plainly_rotated(call.positions, call.query, call.keys, call.head, call.angles, True)
        call.keys.mul_(1 + more)

    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(600, 5 * 64, generator=generator).bfloat16()
    angles = torch.randn(50, 64, generator=generator).bfloat16()
    args = torch.arange(600) % 50, rows[:, : 4 * 64], rows[:, 4 * 64 :], 64, angles
    expected = rows.clone()
    plainly_rotated(args[0], expected[:, : 4 * 64], expected[:, 4 * 64 :], 64, angles, True)
    name = "_C::rotary_embedding"
    monkeypatch.setattr(quick.OPERATIONS[name], "by_kernel", kernel)
    monkeypatch.setattr(quick, "LEAST", 600 * 4 * 64)
    monkeypatch.setattr(fused, "is_on", lambda _device: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    with custom_ops.in_place_of_operations({name: own}), quick.QuickOperations().bound():
        turn: Any = custom_ops.operation(name)
        turn(*args, True)
        assert torch.equal(rows, expected)
        assert by == (["own", "kernel"] * 2 + ["kernel"] if not more else ["own", "kernel", "own"])
        by.clear()
        turn(*args, False)  # pairs of neighbours
        turn(args[0], args[1], args[2], 64, angles.float(), True)
        assert by == ["own", "own"]


class Router:
    """vLLM's operation, which remembers how many rows it was asked for."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.more_rows = 0.0  # what a row's logits are more where there are more rows

    def __call__(self, x: Tensor, weight: Tensor, may_take_another: bool = False) -> Tensor:
        assert not may_take_another
        self.rows.append(len(x))
        return x @ weight.T + self.more_rows * len(x)


@pytest.fixture
def router(monkeypatch: pytest.MonkeyPatch) -> Iterator[Router]:
    """Of the second of two ranks, whose first one computes and finds as it does."""
    from workers.vllm.kernels import quick_operations as quick
    from workers.vllm.release import custom_ops, parallel

    found = Router()

    def gathered(part: Tensor) -> Tensor:
        return torch.cat([X[:4] @ WEIGHT.T + 4 * found.more_rows, part])

    monkeypatch.setattr(fused, "is_on", lambda _device: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(quick, "LEAST", X.numel())
    monkeypatch.setattr(parallel, "tensor_ranks", lambda: (1, 2))
    monkeypatch.setattr(parallel, "of_all_tensor_ranks", gathered)
    monkeypatch.setattr(parallel, "do_all_tensor_ranks", lambda say_so: say_so)
    with custom_ops.in_place_of_operations({quick.ROUTER: found}):
        yield found


X, WEIGHT = torch.arange(24.0).view(8, 3), torch.arange(6.0).view(2, 3)


def routed(quick: Any, x: Tensor = X, *rest: Any) -> Tensor:
    """As vLLM's model asks."""
    from workers.vllm.kernels.quick_operations import ROUTER
    from workers.vllm.release import custom_ops

    with quick.bound():
        logits: Tensor = custom_ops.operation(ROUTER)(x, WEIGHT, *rest)  # type: ignore[misc]
    return logits


def test_each_rank_routes_its_share_after_a_trial(router: Router, quick: Any) -> None:
    quick.settle(replicated=True)
    for _ in range(2):
        assert torch.equal(routed(quick), X @ WEIGHT.T)
    assert router.rows == [4, 8, 4, 4]
    quick.settle(replicated=False)
    routed(quick)
    assert router.rows[4:] == [8]


def test_what_a_later_release_says_beside_the_rows_is_handed_on(router: Router, quick: Any) -> None:
    """Since 0.28 at the latest vLLM says whether Blackwell's kernel may be taken."""
    quick.settle(replicated=True)
    for x in (X, X, X[:6]):
        assert torch.equal(routed(quick, x, False), x @ WEIGHT.T)
    assert router.rows == [4, 8, 4, 4, 6]
    with pytest.raises(AssertionError):
        routed(quick, X, True)


def test_where_a_share_has_other_bits_each_rank_routes_all_rows(router: Router, quick: Any) -> None:
    quick.settle(replicated=True)
    router.more_rows = 0.5
    for _ in range(2):
        assert torch.equal(routed(quick), X @ WEIGHT.T + 4)
    assert router.rows == [4, 8, 8, 8]


def test_rows_that_cannot_be_shared_are_routed_by_each_rank(router: Router, quick: Any) -> None:
    quick.settle(replicated=True)
    routed(quick, X[:6])
    routed(quick, torch.cat([X, X[:1]]))
    assert router.rows == [6, 9]


def test_writes_that_the_kernel_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    from workers.vllm.kernels import quick_operations as quick

    args = writing(40, torch.uint8, False, "cpu")
    assert quick.OPERATIONS[CACHE].read(*args) is None, "too few"
    monkeypatch.setattr(quick, "LEAST", 0)
    call = quick.OPERATIONS[CACHE].read(*args)
    assert call.keys is args[0]
    assert call.value_scale is args[7]
    for place, other in (
        (5, "fp8_e5m2"),
        (5, "auto"),  # of another format than the cache
        (6, torch.ones(2)),  # by head
        (0, args[0].float()),
    ):
        assert quick.OPERATIONS[CACHE].read(*args[:place], other, *args[place + 1 :]) is None


def test_a_trial_of_writes_has_caches_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    from workers.vllm.kernels import quick_operations as quick

    monkeypatch.setattr(quick, "LEAST", 0)
    call = quick.OPERATIONS[CACHE].read(*writing(40, torch.bfloat16, False, "cpu"))
    tried, other = call.of(call.x), call.of(call.x)
    assert tried.keys.equal(call.keys)
    assert tried.values.equal(call.values)
    places = tried.slots[tried.slots >= 0]
    assert len(places) < 40
    assert len(places.unique()) == len(places)
    tried.key_cache.view(-1, 2, 128)[places] = tried.keys[tried.slots >= 0]
    assert not all(map(torch.equal, tried.bits(None), other.bits(None)))
    assert all(map(torch.equal, other.bits(None), call.of(call.x).bits(None)))
    assert not call.key_cache.any()


def unrotation(tokens: int, release: str = "0.30") -> tuple[Any, ...]:
    """A call of DeepSeek-V4's operation as the release makes it: 2 groups of 4 heads of 256."""
    x = torch.randn(tokens, 8, 256, generator=torch.Generator().manual_seed(tokens)).bfloat16()
    angles, positions = torch.ones(50, 64), torch.arange(tokens) % 50
    still, more = (192, (True,)) if release == "0.30" else (192 % 128, ())
    sizes = (-(-tokens // 4) * 4, tokens, 2, 4 * 256, 4 * 256 // 128, *more)
    return x, positions, angles, 4, 128, 2, still, 32, False, 448.0, *sizes


def answered(call: Any, number: float) -> tuple[Tensor, Tensor]:
    """Results of the call's shapes, all of a number."""
    padded, n, groups, columns, n_scales = call.sizes[:5]
    out = torch.full((groups, n, columns), number).to(torch.float8_e4m3fn)
    scales = torch.full((groups * n_scales * padded,), number)
    return out, scales.as_strided((groups, n, n_scales), (n_scales * padded, 1, padded))


@pytest.mark.parametrize("is_same", [True, False])
@pytest.mark.parametrize("release", ["0.25", "0.30"])
def test_an_operation_that_returns_its_results_has_a_kernel_too(
    monkeypatch: pytest.MonkeyPatch, release: str, is_same: bool
) -> None:
    from workers.vllm.kernels import quick_operations as quick
    from workers.vllm.release import custom_ops

    name = UNROTATE
    by = []

    def own(*args: Any) -> tuple[Tensor, Tensor]:
        by.append("own")
        call = quick.OPERATIONS[name].read(*args)
        return answered(call, 1.0)

    def kernel(call: Any) -> Any:
        by.append("kernel")
        return answered(call, 1.0 if is_same else 2.0)

    monkeypatch.setattr(quick, "LEAST", 0)
    monkeypatch.setattr(fused, "is_on", lambda _device: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(quick.OPERATIONS[name], "by_kernel", kernel)
    with custom_ops.in_place_of_operations({name: own}), quick.QuickOperations().bound():
        unrotate: Any = custom_ops.operation(name)
        for tokens in (5, 9):
            out, scales = unrotate(*unrotation(tokens, release))
            assert out.shape == (2, tokens, 1024)
            assert scales.shape == (2, tokens, 8)
    assert by == (
        ["own", "kernel"] * 2 + ["kernel"] * 2 if is_same else ["own", "kernel", *["own"] * 2]
    )


def test_only_what_the_kernel_knows_is_turned_back_by_it() -> None:
    from workers.vllm.kernels import quick_operations as quick

    read = quick.OPERATIONS[UNROTATE].read
    args = unrotation(7)
    call = read(*args)
    assert call.sizes == (8, 7, 2, 1024, 8, True)
    tried = call.of(call.x[:5])
    assert tried.sizes == (8, 5, 2, 1024, 8, True)
    assert tried.positions.max() < 50
    assert tried.key == call.key
    for at, other in ((4, 64), (6, 128), (8, True), (9, 240.0), (11, 6), (-1, False)):
        changed = list(args)
        changed[at] = other
        assert read(*changed) is None, at
    assert read(*args[:12]) is None, "too few"
    assert read(args[0].float(), *args[1:]) is None
