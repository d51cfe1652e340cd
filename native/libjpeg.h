// What every user of libjpeg here shares: errors that jump back to the caller, and memory as the source of bytes.
#pragma once

#include <setjmp.h>
#include <stdio.h>

#include <jpeglib.h>

#include "types.h"

namespace headway {

// Coefficients of progressive images lie in memory whole: 6 bytes a pixel of 4:4:4, so 178 Mpixel.
constexpr long kMaxMemory = 1L << 30;

// Plain data, since longjmp runs no destructors: whoever says setjmp(guard.jump) holds no object that has one.
struct Guard {
  jpeg_error_mgr errors;
  jpeg_source_mgr source;
  jpeg_progress_mgr progress;
  jmp_buf jump;
  uint32_t max_scans;  // 0: no limit
  bool strict;         // a warning is an error
};

// To be called before jpeg_create_decompress or jpeg_create_compress: makes `image` report to the guard.
void watch(Guard& guard, jpeg_common_struct& image);

// To be called after jpeg_create_decompress. Data that end before libjpeg is done are an error, as they are to Pillow.
void read_from(Guard& guard, jpeg_decompress_struct& image, const uint8_t* data, size_t size, uint32_t max_scans);

// Whether the scans read so far hold all bits of those coefficients for which libjpeg would make some up, by smoothing.
bool finished(const jpeg_decompress_struct& image);

}  // namespace headway
