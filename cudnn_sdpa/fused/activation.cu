/* Activations of rows: f(gate) times up, or f(gate) alone; and their gradients.
 *
 * KIND: 0 for SiLU, 1 for GELU, 2 for the square of ReLU. FLAT: all rows lie one behind the other in memory, in less
 * than 2^32 units. UP: there is an `up`, and GRAD_UP: its gradient is wanted. EVEN: every thread of a call has a unit, of
 * which each computes one. Other macros: see rows.cuh.
 */
#include "rows.cuh"

/* Rows, and units from one to the next. */
struct Rows {
  void* base;
  number row;
};

struct Gated {
  Rows gate;
  Rows up;        /* with UP; ones without */
  Rows grad;      /* backward: of the output */
  Rows out;
  Rows grad_gate;
  Rows grad_up;   /* with GRAD_UP */
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

/* A unit of a call: where it is in rows. */
#if FLAT
struct Place {
  unsigned unit;

  __device__ __forceinline__ Place(const Gated&) : unit(blockIdx.x * THREADS + threadIdx.x) {}

  __device__ __forceinline__ bool is_there(const Gated& a) const { return EVEN || unit < (unsigned)a.units; }

  __device__ __forceinline__ number in(const Rows&) const { return unit; }
};
#else
struct Place {
  number row, unit;

  __device__ __forceinline__ Place(const Gated& a) {
    const number index = (number)blockIdx.x * THREADS + threadIdx.x;
    if (a.rows == 1) {
      row = 0;
    } else if (a.rows * a.units < (1ll << 32)) {
      row = (unsigned)index / (unsigned)a.units;
    } else {
      row = index / a.units;
    }
    unit = index - row * a.units;
  }

  __device__ __forceinline__ bool is_there(const Gated& a) const {
    return EVEN || (row < a.rows && unit < a.units);
  }

  __device__ __forceinline__ number in(const Rows& x) const { return row * x.row + unit; }
};
#endif

extern "C" __global__ void __launch_bounds__(THREADS) activate(const Gated a) {
  wait_for_previous();
  const Place at(a);
  if (!at.is_there(a)) return;
  Raw<DTYPE> gate, up, out;
  gate.read(a.gate.base, at.in(a.gate));
  if (UP) up.read(a.up.base, at.in(a.up));
  float x[UNIT], factor[UNIT];
  gate.get(x), up.get(factor);
#pragma unroll
  for (int j = 0; j < UNIT; ++j) x[j] = UP ? activated(x[j]) * factor[j] : activated(x[j]);
  out.set(x);
  out.write(a.out.base, at.in(a.out));
}

extern "C" __global__ void __launch_bounds__(THREADS) gradients(const Gated a) {
  wait_for_previous();
  const Place at(a);
  if (!at.is_there(a)) return;
  Raw<DTYPE> grad, gate, up, found;
  grad.read(a.grad.base, at.in(a.grad));
  gate.read(a.gate.base, at.in(a.gate));
  if (UP) up.read(a.up.base, at.in(a.up));
  float x[UNIT], factor[UNIT], dy[UNIT], of_factor[UNIT];
  gate.get(x), up.get(factor), grad.get(dy);
#pragma unroll
  for (int j = 0; j < UNIT; ++j) {
    of_factor[j] = dy[j] * activated(x[j]);
    x[j] = (UP ? dy[j] * factor[j] : dy[j]) * slope(x[j]);
  }
  found.set(x);
  found.write(a.grad_gate.base, at.in(a.grad_gate));
  if (!GRAD_UP) return;
  found.set(of_factor);
  found.write(a.grad_up.base, at.in(a.grad_up));
}
