// The low-bit codecs on CUDA: the arithmetic of lsgd/codecs, operation by operation, so payloads are bit-identical.
// It is compiled without fused multiply-adds (-fmad=false), so plain operators round as they do in torch.
//
// It includes no headers, so NVRTC needs nothing else. All arguments are long long or float; pointers and doubles are
// passed as the bits of a long long.
//
// A warp processes one block of the vector, with element i in lane i mod 32; in topk a thread block processes a chunk.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef long long i64;

#define ALL 0xffffffffu
#define INFINITE_BITS 0x7f800000u
#define NAN_BITS 0x7fc00000u
#define INFINITE __uint_as_float(INFINITE_BITS)
#define HALF_OF_MAX 1.7014117331926443e+38f
#define MAX_SCALE 1.7014118346046923e+38  // 2**127

struct Block {
  i64 number, start;
  int count, lane;  // count: elements, 0 after the end of the vector
};

__device__ __forceinline__ Block block_of_warp(i64 numel, i64 block) {
  i64 number = (i64)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, start = number * block, left = numel - start;
  return {number, start, (int)(left < 0 ? 0 : left < block ? left : block), (int)(threadIdx.x & 31)};
}

__device__ __forceinline__ void put(float value, float* out, float alpha, i64 add) {
  *out = add ? *out + value * alpha : value;
}

// ---- levels1 and levels2 --------------------------------------------------------------------------------------------

// Add up COUNT vectors, STRIDE apart, from v on, in halves.
template <int COUNT, int STRIDE>
struct Halves {
  template <class Leaf>
  __device__ __forceinline__ static double sum(const Leaf& leaf, int v) {
    return Halves<COUNT / 2, 2 * STRIDE>::sum(leaf, v) + Halves<COUNT / 2, 2 * STRIDE>::sum(leaf, v + STRIDE);
  }
};
template <int STRIDE>
struct Halves<1, STRIDE> {
  template <class Leaf>
  __device__ __forceinline__ static double sum(const Leaf& leaf, int v) {
    return leaf(v);
  }
};

// The sum of ``leaf(v)`` over the block's vectors of 32 elements, added in halves; the same in all lanes.
template <int VECTORS, class Leaf>
__device__ __forceinline__ double sum_in_halves(const Leaf& leaf) {
  double sum = Halves<VECTORS, 1>::sum(leaf, 0);
  for (int distance = 16; distance; distance /= 2) sum += __shfl_xor_sync(ALL, sum, distance);
  return sum;
}

// Write the bits ``bit(v)`` of each of the block's vectors.
template <int VECTORS, class Bit>
__device__ __forceinline__ void write_bits(u8* out, Block block, Bit bit) {
#pragma unroll
  for (int first = 0; first < VECTORS; first += 8) {  // of eight vectors each lane writes a byte
    u32 mine = 0;
#pragma unroll
    for (int v = first; v < first + 8 && v < VECTORS; ++v) {
      u32 word = __ballot_sync(ALL, bit(v));
      if (block.lane / 4 == v - first) mine = word;
    }
    int byte = 4 * first + block.lane;
    if (byte < (block.count + 7) / 8) out[block.start / 8 + byte] = (u8)(mine >> (8 * (block.lane & 3)));
  }
}

// Constants of levels2: near, far - near, and the same of their squares.
template <int VECTORS, bool TWO>
__device__ __forceinline__ void encode_levels(const float* x, u16* scales, u8* signs, u8* fars, u32* flags, i64 numel,
                                              double threshold, double near, double step, double near_square,
                                              double step_square) {
  Block block = block_of_warp(numel, 32 * VECTORS);
  if (!block.count) return;
  float value[VECTORS];
#pragma unroll
  for (int v = 0; v < VECTORS; ++v) {
    int i = 32 * v + block.lane;
    value[v] = i < block.count ? x[block.start + i] : 0.f;
  }
  double total = sum_in_halves<VECTORS>([&](int v) { return (double)fabsf(value[v]); });
  double scale = total / block.count;
  if (TWO) {
    double squares =
        sum_in_halves<VECTORS>([&](int v) { return (double)fabsf(value[v]) * (double)fabsf(value[v]); });
    float beyond = (float)(sqrt(squares / block.count) * threshold);
    auto far = [&](int v) { return fabsf(value[v]) > beyond; };
    double far_total = sum_in_halves<VECTORS>([&](int v) { return far(v) ? (double)fabsf(value[v]) : 0.; });
    double far_count = sum_in_halves<VECTORS>([&](int v) { return far(v) ? 1. : 0.; });
    scale = (total * near + far_total * step) / (block.count * near_square + far_count * step_square);
    write_bits<VECTORS>(fars, block, far);
  }
  write_bits<VECTORS>(signs, block, [&](int v) { return value[v] < 0.f; });
  if (block.lane) return;
  bool finite = scale - scale == 0.;
  u32 bits = __float_as_uint((float)(scale < MAX_SCALE ? scale : MAX_SCALE));
  scales[block.number] = finite ? (u16)((bits + ((bits >> 16) & 1) + 0x7fff) >> 16) : (u16)(NAN_BITS >> 16);
  if (!finite) atomicOr(flags, 1u);
}

