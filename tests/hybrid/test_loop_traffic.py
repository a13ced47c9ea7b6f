"""What a loop moves: laws and samples of both of the compiler's languages."""

from hypothesis import given
from hypothesis import strategies as st

from ridgeline.programs.loop_traffic import (
    ROW_BYTES,
    Argument,
    LoopTraffic,
    cpp_arguments,
    cpp_traffic,
    triton_arguments,
    triton_traffic,
)


def reduction(columns: int) -> str:
    """Rows of so many columns: a statistic of each, then what is made with it."""
    return f"""
    triton_meta={{'signature': {{'in_ptr0': '*bf16', 'in_ptr1': '*fp32', 'out_ptr0': '*fp32'}}}},
def triton_red_fused_0(in_ptr0, in_ptr1, out_ptr0, xnumel, r0_numel, XBLOCK : tl.constexpr):
    xnumel = 100
    r0_numel = {columns}
    xindex = xoffset + tl.arange(0, XBLOCK)[:, None]
    x0 = xindex
    for r0_offset in tl.range(0, r0_numel, R0_BLOCK):
        r0_index = r0_offset + r0_base
        r0_1 = r0_index
        tmp0 = tl.load(in_ptr0 + (r0_1 + {columns}*x0), xmask, other=0.0).to(tl.float32)
    tmp3 = tl.sum(_tmp3, 1)[:, None]
    for r0_offset in tl.range(0, r0_numel, R0_BLOCK):
        r0_index = r0_offset + r0_base
        r0_1 = r0_index
        tmp4 = tl.load(in_ptr0 + (r0_1 + {columns}*x0), xmask, other=0.0).to(tl.float32)
        tmp5 = tl.load(in_ptr1 + (r0_1), None, eviction_policy='evict_last')
        tl.store(out_ptr0 + (r0_1 + {columns}*x0), tmp6, xmask)
"""


GATHER = """
    triton_meta={'signature': {'in_ptr0': '*i64', 'in_ptr1': '*fp32', 'out_ptr0': '*fp32'}},
def triton_poi_fused_index_0(in_ptr0, in_ptr1, out_ptr0, ynumel, xnumel, XBLOCK : tl.constexpr):
    ynumel = 500
    xnumel = 64
    y0 = yindex
    x1 = xindex
    tmp0 = tl.load(in_ptr0 + (500 + y0), ymask, eviction_policy='evict_last')
    tmp8 = tl.load(in_ptr1 + (x1 + 64*tmp4), xmask & ymask)
    tl.atomic_add(out_ptr0 + (tl.broadcast_to(x1 + 64*tmp10, [YBLOCK, XBLOCK])), tmp8, ymask)
"""


@given(columns=st.integers(1, 1 << 20))
def test_rows_are_read_once_where_they_stay_on_the_chip(columns: int) -> None:
    """A second pass reads a longer row from memory again; columns of weights are read once in any case."""
    sizes = [100 * columns, columns, 100 * columns]
    names = [a.name for a in triton_arguments(reduction(columns))]
    read, weights, written = triton_traffic(reduction(columns), names, sizes)
    passes = 2 if 4 * columns > ROW_BYTES else 1
    assert read == LoopTraffic(passes * 100 * columns, 0)
    assert weights == LoopTraffic(columns, 0)
    assert written == LoopTraffic(0, 100 * columns)


def test_gathered_rows_and_atomic_additions() -> None:
    """A gather reads at most all of its source, and each atomic addition goes through memory."""
    names = ["in_ptr0", "in_ptr1", "out_ptr0"]
    indices, source, sums = triton_traffic(GATHER, names, [1000, 50 * 64, 50 * 64])
    assert indices == LoopTraffic(500, 0)
    assert source == LoopTraffic(50 * 64, 0)
    assert sums == LoopTraffic(0, 500 * 64)
    _, source, _ = triton_traffic(GATHER, names, [1000, 9000 * 64, 9000 * 64])
    assert source == LoopTraffic(500 * 64, 0)


@given(sizes=st.lists(st.integers(0, 1 << 30), min_size=3, max_size=3))
def test_reads_are_never_more_than_a_pass_each(sizes: list[int]) -> None:
    """Whatever the tensors: at most all of one in every pass."""
    for moved, size in zip(
        triton_traffic(reduction(8000), ["in_ptr0", "in_ptr1", "out_ptr0"], sizes),
        sizes,
        strict=True,
    ):
        assert 0 <= moved.read <= 2 * size
        assert 0 <= moved.written <= size


def test_parts_of_an_index_have_their_own_range() -> None:
    """`(xindex // 4) % 8` has eight values, however many there are of `xindex`."""
    source = """
def triton_poi_0(in_ptr0, in_ptr1, out_ptr0, xnumel, XBLOCK : tl.constexpr):
    xnumel = 320
    x1 = ((xindex // 4) % 8)
    x2 = xindex // 32
    x3 = xindex
    tmp0 = tl.load(in_ptr0 + (x1), xmask)
    tmp1 = tl.load(in_ptr1 + (x1 + 8*x2), xmask)
    tmp2 = tl.load(in_ptr1 + (x1 + 8*x2), xmask)
    tl.store(out_ptr0 + (x3), tmp3, xmask)
"""
    moved = triton_traffic(source, ["in_ptr0", "in_ptr1", "out_ptr0"], [100, 1000, 320])
    assert moved == [LoopTraffic(8, 0), LoopTraffic(80, 0), LoopTraffic(0, 320)]
    assert triton_arguments(source) == [
        Argument("in_ptr0", None), Argument("in_ptr1", None), Argument("out_ptr0", None),
    ]  # fmt: skip


def test_what_is_not_understood_moves_whole_tensors() -> None:
    """Several loops in one kernel, and kernels without an access that is known."""
    names, sizes = ["in_out_ptr0", "in_ptr0", "out_ptr0"], [3, 5, 7]
    whole = [LoopTraffic(3, 3), LoopTraffic(5, 0), LoopTraffic(0, 7)]
    assert triton_traffic("def f():", names, sizes) == whole
    joined = f"'combo_grid_meta': {{}}\n{GATHER}"
    assert triton_traffic(joined, names, sizes) == whole
    assert triton_traffic(GATHER, ["in_ptr0", "in_ptr1", "out_ptr0"], sizes) != whole


def test_loops_in_cpp() -> None:
    """A constant is read, anything else written, and read where it stands on the right of an assignment."""
    source = """
extern "C"  void  kernel(float* in_out_ptr0,
                       const bfloat16* in_ptr0,
                       float* out_ptr0)
{
    auto tmp0 = at::vec::Vectorized<float>::loadu(in_out_ptr0 + static_cast<int64_t>(x0), 8);
    auto tmp1 = in_ptr0[static_cast<int64_t>(x0)];
    tmp2.store(out_ptr0 + static_cast<int64_t>(x0));
    in_out_ptr0[static_cast<int64_t>(x0)] = tmp2;
}
"""
    names = [argument.name for argument in cpp_arguments(source)]
    assert names == ["in_out_ptr0", "in_ptr0", "out_ptr0"]
    assert cpp_traffic(source, names, [1, 2, 3]) == [
        LoopTraffic(1, 1),
        LoopTraffic(2, 0),
        LoopTraffic(0, 3),
    ]
    written = source.replace(
        "Vectorized<float>::loadu(in_out_ptr0", "Vectorized<float>::loadu(in_ptr0"
    )
    assert cpp_traffic(written, names, [1, 2, 3])[0] == LoopTraffic(0, 1)
