// Products of rows with the matrix of the expert that each tile of rows belongs to, plain bfloat16 or packed (affine, 4 or 8
// bit, groups of 64). A weight is read from memory once for every BM rows that want it, copied asynchronously (cp.async) into
// STAGES buffers of shared memory, and multiplied by tensor cores (PTX ISA, "mma.m16n8k16"); packed ones are unpacked on
// their way into registers.
//
//   block    BM = 16 WM MT rows x BN = 8 WN NT weight rows, WM x WN warps; blockIdx = (columns, tile)
//   first    an expert's first product: rows are x[source[...]], else a tile's own; weights are gate over up, of which a block
//            takes BN / 2 rows each, and writes gelu(gate) * up
//
// K, O and `first` are no parameters of the template, or each shape of matrix were a kernel to compile: what depends on them
// stands before and after the loop over K.
//
// In shared memory a row of 64 numbers is eight chunks of 16 bytes, chunk c at c ^ (row & 7), so that the eight rows that
// ldmatrix reads at once lie in different banks.

// Numbers 2 q and 2 q + 1 of the eight in `word`, times a scale plus a bias. 128 + n is exact in bfloat16 for n < 128 and
// differs from 128 by a constant in its last bits; the product and the sum round once.
__device__ __forceinline__ u32 unpack4(u32 word, int q, u32 scale, u32 bias) {
  const u32 two = word >> (8 * q);
  u32 n = two & 0xFu | two << 12 & 0xF0000u | 0x43004300u, out;
  asm("sub.rn.bf16x2 %0, %1, %2;" : "=r"(n) : "r"(n), "r"(0x43004300u));
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(out) : "r"(n), "r"(scale), "r"(bias));
  return out;
}

// The same for two bytes: 2^23 + n is exact in float32.
__device__ __forceinline__ u32 unpack8(u32 two, float scale, float bias) {
  const float a = __uint_as_float(0x4B000000u | (two & 255u)) - 8388608.0f;
  const float b = __uint_as_float(0x4B000000u | (two >> 8)) - 8388608.0f;
  return pack(fmaf(a, scale, bias), fmaf(b, scale, bias));
}

template <int WM, int WN, int MT, int NT, int STAGES, int BITS>
__device__ __forceinline__ void grouped(
    const void* x, const void* w, const void* scales, const void* biases, const int* source, const int* owner, void* out,
    bool first, int experts, int rows, int K, int O) {
  constexpr int BM = 16 * WM * MT, BN = 8 * WN * NT, THREADS = 32 * WM * WN;
  constexpr int LINE = 8 * BITS;  // bytes of 64 weights of a row
  constexpr int A_BYTES = BM * 128, B_BYTES = BN * LINE, STAGE = A_BYTES + B_BYTES;
  constexpr int A_COPIES = BM * 8 / THREADS, CHUNKS = LINE / 16, B_COPIES = (BN * CHUNKS + THREADS - 1) / THREADS;
  extern __shared__ __align__(128) unsigned char buffers[];  // STAGES x [A | B], then scales and biases [BN, groups]
  const int groups = K / 64, columns = first ? O / 2 : O, span = first ? BN / 2 : BN;  // of K; what is written; by a block
  const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31, wm = warp / WN, wn = warp % WN;
  const int tile = blockIdx.y, expert = owner[tile], n0 = blockIdx.x * span;
  if (expert >= experts) return;

  // The weight row behind row b of the block; a warp's NT x 8 rows are gate's and then up's. Past the end: the last ones.
  auto weight_row = [&](int b) {
    if (!first) return min(n0 + b, O - 8 + (b & 7));
    const int group = b / (8 * NT), j = b / 8 % NT, up = j >= NT / 2;
    const int n = n0 + (group * (NT / 2) + j % (NT / 2)) * 8;
    return min(n, columns - 8) + (b & 7) + up * columns;
  };
  const unsigned char *from_a[A_COPIES], *from_b[B_COPIES];
#pragma unroll
  for (int i = 0; i < A_COPIES; i++) {
    int row = tile * BM + thread / 8 + i * (THREADS / 8);
    row = first ? source[row] : min(row, rows - 1);
    from_a[i] = (const unsigned char*)x + (size_t)row * (2 * K) + thread % 8 * 16;
  }
#pragma unroll
  for (int i = 0; i < B_COPIES; i++) {
    const int at = min(thread + i * THREADS, BN * CHUNKS - 1);
    from_b[i] = (const unsigned char*)w + ((size_t)expert * O + weight_row(at / CHUNKS)) * (K * BITS / 8) + at % CHUNKS * 16;
  }
  const u32 base = in_shared(buffers);
  auto fetch = [&](int k) {
    const u32 a = base + k % STAGES * STAGE, b = a + A_BYTES;
#pragma unroll
    for (int i = 0; i < A_COPIES; i++) {
      const int row = thread / 8 + i * (THREADS / 8);
      copy16(a + row * 128 + (thread % 8 ^ row & 7) * 16, from_a[i] + (size_t)k * 128);
    }
#pragma unroll
    for (int i = 0; i < B_COPIES; i++) {
      const int at = thread + i * THREADS, row = at / CHUNKS, chunk = at % CHUNKS;
      const int turned = BITS == 16 ? chunk ^ row & 7 : BITS == 8 ? chunk ^ row >> 1 & 3 : chunk;
      if (BN * CHUNKS % THREADS == 0 || at < BN * CHUNKS)
        copy16(b + row * LINE + turned * 16, from_b[i] + (size_t)k * LINE);
    }
  };
  const unsigned short* scale_of = (const unsigned short*)(buffers + STAGES * STAGE);
  const unsigned short* bias_of = scale_of + BN * groups;
  if (BITS < 16) {  // eight rows of scales are 16 groups bytes in a row
    for (int eight = warp; eight < BN / 8; eight += WM * WN) {
      const size_t from = ((size_t)expert * O + weight_row(eight * 8)) * groups * 2;
      for (int at = lane; at < groups; at += 32) {
        copy16(in_shared(scale_of) + (eight * groups + at) * 16, (const unsigned char*)scales + from + at * 16);
        copy16(in_shared(bias_of) + (eight * groups + at) * 16, (const unsigned char*)biases + from + at * 16);
      }
    }
  }
#pragma unroll
  for (int k = 0; k < STAGES - 1; k++) {
    if (k < groups) fetch(k);
    asm volatile("cp.async.commit_group;");
  }

  float c[MT][NT][4] = {};
  const int r = lane >> 2, q = lane & 3;
  for (int k = 0; k < groups; k++) {
    asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2));
    __syncthreads();  // everybody's copies of step k are there, and step k - 1's buffer is free
    if (k + STAGES - 1 < groups) fetch(k + STAGES - 1);
    asm volatile("cp.async.commit_group;");
    const u32 a = base + k % STAGES * STAGE, b = a + A_BYTES;
    u32 scale[NT], bias[NT];
    if (BITS < 16) {
      int apart = 8 * groups;
      asm volatile("" : "+r"(apart));  // or the addresses of all scales live in registers: 99 and not 96 for 4 bits, MT = 2
#pragma unroll
      for (int j = 0; j < NT; j++) {
        const unsigned short* at = scale_of + (wn * NT * 8 + r) * groups + k + j * apart;
        scale[j] = *at, bias[j] = at[BN / 8 * apart];
        if (BITS == 4) scale[j] *= 0x10001u, bias[j] *= 0x10001u;
        if (BITS == 8) scale[j] <<= 16, bias[j] <<= 16;
      }
    }