#define ENCODE_LEVELS(NAME, BLOCK, TWO)                                                                                \
  extern "C" __global__ void NAME##_##BLOCK(i64 x, i64 scales, i64 signs, i64 fars, i64 flags, i64 numel,              \
                                            i64 threshold, i64 near, i64 step, i64 near_square, i64 step_square) {     \
    encode_levels<BLOCK / 32, TWO>((const float*)x, (u16*)scales, (u8*)signs, (u8*)fars, (u32*)flags, numel,           \
                                   __longlong_as_double(threshold), __longlong_as_double(near),                        \
                                   __longlong_as_double(step), __longlong_as_double(near_square),                      \
                                   __longlong_as_double(step_square));                                                 \
  }
#define EACH_BLOCK(NAME, TWO)                                                                           \
  ENCODE_LEVELS(NAME, 64, TWO) ENCODE_LEVELS(NAME, 128, TWO) ENCODE_LEVELS(NAME, 256, TWO) \
  ENCODE_LEVELS(NAME, 512, TWO) ENCODE_LEVELS(NAME, 1024, TWO) ENCODE_LEVELS(NAME, 2048, TWO)
EACH_BLOCK(encode_levels1, false)
EACH_BLOCK(encode_levels2, true)

// fars is 0 if all elements are near.
extern "C" __global__ void decode_levels(i64 scales, i64 signs, i64 fars, i64 out, i64 numel, i64 block_numel,
                                         float near, float far, float alpha, i64 add) {
  Block block = block_of_warp(numel, block_numel);
  if (!block.count) return;
  float scale = __uint_as_float((u32)((const u16*)scales)[block.number] << 16);
  float near_value = scale * near, far_value = scale * far;
  for (int k = block.lane; k < block.count; k += 32) {
    i64 i = block.start + k;
    float value = fars && (((const u8*)fars)[i / 8] >> (k & 7)) & 1 ? far_value : near_value;
    put((((const u8*)signs)[i / 8] >> (k & 7)) & 1 ? -value : value, (float*)out + i, alpha, add);
  }
}

// ---- minmax4 --------------------------------------------------------------------------------------------------------

extern "C" __global__ void encode_minmax4(i64 x, i64 scales, i64 codes, i64 flags, i64 numel, i64 block_numel) {
  Block block = block_of_warp(numel, block_numel);
  if (!block.count) return;
  const float* from = (const float*)x + block.start;
  float lo = INFINITE, hi = -INFINITE;
  int bad = 0;
  for (int i = block.lane; i < block.count; i += 32) {
    lo = fminf(lo, from[i]);
    hi = fmaxf(hi, from[i]);
    bad |= !(fabsf(from[i]) < INFINITE);
  }
  for (int distance = 16; distance; distance /= 2) {
    lo = fminf(lo, __shfl_xor_sync(ALL, lo, distance));
    hi = fmaxf(hi, __shfl_xor_sync(ALL, hi, distance));
  }
  bad = __ballot_sync(ALL, bad) != 0;
  lo = lo * .5f + 0.f;  // halving prevents overflow; -0 becomes +0
  float unit = (hi * .5f - lo) / 15.f;
  if (!block.lane) {
    float* scale = (float*)scales + 2 * block.number;
    scale[0] = bad ? __uint_as_float(NAN_BITS) : lo;
    scale[1] = bad ? __uint_as_float(NAN_BITS) : unit + 0.f;
    if (bad) atomicOr((u32*)flags, 1u);
  }
  float divisor = !bad && unit > 0.f ? unit : INFINITE;  // which gives code 0, also for NaN
  auto code = [&](int i) { return (u32)__float2int_rn(fminf(fmaxf((from[i] * .5f - lo) / divisor, 0.f), 15.f)); };
  u8* to = (u8*)codes + block.start / 2;
  for (int pair = block.lane; 2 * pair < block.count; pair += 32)
    to[pair] = (u8)(code(2 * pair) | (2 * pair + 1 < block.count ? code(2 * pair + 1) << 4 : 0));
}

