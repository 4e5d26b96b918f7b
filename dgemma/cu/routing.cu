// Which experts a row goes to, how the rows of an expert are laid out in tiles, and the way back.

// A warp for each row: the TOP best of X scores, best first (of equal ones the first), and the softmax over them.
template <int X, int TOP>
__device__ __forceinline__ void route(const void* scores, int* chosen, float* shares, int rows) {
  constexpr int EACH = (X + 31) / 32;
  const int row = blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5), lane = threadIdx.x & 31;
  if (row >= rows) return;
  float mine[EACH];
#pragma unroll
  for (int i = 0; i < EACH; i++) mine[i] = i * 32 + lane < X ? bf16((const unsigned short*)scores + (size_t)row * X + i * 32 + lane) : -INFINITY;
  float peak = 0, total = 0, kept = 0;  // lane i keeps the i-th of the chosen
  int which = 0;
#pragma unroll
  for (int k = 0; k < TOP; k++) {
    float best = -INFINITY;
    int at = X;
#pragma unroll
    for (int i = 0; i < EACH; i++)
      if (mine[i] > best || at == X) best = mine[i], at = i * 32 + lane;
#pragma unroll
    for (int step = 16; step; step /= 2) {
      const float other = __shfl_xor_sync(~0u, best, step);
      const int place = __shfl_xor_sync(~0u, at, step);
      if (other > best || (other == best && place < at)) best = other, at = place;
    }
#pragma unroll
    for (int i = 0; i < EACH; i++)
      if (i * 32 + lane == at) mine[i] = -INFINITY;
    if (k == 0) peak = best;
    const float weight = expf(best - peak);
    total += weight;
    if (lane == k) kept = weight, which = min(at, X - 1);
  }
  if (lane < TOP) {
    chosen[row * TOP + lane] = which;
    shares[row * TOP + lane] = kept / total;
  }
}

// A block for each expert: `chosen [pairs]` laid out in tiles of R places, an expert's tiles one after the other.
//   source [tiles R]  the row that fills a place (0 where none does)      owner [tiles]  the tile's expert, X where unused
//   place [pairs]     where a pair went
template <int X, int TOP>
__device__ __forceinline__ void lay_out(const int* chosen, int* source, int* owner, int* place, int R, int pairs, int tiles) {
  __shared__ int counts[X], parts[32];
  const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31, warps = blockDim.x >> 5, expert = blockIdx.x;
  for (int i = thread; i < X; i += blockDim.x) counts[i] = 0;
  __syncthreads();
  for (int i = thread; i < pairs; i += blockDim.x) atomicAdd(&counts[chosen[i]], 1);
  __syncthreads();
  int before = 0, all = 0;  // tiles of the experts before this one, and of all
  for (int i = lane; i < X; i += 32) {
    const int needed = (counts[i] + R - 1) / R;
    all += needed;
    if (i < expert) before += needed;
  }
#pragma unroll
  for (int step = 16; step; step /= 2) {
    before += __shfl_xor_sync(~0u, before, step);
    all += __shfl_xor_sync(~0u, all, step);
  }
  const int own = counts[expert], needed = (own + R - 1) / R;
  for (int i = thread; i < needed; i += blockDim.x) owner[before + i] = expert;
  for (int i = own + thread; i < needed * R; i += blockDim.x) source[before * R + i] = 0;
  if (expert == 0)
    for (int i = all + thread; i < tiles; i += blockDim.x) owner[i] = X;

  // Pairs keep their order: each warp takes a stretch of them, after those that the warps before it found in theirs.
  const int stretch = (pairs + 32 * warps - 1) / (32 * warps) * 32, begin = warp * stretch, end = min(begin + stretch, pairs);
  int found = 0;
  for (int i = begin; i < end; i += 32)
    found += __popc(__ballot_sync(~0u, i + lane < end && chosen[i + lane] == expert));
  if (lane == 0) parts[warp] = found;
  __syncthreads();
  int rank = before * R;
  for (int i = 0; i < warp; i++) rank += parts[i];
  for (int i = begin; i < end; i += 32) {
    const bool mine = i + lane < end && chosen[i + lane] == expert;
    const u32 ballot = __ballot_sync(~0u, mine);
    if (mine) {
      const int at = rank + __popc(ballot & ((1u << lane) - 1));
      source[at] = (i + lane) / TOP;
      place[i + lane] = at;
    }
    rank += __popc(ballot);
  }
}

// A block for each row: the sum of its TOP places in y, each times its weight. D / 8 threads.
template <int D, int TOP>
__device__ __forceinline__ void combine(const void* y, const int* place, const float* weights, void* out) {
  const int row = blockIdx.x, at = threadIdx.x;
  if (at >= D / 8) return;
  Eight sum = {};
#pragma unroll
  for (int i = 0; i < TOP; i++) {
    const Eight part = load8((const unsigned short*)y + (size_t)place[row * TOP + i] * D, at);
    const float weight = weights[row * TOP + i];
#pragma unroll
    for (int j = 0; j < 8; j++) sum.v[j] += weight * part.v[j];
  }
  store8((unsigned short*)out + (size_t)row * D, at, sum);
}
