// Hot: memory of a worker, kept from image to image.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>

namespace headway {
namespace HW_ISA {

// 64-byte aligned memory that only grows. It is zeroed when it does and never holds anything undefined.
template <class T>
class Buffer final {
 public:
  Buffer() = default;
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { std::free(data_); }

  // Room for n; what was there is gone where it grows.
  T* room(size_t n) {
    if (n <= size_) return data_;
    const size_t bytes = (n * sizeof(T) + 63) / 64 * 64;
    void* data = std::aligned_alloc(64, bytes);
    if (!data) throw std::bad_alloc();
    std::free(data_);
    data_ = static_cast<T*>(std::memset(data, 0, bytes));
    size_ = n;
    return data_;
  }

  T* data() { return data_; }
  const T* data() const { return data_; }
  const T& operator[](size_t i) const { return data_[i]; }

 private:
  T* data_ = nullptr;
  size_t size_ = 0;
};

}  // namespace HW_ISA
}  // namespace headway
