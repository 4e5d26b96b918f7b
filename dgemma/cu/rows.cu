// What is done to whole rows of D numbers between the products: D / 8 threads a block, a block a row, one pass over memory.

// x / rms(x) * weight (Zhang and Sennrich 2019, arXiv:1910.07467) of the eight numbers that this thread holds.
template <int D>
__device__ __forceinline__ Eight normed(const Eight& x, const void* weight, float eps) {
  float squares = 0;
#pragma unroll
  for (int i = 0; i < 8; i++) squares += x.v[i] * x.v[i];
  const float scale = rsqrtf(sum_of_block(squares) / D + eps);
  const Eight by = load8(weight, threadIdx.x);
  Eight out;
#pragma unroll
  for (int i = 0; i < 8; i++) out.v[i] = x.v[i] * scale * by.v[i];
  return out;
}

template <int D>
__device__ __forceinline__ Eight row_of(const void* x) {
  return load8((const unsigned short*)x + (size_t)blockIdx.x * D, threadIdx.x);
}

template <int D>
__device__ __forceinline__ void add_normed(const void* x, const void* branch, const void* weight, float eps, void* out) {
  Eight sum = normed<D>(row_of<D>(branch), weight, eps);
  const Eight base = row_of<D>(x);
#pragma unroll
  for (int i = 0; i < 8; i++) sum.v[i] += base.v[i];
  store8((unsigned short*)out + (size_t)blockIdx.x * D, threadIdx.x, sum);
}

template <int D>
__device__ __forceinline__ void merge(
    const void* x, const void* dense, const void* sparse, const void* first, const void* second, const void* third,
    const void* scalar, float eps, void* out) {
  Eight sum = normed<D>(row_of<D>(dense), first, eps);
  const Eight other = normed<D>(row_of<D>(sparse), second, eps);
#pragma unroll
  for (int i = 0; i < 8; i++) sum.v[i] += other.v[i];
  sum = normed<D>(sum, third, eps);
  const Eight base = row_of<D>(x);
#pragma unroll
  for (int i = 0; i < 8; i++) sum.v[i] = (sum.v[i] + base.v[i]) * bf16((const unsigned short*)scalar);
  store8((unsigned short*)out + (size_t)blockIdx.x * D, threadIdx.x, sum);
}

// Eight numbers a thread.
__device__ __forceinline__ void geglu(const void* gate, const void* up, void* out, int size) {
  const int at = blockIdx.x * blockDim.x + threadIdx.x;
  if (at * 8 >= size) return;
  Eight a = load8(gate, at);
  const Eight b = load8(up, at);
#pragma unroll
  for (int i = 0; i < 8; i++) a.v[i] = gelu(a.v[i]) * b.v[i];
  store8(out, at, a);
}

// Queries, keys and values as projected -> normed, queries and keys also rotated. A warp for each head of each position;
// lane l holds numbers 8 (l + 32 i), and the partner of number e in the rotation is e +- E / 2: another lane's, or (E = 512)
// another i of the same lane.
template <int E>
__device__ __forceinline__ void head(
    const void* x, const void* weight, const float* cos, const float* sin, float eps, void* out) {
  constexpr int EACH = E / 256;
  const int lane = threadIdx.x & 31;
  Eight mine[EACH];
  float squares = 0;
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    mine[i] = load8(x, lane + 32 * i);
#pragma unroll
    for (int j = 0; j < 8; j++) squares += mine[i].v[j] * mine[i].v[j];
  }
  const float scale = rsqrtf(sum_of_warp(squares) / E + eps);
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    Eight by = {{1, 1, 1, 1, 1, 1, 1, 1}};
    if (weight) by = load8(weight, lane + 32 * i);
#pragma unroll
    for (int j = 0; j < 8; j++) mine[i].v[j] *= scale * by.v[j];
  }
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    Eight turned = mine[i];
    if (cos) {
#pragma unroll
      for (int j = 0; j < 8; j++) {
        const float partner = EACH == 1 ? __shfl_xor_sync(~0u, mine[i].v[j], 16) : mine[EACH - 1 - i].v[j];
        const int at = 8 * (lane + 32 * i) + j;
        turned.v[j] = mine[i].v[j] * cos[at] + partner * sin[at];
      }
    }
    store8(out, lane + 32 * i, turned);
  }
}
