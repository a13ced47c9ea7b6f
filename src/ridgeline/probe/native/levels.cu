/* What levels of a GPU's memory and its multiprocessors give: loops that torch has no operators for. Compiled
   when first used, by the compiler that torch ships (NVRTC), without any header. All loads are volatile: what
   is loaded is of no use to anybody, and would be left out. */

/* So many loads by one thread, each from the address that the one before it brought. The walk goes on where it
   was: from the beginning it would find its first lines in a cache. */
extern "C" __global__ void ridgeline_chase(unsigned long long *place, int loads) {
  unsigned long long at = *place;
  for (int load = 0; load < loads; ++load) {
    asm volatile("ld.global.ca.u64 %0, [%0];" : "+l"(at));
  }
  *place = at;
}

/* So many times four loads of 16 bytes by each thread, neighbours side by side, past the cache of the
   multiprocessor. `mask` is the number of 16-byte words less one, a power of two less one. */
extern "C" __global__ void ridgeline_read_levels(
    const char *words, int mask, int first, int loads, float *sink) {
  unsigned int step = gridDim.x * blockDim.x;
  unsigned int at = first + blockIdx.x * blockDim.x + threadIdx.x;
  float total = 0.0f;
  for (int load = 0; load < loads; ++load) {
    float a[4], b[4], c[4], d[4];
#pragma unroll
    for (int part = 0; part < 4; ++part, at += step) {
      const char *word = words + 16ull * (at & (unsigned int)mask);
      asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];"
                   : "=f"(a[part]), "=f"(b[part]), "=f"(c[part]), "=f"(d[part])
                   : "l"(word));
    }
#pragma unroll
    for (int part = 0; part < 4; ++part) total += a[part] + b[part] + c[part] + d[part];
  }
  if (total == -1.0f) *sink = total;
}

/* So many multiply-adds by each thread, each of which waits for the one before it: multiprocessors are full
   when other threads fill the time. */
extern "C" __global__ void ridgeline_multiply_adds(int operations, float *sink) {
  float value = (float)threadIdx.x;
#pragma unroll 32
  for (int operation = 0; operation < operations; ++operation) {
    value = __fmaf_rn(value, 0.999f, 0.5f);
  }
  if (value == -1.0f) *sink = value;
}

/* So many times sixteen loads of 4 bytes by each thread from memory that its block shares, no two of a warp
   from the same bank. Blocks have 1024 threads at most. */
extern "C" __global__ void ridgeline_read_shared(int passes, float *sink) {
  __shared__ float tile[2048];
  tile[threadIdx.x] = tile[threadIdx.x + 1024] = 0.0f;
  __syncthreads();
  const volatile float *at = tile + threadIdx.x;
  float total[4] = {0.0f, 0.0f, 0.0f, 0.0f};
  for (int pass = 0; pass < passes; ++pass) {
#pragma unroll
    for (int part = 0; part < 16; ++part) total[part % 4] += at[64 * part];
  }
  if (total[0] + total[1] + total[2] + total[3] == -1.0f) *sink = total[0];
}
