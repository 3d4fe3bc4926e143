/* Normalization of rows, forward and backward: RMSNorm, and LayerNorm if LAYER.
 *
 * OF_ROW threads share a row, a power of 2. Each keeps HELD units of it in registers; if HELD is 0, it reads its units
 * again in each pass, and finds them in a cache. A block has THREADS threads, and THREADS / OF_ROW rows at once. SUM: a
 * residual is added to the rows. FP8: 1 if the result is in E4M3 with a scale for each row, 2 if it is with a given one.
 * PAIRED: the amax of a row that has a block is found together with its sum, for one barrier less; not of LayerNorm.
 *
 * Few rows take less time the less code a kernel has, so the code says what there is: WEIGHT; BIAS; SILU behind the
 * norm; WHOLE, a row that fills the units of all its threads.
 *
 * BACKWARD: gradients. TOTAL, a gradient of x plus the residual; ALONE, one block, whose sums are the gradients of the
 * weight: 1 if it has all rows at once, 2 if it takes them one after another.
 * Other macros: see rows.cuh.
 */
#include "rows.cuh"

#define ROWS (THREADS / OF_ROW)
#define KEPT (HELD > 0 ? HELD : 1)

struct Norm {
  const void* x;
  const void* residual;   /* with SUM */
  const void* weight;
  const void* bias;
  void* out;
  void* total;            /* with SUM: x plus the residual, rounded */
  const float* given;     /* with FP8 == 2: the scale */
  float* of_rows;         /* with FP8: the scale of each row, or its amax */
  float* mean;            /* of each row; null: not wanted */
  float* scale;           /* one over the deviation or the root mean square; null: not wanted */
  const void* grad;       /* backward: of the output */
  const void* grad_total; /* of x plus the residual; null: none */
  const float* saved_mean;
  const float* saved_scale;
  void* grad_weight;      /* null: not wanted */
  void* grad_bias;
  float* partial;         /* (blocks, 1 or 2, n): the sums of each block over its rows */
  number rows;
  number n;
  number units;           /* of a row */
  number blocks;          /* whose sums are there */
  number of_count;        /* 1 / n: the bits of a float, as are the next two */
  number eps;
  number shift;           /* is added to the weight */
};

/* The sum over the threads of a row. */
__device__ __forceinline__ float sum_of_row(float x, float* sums) {
  return over_threads<Sum, OF_ROW>(x, sums);
}

#if PAIRED
struct Pair {
  float sum, largest;
};

__device__ __forceinline__ Pair shuffle_xor(Pair x, int apart) {
  return {shuffle_xor(x.sum, apart), shuffle_xor(x.largest, apart)};
}

struct SumAndLargest {
  static __device__ __forceinline__ Pair of(Pair x, Pair y) {
    return {Sum::of(x.sum, y.sum), Largest::of(x.largest, y.largest)};
  }
};
#endif

/* The unit of a thread that it reads as number i; those beyond the row are not read. */
#if WHOLE
#define FOR_UNITS(i, unit)                         \
  _Pragma("unroll") for (int i = 0; i < KEPT; ++i) \
    if (const number unit = lane + i * OF_ROW; true)
#else
#define FOR_UNITS(i, unit)                                       \
  _Pragma("unroll") for (int i = 0; i < KEPT; ++i)               \
    for (number unit = lane + i * OF_ROW; unit < a.units; unit = HELD > 0 ? a.units : unit + OF_ROW)
#endif

/* A unit of x, or of x plus the residual in float32. A LayerNorm's is rounded, but in FP8, which has no gradients: those
 * read its mean beside the rounded sum. */
struct Summed {
#if SUM
  float at[UNIT];

  __device__ __forceinline__ void read(const Norm& a, number unit) {
    Raw<DTYPE> x, residual;
    x.read(a.x, unit), residual.read(a.residual, unit);
    float more[UNIT];
    x.get(at), residual.get(more);
#pragma unroll
    for (int j = 0; j < UNIT; ++j) at[j] += more[j];
#if LAYER && !FP8
    x.set(at), x.get(at);
#endif
  }

