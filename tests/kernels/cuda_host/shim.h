// As much of CUDA as our kernels use, on a CPU: thread blocks run one after another, the threads of a block as
// fibers that take turns at barriers and shuffles.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <ucontext.h>
#include <vector>

#define LSGD_HOST_BUILD
#define __global__
#define __device__
#define __forceinline__ inline
#define __noinline__
#define __shared__ static  // one block at a time, so a static array is the block's
#define __launch_bounds__(...)

struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct Index {
  unsigned x;
};
static Index threadIdx, blockIdx, blockDim;

namespace shim {
enum State { ready, at_barrier, at_shuffle, finished };
struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack{new char[1 << 16]};
  State state = ready;
  uint64_t sent = 0;
};
static std::vector<Fiber> fibers;
static ucontext_t scheduler;
static unsigned current;
static std::function<void()> body;
static int vote, voted;

static void enter() {
  body();
  fibers[current].state = finished;
  swapcontext(&fibers[current].context, &scheduler);
}

static void wait(State where) {
  unsigned self = current;
  fibers[self].state = where;
  swapcontext(&fibers[self].context, &scheduler);
}

// Let everybody in begin..end go on once all of them that have not finished have arrived.
static bool release(unsigned begin, unsigned end, State where) {
  bool any = false;
  for (unsigned i = begin; i < end; ++i) {
    if (fibers[i].state == finished) continue;
    if (fibers[i].state != where) return false;
    any = true;
  }
  for (unsigned i = begin; i < end; ++i)
    if (fibers[i].state == where) fibers[i].state = ready;
  return any;
}

static void run_block(unsigned threads) {
  if (fibers.size() < threads) fibers.resize(threads);
  for (unsigned i = 0; i < threads; ++i) {
    Fiber& fiber = fibers[i];
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.get();
    fiber.context.uc_stack.ss_size = 1 << 16;
    fiber.context.uc_link = &scheduler;
    makecontext(&fiber.context, enter, 0);
    fiber.state = ready;
  }
  for (;;) {
    bool moved = false, all = true;
    for (unsigned i = 0; i < threads; ++i) {
      if (fibers[i].state == ready) {
        current = i;
        threadIdx.x = i;
        swapcontext(&scheduler, &fibers[i].context);
        moved = true;
      }
      all &= fibers[i].state == finished;
    }
    if (all) return;
    for (unsigned warp = 0; warp < threads; warp += 32)
      moved |= release(warp, warp + 32 < threads ? warp + 32 : threads, at_shuffle);
    if (release(0, threads, at_barrier)) {
      voted = vote;
      vote = 0;
      moved = true;
    }
    if (!moved) {
      fprintf(stderr, "the threads of this block wait for each other\n");
      abort();
    }
  }
}

template <class Body>
void launch(unsigned grid, unsigned threads, Body work) {
  blockDim.x = threads;
  body = work;
  for (unsigned i = 0; i < grid; ++i) {
    blockIdx.x = i;
    run_block(threads);
  }
}
}  // namespace shim

template <class T>
static T __shfl_xor_sync(unsigned, T value, int distance) {
  unsigned self = shim::current;
  memcpy(&shim::fibers[self].sent, &value, sizeof value);
  shim::wait(shim::at_shuffle);
  T received;
  memcpy(&received, &shim::fibers[self ^ distance].sent, sizeof received);
  shim::wait(shim::at_shuffle);
  return received;
}
static unsigned __ballot_sync(unsigned, int vote) {
  unsigned self = shim::current, first = self / 32 * 32, votes = 0;
  shim::fibers[self].sent = vote != 0;
  shim::wait(shim::at_shuffle);
  for (unsigned i = 0; i < 32; ++i) votes |= (unsigned)shim::fibers[first + i].sent << i;
  shim::wait(shim::at_shuffle);
  return votes;
}
static void __syncthreads() { shim::wait(shim::at_barrier); }
static int __syncthreads_or(int value) {
  shim::vote |= value;
  shim::wait(shim::at_barrier);
  return shim::voted;
}

template <class To, class From>
static To bits_as(From from) {
  To to;
  static_assert(sizeof to == sizeof from, "same size");
  memcpy(&to, &from, sizeof to);
  return to;
}
static float __uint_as_float(unsigned bits) { return bits_as<float>(bits); }
static unsigned __float_as_uint(float value) { return bits_as<unsigned>(value); }
static double __longlong_as_double(long long bits) { return bits_as<double>(bits); }
static int __popc(unsigned bits) { return __builtin_popcount(bits); }
static float __fadd_rn(float a, float b) { return a + b; }
static float __fsub_rn(float a, float b) { return a - b; }
static float __fmul_rn(float a, float b) { return a * b; }
static float __fdiv_rn(float a, float b) { return a / b; }
static float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
static int __float2int_rn(float value) { return (int)rintf(value); }
static unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)((uint64_t)a * b >> 32); }
static unsigned atomicOr(unsigned* where, unsigned bits) {
  unsigned before = *where;
  *where |= bits;
  return before;
}
static int min(int a, int b) { return a < b ? a : b; }
static int max(int a, int b) { return a > b ? a : b; }
static float half_to_float(unsigned short bits) { return (float)bits_as<_Float16>(bits); }
static unsigned short float_to_half(float value) { return bits_as<unsigned short>((_Float16)value); }