extern "C" __global__ void decode_minmax4(i64 scales, i64 codes, i64 out, i64 numel, i64 block_numel, float alpha,
                                          i64 add) {
  Block block = block_of_warp(numel, block_numel);
  if (!block.count) return;
  float lo = ((const float*)scales)[2 * block.number], unit = ((const float*)scales)[2 * block.number + 1];
  for (int k = block.lane; k < block.count; k += 32) {
    i64 i = block.start + k;
    float value = (float)((((const u8*)codes)[i / 2] >> (4 * (k & 1))) & 15) * unit + lo;
    value = value < -HALF_OF_MAX ? -HALF_OF_MAX : value > HALF_OF_MAX ? HALF_OF_MAX : value;  // keeps NaN
    put(value * 2.f, (float*)out + i, alpha, add);
  }
}

// ---- topk -----------------------------------------------------------------------------------------------------------

#define CHUNK 4096
#define THREADS 256
#define WARPS (THREADS / 32)
#define EACH (CHUNK / THREADS)  // elements per thread
#define WORDS (CHUNK / 32)
#define MOST_KEPT (CHUNK / 2)

__device__ __forceinline__ int block_sum(int value) {
  __shared__ int parts[WARPS];
  for (int distance = 16; distance; distance /= 2) value += __shfl_xor_sync(ALL, value, distance);
  __syncthreads();  // all threads have read the previous sum's parts
  if (!(threadIdx.x & 31)) parts[threadIdx.x / 32] = value;
  __syncthreads();
  int total = 0;
  for (int warp = 0; warp < WARPS; ++warp) total += parts[warp];
  return total;
}

// The sum of ``count`` numbers, a power of two, added in halves; overwrites them.
__device__ __forceinline__ double block_sum_in_halves(double* numbers, int count) {
  for (int half = count / 2; half; half /= 2) {
    __syncthreads();
    for (int i = threadIdx.x; i < half; i += THREADS) numbers[i] += numbers[i + half];
  }
  __syncthreads();
  double total = numbers[0];
  __syncthreads();
  return total;
}

// The number of one bits before each word, for two bit sets at once: in the upper and the lower half of ``before``.
__device__ __forceinline__ void count_before(const u32* high, const u32* low, u32* before) {
  int word = (int)threadIdx.x;
  u32 own = word < WORDS ? (u32)__popc(high[word]) << 16 | (u32)__popc(low[word]) : 0, sum = own;
  for (int distance = 1; distance < WORDS; distance *= 2) {
    if (word < WORDS) before[word] = sum;
    __syncthreads();
    if (distance <= word && word < WORDS) sum += before[word - distance];
    __syncthreads();
  }
  if (word < WORDS) before[word] = sum - own;
  __syncthreads();
}

__device__ __forceinline__ float level(double mean) {
  return mean - mean == 0. ? (float)mean : __uint_as_float(NAN_BITS);
}

