// Compiled once for each instruction set, as worker.cpp is.
//
// Three passes over a file: its bits are read as tokens and those counted; the tokens are written with the best code for
// these counts; and what was written is read back and compared, token by token.
#include "transcode.h"

#include <vector>

#include "buffer.h"
#include "optimal.h"
#include "segments.h"
#include "symbols.h"

namespace headway {
namespace HW_ISA {
namespace {

// More would take 256 MiB; such a file is libjpeg's.
constexpr size_t kMostTokens = 1 << 26;
constexpr size_t kMcuTokens = 10 * 64;

class Rewriter final : public Transcoder {
 public:
  Outcome run(const Jpeg& jpeg, const uint8_t* data, size_t size, int restart, const uint8_t*& written,
              size_t& count) override {
    jpeg_ = &jpeg;
    restart_ = restart;
    if (!header_is_plain(jpeg, data) || !plan() || !read(data, size) || !choose_codes()) return Outcome::declined;
    count = write(data);
    written = out_.data();
    return verify(data, count) ? Outcome::ok : Outcome::declined;
  }

 private:
  // A block of the MCU: its component, and its place there.
  struct Block {
    int component, x, y;
  };

  bool plan() {
    blocks_ = 0;
    for (int i = 0; i < jpeg_->components; i++) {
      const Component& c = jpeg_->component[i];
      if (!dc_[i].build(jpeg_->dc[c.dc], i ? DC_CHROMA : DC_LUMA)) return false;
      if (!ac_[i].build(jpeg_->ac[c.ac], i ? AC_CHROMA : AC_LUMA)) return false;
      for (int y = 0; y < c.v; y++)
        for (int x = 0; x < c.h; x++) block_[blocks_++] = {i, x, y};
      // How many blocks of the last MCU of a row, and of a column, are of the image.
      last_width_[i] = count_last(jpeg_->width, c.h, jpeg_->h_max);
      last_height_[i] = count_last(jpeg_->height, c.v, jpeg_->v_max);
    }
    return true;
  }

  static int count_last(int pixels, int factor, int most) {
    const int blocks = int((int64_t(pixels) * factor + 8 * most - 1) / (8 * most));
    return (blocks - 1) % factor + 1;
  }

  // The tokens of all blocks, as the copy will have them: differences of DC begin anew with each of its intervals, and
  // blocks beyond the image say nothing.
  bool read(const uint8_t* data, size_t size) {
    const uint8_t *at = data + jpeg_->entropy, *const end = data + size;
    uint8_t* const bytes = bytes_.room(size_t(end - at) + 64 + BIT_SLACK);
    const uint8_t* bytes_end = bytes;
    Bits bits{};
    int left = 0, number = 0, predicted[3] = {}, last[3] = {};  // of the source, of the copy
    size_t count = 0;
    starts_.clear(), blocks_at_.clear();
    hash_ = 0;
    for (int row = 0; row < jpeg_->mcu_rows; row++) {
      for (int column = 0; column < jpeg_->mcus_per_row; column++, left--) {
        if (left == 0) {
          if (row + column) {
            if (!ended(bits, bytes_end) || end - at < 2 || at[1] != 0xD0 + (number++ & 7)) return false;
            at += 2;
          }
          left = jpeg_->restart ? jpeg_->restart : jpeg_->mcus_per_row * jpeg_->mcu_rows;
          uint8_t* out = bytes;
          at = unstuff(at, end, out);
          bytes_end = out;
          bits.open(bytes, bytes_end);
          std::fill_n(predicted, 3, 0);
        }
        if (column % restart_ == 0) {
          starts_.push_back(count);
          std::fill_n(last, 3, 0);
        }
        if (tokens_.size() - count < kMcuTokens) {
          if (count > kMostTokens) return false;
          tokens_.resize(std::max(2 * tokens_.size(), size_t(1) << 16));
        }
        Token* out = tokens_.data() + count;
        const bool at_edge = row == jpeg_->mcu_rows - 1 || column == jpeg_->mcus_per_row - 1;
        for (int i = 0; i < blocks_; i++) {
          const int component = block_[i].component;
          Token* const begin = out;
          blocks_at_.push_back(uint32_t(out - tokens_.data()));
          Token dc;
          if (!read_dc(bits, dc_[component], dc) || !read_ac(bits, ac_[component], ++out)) return false;
          const int value = predicted[component] + value_of(extra_of(dc), symbol_of(dc));
          if (value != int16_t(value)) return false;
          predicted[component] = value;
          int difference = value - last[component];
          if (at_edge && is_beyond(block_[i], row, column)) {
            difference = 0;
            out = begin + 1;
            *out++ = make_token(component ? AC_CHROMA : AC_LUMA, 0, 0);
          }
          const int length = size_of(difference);
          if (length > 11) return false;
          *begin = make_token(component ? DC_CHROMA : DC_LUMA, length, extra_for(difference, length));
          mix(last[component] += difference);
        }
        if (bits.overrun()) return false;
        count = size_t(out - tokens_.data());
      }
    }
    starts_.push_back(count);
    return ended(bits, bytes_end) && end - at >= 2 && at[1] == 0xD9;
  }

