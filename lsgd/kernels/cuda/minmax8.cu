// The 8-bit min-max quantizer on CUDA: the arithmetic of lsgd/codecs/minmax.py, operation by operation, so payloads are
// bit-identical. Every rounding operation is an intrinsic, so the compiler fuses nothing by itself.
//
// It includes no headers, so NVRTC needs nothing else. All arguments are long long or float, including pointers.
//
// A thread processes eight neighboring elements: 16-byte loads, one 8-byte store of codes, one Philox call.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#define LANES 8
#define BIG 8.507059173023462e+37f       // 2**126: blocks with values from here on are halved, because their range could overflow
#define BIG_UNIT 3.3230699894622897e+35f // 2**118
#define HALF_OF_MAX 1.7014117331926443e+38f
#define SMALLEST_UNIT 1.1754943508222875e-38f // 2**-126
#define INFINITE __uint_as_float(0x7f800000u)
#define NOT_A_NUMBER __uint_as_float(0x7fc00000u)

struct Half {
  u16 bits;
};
struct Bfloat {
  u16 bits;
};
struct Eight {
  float value[8];
};
struct alignas(16) Eight16 {
  u16 bits[8];
};

#ifndef LSGD_HOST_BUILD
__device__ __forceinline__ float half_to_float(u16 bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}
__device__ __forceinline__ u16 float_to_half(float value) {
  u16 bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}
#endif

__device__ __forceinline__ float widen(float value) { return value; }
__device__ __forceinline__ float widen(Half value) { return half_to_float(value.bits); }
__device__ __forceinline__ float widen(Bfloat value) { return __uint_as_float((u32)value.bits << 16); }
__device__ __forceinline__ void narrow(float value, float& out) { out = value; }
__device__ __forceinline__ void narrow(float value, Half& out) { out.bits = float_to_half(value); }
__device__ __forceinline__ void narrow(float value, Bfloat& out) {
  u32 bits = __float_as_uint(value);
  out.bits = value == value ? (u16)((bits + ((bits >> 16) & 1) + 0x7fff) >> 16) : (u16)0x7fc0;
}

// The block of an element; shift is log2(block), or negative if block is not a power of two.
__device__ __noinline__ i64 divide(i64 index, i64 block) { return index / block; }
__device__ __forceinline__ i64 block_of(i64 index, i64 block, i64 shift) {
  return shift >= 0 ? index >> shift : divide(index, block);
}

// ---- random bits ----------------------------------------------------------------------------------------------------

struct Dither {
  u32 word[4];
  __device__ __forceinline__ u32 lane(int k) const { return (word[k >> 1] >> (16 * (k & 1))) & 0xffff; }
};