  __device__ __forceinline__ void get(float (&x)[UNIT]) const {
#pragma unroll
    for (int j = 0; j < UNIT; ++j) x[j] = at[j];
  }
#else
  Raw<DTYPE> raw;

  __device__ __forceinline__ void read(const Norm& a, number unit) { raw.read(a.x, unit); }

  __device__ __forceinline__ void get(float (&x)[UNIT]) const { raw.get(x); }
#endif
};

/* A unit of the result, of the row that begins at the unit `first`. */
__device__ __forceinline__ void result_of(
    const Norm& a, Summed& of_x, Raw<WDTYPE>& weight, number first, number unit, float mean, float scale, float (&x)[UNIT]) {
  if (HELD == 0) {
    of_x.read(a, first + unit);
    if (WEIGHT) weight.read(a.weight, unit);
  }
  const float shift = float_of(a.shift);
  float factor[UNIT];
  of_x.get(x), weight.get(factor);
#pragma unroll
  for (int j = 0; j < UNIT; ++j) {
    x[j] = (x[j] - mean) * scale;
    if (WEIGHT) x[j] *= factor[j] + shift;
  }
  if (BIAS) {
    Raw<WDTYPE> bias;
    bias.read(a.bias, unit);
    bias.get(factor);
#pragma unroll
    for (int j = 0; j < UNIT; ++j) x[j] += factor[j];
  }
  if (SILU) {
#pragma unroll
    for (int j = 0; j < UNIT; ++j) x[j] *= sigmoid(x[j]);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS) normalize(const Norm a) {
  wait_for_previous();
  SHARED_MEMORY(memory);
  float* const sums = reinterpret_cast<float*>(memory);
  const int lane = threadIdx.x % OF_ROW;
  const number asked = (number)blockIdx.x * ROWS + threadIdx.x / OF_ROW;
  const bool is_there = asked < a.rows;
  const number row = is_there ? asked : a.rows - 1, first = row * a.units;
  Summed held[KEPT];
  Raw<WDTYPE> weights[KEPT]; /* on the way before the rows are summed */
  FOR_UNITS(i, unit) {
    if (HELD == 0) break;
    held[i].read(a, first + unit);
  }
  FOR_UNITS(i, unit) {
    if (HELD == 0) break;
    if (WEIGHT) weights[i].read(a.weight, unit);
  }
  float sum = 0.0f;
  [[maybe_unused]] float largest = 0.0f; /* PAIRED: of x times the weight */
  FOR_UNITS(i, unit) {
    if (HELD == 0) held[i].read(a, first + unit);
    float x[UNIT];
    held[i].get(x);
#if PAIRED
    float factor[UNIT];
    weights[i].get(factor);
#pragma unroll
    for (int j = 0; j < UNIT; ++j)
      largest = Largest::of(largest, fabsf(WEIGHT ? x[j] * (factor[j] + float_of(a.shift)) : x[j]));
#endif
#if SUM
    if (is_there) {
      Raw<DTYPE> rounded;
      rounded.set(x);
      rounded.write(a.total, first + unit);
    }
#endif
#pragma unroll
    for (int j = 0; j < UNIT; ++j) sum += LAYER ? x[j] : x[j] * x[j];
  }
  const float of_count = float_of(a.of_count); /* a division of this precision takes 1 KB of code, and registers */
  float mean = 0.0f;
#if LAYER
  mean = sum_of_row(sum, sums) * of_count;
  sum = 0.0f;
  FOR_UNITS(i, unit) {
    if (HELD == 0) held[i].read(a, first + unit);
    float x[UNIT];
    held[i].get(x);
#pragma unroll
    for (int j = 0; j < UNIT; ++j) sum = fmaf(x[j] - mean, x[j] - mean, sum);
  }
#endif
#if PAIRED
  const Pair pair = over_threads<SumAndLargest, OF_ROW>(Pair{sum, largest}, reinterpret_cast<Pair*>(sums));
  sum = pair.sum, largest = pair.largest;
#else
  sum = sum_of_row(sum, LAYER ? sums + THREADS / 32 : sums);
#endif
  const float scale = rsqrt_fast(sum * of_count + float_of(a.eps));
#if FP8
  /* Otherwise products may have overflowed or lost bits, or SiLU follows, which has another largest value. */
  const bool is_known = PAIRED && !SILU && largest > 1e-30f && largest < 1e30f;
  float most = is_known ? largest * scale : 0.0f, kept[KEPT][UNIT]; /* in the registers of the row and the weight */
  FOR_UNITS(i, unit) {
    result_of(a, held[i], weights[i], first, unit, mean, scale, kept[i]);
#pragma unroll
    for (int j = 0; j < UNIT; ++j)
      if (!is_known) most = Largest::of(most, fabsf(kept[i][j]));
  }
  if (!is_known) {
    if (PAIRED) __syncthreads(); /* all have read the pairs */
    most = over_threads<Largest, OF_ROW>(most, sums + (1 + LAYER) * (THREADS / 32));
  }
  const float least = 7.888609052210118e-31f, of_row = most * (1.0f / 448.0f); /* 2^-100: one over it is finite */
  const float used = FP8 == 2 ? load(a.given) : of_row < least ? least : of_row, one_over = 1.0f / used;
#endif
  if (!is_there) return;
  if (lane == 0 && a.scale) store(a.scale + row, scale);
  if (lane == 0 && a.mean) store(a.mean + row, mean);
#if FP8
  if (lane == 0) store(a.of_rows + row, FP8 == 2 ? most : used);
#endif
  FOR_UNITS(i, unit) {
#if FP8
    if (HELD == 0) result_of(a, held[i], weights[i], first, unit, mean, scale, kept[i]);
    write_fp8(a.out, first + unit, kept[i], one_over);
#else
    float x[UNIT];
    result_of(a, held[i], weights[i], first, unit, mean, scale, x);
    Raw<DTYPE> out;
    out.set(x);
    out.write(a.out, first + unit);
#endif
  }
}

#if BACKWARD
#define KEEPS (ALONE && THREADS <= 512) /* with more, a thread has too few registers to keep parts until the row is summed */
#define OF_ONE_ROW (ALONE == 1 && ROWS == 1) /* the weight's gradient needs no sum, and is written before the row's is there */

/* A row's normalized numbers and their gradient, of one unit. */
struct Parts {
  float normalized[UNIT], grad[UNIT], of_normalized[UNIT];

  __device__ __forceinline__ void keep_all() {
#pragma unroll
    for (int j = 0; j < UNIT; ++j) keep(normalized[j]), keep(grad[j]), keep(of_normalized[j]);
  }
};

/* Those of the unit `unit` of a row. */
__device__ __forceinline__ Parts parts_of(
    const Norm& a, const Raw<DTYPE>& x, const Raw<DTYPE>& grad, const Raw<WDTYPE>& weight, number unit, float mean, float scale) {
  const float shift = float_of(a.shift);
  float values[UNIT], grads[UNIT], factors[UNIT], biases[UNIT] = {};
  x.get(values), grad.get(grads), weight.get(factors);
  if (SILU && BIAS) {
    Raw<WDTYPE> bias;
    bias.read(a.bias, unit);
    bias.get(biases);
  }
  Parts found;
#pragma unroll
  for (int j = 0; j < UNIT; ++j) {
    const float normalized = (values[j] - mean) * scale, factor = WEIGHT ? factors[j] + shift : 1.0f;
    float of_out = grads[j];
    if (SILU) {
      const float y = normalized * factor + biases[j], s = sigmoid(y);
      of_out *= s + y * s * (1.0f - s);
    }
    found.normalized[j] = normalized;
    found.grad[j] = of_out;
    found.of_normalized[j] = of_out * factor;
  }
  return found;
}

#if THREADS == 1024 && HELD == 1 /* NVRTC would aim at two blocks at once, with spills */
#define BOUNDS __launch_bounds__(THREADS, 1)
#else
#define BOUNDS __launch_bounds__(THREADS)
#endif

/* A block computes the rows from its number on, as many apart as there are blocks, and sums for the weight. */
extern "C" __global__ void BOUNDS gradients(const Norm a) {
  wait_for_previous();
  SHARED_MEMORY(memory);
  float* const sums = reinterpret_cast<float*>(memory);
  const int lane = threadIdx.x % OF_ROW, group = ROWS == 1 ? 0 : threadIdx.x / OF_ROW, kinds = LAYER ? 2 : 1;
  const float of_count = float_of(a.of_count);
  const number block = ALONE ? 0 : blockIdx.x, step = ALONE ? ROWS : (number)gridDim.x * ROWS;
  float* const mine = a.partial + block * kinds * a.n;
  float of_weight[KEPT][UNIT], of_bias[KEPT][UNIT];
  Raw<WDTYPE> weights[KEPT];
#pragma unroll
  for (int i = 0; i < KEPT; ++i)
#pragma unroll
    for (int j = 0; j < UNIT; ++j) of_weight[i][j] = of_bias[i][j] = 0.0f;
  FOR_UNITS(i, unit) {
    if (HELD > 0 && WEIGHT && !ALONE) weights[i].read(a.weight, unit);
    if (HELD == 0 && WEIGHT)
      for (int j = 0; j < kinds * UNIT; ++j) mine[j / UNIT * a.n + unit * UNIT + j % UNIT] = 0.0f;
  }
  number begin = block * ROWS;
  do {
    const bool is_there = ROWS == 1 || begin + group < a.rows;
    const number row = is_there ? begin + group : a.rows - 1, first = row * a.units;
    const float scale = load(a.saved_scale + row), mean = LAYER ? load(a.saved_mean + row) : 0.0f;
    Raw<DTYPE> x[KEPT], grad[KEPT];
    FOR_UNITS(i, unit) {
      if (HELD > 0) x[i].read(a.x, first + unit), grad[i].read(a.grad, first + unit);
      if (ALONE) weights[i].read(a.weight, unit); /* ahead of the loop, the row would begin after it has come */
    }
    if (ALONE == 2 && begin == 0) { /* the other rows are on their way, too */
#pragma unroll 1
      for (number other = ROWS + group; other < a.rows; other += ROWS)
        FOR_UNITS(i, unit) fetch<DTYPE>(a.x, other * a.units + unit), fetch<DTYPE>(a.grad, other * a.units + unit);
    }
    float along = 0.0f, sum = 0.0f;
    Parts kept[KEPT];
    FOR_UNITS(i, unit) {
      if (HELD == 0) {
        x[i].read(a.x, first + unit), grad[i].read(a.grad, first + unit);
        if (WEIGHT) weights[i].read(a.weight, unit);
      }
      Parts parts = parts_of(a, x[i], grad[i], weights[i], unit, mean, scale);
      if (KEEPS) parts.keep_all();
#pragma unroll
      for (int j = 0; j < UNIT; ++j) {
        along = fmaf(parts.of_normalized[j], parts.normalized[j], along);
        if (LAYER) sum += parts.of_normalized[j];
      }
      if (KEEPS) kept[i] = parts;
      if (OF_ONE_ROW && WEIGHT) {
        float of_factor[UNIT];
#pragma unroll
        for (int j = 0; j < UNIT; ++j) of_factor[j] = parts.grad[j] * parts.normalized[j];
        Raw<WDTYPE> found;
        found.set(of_factor);
        found.write(a.grad_weight, unit);
        if (LAYER) found.set(parts.grad), found.write(a.grad_bias, unit);
      }
    }
    if (OF_ROW > 32 && ALONE != 1 && begin != block * ROWS) __syncthreads(); /* all have read the sums of the row before */
    along = sum_of_row(along, sums) * of_count;
    if (LAYER) sum = sum_of_row(sum, sums + THREADS / 32) * of_count;
    if (!is_there) continue; /* the last rows of a block, which wait for no others any more */
    FOR_UNITS(i, unit) {
      if (HELD == 0) {
        x[i].read(a.x, first + unit), grad[i].read(a.grad, first + unit);
        if (WEIGHT) weights[i].read(a.weight, unit);
      }
      Raw<DTYPE> found;
      float of_x[UNIT];
      if (TOTAL) found.read(a.grad_total, first + unit), found.get(of_x);
      const Parts parts = KEEPS ? kept[i] : parts_of(a, x[i], grad[i], weights[i], unit, mean, scale);
#pragma unroll
      for (int j = 0; j < UNIT; ++j) {
        const float of_total = TOTAL ? of_x[j] : 0.0f;
        of_x[j] = scale * (parts.of_normalized[j] - parts.normalized[j] * along - sum) + of_total;
        if (OF_ONE_ROW) continue;
        const float of_factor = parts.grad[j] * parts.normalized[j];
        if (HELD > 0) {
          of_weight[i][j] += of_factor;
          if (LAYER) of_bias[i][j] += parts.grad[j];
        } else if (WEIGHT) {
          mine[unit * UNIT + j] += of_factor;
          if (LAYER) mine[a.n + unit * UNIT + j] += parts.grad[j];
        }
      }
      found.set(of_x);
      found.write(a.out, first + unit);
    }
  } while (ALONE != 1 && (begin += step) < a.rows);
  typedef Dtype<WDTYPE>::element element;
#pragma unroll
  for (int kind = 0; kind < (HELD > 0 && WEIGHT && !OF_ONE_ROW ? kinds : 0); ++kind) {
    element* const result = (element*)(kind ? a.grad_bias : a.grad_weight);
    if (ROWS > 1) __syncthreads();
    FOR_UNITS(i, unit) {
      const float(&values)[UNIT] = kind ? of_bias[i] : of_weight[i];
      if (ALONE && ROWS == 1) {
        Raw<WDTYPE> found;
        found.set(values);
        found.write(result, unit);
      } else {
#pragma unroll
        for (int j = 0; j < UNIT; ++j) {
          if (ROWS > 1) {
            sums[group * a.n + unit * UNIT + j] = values[j];
          } else {
            store(mine + kind * a.n + unit * UNIT + j, values[j]);
          }
        }
      }
    }
    if (ROWS > 1) {
      __syncthreads();
      for (number column = threadIdx.x; column < a.n; column += THREADS) {
        float value = 0.0f;
        for (int other = 0; other < ROWS; ++other) value += sums[other * a.n + column];
        if (ALONE) {
          store(result + column, to_element<WDTYPE>(value));
        } else {
          store(mine + kind * a.n + column, value);
        }
      }
    }
  }
}

/* The sums of all blocks: a block for each 32 columns, first of the weight, then of the bias. */
extern "C" __global__ void __launch_bounds__(512) sum_blocks(const Norm a) {
  wait_for_previous();
  const number columns = (LAYER ? 2 : 1) * a.n, column = (number)blockIdx.x * 32 + threadIdx.x % 32;
  const float sum = sum_over_blocks(a.partial, a.blocks, columns, column);
  if (threadIdx.x >= 32 || column >= columns) return;
  const bool is_bias = column >= a.n;
  typedef Dtype<WDTYPE>::element element;
  store((element*)(is_bias ? a.grad_bias : a.grad_weight) + (is_bias ? column - a.n : column), to_element<WDTYPE>(sum));
}
#endif
