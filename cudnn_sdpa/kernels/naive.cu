/* Attention as the formula says it: each thread computes one score, one row of the softmax, or one number of the output.
 *
 * Every operand is read from global memory each time. Any number of blocks of any size.
 */
#include "common.cuh"

extern "C" __global__ void naive_qk(const Attention a) {
  wait_for_previous();
  const number all = a.batch * a.heads * a.sq * a.skv;
  const float scale = scale_of(a) * log2_e;
  for (number i = (number)blockIdx.x * blockDim.x + threadIdx.x; i < all; i += (number)gridDim.x * blockDim.x) {
    const number key = i % a.skv, query = i / a.skv % a.sq, head = i / a.skv / a.sq % a.heads;
    const number batch = i / a.skv / a.sq / a.heads;
    const Element* q = row_of<Element>(a.q, batch, head, query);
    const Element* k = row_of<Element>(a.k, batch, head / (a.heads / a.heads_kv), key);
    float sum = 0.0f;
    for (number d = 0; d < a.dim; ++d) sum = fmaf(read(q + d * a.q.column), read(k + d * a.k.column), sum);
    store(a.scores + i, masked(a, batch, head, query, key, sum * scale));
  }
}

extern "C" __global__ void naive_softmax(const Attention a) {
  wait_for_previous();
  const number rows = a.batch * a.heads * a.sq;
  for (number row = (number)blockIdx.x * blockDim.x + threadIdx.x; row < rows; row += (number)gridDim.x * blockDim.x) {
    float* scores = a.scores + row * a.skv;
    float highest = -infinity, sum = 0.0f;
    for (number key = 0; key < a.skv; ++key) highest = fmaxf(highest, load(scores + key));
    for (number key = 0; key < a.skv; ++key) sum += safe_exp2(load(scores + key), highest);
    const float inverse = safe_inverse(sum);
    for (number key = 0; key < a.skv; ++key) store(scores + key, safe_exp2(load(scores + key), highest) * inverse);
    save_statistics(a, row, highest, inverse);
  }
}

extern "C" __global__ void naive_av(const Attention a) {
  wait_for_previous();
  const number all = a.batch * a.heads * a.sq * a.dim;
  for (number i = (number)blockIdx.x * blockDim.x + threadIdx.x; i < all; i += (number)gridDim.x * blockDim.x) {
    const number column = i % a.dim, query = i / a.dim % a.sq, head = i / a.dim / a.sq % a.heads;
    const number batch = i / a.dim / a.sq / a.heads;
    const float* weights = a.scores + row_number(a, batch, head, query) * a.skv;
    const Element* v = row_of<Element>(a.v, batch, head / (a.heads / a.heads_kv), 0) + column * a.v.column;
    const number keys = visible_keys(a, query + 1);
    float sum = 0.0f;
    for (number key = 0; key < keys; ++key) sum = fmaf(load(weights + key), read(v + key * a.v.row), sum);
    write(a.out, batch, head, query, column, sum);
  }
}