// Philox4x32-7 (Salmon et al., SC 2011): 16 bits for each of the elements 8 * call to 8 * call + 7.
__device__ __forceinline__ Dither philox(u64 call, u64 seed) {
  u32 a = (u32)call, b = (u32)(call >> 32), c = 0, d = 0, key0 = (u32)seed, key1 = (u32)(seed >> 32);
#pragma unroll
  for (int round = 0; round < 7; ++round) {
    u32 high0 = __umulhi(0xD2511F53u, a), low0 = 0xD2511F53u * a;
    u32 high1 = __umulhi(0xCD9E8D57u, c), low1 = 0xCD9E8D57u * c;
    a = high1 ^ b ^ key0;
    b = low1;
    c = high0 ^ d ^ key1;
    d = low0;
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  Dither dither = {{a, b, c, d}};
  return dither;
}

// The same for eight elements from an index that is not a multiple of eight.
__device__ __noinline__ Dither straddling(u64 index, u64 seed) {
  Dither low = philox(index / LANES, seed), high = philox(index / LANES + 1, seed), dither = {};
  for (int k = 0; k < 8; ++k) {
    int lane = (int)(index & 7) + k;
    dither.word[k >> 1] |= (lane < 8 ? low.lane(lane) : high.lane(lane - 8)) << (16 * (k & 1));
  }
  return dither;
}

// ---- where the elements come from -----------------------------------------------------------------------------------

__device__ __forceinline__ Eight load_eight(const float* from) {
  float4 low = ((const float4*)from)[0], high = ((const float4*)from)[1];
  return {{low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w}};
}
template <class T>
__device__ __forceinline__ Eight load_eight(const T* from) {
  Eight16 bits = *(const Eight16*)from;
  Eight eight;
#pragma unroll
  for (int k = 0; k < 8; ++k) {
    T element = {bits.bits[k]};
    eight.value[k] = widen(element);
  }
  return eight;
}

// A vector in memory. The unused members let it be built from the same arguments as Payloads.
template <class T>
struct Vector {
  typedef T Data;
  const T* data;
  i64 unused[5];
  float unused_weight;
  __device__ __noinline__ static Eight load_slowly(const T* from, int count) {
    Eight eight = {};
#pragma unroll 1
    for (int k = 0; k < count; ++k) eight.value[k] = widen(from[k]);
    return eight;
  }
  // Load count elements, at most eight, from index on.
  __device__ __forceinline__ Eight load(i64 index, int count) const {
    const T* from = data + index;
    return count == 8 && ((u64)from & 15) == 0 ? load_eight(from) : load_slowly(from, count);
  }
};

__device__ __forceinline__ float decode(u32 code, float2 scale) {
  if (fabsf(scale.x) >= BIG || scale.y >= BIG_UNIT) {
    float half = __fadd_rn(__fmul_rn(scale.x, .5f), __fmul_rn((float)code, __fmul_rn(scale.y, .5f)));
    return __fmul_rn(fminf(fmaxf(half, -HALF_OF_MAX), HALF_OF_MAX), 2.f);
  }
  return __fadd_rn(scale.x, __fmul_rn((float)code, scale.y));
}

__device__ __forceinline__ float2 scale_of(const u8* scales, i64 number) { return ((const float2*)scales)[number]; }

// The weighted sum of the vectors in several payloads, whose scales are stride bytes apart.
struct Payloads {
  typedef u8 Data;
  const u8* first;
  i64 stride, members, block, shift, codes_offset;
  float weight;
  __device__ __noinline__ static Eight load_slowly(Payloads source, i64 index, int count) {
    Eight eight = {};
#pragma unroll 1
    for (int k = 0; k < count; ++k) {
      i64 number = block_of(index + k, source.block, source.shift);
#pragma unroll 1
      for (i64 member = 0; member < source.members; ++member) {
        const u8* payload = source.first + member * source.stride;
        float decoded = decode(payload[source.codes_offset + index + k], scale_of(payload, number));
        eight.value[k] = member ? __fadd_rn(eight.value[k], decoded) : decoded;
      }
      eight.value[k] = __fmul_rn(eight.value[k], source.weight);
    }
    return eight;
  }
  __device__ __forceinline__ Eight load(i64 index, int count) const {
    i64 number = block_of(index, block, shift);
    if (count < 8 || (index & 7) || index + 8 > (number + 1) * block) return load_slowly(*this, index, count);
    Eight eight = {};
    for (i64 member = 0; member < members; ++member) {
      const u8* payload = first + member * stride;
      uint2 bits = *(const uint2*)(payload + codes_offset + index);
      float2 one = scale_of(payload, number);
#pragma unroll
      for (int k = 0; k < 8; ++k) {
        float decoded = decode(((k < 4 ? bits.x : bits.y) >> (8 * (k & 3))) & 255, one);
        eight.value[k] = member ? __fadd_rn(eight.value[k], decoded) : decoded;
      }
    }
#pragma unroll
    for (int k = 0; k < 8; ++k) eight.value[k] = __fmul_rn(eight.value[k], weight);
    return eight;
  }
};

// ---- ranges and codes -----------------------------------------------------------------------------------------------

struct Range {
  float lo, hi;
  int bad;
  __device__ __forceinline__ void clear() { lo = INFINITE, hi = -INFINITE, bad = 0; }
  __device__ __forceinline__ void take(float value) {
    lo = fminf(lo, value);
    hi = fmaxf(hi, value);
    bad |= !(fabsf(value) < INFINITE);
  }
};

// The combined range of all threads of the block, in every thread.
__device__ __forceinline__ Range block_range(Range mine) {
  __shared__ float least[32], greatest[32];
  for (int distance = 16; distance; distance >>= 1) {
    mine.lo = fminf(mine.lo, __shfl_xor_sync(0xffffffffu, mine.lo, distance));
    mine.hi = fmaxf(mine.hi, __shfl_xor_sync(0xffffffffu, mine.hi, distance));
  }
  if ((threadIdx.x & 31) == 0) least[threadIdx.x >> 5] = mine.lo, greatest[threadIdx.x >> 5] = mine.hi;
  mine.bad = __syncthreads_or(mine.bad);
  for (int warp = 0; warp < (int)(blockDim.x >> 5); ++warp) {
    mine.lo = fminf(mine.lo, least[warp]);
    mine.hi = fmaxf(mine.hi, greatest[warp]);
  }
  return mine;
}

__device__ __noinline__ void write_slowly(u8* to, uint2 bits, int count) {
#pragma unroll 1
  for (int k = 0; k < count; ++k) to[k] = (u8)((k < 4 ? bits.x : bits.y) >> (8 * (k & 3)));
}

struct Encoder {
  float lo, inverse, factor;  // lo times factor, 1 / unit of the block times factor
  int bad;

  // Initialize from a block's range; one thread, the writer, also writes the block's scales and the flag.
  __device__ __forceinline__ void close(Range range, float2* scales, u32* flags, i64 number, bool writer) {
    float least = __fadd_rn(range.lo, 0.f), greatest = __fadd_rn(range.hi, 0.f);  // -0 becomes +0
    factor = fmaxf(fabsf(least), fabsf(greatest)) >= BIG ? .5f : 1.f;
    lo = __fmul_rn(least, factor);
    float unit = __fdiv_rn(__fsub_rn(__fmul_rn(greatest, factor), lo), 255.f);
    bool usable = unit >= SMALLEST_UNIT;
    inverse = usable ? __fdiv_rn(1.f, unit) : 0.f;
    bad = range.bad;
    if (!writer) return;
    float2 scale = {bad ? NOT_A_NUMBER : least, bad || !usable ? 0.f : __fdiv_rn(unit, factor)};
    scales[number] = scale;
    if (bad) atomicOr(flags, 1u);
  }

  // Initialize from the block's scales; the factor only has to prevent overflow, codes do not depend on it.
  __device__ __forceinline__ void reopen(float2 scale) {
    factor = fabsf(scale.x) >= BIG || scale.y >= BIG_UNIT ? .5f : 1.f;
    lo = __fmul_rn(scale.x, factor);
    inverse = scale.y > 0.f ? __fdiv_rn(1.f, __fmul_rn(scale.y, factor)) : 0.f;
    bad = scale.x != scale.x;
  }

  template <bool STOCHASTIC>
  __device__ __forceinline__ u32 code(float value, u32 random) const {
    if (bad) return 0;
    float difference = __fsub_rn(__fmul_rn(value, factor), lo);
    if (!STOCHASTIC) {
      // Adding 1.5 * 2**23 leaves the nearest integer in the low bits.
      int code = (int)__float_as_uint(__fmaf_rn(difference, inverse, 12582912.f)) - 0x4B400000;
      return (u32)min(max(code, 0), 255);
    }
    int fixed = __float2int_rn(__fmul_rn(__fmul_rn(difference, inverse), 65536.f));
    return ((u32)min(max(fixed, 0), 255 << 16) + random) >> 16;
  }

  // Write the codes of count elements, at most eight, from index on.
  template <bool STOCHASTIC>
  __device__ __forceinline__ void store(const float* value, i64 index, int count, u8* codes, u64 seed) const {
    u32 code_of[8];
    Dither dither = {};
    if (STOCHASTIC) dither = index & 7 ? straddling(index, seed) : philox((u64)index / LANES, seed);
#pragma unroll
    for (int k = 0; k < 8; ++k) code_of[k] = code<STOCHASTIC>(value[k], STOCHASTIC ? dither.lane(k) : 0);
    u8* to = codes + index;
    uint2 bits = {code_of[0] | code_of[1] << 8 | code_of[2] << 16 | code_of[3] << 24,
                  code_of[4] | code_of[5] << 8 | code_of[6] << 16 | code_of[7] << 24};
    if (count == 8 && ((u64)to & 7) == 0)
      *(uint2*)to = bits;
    else
      write_slowly(to, bits, count);
  }
};

__device__ __forceinline__ int up_to_eight(i64 count) { return (int)(count < 0 ? 0 : count < 8 ? count : 8); }

// ---- kernels --------------------------------------------------------------------------------------------------------

// One thread block per block of the vector, which is read once into registers: up to 8 * CHUNKS elements per thread.
template <class Source, int CHUNKS, bool STOCHASTIC>
__device__ __forceinline__ void quantize(Source source, float2* scales, u8* codes, u32* flags, i64 first, i64 numel,
                                         i64 block, u64 seed) {
  i64 number = first + blockIdx.x, start = number * block;
  i64 stop = start + block < numel ? start + block : numel;
  Eight eight[CHUNKS];
  Range range;
  range.clear();
#pragma unroll
  for (int chunk = 0; chunk < CHUNKS; ++chunk) {
    i64 index = start + ((i64)chunk * blockDim.x + threadIdx.x) * 8;
    int count = up_to_eight(stop - index);
    if (count) eight[chunk] = source.load(index, count);
#pragma unroll
    for (int k = 0; k < 8; ++k)
      if (k < count) range.take(eight[chunk].value[k]);
  }
  Encoder encoder;
  encoder.close(block_range(range), scales, flags, number, threadIdx.x == 0);
#pragma unroll
  for (int chunk = 0; chunk < CHUNKS; ++chunk) {
    i64 index = start + ((i64)chunk * blockDim.x + threadIdx.x) * 8;
    int count = up_to_eight(stop - index);
    if (count) encoder.template store<STOCHASTIC>(eight[chunk].value, index, count, codes, seed);
  }
}

// Memory for the ranges of a big block's segments, until its codes overwrite them.
__device__ __forceinline__ float4* partials_of(u8* codes, i64 start) {
  return (float4*)(((u64)(codes + start) + 15) & ~(u64)15);
}

// Big blocks, first pass: thread blocks segments * i to segments * i + segments - 1 find the ranges in block i.
template <class Source>
__device__ __forceinline__ void find_ranges(Source source, u8* codes, i64 numel, i64 block, i64 segments) {
  i64 number = blockIdx.x / segments, segment = blockIdx.x % segments, start = number * block;
  i64 stop = start + block < numel ? start + block : numel;
  Range range;
  range.clear();
  for (i64 index = start + (segment * blockDim.x + threadIdx.x) * 8; index < stop; index += segments * blockDim.x * 8) {
    int count = up_to_eight(stop - index);
    Eight eight = source.load(index, count);
#pragma unroll
    for (int k = 0; k < 8; ++k)
      if (k < count) range.take(eight.value[k]);
  }
  range = block_range(range);
  float4 partial = {range.lo, range.hi, range.bad ? 1.f : 0.f, 0.f};
  if (threadIdx.x == 0) partials_of(codes, start)[segment] = partial;
}

// Big blocks, last pass: write the codes, with the scales that close_blocks wrote.
template <class Source, bool STOCHASTIC>
__device__ __forceinline__ void write_codes(Source source, const float2* scales, u8* codes, i64 numel, i64 block,
                                            i64 segments, u64 seed) {
  i64 number = blockIdx.x / segments, segment = blockIdx.x % segments, start = number * block;
  i64 stop = start + block < numel ? start + block : numel;
  Encoder encoder;
  encoder.reopen(scales[number]);
  for (i64 index = start + (segment * blockDim.x + threadIdx.x) * 8; index < stop; index += segments * blockDim.x * 8) {
    int count = up_to_eight(stop - index);
    Eight eight = source.load(index, count);
    encoder.template store<STOCHASTIC>(eight.value, index, count, codes, seed);
  }
}

// Big blocks, second pass: combine the ranges, with one thread block per block.
extern "C" __global__ void close_blocks(i64 scales, i64 codes, i64 flags, i64 block, i64 segments) {
  const float4* partials = partials_of((u8*)codes, blockIdx.x * block);
  Range range;
  range.clear();
  for (i64 segment = threadIdx.x; segment < segments; segment += blockDim.x) {
    float4 partial = partials[segment];
    range.lo = fminf(range.lo, partial.x);
    range.hi = fmaxf(range.hi, partial.y);
    range.bad |= partial.z != 0.f;
  }
  Encoder encoder;
  encoder.close(block_range(range), (float2*)scales, (u32*)flags, blockIdx.x, threadIdx.x == 0);
}

// Four elements per thread and step, so neighboring threads write neighboring 16 bytes.
template <class T>
struct alignas(4 * sizeof(T)) Four {
  T element[4];
};

template <class T, bool ADD>
__device__ __forceinline__ void dequantize(const u8* scales, const u8* all_codes, T* out, i64 numel, i64 block, i64 shift,
                                           float alpha) {
  i64 start = (i64)blockIdx.x * blockDim.x * 16 + threadIdx.x * 4;
#pragma unroll
  for (int step = 0; step < 4; ++step) {
    i64 index = start + (i64)step * blockDim.x * 4, number = block_of(index, block, shift);
    const u8* codes = all_codes + index;
    if (index + 4 <= numel && index + 4 <= (number + 1) * block && ((u64)(out + index) & (sizeof(Four<T>) - 1)) == 0) {
      u32 bits = *(const u32*)codes;
      float2 scale = scale_of(scales, number);
      Four<T> four;
      if (ADD) four = *(const Four<T>*)(out + index);
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        float value = decode((bits >> (8 * k)) & 255, scale);
        if (ADD) value = __fadd_rn(widen(four.element[k]), __fmul_rn(value, alpha));
        narrow(value, four.element[k]);
      }
      *(Four<T>*)(out + index) = four;
      continue;
    }
#pragma unroll 1
    for (int k = 0; k < 4 && index + k < numel; ++k) {
      float value = decode(codes[k], scale_of(scales, block_of(index + k, block, shift)));
      if (ADD) value = __fadd_rn(widen(out[index + k]), __fmul_rn(value, alpha));
      narrow(value, out[index + k]);
    }
  }
}

