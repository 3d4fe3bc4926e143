/* softmax(scale * x) over each row, and its gradient. A warp takes a row; any number of blocks, of any number of warps.
 *
 * DTYPE is 0 for float32, 1 for float16 and 2 for bfloat16; all arithmetic is in float32.
 */
#include "primitives.cuh"

typedef long long number;

#if DTYPE == 0
typedef float Element;
__device__ float widened(float x) { return x; }
__device__ float rounded(float x) { return x; }
#else
typedef unsigned short Element; /* its bits */
#if DTYPE == 1
__device__ float widened(unsigned short bits) { return half_to_float(bits); }
__device__ unsigned short rounded(float x) { return float_to_half(x); }
#else
__device__ float widened(unsigned short bits) { return bfloat16_to_float(bits); }
__device__ unsigned short rounded(float x) { return float_to_bfloat16(x); }
#endif
#endif

/* Rows that are `row` elements apart, of elements that are `column` apart. */
struct Rows {
  Element* base;
  number row, column;

  __device__ float read(number i, number j) const { return widened(load(base + i * row + j * column)); }
  __device__ void write(number i, number j, float x) const { store(base + i * row + j * column, rounded(x)); }
};

/* All fields have 64 bits: the host writes them as an array. */
struct Call {
  Rows x, out, grad_out, grad_x;
  number rows, columns, scale; /* the scale as the bits of a float */
};

__device__ float warp_maximum(float x) {
  for (int apart = 16; apart > 0; apart /= 2) x = fmaxf(x, shuffle_xor(x, apart));
  return x;
}

__device__ float warp_sum(float x) {
  for (int apart = 16; apart > 0; apart /= 2) x += shuffle_xor(x, apart);
  return x;
}

/* The row of the first warp of the grid is 0, and so on; then each warp goes on by as many rows as there are warps. */
__device__ number first_row() { return (number)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32; }
__device__ number warps() { return (number)gridDim.x * (blockDim.x / 32); }

extern "C" __global__ void row_softmax(const Call a) {
  wait_for_previous();
  const int lane = threadIdx.x % 32;
  const float scale = float_of_bits((unsigned)a.scale);
  for (number row = first_row(); row < a.rows; row += warps()) {
    float highest = -3.4028234663852886e38f, sum = 0.0f;
    for (number j = lane; j < a.columns; j += 32) highest = fmaxf(highest, scale * a.x.read(row, j));
    highest = warp_maximum(highest);
    for (number j = lane; j < a.columns; j += 32) sum += expf(scale * a.x.read(row, j) - highest);
    sum = warp_sum(sum);
    for (number j = lane; j < a.columns; j += 32) a.out.write(row, j, expf(scale * a.x.read(row, j) - highest) / sum);
  }
}

extern "C" __global__ void row_softmax_gradient(const Call a) {
  wait_for_previous();
  const int lane = threadIdx.x % 32;
  const float scale = float_of_bits((unsigned)a.scale);
  for (number row = first_row(); row < a.rows; row += warps()) {
    float mean = 0.0f;
    for (number j = lane; j < a.columns; j += 32) mean += a.out.read(row, j) * a.grad_out.read(row, j);
    mean = warp_sum(mean);
    for (number j = lane; j < a.columns; j += 32) {
      a.grad_x.write(row, j, scale * a.out.read(row, j) * (a.grad_out.read(row, j) - mean));
    }
  }
}
