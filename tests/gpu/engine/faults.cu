/* Kernels of a plan into whose recording faults are put. A block of 64 threads. */
struct Work {
  float* space;     /* a count, and from word 64 on what `products` computes */
  const float* a;
  const float* b;
  float* out;
  long long clocks; /* for which kernels do nothing */
};

__device__ void do_nothing(long long clocks) {
  const long long begin = clock64();
  while (clock64() - begin < clocks) {
  }
}

__device__ void compute(const Work& w, float a, float b) {
  asm volatile("griddepcontrol.launch_dependents;");
  do_nothing(w.clocks);
  if (threadIdx.x == 0) *(unsigned*)w.space += 1;
  w.space[64 + threadIdx.x] = a * w.a[threadIdx.x] + b * w.b[threadIdx.x];
}

/* The next kernel may begin before it computes. */
extern "C" __global__ void products(const Work w) {
  compute(w, 1, -2);
}

extern "C" __global__ void other_products(const Work w) {
  compute(w, 3, 1);
}

__device__ void write(const Work& w) {
  w.out[threadIdx.x] = w.space[64 + threadIdx.x] + (float)*(unsigned*)w.space;
}

extern "C" __global__ void finish(const Work w) {
  write(w);
}

/* It may begin before `products` has ended. */
extern "C" __global__ void finish_early(const Work w) {
  do_nothing(w.clocks);
  asm volatile("griddepcontrol.wait;" ::: "memory");
  write(w);
}