  bool is_beyond(const Block& block, int row, int column) const {
    return (column == jpeg_->mcus_per_row - 1 && block.x >= last_width_[block.component]) ||
           (row == jpeg_->mcu_rows - 1 && block.y >= last_height_[block.component]);
  }

  // Whether less than a byte is left.
  static bool ended(const Bits& bits, const uint8_t* end) {
    const ptrdiff_t left = 8 * (end - bits.at) + bits.count;
    return left >= 0 && left < 8;
  }

  static bool read_dc(Bits& bits, const SymbolTable& table, Token& token) {
    bits.refill();
    const uint32_t entry = table[bits.top];
    if (SymbolTable::is_long(entry)) return table.look_up(entry, bits, token);
    bits.drop(SymbolTable::length_of(entry));
    token = table.token_of(entry);
    return true;
  }

  // The tokens of a block after its DC; runs of zeros at its end are left to the symbol that ends it.
  static bool read_ac(Bits& bits, const SymbolTable& table, Token*& out) {
    Token* at = out;
    uint32_t k = 0;
    while (k < BLOCK_ENDS) {
      bits.refill();
      // A token of the table takes at most 11 bits, so a refill serves for four.
      uint32_t entry = 0;
      for (int time = 0; time < 4 && k < BLOCK_ENDS; time++) {
        entry = table[bits.top];
        if (__builtin_expect(SymbolTable::is_long(entry), 0)) break;
        bits.drop(SymbolTable::length_of(entry));
        k += SymbolTable::advance_of(entry);
        *at++ = table.token_of(entry);
      }
      if (__builtin_expect(SymbolTable::is_long(entry), 0)) {
        bits.refill();
        if (!table.look_up(entry, bits, *at)) return false;
        k += SymbolTable::advance(symbol_of(*at++));
      }
    }
    const int last = symbol_of(at[-1]);
    if (last == 0 || last == ZEROS_16) {
      const Token ends = make_token(int(place_of(at[-1]) >> 8), 0, 0);
      if (last == ZEROS_16 && k != BLOCK_ENDS) return false;
      for (at--; at > out && symbol_of(at[-1]) == ZEROS_16; at--) continue;
      *at++ = ends;
    } else if (k != BLOCK_ENDS) {
      return false;
    }
    out = at;
    return true;
  }

  // Of the DC values in their order.
  void mix(int value) { hash_ = (hash_ + uint64_t(uint32_t(value))) * 0x9E3779B97F4A7C15u; }

  bool choose_codes() {
    // Two counts for each, so that one does not wait for the last addition to the same.
    static_assert(SYMBOLS == 1024);
    uint32_t counts[2][SYMBOLS] = {};
    const Token *at = tokens_.data(), *const end = at + starts_.back();
    for (; end - at >= 2; at += 2) counts[0][place_of(at[0])]++, counts[1][place_of(at[1])]++;
    if (at < end) counts[0][place_of(*at)]++;
    size_t total = 0;
    std::fill_n(code_, SYMBOLS, 0);
    for (int table = 0; table < (jpeg_->components == 1 ? 2 : 4); table++) {
      uint32_t* const of = counts[0] + 256 * table;
      for (int i = 0; i < 256; i++) of[i] += counts[1][256 * table + i];
      if (!make_optimal(of, new_[table]) || !list_codes(new_[table], table, code_)) return false;
      for (int i = 0; i < 256; i++) total += size_t(of[i]) * (code_[256 * table + i] & 31);
    }
    bytes_needed_ = total / 8 + 1;
    return true;
  }

