"""Modules as torch 2.11 writes them for a GPU, small and by hand: kernels as text, calls in order."""

HEAD = """\
# AOT ID: ['{number}_{phase}']
import torch
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.select_algorithm import extern_kernels
aten = torch.ops.aten
async_compile = AsyncCompile()
empty_strided_cuda = torch._C._dynamo.guards._empty_strided_cuda
"""

KERNEL = """
{name} = async_compile.triton('{name}', '''
import triton
@triton_heuristics.pointwise(
    triton_meta={{'signature': {{{signature}, 'xnumel': 'i32'}}}},
)
@triton.jit
def {name}({arguments}, xnumel, XBLOCK : tl.constexpr):
{body}
''', device_str='cuda')
"""


def make_kernel(name: str, types: dict[str, str], lines: list[str]) -> str:
    """A Triton kernel: its tensors with their types, and its lines."""
    return KERNEL.format(
        name=name,
        signature=", ".join(f"'{pointer}': '*{kind}'" for pointer, kind in types.items()),
        arguments=", ".join(types),
        body="\n".join(f"    {line}" for line in lines),
    )


RELU = make_kernel(
    "triton_poi_fused_relu_0",
    {"in_out_ptr0": "bf16", "in_ptr0": "fp32"},
    [
        "xnumel = 8192",
        "xindex = xoffset + tl.arange(0, XBLOCK)[:]",
        "x2 = xindex",
        "x0 = (xindex % 128)",
        "tmp0 = tl.load(in_out_ptr0 + (x2), None).to(tl.float32)",
        "tmp1 = tl.load(in_ptr0 + (x0), None, eviction_policy='evict_last')",
        "tl.store(in_out_ptr0 + (x2), tmp4, None)",
    ],
)
"""Adds a bias to 64 x 128 elements in place."""

FORWARD = (
    HEAD.format(number=0, phase="forward")
    + RELU
    + """
class Runner:
    def call(self, args):
        primals_1, primals_2, primals_3 = args
        args.clear()
        assert_size_stride(primals_1, (128, 32), (32, 1))
        assert_size_stride(primals_2, (128, ), (1, ))
        assert_size_stride(primals_3, (64, 32), (32, 1))
        with torch.cuda._DeviceGuard(0):
            torch.cuda.set_device(0)
            buf0 = empty_strided_cuda((64, 128), (128, 1), torch.bfloat16)
            # Topologically Sorted Source Nodes: [linear], Original ATen: [aten.t, aten.addmm]
            extern_kernels.mm(primals_3, reinterpret_tensor(primals_1, (32, 128), (1, 32), 0), out=buf0)
            buf1 = buf0; del buf0  # reuse
            # Topologically Sorted Source Nodes: [linear, x], Original ATen: [aten.addmm, aten.relu]
            stream0 = get_raw_stream(0)
            triton_poi_fused_relu_0.run(buf1, primals_2, 8192, stream=stream0)
            # Topologically Sorted Source Nodes: [attention], Original ATen: [aten._attention]
            buf2 = torch.ops.aten._scaled_dot_product_cudnn_attention.default(reinterpret_tensor(buf1, (1, 2, 64, 64), (1, 64, 128, 1), 0), None, True)
            buf3 = buf2[0]
            assert_size_stride(buf3, (1, 2, 64, 64), (8192, 4096, 64, 1), 'torch.ops.aten')
            del buf2
            triton_poi_fused_relu_0.run(reinterpret_tensor(buf3, (64, 128), (128, 1), 0), primals_2, 8192, stream=stream0)
        return (buf1, buf3, )

runner = Runner(partitions=[])
call = runner.call


def get_args():
    from torch._dynamo.testing import rand_strided
    primals_1 = rand_strided((128, 32), (32, 1), device='cuda:0', dtype=torch.bfloat16)
    primals_2 = rand_strided((128, ), (1, ), device='cuda:0', dtype=torch.float32)
    primals_3 = rand_strided((64, 32), (32, 1), device='cuda:0', dtype=torch.bfloat16)
    return [primals_1, primals_2, primals_3]
"""
)
"""A linear layer with its bias in the next kernel, then attention, then the same kernel once more."""

BACKWARD = (
    HEAD.format(number=0, phase="backward")
    + """
def partition_0(args):
    tangents_1, primals_2, primals_1 = args
    with torch.cuda._DeviceGuard(0):
        workspace_0 = empty_strided_cuda((3072, ), (1, ), torch.float32)
        buf4 = workspace_0[0 * 24 * 64 : (0 + 1) * 24 * 64].view(24, 64).sum(dim=0)
        # Topologically Sorted Source Nodes: [conv], Original ATen: [aten.convolution_backward]
        buf5 = torch.ops.aten.convolution_backward.default(tangents_1, primals_2, primals_1, [0], [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, False, False])
        buf6 = buf5[0]
        assert_size_stride(buf6, (4, 8, 6, 6), (288, 1, 48, 8), 'torch.ops.aten')
        aten.relu_.default(buf6)
        torch.ops.ridgeline.join.default([buf6], [primals_2])
        buf7 = torch.ops.ridgeline.product.default(reinterpret_tensor(buf6, (8, 144), (1, 8), 0), reinterpret_tensor(primals_2, (144, 8), (8, 1), 0), -1)
        buf8 = torch.ops.ridgeline.hand_out.default([buf7, primals_1], torch.float32, 7, True)
        buf9 = buf8[0]
        assert_size_stride(buf9, (8, 8), (8, 1), 'torch.ops.ridgeline.hand_out.default')
    return (buf4, buf6, buf9)


def get_args():
    from torch._dynamo.testing import rand_strided
    tangents_1 = rand_strided((4, 16, 6, 6), (576, 1, 96, 16), device='cuda:0', dtype=torch.bfloat16)
    primals_2 = rand_strided((4, 8, 6, 6), (288, 1, 48, 8), device='cuda:0', dtype=torch.bfloat16)
    primals_1 = rand_strided((16, 8, 3, 3), (72, 1, 24, 8), device='cuda:0', dtype=torch.bfloat16)
    return [tangents_1, primals_2, primals_1]
"""
)
"""Partial sums of a loop added up by eager torch, half of a convolution's backward, what has no loop of its own,
a product beside, and results that leave in another type."""
