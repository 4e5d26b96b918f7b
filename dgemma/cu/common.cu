// What the kernels of this folder share. A kernel's file is handed to mx.fast.cuda_kernel with this one before it.

using u32 = unsigned int;

__device__ __forceinline__ float low(u32 pair) { return __uint_as_float(pair << 16); }          // bfloat16 is float's upper half
__device__ __forceinline__ float high(u32 pair) { return __uint_as_float(pair & 0xFFFF0000u); }

__device__ __forceinline__ u32 pack(float lower, float upper) {
  u32 out;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(upper), "f"(lower));
  return out;
}

__device__ __forceinline__ float bf16(const unsigned short* p) { return __uint_as_float((u32)*p << 16); }

// The tanh form of GELU (Hendrycks and Gimpel 2016, arXiv:1606.08415).
__device__ __forceinline__ float gelu(float x) {
  return 0.5f * x * (1.0f + tanhf(0.7978845608028654f * (x + 0.044715f * x * x * x)));
}

__device__ __forceinline__ float sum_of_warp(float x) {
#pragma unroll
  for (int step = 16; step; step /= 2) x += __shfl_xor_sync(~0u, x, step);
  return x;
}

// Sum over a block of at most 1,024 threads, the same in every thread.
__device__ __forceinline__ float sum_of_block(float x) {
  __shared__ float parts[32];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, warps = (blockDim.x + 31) >> 5;
  x = sum_of_warp(x);
  __syncthreads();  // or a warp still reads the parts of the sum before
  if (lane == 0) parts[warp] = x;
  __syncthreads();
  return sum_of_warp(lane < warps ? parts[lane] : 0.0f);
}

// Eight bfloat16 of a row.
struct Eight {
  float v[8];
};

__device__ __forceinline__ Eight load8(const void* row, int at) {
  const uint4 raw = reinterpret_cast<const uint4*>(row)[at];
  return {{low(raw.x), high(raw.x), low(raw.y), high(raw.y), low(raw.z), high(raw.z), low(raw.w), high(raw.w)}};
}

__device__ __forceinline__ void store8(void* row, int at, const Eight& x) {
  reinterpret_cast<uint4*>(row)[at] =
      make_uint4(pack(x.v[0], x.v[1]), pack(x.v[2], x.v[3]), pack(x.v[4], x.v[5]), pack(x.v[6], x.v[7]));
}

// -- tensor cores (PTX ISA: cp.async, ldmatrix, mma.m16n8k16) --------------------------------------------------------

__device__ __forceinline__ u32 in_shared(const void* p) { return (u32)__cvta_generic_to_shared(p); }

__device__ __forceinline__ void copy16(u32 to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from));
}

__device__ __forceinline__ void read_matrices(u32 (&out)[4], u32 at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
               : "r"(at));
}

__device__ __forceinline__ void read_turned(u32 (&out)[4], u32 at) {  // each matrix transposed
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
               : "r"(at));
}

__device__ __forceinline__ void multiply(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
