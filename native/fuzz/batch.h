// A batch of files on its way through the core, and what is said of it when something is wrong.
#pragma once

#include <cstring>
#include <memory>

#include "../headway.h"
#include "mutate.h"

namespace headway::fuzz {

constexpr uint32_t kMaxPixels = 1 << 20;  // of an image: larger ones only take time

// Bytes at their exact size, so that the sanitizer sees the first one beyond them.
class Exact final {
 public:
  explicit Exact(const Bytes& bytes) : data_(new uint8_t[bytes.size()]), size_(bytes.size()) {
    if (size_) memcpy(data_.get(), bytes.data(), size_);
  }
  uint64_t address() const { return reinterpret_cast<uint64_t>(data_.get()); }
  const uint8_t* data() const { return data_.get(); }
  uint64_t size() const { return size_; }

 private:
  std::unique_ptr<uint8_t[]> data_;
  size_t size_;
};

struct Box {
  float left, top, width, height;
};

// Its columns are those of hw_items.
struct Batch {
  std::vector<Exact> files;
  std::vector<uint64_t> address, length;
  std::vector<uint32_t> crc, shape;
  std::vector<uint8_t> check, kind, flip;
  std::vector<Box> box;

  void add(const Bytes& bytes, Box where, uint8_t mirrored) {
    files.emplace_back(bytes);
    address.push_back(files.back().address());
    length.push_back(files.back().size());
    crc.push_back(0);
    check.push_back(0);
    kind.push_back(HW_JPEG);
    shape.insert(shape.end(), {1, 1, 1});
    flip.push_back(mirrored);
    box.push_back(where);
  }
};

struct Result {
  Bytes out, status;
};

// Threads that decode with one instruction set.
struct Crew {
  const char* isa;
  hw_pool* pool;
};

// Decodes it, and checks what holds for every batch. All images have a status, the bad ones are zeros, and the bytes
// between the images stay as they were. Image i lies at i * stride(spec) of the result.
Result decode(const Crew& crew, const Batch& batch, const hw_spec& spec);

inline size_t image_size(const hw_spec& spec) { return size_t(spec.height) * spec.width * spec.channels; }
inline size_t stride(const hw_spec& spec) { return image_size(spec) + 16; }

// What is under way: for the message, and for leaving the files in a folder where the process dies.
struct Now {
  const Batch* batch = nullptr;
  const char* isa = "none";
  uint64_t seed = 0;
  size_t number = 0;
};
extern Now now;

// To be called once: deaths by a sanitizer or by alarm() leave the files too.
void watch();

[[noreturn]] void fail(const char* what, size_t image);

}  // namespace headway::fuzz