extern "C" __global__ void dequantize_reduce(i64 first, i64 stride, i64 members, i64 payload_block, i64 shift,
                                             i64 payload_codes, float weight, i64 out, i64 numel) {
  Payloads source = {(const u8*)first, stride, members, payload_block, shift, payload_codes, weight};
  i64 index = ((i64)blockIdx.x * blockDim.x + threadIdx.x) * 8;
  int count = up_to_eight(numel - index);
  if (!count) return;
  Eight eight = source.load(index, count);
  float* to = (float*)out + index;
  if (count == 8 && ((u64)to & 15) == 0) {
    const float* v = eight.value;
    ((float4*)to)[0] = {v[0], v[1], v[2], v[3]};
    ((float4*)to)[1] = {v[4], v[5], v[6], v[7]};
    return;
  }
  for (int k = 0; k < count; ++k) to[k] = eight.value[k];
}

// The kernels that Python launches. Each one that reads a source takes all of its seven arguments.
#define SOURCE_PARAMETERS                                                                                              \
  i64 values, i64 stride, i64 members, i64 payload_block, i64 shift, i64 payload_codes, float weight
#define SOURCE (Source{(const Source::Data*)values, stride, members, payload_block, shift, payload_codes, weight})

#define ROUNDING_KERNELS(NAME, TYPE, ROUNDING, STOCHASTIC)                                                             \
  extern "C" __global__ void __launch_bounds__(256) quantize_##NAME##_1_##ROUNDING(                                    \
      SOURCE_PARAMETERS, i64 scales, i64 codes, i64 flags, i64 first, i64 numel, i64 block, i64 seed) {                \
    typedef TYPE Source;                                                                                               \
    quantize<Source, 1, STOCHASTIC>(SOURCE, (float2*)scales, (u8*)codes, (u32*)flags, first, numel, block, seed);      \
  }                                                                                                                    \
  extern "C" __global__ void __launch_bounds__(1024) quantize_##NAME##_4_##ROUNDING(                                   \
      SOURCE_PARAMETERS, i64 scales, i64 codes, i64 flags, i64 first, i64 numel, i64 block, i64 seed) {                \
    typedef TYPE Source;                                                                                               \
    quantize<Source, 4, STOCHASTIC>(SOURCE, (float2*)scales, (u8*)codes, (u32*)flags, first, numel, block, seed);      \
  }                                                                                                                    \
  extern "C" __global__ void __launch_bounds__(256) write_codes_##NAME##_##ROUNDING(                                   \
      SOURCE_PARAMETERS, i64 scales, i64 codes, i64 numel, i64 block, i64 segments, i64 seed) {                        \
    typedef TYPE Source;                                                                                               \
    write_codes<Source, STOCHASTIC>(SOURCE, (const float2*)scales, (u8*)codes, numel, block, segments, seed);          \
  }

