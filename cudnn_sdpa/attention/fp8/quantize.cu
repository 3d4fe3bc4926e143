/* Around attention in FP8: values of 16 bits to FP8 and back, their amax, and the scales that come from it.
 *
 * Blocks of 256 threads. All fields have 64 bits, so that a call is an array of numbers on the host. Conversions to FP8
 * are instructions of compute capability 8.9 and newer.
 *
 * The table of a call says for each of ten tensors its scale, one over it, and its largest absolute value. Each number
 * has 16 bytes to itself, as cuDNN wants its operands aligned.
 */
#include "launch.cuh"

typedef long long number;
typedef unsigned int word;

#define TENSORS 10
#define SLOT 4                    /* floats */
#define SCALES 0                  /* where a table's three parts begin */
#define DESCALES (SLOT * TENSORS)
#define AMAXES (2 * SLOT * TENSORS)
#define Q 0
#define V 2
#define S 3
#define O 4

#define SCALE_S 256.0f            /* of the probabilities, as in scaling_state.py */
#define TINY 7.70371977754894341e-34f /* 2^-110: no scale and no descale is infinite or subnormal */

#define FINITE 0x7f7fffffu        /* bits of the largest finite number: those of what is not finite are larger */
#define AT_ONCE 4                 /* loads of a thread that are under way together, each of 32 bytes */

__device__ float as_float(word bits) { return __uint_as_float(bits); }

/* The bits of |x|: as integers they are in the order of the numbers, infinity and then NaN behind all others. */
__device__ word magnitude(float x) { return __float_as_uint(x) & 0x7fffffffu; }

__device__ float half_to_float(word bits) {
  float result;
  asm("{ .reg .b16 h; cvt.u16.u32 h, %1; cvt.f32.f16 %0, h; }" : "=f"(result) : "r"(bits & 0xffffu));
  return result;
}

__device__ word floats_to_halves(float low, float high, int is_bfloat16) {
  word result;
  if (is_bfloat16) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
  }
  return result;
}

__device__ word floats_to_fp8(float low, float high, int is_e5m2) {
  unsigned short result;
  if (is_e5m2) {
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(result) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(result) : "f"(high), "f"(low));
  }
  return result;
}

/* Two numbers of FP8 are exact in float16. */
__device__ word fp8_to_halves(word pair, int is_e5m2) {
  word result;
  unsigned short bits = (unsigned short)pair;
  if (is_e5m2) {
    asm("cvt.rn.f16x2.e5m2x2 %0, %1;" : "=r"(result) : "h"(bits));
  } else {
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(result) : "h"(bits));
  }
  return result;
}

/* 2^-110 at least, so that the quotient is finite; where there is nothing to go by, 1. */
__device__ float scale_for(float limit, word amax) {
  return amax == 0 || amax > FINITE ? 1.0f : limit / fmaxf(as_float(amax), TINY);
}

/* The amax of all threads of a block, in its first one. */
__device__ word largest_of_block(word mine) {
  __shared__ word of_warp[8];
  mine = __reduce_max_sync(0xffffffffu, mine);
  __syncthreads(); /* of_warp may still be read */
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = mine;
  __syncthreads();
  for (int warp = 0; threadIdx.x == 0 && warp < 8; ++warp) mine = max(mine, of_warp[warp]);
  return mine;
}

/* A tensor of rows of 16-bit numbers. A unit is 16 of them. */
struct Source {
  const char* from;
  uint4* to;      /* in FP8, dense */
  number units;
  number of_row;  /* units of a row */
  number middle;  /* how many rows follow each other along the two inner dimensions */
  number inner;
  number strides[3]; /* bytes from row to row along each dimension, the innermost last */
  number row;     /* of the table */
};

struct Quantize {
  word* table;
  const float* given; /* scales of all tensors, or null: they come from what the table says is the largest */
  word* record;       /* (10,): raised to the amax values; or null */
  number tensors;
  number is_bfloat16;
  number is_e5m2;
  number limit;       /* bits of the largest number that a value may become */
  number measures;    /* whether the amax values are looked for */
  number converts;
  number by_amax;     /* whether these tensors' scales come from the table, also if others are given */
  Source of[3];
};

