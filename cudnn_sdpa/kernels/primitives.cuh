/* What attention kernels use of the GPU besides C++: words, roundings, asynchronous copies, tensor cores.
 *
 * The tests compile the kernels as C++ for the CPU and put functions of the same names in place of these.
 */
#include "launch.cuh"

#ifndef CUDNN_SDPA_PRIMITIVES
#define CUDNN_SDPA_PRIMITIVES

#define SHARED_MEMORY(name) extern __shared__ __align__(16) unsigned char name[]

struct alignas(16) vec4 {
  float x, y, z, w;
};

/* Global memory. */

template <class T>
__device__ __forceinline__ T load(const T* from) {
  return *from;
}

template <>
__device__ __forceinline__ vec4 load(const vec4* from) {
  const float4 found = *reinterpret_cast<const float4*>(from);
  return {found.x, found.y, found.z, found.w};
}

__device__ __forceinline__ void prefetch(const void* from) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(from));
}

template <class T>
__device__ __forceinline__ void store(T* to, T value) {
  *to = value;
}

/* Numbers. */

__device__ __forceinline__ float float_of_bits(unsigned bits) {
  return __uint_as_float(bits);
}

__device__ __forceinline__ float exp2_fast(float x) {
  float found;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(found) : "f"(x));
  return found;
}

/* Two units in the last place, over the whole range. */
__device__ __forceinline__ float divide_fast(float x, float y) {
  float found;
  asm("div.full.f32 %0, %1, %2;" : "=f"(found) : "f"(x), "f"(y));
  return found;
}

__device__ __forceinline__ float rsqrt_fast(float x) {
  float found;
  asm("rsqrt.approx.f32 %0, %1;" : "=f"(found) : "f"(x));
  return found;
}

/* Keeps a number in its register: the compiler would compute it again where that is one instruction, which has to be
 * fetched, too. */
__device__ __forceinline__ void keep(float& x) {
  asm volatile("" : "+f"(x));
}

__device__ __forceinline__ float half_to_float(unsigned short bits) {
  float found;
  asm("cvt.f32.f16 %0, %1;" : "=f"(found) : "h"(bits));
  return found;
}

__device__ __forceinline__ float bfloat16_to_float(unsigned short bits) {
  return __uint_as_float((unsigned)bits << 16);
}

__device__ __forceinline__ unsigned short float_to_half(float x) {
  unsigned short bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
  return bits;
}

__device__ __forceinline__ unsigned short float_to_bfloat16(float x) {
  unsigned short bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
  return bits;
}

/* Two numbers in one word, the first in the lower half. */
__device__ __forceinline__ unsigned pack_half(float low, float high) {
  unsigned word;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  return word;
}

__device__ __forceinline__ unsigned pack_bfloat16(float low, float high) {
  unsigned word;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  return word;
}

/* Two numbers in E4M3, the first in the lower half; larger ones than 448 become that. From compute capability 8.9 on. */
__device__ __forceinline__ unsigned short pack_e4m3(float low, float high) {
  unsigned short word;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(word) : "f"(high), "f"(low));
  return word;
}

/* Warps. */

__device__ __forceinline__ float shuffle_xor(float x, int lanes) {
  return __shfl_xor_sync(0xFFFFFFFFu, x, lanes);
}

/* Asynchronous copies of 16 bytes from global to shared memory; of 0 bytes, zeros are written. */

__device__ __forceinline__ void copy_async(void* to, const void* from, int bytes) {
  const unsigned address = (unsigned)__cvta_generic_to_shared(to);
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(from), "r"(bytes) : "memory");
}

/* Ends a group of copies, which may be empty. */
__device__ __forceinline__ void commit_copies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

/* Waits until at most `pending` groups of this thread are under way. */
template <int pending>
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}

/* Tensor cores. */

/* Four matrices of 8 x 8 numbers of 16 bits; lane i gives the address of row i % 8 of matrix i / 8. */
__device__ __forceinline__ void load_matrices(unsigned (&found)[4], const void* row) {
  const unsigned address = (unsigned)__cvta_generic_to_shared(row);
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(found[0]), "=r"(found[1]), "=r"(found[2]), "=r"(found[3])
               : "r"(address)
               : "memory");
}

/* The same, each of them transposed. */
__device__ __forceinline__ void load_matrices_transposed(unsigned (&found)[4], const void* row) {
  const unsigned address = (unsigned)__cvta_generic_to_shared(row);
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(found[0]), "=r"(found[1]), "=r"(found[2]), "=r"(found[3])
               : "r"(address)
               : "memory");
}

/* c += a b, where a is 16 x 16 and b 16 x 8. */
__device__ __forceinline__ void multiply_add_half(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
               "{%0, %1, %2, %3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void multiply_add_bfloat16(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
               "{%0, %1, %2, %3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

#endif