#define SOURCE_KERNELS(NAME, TYPE)                                                                                     \
  ROUNDING_KERNELS(NAME, TYPE, nearest, false)                                                                         \
  ROUNDING_KERNELS(NAME, TYPE, stochastic, true)                                                                       \
  extern "C" __global__ void __launch_bounds__(256) find_ranges_##NAME(                                                \
      SOURCE_PARAMETERS, i64 codes, i64 numel, i64 block, i64 segments) {                                              \
    typedef TYPE Source;                                                                                               \
    find_ranges<Source>(SOURCE, (u8*)codes, numel, block, segments);                                                   \
  }

#define DECODER_KERNELS(NAME, TYPE)                                                                                    \
  extern "C" __global__ void __launch_bounds__(256) dequantize_##NAME(i64 scales, i64 codes, i64 out, i64 numel,       \
                                                                      i64 block, i64 shift) {                          \
    dequantize<TYPE, false>((const u8*)scales, (const u8*)codes, (TYPE*)out, numel, block, shift, 1.f);                \
  }                                                                                                                    \
  extern "C" __global__ void __launch_bounds__(256) dequantize_add_##NAME(                                             \
      i64 scales, i64 codes, i64 out, i64 numel, i64 block, i64 shift, float alpha) {                                  \
    dequantize<TYPE, true>((const u8*)scales, (const u8*)codes, (TYPE*)out, numel, block, shift, alpha);               \
  }

SOURCE_KERNELS(float32, Vector<float>)
SOURCE_KERNELS(float16, Vector<Half>)
SOURCE_KERNELS(bfloat16, Vector<Bfloat>)
SOURCE_KERNELS(payloads, Payloads)
DECODER_KERNELS(float32, float)
DECODER_KERNELS(float16, Half)
DECODER_KERNELS(bfloat16, Bfloat)
