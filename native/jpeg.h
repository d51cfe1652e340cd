// The header of a JPEG: all markers up to the first scan.
#pragma once

#include "types.h"

namespace headway {

struct HuffmanSpec {
  uint8_t bits[16];     // codes of each length, from 1
  uint8_t values[256];  // in order of their codes
  int count;
};

struct Component {
  int id, h, v, quant, dc, ac;
};

struct Jpeg {
  int width, height, components;
  Component component[4];
  int h_max, v_max;
  int mcus_per_row, mcu_rows;  // of one scan that interleaves all components
  int restart;                 // MCUs in a restart interval, 0: no markers
  size_t exif, exif_size;      // where a segment of EXIF has its TIFF directory; 0: there is none
  bool progressive;
  bool ycc;     // colour is YCbCr, by libjpeg's rules
  bool direct;  // Huffman-coded baseline, gray or YCbCr, one scan, nothing out of the ordinary: for our own decoder
  uint16_t quant[4][64];  // in zigzag order, as in the file
  HuffmanSpec dc[4], ac[4];
  size_t sof;      // where the frame header's marker begins
  size_t scan;     // where the first scan's marker begins
  size_t entropy;  // where its entropy-coded bytes begin
};

// ok, foreign (it does not begin like a JPEG), or undecodable (no frame or no scan is found).
Outcome parse(const uint8_t* data, size_t size, Jpeg& jpeg);

Outcome probe(const uint8_t* data, size_t size, hw_info& info);

}  // namespace headway
