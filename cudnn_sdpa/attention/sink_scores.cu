/* The gradient of attention sinks: minus the sum over all rows of the sink's weight times grad_out · out.
 *
 * Each row is read once. Blocks sum some rows of some heads, then warps sum what blocks have found, always in the same
 * order. DTYPE: 0 for float16, 1 for bfloat16, 2 for float32.
 */
#include "primitives.cuh"

typedef long long number;

#define THREADS 256 /* as in sink_scores.py */
#define AT_ONCE 2   /* rows whose loads are in flight together, as there */

#if DTYPE == 2
typedef float element;
#else
typedef unsigned short element;
#endif

/* A tensor; bytes from one batch entry, head, row and unit of a row to the next. */
struct Rows {
  const char* base;
  number batch;
  number head;
  number row;
  number unit;
  number step;         /* from a thread's row to its next one, in the same batch entry or in so many later ones */
  number wrap;         /* and if that is beyond the last row of a batch entry, as many bytes more */
};

struct SinkGradient {
  Rows out;
  Rows grad_out;
  Rows lse;            /* float32; it has no units */
  const float* sinks;
  const int* tokens;   /* how many rows count; null: all */
  float* partial;      /* (heads, chunks): the sum over each chunk of a head's rows */
  float* gradient;     /* (heads,) */
  number sink;         /* elements from one sink to the next */
  number heads;
  number rows;         /* of a head, of all batch entries */
  number length;       /* rows of a batch entry */
  number units;        /* of a row: words of 16 bytes, or elements */
  number is_wide;      /* whether they are words */
  number lanes;        /* threads that read a row, a power of 2 up to 32 */
  number side_by_side; /* heads of a block, a power of 2 that divides their number */
  number chunks;
  number apart;        /* rows from a thread's row to its next one */
  number places;       /* the same, beyond whole batch entries */
};

__device__ __forceinline__ float to_float(element x) {
#if DTYPE == 0
  return half_to_float(x);
#elif DTYPE == 1
  return bfloat16_to_float(x);
#else
  return x;
#endif
}

union Word {
  vec4 whole;
  element at[16 / sizeof(element)];
};

union Element {
  element whole;
  element at[1];
};

template <class Unit>
__device__ __forceinline__ float product(const Unit& x, const Unit& y) {
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < (int)(sizeof(Unit) / sizeof(element)); ++i) sum = fmaf(to_float(x.at[i]), to_float(y.at[i]), sum);
  return sum;
}

/* A thread's place in a tensor. */
struct Place {
  const char* at;

  __device__ __forceinline__ Place(const Rows& x, number batch, number head, number row, number unit)
      : at(x.base + batch * x.batch + head * x.head + row * x.row + unit * x.unit) {}

  __device__ __forceinline__ void advance(const Rows& x, bool wraps) { at += wraps ? x.step + x.wrap : x.step; }
};

/* The part of a thread: its units of some rows of a head, from row `first` on. */
template <class Unit>
__device__ __forceinline__ float part_of(const SinkGradient& a, number head, number first, number lane) {
  const float lowest = -3.4028234663852886e38f; /* in place of minus infinity, because -inf - (-inf) is NaN */
  const float sink = load(a.sinks + head * a.sink);
  const number rows = a.tokens && load(a.tokens) < a.rows ? load(a.tokens) : a.rows;
  const number batch = first / a.length;
  float sum = 0.0f;
  for (number unit = lane; unit < a.units; unit += a.lanes) {
    number row = first - batch * a.length;
    Place out(a.out, batch, head, row, unit), grad_out(a.grad_out, batch, head, row, unit), lse(a.lse, batch, head, row, 0);
    for (number left = rows - first; left > 0; left -= AT_ONCE * a.apart) {
      Unit x[AT_ONCE], y[AT_ONCE];
      float lses[AT_ONCE];
#pragma unroll
      for (int i = 0; i < AT_ONCE; ++i) {
        if (i * a.apart < left) {
          x[i].whole = load(&((const Unit*)out.at)->whole);
          y[i].whole = load(&((const Unit*)grad_out.at)->whole);
          lses[i] = load((const float*)lse.at);
        }
        row += a.places;
        const bool wraps = row >= a.length;
        if (wraps) row -= a.length;
        out.advance(a.out, wraps), grad_out.advance(a.grad_out, wraps), lse.advance(a.lse, wraps);
      }
#pragma unroll
      for (int i = 0; i < AT_ONCE; ++i) {
        if (i * a.apart >= left) continue;
        const float weight = expf(sink - (lses[i] < lowest ? lowest : lses[i]));
        sum = fmaf(weight, product(x[i], y[i]), sum);
      }
    }
  }
  return sum;
}

extern "C" __global__ void __launch_bounds__(THREADS, 4) sum_chunks(const SinkGradient a) {
  wait_for_previous();
  SHARED_MEMORY(memory);
  float* const sums = reinterpret_cast<float*>(memory);
  const int lanes = (int)a.lanes, heads = (int)a.side_by_side, groups = THREADS / lanes;
  const int thread = threadIdx.x, group = thread / lanes, lane = thread % lanes;
  const number of_heads = blockIdx.x / a.chunks, chunk = blockIdx.x - of_heads * a.chunks, first = of_heads * heads;
  const number head = first + group % heads, row = chunk * (groups / heads) + group / heads;
  float sum = a.is_wide ? part_of<Word>(a, head, row, lane) : part_of<Element>(a, head, row, lane);
  for (int apart = lanes / 2; apart > 0; apart /= 2) sum += shuffle_xor(sum, apart);
  if (lane == 0) sums[group] = sum;
  for (int left = groups / 2; left >= heads; left /= 2) {
    __syncthreads();
    if (thread < left) sums[thread] += sums[thread + left];
  }
  __syncthreads();
  if (thread < heads) store(a.partial + (first + thread) * a.chunks + chunk, sums[thread]);
}

/* A warp for each head. */
extern "C" __global__ void sum_heads(const SinkGradient a) {
  wait_for_previous();
  const number warps = (number)gridDim.x * (blockDim.x / 32);
  const int lane = threadIdx.x % 32;
  for (number head = (number)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32; head < a.heads; head += warps) {
    float sum = 0.0f;
    for (number chunk = lane; chunk < a.chunks; chunk += 32) sum += load(a.partial + head * a.chunks + chunk);
    for (int apart = 16; apart > 0; apart /= 2) sum += shuffle_xor(sum, apart);
    if (lane == 0) store(a.gradient + head, -sum);
  }
}
