// What a step believes about a position, from its V scores: a block of 1,024 threads a position, three passes over its scores.
//   l = cap tanh(score / cap) / t;  p = exp(l - peak) / Z;  entropy = peak + log Z - E[l]
// and the token at which the cumulative sum of p passes a uniform number. Sums are taken in one order, whatever runs beside.

template <int V>
__device__ __forceinline__ void believe(
    const void* scores, const float* bounds, const float* uniforms, int* best, float* entropy, float* confidence,
    int* drawn, void* probabilities) {
  constexpr int SPAN = 8 * 1024, TURNS = (V + SPAN - 1) / SPAN, PARTS = 32 * TURNS;  // a warp's 256 numbers of a turn
  __shared__ float sums[PARTS], tops[32];
  __shared__ int places[32], segment;
  __shared__ float target;
  const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31;
  const float cap = bounds[0], t = bounds[1];
  const unsigned short* row = (const unsigned short*)scores + (size_t)blockIdx.x * V;

  // The largest score and the first place that has it; softcap keeps the order.
  float top = -INFINITY;
  int at = V - 1;
  for (int turn = 0; turn < TURNS; turn++) {
    const int first = turn * SPAN + thread * 8;
    if (first >= V) break;
    const Eight x = load8(row, first / 8);
#pragma unroll
    for (int i = 0; i < 8; i++)
      if (x.v[i] > top) top = x.v[i], at = first + i;
  }
#pragma unroll
  for (int step = 16; step; step /= 2) {
    const float other = __shfl_xor_sync(~0u, top, step);
    const int place = __shfl_xor_sync(~0u, at, step);
    if (other > top || (other == top && place < at)) top = other, at = place;
  }
  if (lane == 0) tops[warp] = top, places[warp] = at;
  __syncthreads();
  for (int i = 0; i < 32; i++)
    if (tops[i] > top || (tops[i] == top && places[i] < at)) top = tops[i], at = places[i];
  const float peak = cap * tanhf(top / cap) / t;

  float whole = 0, mean = 0;
  for (int turn = 0; turn < TURNS; turn++) {
    const int first = turn * SPAN + thread * 8;
    float part = 0;
    if (first < V) {
      const Eight x = load8(row, first / 8);
#pragma unroll
      for (int i = 0; i < 8; i++) {
        const float l = cap * tanhf(x.v[i] / cap) / t, e = expf(l - peak);
        part += e;
        mean += e * l;
      }
    }
    part = sum_of_warp(part);
    if (lane == 0) sums[turn * 32 + warp] = part;
    whole += part;
  }
  whole = sum_of_block(lane == 0 ? whole : 0.0f);
  mean = sum_of_block(mean) / whole;
  const float share = 1 / whole;
  if (thread == 0) {
    best[blockIdx.x] = at;
    confidence[blockIdx.x] = share;
    entropy[blockIdx.x] = fmaxf(peak + logf(whole) - mean, 0.0f);
  }

  // The part in which the cumulative sum passes the target, by the first warp.
  if (warp == 0) {
    const float wanted = uniforms[blockIdx.x] * whole;
    float before = 0;
    int found = PARTS - 1;
    float rest = wanted;
    for (int begin = 0; begin < PARTS; begin += 32) {
      const float own = begin + lane < PARTS ? sums[begin + lane] : 0.0f;
      float upto = own;
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const float other = __shfl_up_sync(~0u, upto, step);
        if (lane >= step) upto += other;
      }
      const u32 past = __ballot_sync(~0u, before + upto > wanted);
      if (past) {
        const int who = __ffs(past) - 1;
        rest = wanted - before - (__shfl_sync(~0u, upto, who) - __shfl_sync(~0u, own, who));
        found = begin + who;
        break;
      }
      before += __shfl_sync(~0u, upto, 31);
    }
    if (lane == 0) segment = found, target = rest;
  }
  __syncthreads();
  for (int turn = 0; turn < TURNS; turn++) {
    const int first = turn * SPAN + thread * 8;
    const bool here = segment == turn * 32 + warp;  // the whole warp's
    Eight p = {};
    if (first < V) {
      const Eight x = load8(row, first / 8);
#pragma unroll
      for (int i = 0; i < 8; i++) p.v[i] = expf(cap * tanhf(x.v[i] / cap) / t - peak);
    }
    if (here) {  // which of these 256
      float own = 0;
#pragma unroll
      for (int i = 0; i < 8; i++) own += p.v[i];
      float upto = own;
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const float other = __shfl_up_sync(~0u, upto, step);
        if (lane >= step) upto += other;
      }
      const u32 past = __ballot_sync(~0u, upto > target);
      const int who = past ? __ffs(past) - 1 : 31;
      if (lane == who) {
        float sum = upto - own;
        int i = 0;
        for (; i < 7; i++)
          if ((sum += p.v[i]) > target) break;
        drawn[blockIdx.x] = min(first + i, V - 1);
      }
    }
    if (first < V) {
#pragma unroll
      for (int i = 0; i < 8; i++) p.v[i] *= share;
      store8((unsigned short*)probabilities + (size_t)blockIdx.x * V, first / 8, p);
    }
  }
}