__device__ float scale_of(const Quantize& a, number row) {
  int is_of_call = 0;
  for (int i = 0; i < a.tensors; ++i) is_of_call |= a.of[i].row == row;
  if (a.given && !(a.by_amax && is_of_call)) return a.given[row];
  if (row == S) return SCALE_S;
  if (row == O) return scale_of(a, V); /* an output is a mean of values */
  return is_of_call ? scale_for(as_float((word)a.limit), a.table[AMAXES + SLOT * row]) : 1.0f;
}

__device__ const uint4* place_of(const Source& a, word unit) {
  if (a.of_row == a.units) return (const uint4*)(a.from + 32 * (number)unit);
  word row = unit / (word)a.of_row, part = unit % (word)a.of_row;
  word outer = row / (word)a.inner;
  number byte = outer / (word)a.middle * a.strides[0] + outer % (word)a.middle * a.strides[1];
  return (const uint4*)(a.from + byte + row % (word)a.inner * a.strides[2] + 32 * (number)part);
}

/* Two words of two numbers each to one of four. */
__device__ word convert(word first, word second, float scale, const Quantize& a, word* amax) {
  float x[4];
  if (a.is_bfloat16) {
    x[0] = as_float(first << 16), x[1] = as_float(first & 0xffff0000u);
    x[2] = as_float(second << 16), x[3] = as_float(second & 0xffff0000u);
  } else {
    x[0] = half_to_float(first), x[1] = half_to_float(first >> 16);
    x[2] = half_to_float(second), x[3] = half_to_float(second >> 16);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) *amax = max(*amax, magnitude(x[i]));
  word low = floats_to_fp8(x[0] * scale, x[1] * scale, (int)a.is_e5m2);
  return low | floats_to_fp8(x[2] * scale, x[3] * scale, (int)a.is_e5m2) << 16;
}

extern "C" __global__ void fp8_quantize(const Quantize a) {
  wait_for_previous();
  if (a.converts && blockIdx.x == 0 && threadIdx.x < TENSORS) {
    float scale = scale_of(a, threadIdx.x);
    a.table[SCALES + SLOT * threadIdx.x] = __float_as_uint(scale);
    a.table[DESCALES + SLOT * threadIdx.x] = __float_as_uint(1.0f / scale);
  }
  for (int which = 0; which < a.tensors; ++which) {
    const Source& source = a.of[which];
    float scale = a.converts ? scale_of(a, source.row) : 1.0f;
    word amax = 0, units = (word)source.units, step = gridDim.x * blockDim.x;
    for (number begin = blockIdx.x * blockDim.x + threadIdx.x; begin < units; begin += AT_ONCE * (number)step) {
      uint4 held[AT_ONCE][2];
#pragma unroll
      for (int i = 0; i < AT_ONCE; ++i) {
        number unit = begin + i * (number)step;
        if (unit < units) {
          const uint4* place = place_of(source, (word)unit);
          held[i][0] = place[0], held[i][1] = place[1];
        }
      }
#pragma unroll
      for (int i = 0; i < AT_ONCE; ++i) {
        number unit = begin + i * (number)step;
        if (unit < units) {
          uint4 made;
          made.x = convert(held[i][0].x, held[i][0].y, scale, a, &amax);
          made.y = convert(held[i][0].z, held[i][0].w, scale, a, &amax);
          made.z = convert(held[i][1].x, held[i][1].y, scale, a, &amax);
          made.w = convert(held[i][1].z, held[i][1].w, scale, a, &amax);
          if (a.converts) source.to[unit] = made;
        }
      }
    }
    if (a.measures) {
      amax = largest_of_block(amax);
      if (threadIdx.x == 0 && amax) {
        atomicMax(a.table + AMAXES + SLOT * source.row, amax);
        if (a.record) atomicMax(a.record + source.row, amax);
      }
    }
  }
}

/* A dense tensor of FP8. A unit is 16 numbers. */
struct Result {
  const uint4* from;
  uint4* to;   /* of 16 bits */
  number units;
  number row;  /* of the table */
};

