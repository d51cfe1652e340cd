#include <cstdlib>
#include <cstring>

#include "transcode.h"
#include "update.h"
#include "winograd.h"
#include "worker.h"

namespace headway {

using Maker = std::unique_ptr<Worker>();
using TranscoderMaker = std::unique_ptr<Transcoder>();
using Kernels = const Updates&();
using Convolutions = const Winograd&();

namespace portable {
Maker make_worker;
TranscoderMaker make_transcoder;
Kernels updates;
Convolutions winograd;
}  // namespace portable
#ifdef HW_X86
namespace avx2 {
Maker make_worker;
TranscoderMaker make_transcoder;
Kernels updates;
Convolutions winograd;
}  // namespace avx2
namespace avx512 {
Maker make_worker;
TranscoderMaker make_transcoder;
Kernels updates;
Convolutions winograd;
}  // namespace avx512
#endif

namespace {

struct Isa {
  const char* name;
  Maker* make;
  TranscoderMaker* make_transcoder;
  Kernels* updates;
  Convolutions* winograd;
};

constexpr Isa kIsas[] = {
    {"portable", portable::make_worker, portable::make_transcoder, portable::updates, portable::winograd},
#ifdef HW_X86
    {"avx2", avx2::make_worker, avx2::make_transcoder, avx2::updates, avx2::winograd},
    {"avx512", avx512::make_worker, avx512::make_transcoder, avx512::updates, avx512::winograd},
#endif
};

// How many of them run here.
size_t runnable() {
#ifdef HW_X86
#define HAS __builtin_cpu_supports
  if (!(HAS("avx2") && HAS("bmi") && HAS("bmi2") && HAS("lzcnt") && HAS("popcnt") && HAS("fma"))) return 1;
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

std::unique_ptr<Transcoder> make_transcoder() { return chosen().make_transcoder(); }

const Updates& updates() { return chosen().updates(); }

const Winograd& winograd() { return chosen().winograd(); }

const char* isa() { return chosen().name; }

}  // namespace headway
