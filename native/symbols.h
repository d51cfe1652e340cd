// Entropy-coded data as tokens: a symbol, the table it is coded with in the copy, and the bits that follow it.
#pragma once

#include "huffman.h"

namespace headway {
namespace HW_ISA {

// Bits 6-16: the bits that follow; 17-24: the symbol; 25-26: its table, as the copy numbers them. Those below are an
// entry's.
using Token = uint32_t;
enum TokenTable { DC_LUMA, AC_LUMA, DC_CHROMA, AC_CHROMA, TOKEN_TABLES };
constexpr int EXTRA_AT = 6, EXTRA_BITS = 11, SYMBOL_AT = 17, TABLE_AT = 25, SYMBOLS = TOKEN_TABLES * 256;

inline Token make_token(int table, int symbol, uint32_t extra) {
  return uint32_t(table) << TABLE_AT | uint32_t(symbol) << SYMBOL_AT | extra << EXTRA_AT;
}
inline uint32_t place_of(Token token) { return token >> SYMBOL_AT; }
inline int symbol_of(Token token) { return int(token >> SYMBOL_AT & 255); }
inline uint32_t extra_of(Token token) { return token >> EXTRA_AT & ((1u << EXTRA_BITS) - 1); }

// What the bits after a symbol of size `size` say, and back.
inline int value_of(uint32_t extra, int size) { return size ? extend(extra, size) : 0; }
inline int size_of(int value) { return value ? 32 - __builtin_clz(uint32_t(value < 0 ? -value : value)) : 0; }
inline uint32_t extra_for(int value, int size) { return uint32_t(value < 0 ? value + (1 << size) - 1 : value); }

constexpr int ZEROS_16 = 0xF0;  // the symbol of a run of 16 zeros
constexpr uint32_t BLOCK_ENDS = 63;

// Looks up tokens in a file's bits. An entry: a token, where bits 0-5 are the length of code and bits, and 25-30 the
// advance in zigzag order, BLOCK_ENDS where the block ends. Where the sign is set, the bits are not in the entry, and the
// length is the code's alone, or 0 where the code does not fit either.
class SymbolTable final {
 public:
  // False where libjpeg would refuse the code, and where a symbol is not one of baseline coefficients.
  bool build(const HuffmanSpec& spec, int table) {
    const bool is_ac = table & 1;
    if (spec.count == spec_.count && table == table_ && !std::memcmp(&spec, &spec_, size_t(16 + spec.count)))
      return true;
    spec_.count = -1;
    std::fill_n(entry_, 1 << LOOKUP_BITS, 1u << 31);
    uint32_t code = 0;
    int at = 0;
    for (int length = 1; length <= 16; length++) {
      offset_[length] = at - int(code);
      for (int i = 0; i < spec.bits[length - 1]; i++, at++, code++) {
        const int symbol = spec.values[at];
        if (at >= spec.count || (is_ac ? !is_ac_symbol(symbol) : symbol > 11)) return false;
        if (code + 1 >= 1u << length) return false;  // all ones
        if (length <= LOOKUP_BITS) fill(code, length, symbol, table);
      }
      below_[length] = code << (16 - length);
      code <<= 1;
    }
    std::memcpy(&spec_, &spec, sizeof spec);
    table_ = table;
    return true;
  }

  uint32_t operator[](uint64_t top) const { return entry_[top >> (64 - LOOKUP_BITS)]; }

  // A token whose entry has the sign set, of which up to 27 bits are there; false where the code is none.
  bool look_up(uint32_t entry, Bits& bits, Token& token) const {
    int length = length_of(entry);
    token = token_of(entry);
    if (__builtin_expect(length == 0, 0)) {
      const uint32_t word = uint32_t(bits.top >> 48);
      length = LOOKUP_BITS + 1;
      while (length <= 16 && word >= below_[length]) length++;
      if (length > 16) return false;
      token = make_token(table_, spec_.values[(offset_[length] + int(word >> (16 - length))) & 255], 0);
    }
    bits.drop(length);
    const int size = symbol_of(token) & 15;
    token |= size ? uint32_t(bits.top >> (64 - size)) << EXTRA_AT : 0;
    bits.drop(size);
    return true;
  }

  static bool is_long(uint32_t entry) { return int32_t(entry) < 0; }
  static int length_of(uint32_t entry) { return int(entry & 63); }
  static uint32_t advance_of(uint32_t entry) { return entry >> TABLE_AT; }
  Token token_of(uint32_t entry) const {
    return (entry & ((1u << TABLE_AT) - 1)) | uint32_t(table_) << TABLE_AT;
  }
  static uint32_t advance(int symbol) { return symbol ? uint32_t(symbol >> 4) + 1 : BLOCK_ENDS; }

 private:
  // Symbols that have a size of 0 and a run below 15 are of progressive files.
  static bool is_ac_symbol(int symbol) {
    const int size = symbol & 15;
    return size ? size <= 10 : symbol == 0 || symbol == ZEROS_16;
  }

  void fill(uint32_t code, int length, int symbol, int table) {
    const int size = symbol & 15, spare = LOOKUP_BITS - length - size;
    uint32_t* at = entry_ + (code << (LOOKUP_BITS - length));
    if (spare < 0) {
      std::fill_n(at, 1 << (LOOKUP_BITS - length), 1u << 31 | uint32_t(length) | make_token(0, symbol, 0));
      return;
    }
    const uint32_t rest = (table & 1 ? advance(symbol) : 0) << TABLE_AT | uint32_t(length + size);
    for (uint32_t extra = 0; extra < 1u << size; extra++)
      for (int i = 0; i < 1 << spare; i++) *at++ = rest | make_token(0, symbol, extra);
  }

  uint32_t entry_[1 << LOOKUP_BITS];
  HuffmanSpec spec_{{}, {}, -1};
  int table_ = -1, offset_[17];
  uint32_t below_[17];
};

}  // namespace HW_ISA
}  // namespace headway
