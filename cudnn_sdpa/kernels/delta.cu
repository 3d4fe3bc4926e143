/* What all backward passes need of each row first: the sum of grad_out times out. Any number of blocks of any size. */
#include "common.cuh"

/* A warp computes a row. */
extern "C" __global__ void grad_delta(const Attention a) {
  wait_for_previous();
  const number rows = a.batch * a.heads * a.sq, warps = (number)gridDim.x * (blockDim.x / 32);
  const int lane = threadIdx.x % 32;
  for (number row = (number)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32; row < rows; row += warps) {
    const number query = row % a.sq, head = row / a.sq % a.heads, batch = row / a.sq / a.heads;
    const Element* out = row_of<Element>(a.out, batch, head, query);
    const Element* grad_out = row_of<Element>(a.grad_out, batch, head, query);
    float sum = 0.0f;
    for (number d = lane; d < a.dim; d += 32) sum = fmaf(read(out + d * a.out.column), read(grad_out + d * a.grad_out.column), sum);
    sum = warp_reduce<Sum>(sum);
    if (lane == 0) store(a.delta + row, sum);
  }
}
