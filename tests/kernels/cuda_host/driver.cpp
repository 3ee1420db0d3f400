// Starts the kernels of a CUDA source by name, on a CPU. The source, and the list of its kernels, come from the command
// line.
#include "shim.h"

#include CUDA_SOURCE

#include <map>
#include <string>
#include <tuple>
#include <utility>

static void read_word(uint64_t word, i64& value) { value = (i64)word; }
static void read_word(uint64_t word, float& value) { value = __uint_as_float((u32)word); }

typedef std::function<void()> Call;

template <class... Parameters, size_t... Index>
static Call with_words(void (*kernel)(Parameters...), const uint64_t* words, std::index_sequence<Index...>) {
  std::tuple<Parameters...> values;
  int read[] = {(read_word(words[Index], std::get<Index>(values)), 0)...};
  (void)read;
  return [=] { kernel(std::get<Index>(values)...); };
}

template <class... Parameters>
static std::pair<size_t, std::function<Call(const uint64_t*)>> entry(void (*kernel)(Parameters...)) {
  auto make = [=](const uint64_t* words) { return with_words(kernel, words, std::index_sequence_for<Parameters...>()); };
  return {sizeof...(Parameters), make};
}

#define ENTRY(NAME) {#NAME, entry(NAME)},
#include KERNEL_LIST

static const std::map<std::string, std::pair<size_t, std::function<Call(const uint64_t*)>>> kernels = {KERNELS};

// 0 if it ran, 1 if there is no such kernel, 2 if it takes another number of arguments.
extern "C" int launch(const char* name, unsigned grid, unsigned threads, const uint64_t* words, size_t count) {
  auto found = kernels.find(name);
  if (found == kernels.end()) return 1;
  if (found->second.first != count) return 2;
  shim::launch(grid, threads, found->second.second(words));
  return 0;
}