struct Dequantize {
  const word* table;
  word* record;        /* (10,), or null */
  number tensors;
  number is_bfloat16;
  number is_e5m2;
  number measured;     /* how many amax values cuDNN gave */
  const float* amax[4];
  number row[4];       /* of the table */
  Result of[3];
};

/* 0, or NaN if one of the call's numbers is not finite: what saturation would have hidden. */
__device__ float defect(const Dequantize& a) {
  float sum = 0.0f;
  for (int i = 0; i < TENSORS; ++i) sum += 0.0f * as_float(a.table[AMAXES + SLOT * i]);
  for (int i = 0; i < a.measured; ++i) sum += 0.0f * *a.amax[i];
  return sum;
}

__device__ void revert(word four, float descale, const Dequantize& a, word* to) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    word pair = fp8_to_halves(four >> 16 * i & 0xffffu, (int)a.is_e5m2);
    to[i] = floats_to_halves(half_to_float(pair) * descale, half_to_float(pair >> 16) * descale, (int)a.is_bfloat16);
  }
}

extern "C" __global__ void fp8_dequantize(const Dequantize a) {
  wait_for_previous();
  if (a.record && blockIdx.x == 0 && threadIdx.x < a.measured) {
    atomicMax(a.record + a.row[threadIdx.x], magnitude(*a.amax[threadIdx.x]));
  }
  float nothing = defect(a);
  for (int which = 0; which < a.tensors; ++which) {
    const Result& result = a.of[which];
    float descale = as_float(a.table[DESCALES + SLOT * result.row]) + nothing;
    number step = (number)gridDim.x * blockDim.x;
    for (number begin = (number)blockIdx.x * blockDim.x + threadIdx.x; begin < result.units; begin += AT_ONCE * step) {
      uint4 held[AT_ONCE];
#pragma unroll
      for (int i = 0; i < AT_ONCE; ++i) {
        if (begin + i * step < result.units) held[i] = result.from[begin + i * step];
      }
#pragma unroll
      for (int i = 0; i < AT_ONCE; ++i) {
        if (begin + i * step < result.units) {
          uint4 made[2];
          revert(held[i].x, descale, a, &made[0].x);
          revert(held[i].y, descale, a, &made[0].z);
          revert(held[i].z, descale, a, &made[1].x);
          revert(held[i].w, descale, a, &made[1].z);
          uint4* to = result.to + 2 * (begin + i * step);
          to[0] = made[0], to[1] = made[1];
        }
      }
    }
  }
}

/* The amax values of a step become part of the history, and the scales follow. */
struct Update {
  word* amax;          /* (10,) of the step, filled with zeros for the next one */
  word* history;       /* (10, length), the latest step first */
  float* scale;        /* (10,) */
  const float* limits; /* (10,): what the amax shall become; 0: the scale stays */
  number length;
  number most_recent;  /* whether the latest step alone counts */
};

/* One block, of which each warp serves a tensor after the other. */
extern "C" __global__ void fp8_update(const Update a) {
  wait_for_previous();
  int lane = threadIdx.x % 32, skips = 0;
  for (int row = 0; row < TENSORS; ++row) skips |= a.amax[row] > FINITE;
  for (int row = threadIdx.x / 32; row < TENSORS && !skips; row += blockDim.x / 32) {
    word* history = a.history + row * a.length;
    word latest = a.amax[row], peak = latest;
    for (number first = (a.length - 1) / 32 * 32; first >= 0; first -= 32) { /* from the end: each moves by one */
      number place = first + lane;
      word value = 0;
      if (place < a.length) value = place == 0 ? latest : history[place - 1];
      __syncwarp();
      if (place < a.length) history[place] = value;
      __syncwarp();
      if (!a.most_recent) peak = max(peak, __reduce_max_sync(0xffffffffu, value));
    }
    if (lane == 0 && peak != 0 && a.limits[row] != 0.0f) a.scale[row] = scale_for(a.limits[row], peak);
  }
  __syncthreads();
  if (threadIdx.x < TENSORS) a.amax[threadIdx.x] = 0;
}
