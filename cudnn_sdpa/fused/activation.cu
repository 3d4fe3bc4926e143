/* Activations of rows: f(gate) times up, or f(gate) alone; and their gradients.
 *
 * KIND: 0 for SiLU, 1 for GELU, 2 for the square of ReLU. A thread computes AT_ONCE units, whose loads are in flight
 * together. Other macros: see rows.cuh.
 */
#include "rows.cuh"

#define THREADS 128 /* as in activation_kernels.py */

/* Rows, and units from one to the next. */
struct Rows {
  void* base;
  number row;
};

struct Gated {
  Rows gate;
  Rows up;        /* null: ones */
  Rows grad;      /* backward: of the output */
  Rows out;
  Rows grad_gate; /* null: not wanted */
  Rows grad_up;   /* null: not wanted */
  number rows;
  number units;   /* of a row */
};

__device__ __forceinline__ float activated(float x) {
#if KIND == 0
  return x * sigmoid(x);
#elif KIND == 1
  return 0.5f * x * (1.0f + erff(0.70710678118654752f * x));
#else
  const float y = x < 0.0f ? 0.0f : x; /* NaN stays */
  return y * y;
#endif
}

__device__ __forceinline__ float slope(float x) {
#if KIND == 0
  const float s = sigmoid(x), y = x * s;
  return s + (y - y * s); /* in this order: beside a large y nothing is left of s */
#elif KIND == 1
  const float density = 0.39894228040143268f * exp2_fast(-0.72134752044448170f * x * x);
  return 0.5f * (1.0f + erff(0.70710678118654752f * x)) + (density == 0.0f ? 0.0f : x * density); /* at infinity */
#else
  return x < 0.0f ? 0.0f : 2.0f * x; /* NaN stays */
#endif
}

/* A unit of a call: the row, and the unit of the row. */
struct Place {
  number row, unit;

  __device__ __forceinline__ Place(const Gated& a, number index) {
    if (a.rows == 1) {
      row = 0, unit = index;
    } else if (a.rows * a.units < (1ll << 32)) {
      row = (unsigned)index / (unsigned)a.units, unit = index - row * a.units;
    } else {
      row = index / a.units, unit = index - row * a.units;
    }
  }

  __device__ __forceinline__ number in(const Rows& x) const { return row * x.row + unit; }
};

#define FOR_UNITS(i, index)                      \
  _Pragma("unroll") for (int i = 0; i < AT_ONCE; ++i) \
    for (number index = first + i * THREADS; index < total; index = total)

extern "C" __global__ void __launch_bounds__(THREADS) activate(const Gated a) {
  const number first = (number)blockIdx.x * (THREADS * AT_ONCE) + threadIdx.x, total = a.rows * a.units;
  Raw<DTYPE> gate[AT_ONCE], up[AT_ONCE];
  FOR_UNITS(i, index) {
    const Place at(a, index);
    gate[i].read(a.gate.base, at.in(a.gate));
    if (a.up.base) up[i].read(a.up.base, at.in(a.up));
  }
  FOR_UNITS(i, index) {
    float x[UNIT], factor[UNIT];
    gate[i].get(x), up[i].get(factor);
#pragma unroll
    for (int j = 0; j < UNIT; ++j) x[j] = a.up.base ? activated(x[j]) * factor[j] : activated(x[j]);
    Raw<DTYPE> out;
    out.set(x);
    out.write(a.out.base, Place(a, index).in(a.out));
  }
}

extern "C" __global__ void __launch_bounds__(THREADS) gradients(const Gated a) {
  const number first = (number)blockIdx.x * (THREADS * AT_ONCE) + threadIdx.x, total = a.rows * a.units;
  Raw<DTYPE> grad[AT_ONCE], gate[AT_ONCE], up[AT_ONCE];
  FOR_UNITS(i, index) {
    const Place at(a, index);
    grad[i].read(a.grad.base, at.in(a.grad));
    gate[i].read(a.gate.base, at.in(a.gate));
    if (a.up.base) up[i].read(a.up.base, at.in(a.up));
  }
  FOR_UNITS(i, index) {
    float x[UNIT], factor[UNIT], dy[UNIT], of_factor[UNIT];
    gate[i].get(x), up[i].get(factor), grad[i].get(dy);
#pragma unroll
    for (int j = 0; j < UNIT; ++j) {
      of_factor[j] = dy[j] * activated(x[j]);
      x[j] = (a.up.base ? dy[j] * factor[j] : dy[j]) * slope(x[j]);
    }
    const Place at(a, index);
    Raw<DTYPE> found;
    found.set(x);
    found.write(a.grad_gate.base, at.in(a.grad_gate));
    if (!a.grad_up.base) continue;
    found.set(of_factor);
    found.write(a.grad_up.base, at.in(a.grad_up));
  }
}
