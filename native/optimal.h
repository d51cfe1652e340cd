// The best Huffman code of at most 16 bits for given counts (ITU-T T.81, annex K.2), the same as libjpeg's.
#pragma once

#include <algorithm>
#include <cstring>
#include <functional>

#include "jpeg.h"

namespace headway {
namespace HW_ISA {

// False where a code would be longer than what annex K.3 shortens.
inline bool make_optimal(const uint32_t counts[256], HuffmanSpec& spec) {
  constexpr int kLongest = 32, kReserved = 256;  // a symbol that takes the code of all ones, which may not be used
  // The rarest symbol comes first, and of equals the one with the highest number.
  uint64_t heap[257];
  int size = 0;
  const auto key = [](uint64_t count, int symbol) { return count << 9 | uint64_t(511 - symbol); };
  for (int symbol = 0; symbol < 256; symbol++)
    if (counts[symbol]) heap[size++] = key(counts[symbol], symbol);
  heap[size++] = key(1, kReserved);
  const auto later = std::greater<uint64_t>();
  std::make_heap(heap, heap + size, later);
  int length[257] = {}, next[257];
  std::fill_n(next, 257, -1);
  while (size > 1) {
    std::pop_heap(heap, heap + size, later);
    std::pop_heap(heap, heap + size - 1, later);
    const uint64_t rarest = heap[size - 1], second = heap[size - 2];
    int one = 511 - int(rarest & 511);
    const int other = 511 - int(second & 511);
    heap[size - 2] = key((rarest >> 9) + (second >> 9), one);
    size--;
    std::push_heap(heap, heap + size, later);
    // Each tree is a list: all its symbols move one level down, and the lists are joined.
    for (length[one]++; next[one] >= 0; length[one]++) one = next[one];
    next[one] = other;
    for (int symbol = other; symbol >= 0; symbol = next[symbol]) length[symbol]++;
  }
  int bits[kLongest + 1] = {};
  for (int symbol = 0; symbol <= kReserved; symbol++) {
    if (length[symbol] > kLongest) return false;
    if (length[symbol]) bits[length[symbol]]++;
  }
  // A pair of codes that are too long: one takes their prefix, the other shares that of a shorter code.
  for (int i = kLongest; i > 16; i--)
    while (bits[i] > 0) {
      int j = i - 2;
      while (bits[j] == 0) j--;
      bits[i] -= 2, bits[i - 1]++, bits[j + 1] += 2, bits[j]--;
    }
  int longest = 16;
  while (bits[longest] == 0) longest--;
  bits[longest]--;  // the reserved one
  spec.count = 0;
  for (int i = 0; i < 16; i++) spec.bits[i] = uint8_t(bits[i + 1]);
  for (int i = 1; i <= kLongest; i++)
    for (int symbol = 0; symbol < 256; symbol++)
      if (length[symbol] == i) spec.values[spec.count++] = uint8_t(symbol);
  return true;
}

}  // namespace HW_ISA
}  // namespace headway