extern "C" __global__ void encode_topk(i64 x, i64 levels, i64 low, i64 high, i64 signs, i64 fars, i64 flags, i64 numel,
                                       i64 to_keep) {
  __shared__ u32 greater[WORDS], equal[WORDS], before[WORDS];
  __shared__ u16 index[MOST_KEPT];
  __shared__ float kept[MOST_KEPT];
  __shared__ double room[MOST_KEPT];
  int me = (int)threadIdx.x, warp = me / 32, lane = me & 31, k = (int)to_keep;
  i64 chunk = blockIdx.x, start = chunk * CHUNK;
  int count = numel - start < CHUNK ? (int)(numel - start) : CHUNK;

  u32 value[EACH], bad = 0;  // the bits of elements me, me + THREADS, ...
  for (int r = 0; r < EACH; ++r) {
    int i = r * THREADS + me;
    value[r] = i < count ? __float_as_uint(((const float*)x)[start + i]) : 0;
    bad |= (value[r] & 0x7fffffffu) >= INFINITE_BITS;
  }
  if (bad) atomicOr((u32*)flags, 1u);

  // Magnitudes compare as their bits do. Find the least one to keep, bit by bit.
  u32 least = 0;
  for (int bit = 30; bit >= 0; --bit) {
    u32 tried = least | 1u << bit;
    int many = 0;
    for (int r = 0; r < EACH; ++r) many += (value[r] & 0x7fffffffu) >= tried;
    if (block_sum(many) >= k) least = tried;
  }

  // Keep the greater ones, and the first of the equal ones, in the order of their indices.
  int many = 0;
  for (int r = 0; r < EACH; ++r) {
    u32 magnitude = value[r] & 0x7fffffffu;
    u32 over = __ballot_sync(ALL, magnitude > least), like = __ballot_sync(ALL, magnitude == least);
    if (!lane) greater[r * WARPS + warp] = over, equal[r * WARPS + warp] = like;
    many += magnitude > least;
  }
  int left = k - block_sum(many);
  count_before(greater, equal, before);
  for (int r = 0; r < EACH; ++r) {
    int word = r * WARPS + warp;
    u32 earlier = (1u << lane) - 1, over = greater[word], like = equal[word];
    int greater_before = (int)(before[word] >> 16) + __popc(over & earlier);
    int equal_before = (int)(before[word] & 0xffff) + __popc(like & earlier);
    if ((over >> lane & 1) || ((like >> lane & 1) && equal_before < left)) {
      int place = greater_before + (equal_before < left ? equal_before : left);
      index[place] = (u16)(r * THREADS + me);
      kept[place] = __uint_as_float(value[r]);
    }
  }
  __syncthreads();

  int numbers = count < k ? count : k;
  for (int i = me; i < k; i += THREADS) room[i] = (double)fabsf(kept[i]);
  double mean = block_sum_in_halves(room, k) / numbers;
  auto far = [&](int i) { return (double)fabsf(kept[i]) > mean; };
  int fars_here = 0;
  for (int i = me; i < k; i += THREADS) fars_here += far(i), room[i] = far(i) ? (double)fabsf(kept[i]) : 0.;
  double far_total = block_sum_in_halves(room, k);
  for (int i = me; i < k; i += THREADS) room[i] = far(i) ? 0. : (double)fabsf(kept[i]);
  double near_total = block_sum_in_halves(room, k);
  int far_count = block_sum(fars_here);

  if (!me) {
    ((float*)levels)[2 * chunk] = level(near_total / (numbers - far_count));
    ((float*)levels)[2 * chunk + 1] = level(far_total / (far_count ? far_count : 1));
  }
  for (int i = me; i < k; i += THREADS) ((u8*)low)[chunk * k + i] = (u8)index[i];
  for (int i = me; i < k / 2; i += THREADS)
    ((u8*)high)[chunk * (k / 2) + i] = (u8)(index[2 * i] >> 8 | (index[2 * i + 1] >> 8) << 4);
  for (int byte = me; byte < k / 8; byte += THREADS) {
    u32 sign_bits = 0, far_bits = 0;
    for (int i = 0; i < 8; ++i) {
      sign_bits |= (u32)(kept[8 * byte + i] < 0.f) << i;
      far_bits |= (u32)far(8 * byte + i) << i;
    }
    ((u8*)signs)[chunk * (k / 8) + byte] = (u8)sign_bits;
    ((u8*)fars)[chunk * (k / 8) + byte] = (u8)far_bits;
  }
}

extern "C" __global__ void decode_topk(i64 levels, i64 low, i64 high, i64 signs, i64 fars, i64 out, i64 numel, i64 k,
                                       float alpha, i64 add) {
  __shared__ float room[CHUNK];
  i64 chunk = blockIdx.x, start = chunk * CHUNK;
  int count = numel - start < CHUNK ? (int)(numel - start) : CHUNK;
  float near = ((const float*)levels)[2 * chunk], far = ((const float*)levels)[2 * chunk + 1];
  for (int i = threadIdx.x; i < CHUNK; i += THREADS) room[i] = near * 0.f;
  __syncthreads();
  for (i64 i = chunk * k + threadIdx.x; i < (chunk + 1) * k; i += THREADS) {
    int index = ((const u8*)low)[i] | (((const u8*)high)[i / 2] >> (4 * (i & 1)) & 15) << 8;
    float value = ((const u8*)fars)[i / 8] >> (i & 7) & 1 ? far : near;
    room[index] = ((const u8*)signs)[i / 8] >> (i & 7) & 1 ? -value : value;
  }
  __syncthreads();
  for (int i = threadIdx.x; i < count; i += THREADS) put(room[i], (float*)out + start + i, alpha, add);
}
