/* The statistics of each row from its log-sum-exp, for backward passes of `sdpa`. Any number of blocks of any size.
 *
 * A large one says little of its sum: beside a mask of -1e9 float32 rounds it to a multiple of 64. Such rows are rare, and
 * computed again. A warp computes a row.
 */
#include "common.cuh"

constexpr float largest_exact = DTYPE == 0 ? 128.0f : 2048.0f; /* weights are off by a share of 2^-16 at most, or 2^-12 */

extern "C" __global__ void statistics_of_lse(const Attention a) {
  wait_for_previous();
  const number rows = a.batch * a.heads * a.sq, warps = (number)gridDim.x * (blockDim.x / 32);
  const int lane = threadIdx.x % 32;
  const float scale = scale_of(a) * log2_e;
  for (number row = (number)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32; row < rows; row += warps) {
    const number query = row % a.sq, head = row / a.sq % a.heads, batch = row / a.sq / a.heads;
    const float lse = load(a.lse + row);
    float highest = lse * log2_e, inverse = 1.0f;
    if (lse == -infinity) highest = inverse = 0.0f;
    else if (fabsf(lse) > largest_exact) {
      const Element* q = row_of<Element>(a.q, batch, head, query);
      float own = -infinity, sum = 0.0f;
      for (number key = lane; key < visible_keys(a, query + 1); key += 32) {
        const Element* k = row_of<Element>(a.k, batch, head / (a.heads / a.heads_kv), key);
        float score = 0.0f;
        for (number d = 0; d < a.dim; ++d) score = fmaf(read(q + d * a.q.column), read(k + d * a.k.column), score);
        score = masked(a, batch, head, query, key, score * scale);
        const float higher = fmaxf(own, score);
        sum = sum * safe_exp2(own, higher) + safe_exp2(score, higher);
        own = higher;
      }
      highest = warp_reduce<Maximum>(own);
      inverse = safe_inverse(warp_reduce<Sum>(sum * safe_exp2(own, highest)));
    }
    if (lane > 0) continue;
    store(a.statistics + 2 * row, highest);
    store(a.statistics + 2 * row + 1, inverse);
  }
}
