// Why a file was refused, in words.
#pragma once

#include <cstdarg>
#include <cstdint>
#include <cstdio>

namespace headway {

constexpr int kReason = 200;  // bytes of hw_seekable's and hw_splice's reason; it may be NULL

__attribute__((format(printf, 2, 3))) inline int64_t refuse(char* reason, const char* format, ...) {
  if (reason) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(reason, kReason, format, arguments);
    va_end(arguments);
  }
  return 0;
}

}  // namespace headway