#pragma unroll
    for (int kk = 0; kk < 4; kk++) {  // sixteen numbers of K
      u32 left[MT][4];
#pragma unroll
      for (int m = 0; m < MT; m++) {
        const int row = (wm * MT + m) * 16 + (lane & 15);
        read_matrices(left[m], a + row * 128 + (kk * 2 + (lane >> 4) ^ row & 7) * 16);
      }
#pragma unroll
      for (int j = 0; j < NT; j += 2) {
        u32 right[4];
        if (BITS == 16) {
          const int row = (wn * NT + j) * 8 + (lane & 7) + (lane >> 4) * 8;
          read_matrices(right, b + row * 128 + (kk * 2 + (lane >> 3 & 1) ^ row & 7) * 16);
        } else {
#pragma unroll
          for (int i = 0; i < 2; i++) {
            const int row = (wn * NT + j + i) * 8 + r;
            const unsigned char* line = buffers + k % STAGES * STAGE + A_BYTES + row * LINE;
            if (BITS == 4) {
              const uint2 words = *(const uint2*)(line + kk * 8);
              right[2 * i] = unpack4(words.x, q, scale[j + i], bias[j + i]);
              right[2 * i + 1] = unpack4(words.y, q, scale[j + i], bias[j + i]);
            } else {
              const unsigned short* two = (const unsigned short*)(line + (kk ^ row >> 1 & 3) * 16) + q;
              right[2 * i] = unpack8(two[0], __uint_as_float(scale[j + i]), __uint_as_float(bias[j + i]));
              right[2 * i + 1] = unpack8(two[4], __uint_as_float(scale[j + i]), __uint_as_float(bias[j + i]));
            }
          }
        }
#pragma unroll
        for (int m = 0; m < MT; m++) {
          multiply(c[m][j], left[m], right[0], right[1]);
          multiply(c[m][j + 1], left[m], right[2], right[3]);
        }
      }
    }
  }

  const int shown = first ? NT / 2 : NT;
#pragma unroll
  for (int m = 0; m < MT; m++)
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int row = tile * BM + (wm * MT + m) * 16 + h * 8 + r;
#pragma unroll
      for (int j = 0; j < NT; j++) {
        const int column = n0 + (wn * shown + j) * 8 + 2 * q, up = (j + NT / 2) % NT;
        float u = c[m][j][2 * h], v = c[m][j][2 * h + 1];
        if (first && j >= NT / 2) continue;
        if (first) u = gelu(u) * c[m][up][2 * h], v = gelu(v) * c[m][up][2 * h + 1];
        if (row < rows && column < columns) ((u32*)out)[((size_t)row * columns + column) / 2] = pack(u, v);
      }
    }
}
