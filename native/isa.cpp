#include <cstdlib>
#include <cstring>

#include "worker.h"

namespace headway {

using Maker = std::unique_ptr<Worker>();

namespace portable {
Maker make_worker;
}
#ifdef HW_X86
namespace avx2 {
Maker make_worker;
}
namespace avx512 {
Maker make_worker;
}
#endif

namespace {

struct Isa {
  const char* name;
  Maker* make;
};

constexpr Isa kIsas[] = {
    {"portable", portable::make_worker},
#ifdef HW_X86
    {"avx2", avx2::make_worker},
    {"avx512", avx512::make_worker},
#endif
};

// How many of them run here.
size_t runnable() {
#ifdef HW_X86
#define HAS __builtin_cpu_supports
  if (!(HAS("avx2") && HAS("bmi") && HAS("bmi2") && HAS("lzcnt") && HAS("popcnt"))) return 1;
  if (!(HAS("avx512f") && HAS("avx512bw") && HAS("avx512vl") && HAS("avx512dq") && HAS("avx512vbmi"))) return 2;
#undef HAS
  return 3;
#else
  return 1;
#endif
}

const Isa& chosen() {
  const size_t count = runnable();
  const char* asked = std::getenv("HEADWAY_ISA");
  for (size_t i = 0; asked && i < count; i++)
    if (!std::strcmp(asked, kIsas[i].name)) return kIsas[i];
  return kIsas[count - 1];
}

}  // namespace

std::unique_ptr<Worker> make_worker() { return chosen().make(); }

const char* isa() { return chosen().name; }

}  // namespace headway