  // The code words of a table, each with room for the bits that follow it, and below them how long both are.
  static bool list_codes(const HuffmanSpec& spec, int table, uint32_t codes[SYMBOLS]) {
    uint32_t code = 0;
    for (int length = 1, at = 0; length <= 16; length++, code <<= 1)
      for (int i = 0; i < spec.bits[length - 1]; i++, at++, code++) {
        const int symbol = spec.values[at], size = symbol & 15;
        if (size > 11 || code + 1 >= 1u << length) return false;
        codes[256 * table + symbol] = code << (size + 5) | uint32_t(length + size);
      }
    return true;
  }

  size_t write(const uint8_t* data) {
    const size_t intervals = starts_.size() - 1;
    uint8_t* const begin = out_.room(jpeg_->entropy + HEADER_GROWTH + 2 * bytes_needed_ + 4 * intervals + 64);
    size_t longest = 0;
    for (size_t i = 0; i < intervals; i++) longest = std::max(longest, starts_[i + 1] - starts_[i]);
    plain_room_ = 8 * longest;
    uint8_t* const plain = plain_.room(plain_room_ + 64);
    uint8_t* out = write_header(*jpeg_, data, new_, restart_, begin);
    for (size_t i = 0; i < intervals; i++) {
      const uint8_t* const end = put_codes(tokens_.data() + starts_[i], tokens_.data() + starts_[i + 1], plain);
      out = stuff(plain, end, out);
      *out++ = 0xFF;
      *out++ = i + 1 < intervals ? uint8_t(0xD0 + (i & 7)) : 0xD9;
    }
    return size_t(out - begin);
  }

  // The codes of an interval, without stuffing; returns their end.
  uint8_t* put_codes(const Token* at, const Token* end, uint8_t* out) const {
    uint64_t held = 0;
    int count = 0;  // of its low bits
    const auto put = [&](Token token) {
      const uint32_t code = code_[place_of(token)];
      held = held << (code & 31) | (code >> 5) | extra_of(token);
      count += int(code & 31);
    };
    const auto store = [&] {
      const uint64_t word = __builtin_bswap64(held << (64 - count));
      std::memcpy(out, &word, 8);
      out += count >> 3;
      count &= 7;
    };
    // A code and its bits are at most 27.
    for (; end - at >= 2; at += 2) put(at[0]), put(at[1]), store();
    if (at < end) put(*at), store();
    if (count) *out++ = uint8_t(held << (8 - count) | 0xFFu >> count);
    return out;
  }

  // Copies with a zero after each 0xFF; may write 8 bytes beyond.
  static uint8_t* stuff(const uint8_t* at, const uint8_t* end, uint8_t* out) {
    while (at < end) {
      uint64_t word;
      std::memcpy(&word, at, 8);
      std::memcpy(out, &word, 8);
      // A byte of all ones is a zero byte of the complement.
      const uint64_t hits = (~word - 0x0101010101010101u) & word & 0x8080808080808080u;
      const ptrdiff_t clear = std::min<ptrdiff_t>(hits ? __builtin_ctzll(hits) / 8 : 8, end - at);
      at += clear, out += clear;
      if (hits && at < end) *out++ = *at++, *out++ = 0;
    }
    return out;
  }

