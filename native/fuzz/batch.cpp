#include "batch.h"

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <string>

// Absent where no sanitizer is built in.
extern "C" __attribute__((weak)) void __sanitizer_set_death_callback(void (*callback)());

namespace headway::fuzz {

Now now;

namespace {

constexpr uint8_t kUntouched = 0xA5;

void leave_files() {
  if (!now.batch) return;
  char folder[64];
  snprintf(folder, sizeof folder, "fuzz-%llu-%zu", static_cast<unsigned long long>(now.seed), now.number);
  std::filesystem::create_directories(folder);
  for (size_t i = 0; i < now.batch->files.size(); ++i) {
    std::ofstream(std::string(folder) + "/" + std::to_string(i) + ".jpg", std::ios::binary)
        .write(reinterpret_cast<const char*>(now.batch->files[i].data()),
               std::streamsize(now.batch->files[i].size()));
  }
  fprintf(stderr, "headway_fuzz: its files are in %s; run it again with TARGET FOLDER 1 0 %llu %zu\n", folder,
          static_cast<unsigned long long>(now.seed), now.number);
}

void on_alarm(int) { fail("it hangs", now.batch ? now.batch->files.size() : 0); }

}  // namespace

void watch() {
  signal(SIGALRM, on_alarm);
  if (__sanitizer_set_death_callback) __sanitizer_set_death_callback(leave_files);
}

void fail(const char* what, size_t image) {
  fprintf(stderr, "headway_fuzz: image %zu of batch %zu, %s: %s\n", image, now.number, now.isa, what);
  leave_files();
  _exit(1);
}

Result decode(const Crew& crew, const Batch& batch, const hw_spec& spec) {
  // Threads of one crew would race if each wrote it.
  if (now.isa != crew.isa) now.isa = crew.isa;
  const size_t count = batch.files.size(), size = image_size(spec), step = stride(spec);
  Result result{Bytes(count * step, kUntouched), Bytes(count, 0xEE)};
  const hw_items items = {batch.address.data(), batch.length.data(), batch.crc.data(),   batch.check.data(),
                          batch.kind.data(),    batch.shape.data(),  &batch.box[0].left, batch.flip.data()};
  const int64_t failed = hw_decode_batch(crew.pool, int64_t(count), &items, &spec, result.out.data(), int64_t(step),
                                         result.status.data(), nullptr);
  int64_t bad = 0;
  for (size_t i = 0; i < count; ++i) {
    const uint8_t* const image = &result.out[i * step];
    if (result.status[i] > HW_FOREIGN) fail("it has no status", i);
    if (result.status[i] != HW_OK) {
      ++bad;
      if (std::any_of(image, image + size, [](uint8_t value) { return value; })) fail("it is bad but not zero", i);
    }
    if (std::any_of(image + size, image + step, [](uint8_t value) { return value != kUntouched; }))
      fail("the bytes behind it were touched", i);
  }
  if (failed != bad) fail("the number of bad images is wrong", count);
  return result;
}

}  // namespace headway::fuzz
