"""What latent decode attention moves and computes, and what its kernel's design follows from.

Counts for one step of the kernel (64 tokens, R 512, C 64) on an H200: 4.8 TB/s and 989 TFLOP/s of
bf16 over 132 processors of 1.83 GHz are 36.4 bytes a ns and 4096 FLOP a cycle for each. The
decision is docs/adr/0016.

* Device memory: 64 * 576 * 2 = 73,728 bytes, 2.03 us in bf16, 1.01 us in fp8.
* Tensor cores, heads as wgmma's columns: scores take 36 instructions, sums 32. One with 64 columns
  takes 32 cycles. With 16 columns the sums cost 8 cycles, but reading the 64-row operand from
  shared memory (128 bytes a cycle) takes 16, and the columns' 4: 20. So 64 heads take 68 * 32 =
  2176 cycles, 1.19 us; 16 heads take 68 * 20 = 1360, 0.74 us. Either way a step of bf16 is bound by
  device memory, and there is time to spare for the softmax, which overlaps anyway.
* The alternative, heads as 64 padded rows: 1.19 us for any number up to 64, or 1.82 us where each
  of two warpgroups takes the scores for itself; of fp8 both are slower than device memory.
* An fp8 step passes through shared memory once more: 288 cycles for what is loaded, 288 to read it
  again, 576 to write it as f16, beside the 1360 that the matmuls of 16 heads read: 2512 cycles,
  1.37 us. So shared memory sets its pace, 1.5 times that of bf16; device memory could be twice.
  For more than 32 heads (tiles of 32, since bytes and numbers leave no room for 64 queries) each
  tile converts for itself: such a cache saves memory then, not time.
* 128 heads are two tiles. Together they need 2.38 us of tensor cores for 2.03 us of device memory,
  so this size is bound by the tensor cores (242 FLOP a byte; the H200 balances at 206). The second
  tile's block runs beside the first and reads the latents from L2, at 5.5 TB/s or so 1.77 us a step
  of each processor: it is L2 that then keeps a step from 1.19 us. One block of 128 heads is
  impossible: its sums alone would take the whole register file.
* Registers: the sums of 64 heads, 512 * 64 in f32, take 128 registers of each of 256 threads.
* Two blocks of latents (147,456 bytes) are in flight or at work. A block is at work for scores,
  softmax and sums, some 1.5 us, and is then refilled in 1.4 us or more, so that two of them keep up
  with (1.5 + 1.4) / 2 = 1.45 us a step, ahead of device memory in bf16.
"""

from collections.abc import Sequence

from pallas_kernels.cost import Cost


def cost(
    lengths: Sequence[int],
    *,
    num_heads: int,
    latent: int,
    rotated: int,
    page_size: int,
    cache_itemsize: int = 2,
) -> Cost:
    """Of `api.mla_decode` with rows of these lengths: every token's latent once, q and the result.

    q and the result are bf16; cache_itemsize is 2 for bf16 and 1 for e4m3.
    """
    tokens = sum(lengths)
    pages = sum(-(-length // page_size) for length in lengths)
    width = latent + rotated
    return Cost(
        bytes=tokens * width * cache_itemsize
        + len(lengths) * num_heads * (width + latent) * 2
        + 4 * (pages + len(lengths)),
        flops=2 * tokens * num_heads * (width + latent),
    )