  // Reads back what was written, as a decoder does, and compares it with the tokens, and the header with the source's.
  bool verify(const uint8_t* data, size_t size) {
    Jpeg copy;
    if (parse(out_.data(), size, copy) != Outcome::ok || !copy.direct || !same_header(copy, data)) return false;
    uint32_t codes[SYMBOLS] = {};
    for (int i = 0; i < copy.components; i++) {
      const Component& c = copy.component[i];
      if (!list_codes(copy.dc[c.dc], i ? DC_CHROMA : DC_LUMA, codes)) return false;
      if (!list_codes(copy.ac[c.ac], i ? AC_CHROMA : AC_LUMA, codes)) return false;
    }
    if (std::memcmp(codes, code_, sizeof codes)) return false;
    const uint8_t *at = out_.data() + copy.entropy, *const end = out_.data() + size;
    const size_t intervals = starts_.size() - 1;
    for (size_t i = 0; i < intervals; i++) {
      uint8_t* bytes_end = plain_.data();
      // The tokens' bits cannot leave it: they were in it when they were written.
      at = unstuff(at, at + std::min(size_t(end - at), plain_room_), bytes_end);
      if (end - at < 2 || *at != 0xFF || at[1] != (i + 1 < intervals ? 0xD0 + (i & 7) : 0xD9)) return false;
      at += 2;
      if (!same_bits(tokens_.data() + starts_[i], tokens_.data() + starts_[i + 1], bytes_end)) return false;
    }
    return at == end && same_dc();
  }

  bool same_header(const Jpeg& copy, const uint8_t* data) const {
    const Jpeg& source = *jpeg_;
    if (copy.width != source.width || copy.height != source.height || copy.components != source.components ||
        copy.ycc != source.ycc || copy.restart != restart_)
      return false;
    for (int i = 0; i < copy.components; i++) {
      const Component &a = copy.component[i], &b = source.component[i];
      if (a.id != b.id || a.h != b.h || a.v != b.v ||
          std::memcmp(copy.quant[a.quant], source.quant[b.quant], sizeof copy.quant[0]))
        return false;
    }
    return same_kept_segments(copy, out_.data(), source, data);
  }

  // Whether the bits of an interval are the code words of these tokens: then a decoder finds nothing else in them.
  bool same_bits(const Token* at, const Token* end, const uint8_t* bytes_end) const {
    const uint8_t* const bytes = plain_.data();
    uint64_t place = 0, difference = 0;  // in bits
    for (; at < end; at++) {
      const uint32_t code = code_[place_of(*at)], length = code & 31;
      uint64_t word;
      std::memcpy(&word, bytes + (place >> 3), 8);
      difference |= (__builtin_bswap64(word) << (place & 7) >> (64 - length)) ^ (code >> 5 | extra_of(*at));
      place += length;
    }
    return !difference && (place + 7) / 8 == uint64_t(bytes_end - bytes);
  }

  // Whether the differences of DC add up to the source's values.
  bool same_dc() {
    const uint64_t expected = hash_;
    hash_ = 0;
    int last[3] = {};
    for (size_t i = 0, mcu = 0; i < blocks_at_.size(); mcu++) {
      if (mcu % size_t(restart_) == 0) {
        std::fill_n(last, 3, 0);
        if (starts_[mcu / size_t(restart_)] != blocks_at_[i]) return false;
      }
      for (int in_mcu = 0; in_mcu < blocks_; in_mcu++, i++) {
        const Token dc = tokens_[blocks_at_[i]];
        mix(last[block_[in_mcu].component] += value_of(extra_of(dc), symbol_of(dc)));
      }
    }
    return hash_ == expected;
  }

  const Jpeg* jpeg_;
  int restart_;
  Block block_[10];
  int blocks_, last_width_[3], last_height_[3];
  SymbolTable dc_[3], ac_[3];
  HuffmanSpec new_[TOKEN_TABLES];

  Buffer<uint8_t> bytes_, plain_, out_;  // the source's bits, those of an interval of the copy, the copy
  std::vector<Token> tokens_;
  std::vector<size_t> starts_;       // of each interval of the copy, and the end
  std::vector<uint32_t> blocks_at_;  // the first token of each block
  uint32_t code_[SYMBOLS] = {};
  size_t bytes_needed_, plain_room_;
  uint64_t hash_;
};

}  // namespace

std::unique_ptr<Transcoder> make_transcoder() { return std::make_unique<Rewriter>(); }

}  // namespace HW_ISA
}  // namespace headway
