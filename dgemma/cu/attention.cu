// Softmax attention of heads of 256 numbers without its scores in memory (Dao 2023, arXiv:2307.08691): the keys pass by in
// tiles of 64, and each query keeps the largest score so far, the sum of its exponentials and the values weighted by them.
//
// A block is 64 queries of one head: 4 x 2 warps, 16 queries each, the two warps of a row each half of a tile's keys; what
// they found is put together at the end. blockIdx = (head of the batch, queries). Masks are read where there are any
// (`mask` is null where there are none), and tiles that they hide altogether are passed over.

__device__ __forceinline__ void attend(
    const unsigned char* queries, const unsigned char* keys, const unsigned char* values, size_t query_step, size_t key_step,
    size_t value_step, const bool* mask, size_t mask_step, size_t mask_unit, int length, int stored, float scale, void* out,
    size_t out_step) {
  constexpr int E = 256, BM = 64, BN = 64, LINE = 2 * E, CHUNKS = LINE / 16, TILE = BN * LINE;
  extern __shared__ __align__(128) unsigned char buffers[];  // queries, then two of [keys | values]
  const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31, wm = warp >> 1, side = warp & 1;
  const int r = lane >> 2, q = lane & 3, first = blockIdx.y * BM, mine = first + wm * 16 + r;
  const u32 base = in_shared(buffers);
  auto place = [](int row, int chunk) { return row * LINE + (chunk ^ row & 7) * 16; };
  auto fetch = [&](u32 to, const unsigned char* from, size_t step, int begin, int end) {
#pragma unroll
    for (int at = thread; at < BN * CHUNKS; at += 256) {
      const int row = at / CHUNKS, chunk = at % CHUNKS;
      copy16(to + place(row, chunk), from + (size_t)min(begin + row, end - 1) * step + chunk * 16);
    }
  };
  const int tiles = (stored + BN - 1) / BN;
  fetch(base, queries, query_step, first, length);
  fetch(base + TILE, keys, key_step, 0, stored);
  fetch(base + 2 * TILE, values, value_step, 0, stored);
  asm volatile("cp.async.commit_group;");

  float o[E / 8][4] = {}, top[2] = {-INFINITY, -INFINITY}, sum[2] = {};
  scale *= 1.4426950408889634f;  // exponentials of 2
  for (int tile = 0; tile < tiles; tile++) {
    const u32 k = base + TILE + (tile & 1) * 2 * TILE, v = k + TILE;
    if (tile + 1 < tiles) {
      const u32 next = base + TILE + (tile + 1 & 1) * 2 * TILE;
      fetch(next, keys, key_step, (tile + 1) * BN, stored);
      fetch(next + TILE, values, value_step, (tile + 1) * BN, stored);
    }
    asm volatile("cp.async.commit_group;");
    const int from = tile * BN + side * 32 + 2 * q;  // this lane's first key
    u32 seen = ~0u;                                  // a bit for each of its 16 scores
    if (mask || (tile + 1) * BN > stored) {
      seen = 0;
#pragma unroll
      for (int bit = 0; bit < 16; bit++) {
        const int row = mine + (bit >> 1 & 1) * 8, key = from + (bit >> 2) * 8 + (bit & 1);
        const bool there = row < length && key < stored;
        if (there && (!mask || mask[(size_t)row * mask_step + (size_t)key * mask_unit])) seen |= 1u << bit;
      }
    }
    asm volatile("cp.async.wait_group 1;");
    if (__syncthreads_or(seen)) {
      float s[4][4] = {};
#pragma unroll
      for (int e = 0; e < E / 16; e++) {
        u32 left[4];
        read_matrices(left, base + place(wm * 16 + (lane & 15), e * 2 + (lane >> 4)));
#pragma unroll
        for (int j = 0; j < 4; j += 2) {
          u32 right[4];
          read_matrices(right, k + place(side * 32 + j * 8 + (lane & 7) + (lane >> 4) * 8, e * 2 + (lane >> 3 & 1)));
          multiply(s[j], left, right[0], right[1]);
          multiply(s[j + 1], left, right[2], right[3]);
        }
      }
#pragma unroll
      for (int h = 0; h < 2; h++) {  // this lane's two queries
        float best = top[h];
#pragma unroll
        for (int j = 0; j < 4; j++)
#pragma unroll
          for (int i = 0; i < 2; i++) {
            float& score = s[j][2 * h + i];
            score = seen >> (4 * j + 2 * h + i) & 1 ? score * scale : -INFINITY;
            best = fmaxf(best, score);
          }
        best = fmaxf(best, __shfl_xor_sync(~0u, best, 1));
        best = fmaxf(best, __shfl_xor_sync(~0u, best, 2));
        const float still = best == -INFINITY ? 0.0f : best;  // nothing seen yet: exponentials of -inf, not of nan
        const float fade = exp2f(top[h] - still);
        top[h] = best;
        sum[h] *= fade;
#pragma unroll
        for (int n = 0; n < E / 8; n++) o[n][2 * h] *= fade, o[n][2 * h + 1] *= fade;
#pragma unroll
        for (int j = 0; j < 4; j++)
#pragma unroll
          for (int i = 0; i < 2; i++) sum[h] += s[j][2 * h + i] = exp2f(s[j][2 * h + i] - still);
      }
#pragma unroll
      for (int i = 0; i < 2; i++) {  // sixteen keys
        const u32 left[4] = {pack(s[2 * i][0], s[2 * i][1]), pack(s[2 * i][2], s[2 * i][3]),
                             pack(s[2 * i + 1][0], s[2 * i + 1][1]), pack(s[2 * i + 1][2], s[2 * i + 1][3])};
#pragma unroll
        for (int n = 0; n < E / 8; n += 2) {
          u32 right[4];
          read_turned(right, v + place(side * 32 + i * 16 + (lane & 15), n + (lane >> 4)));
          multiply(o[n], left, right[0], right[1]);
          multiply(o[n + 1], left, right[2], right[3]);
        }
      }
    }
    __syncthreads();  // before this tile's buffer is filled again
  }

  // The second warp of a row leaves what it found to the first.
  float* left_over = reinterpret_cast<float*>(buffers + TILE) + (wm * 32 + lane) * (E / 2 + 4);
#pragma unroll
  for (int h = 0; h < 2; h++) {
    sum[h] += __shfl_xor_sync(~0u, sum[h], 1);
    sum[h] += __shfl_xor_sync(~0u, sum[h], 2);
  }
  if (side == 1) {
#pragma unroll
    for (int n = 0; n < E / 8; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) left_over[n * 4 + i] = o[n][i];
    left_over[E / 2] = top[0], left_over[E / 2 + 1] = top[1], left_over[E / 2 + 2] = sum[0], left_over[E / 2 + 3] = sum[1];
  }
  __syncthreads();
  if (side == 1) return;
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const float other = left_over[E / 2 + h], best = fmaxf(top[h], other), still = best == -INFINITY ? 0.0f : best;
    const float own = exp2f(top[h] - still), its = exp2f(other - still);
    const float whole = sum[h] * own + left_over[E / 2 + 2 + h] * its, by = whole > 0 ? 1 / whole : 0.0f;
    const int row = mine + 8 * h;
    if (row < length) {
#pragma unroll
      for (int n = 0; n < E / 8; n++) {
        const float a = (o[n][2 * h] * own + left_over[n * 4 + 2 * h] * its) * by;
        const float b = (o[n][2 * h + 1] * own + left_over[n * 4 + 2 * h + 1] * its) * by;
        reinterpret_cast<u32*>((unsigned char*)out + row * out_step)[n * 4 + q] = pack(a, b);
      }
    }
  }
}
