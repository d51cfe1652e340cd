// Our own decoder of baseline JPEG: a region, in strips of one MCU row, straight into a sink of rows.
//
// Where the file has restart markers, only the intervals that the region needs are decoded: their rows and their
// columns. Two rows of MCUs are decoded side by side, symbol by symbol: each waits for its own table lookups, and the
// processor fills one's waiting with the other's work. Without markers everything before the region is entropy-decoded
// too, and nothing after it. Pixels are those of libjpeg's full decode (islow, fancy upsampling), bit for bit. Whatever
// is not in order is declined, so that libjpeg's own recovery says what becomes of it.
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "buffer.h"
#include "colour.h"
#include "huffman.h"
#include "idct.h"
#include "jpeg.h"
#include "reduced.h"

namespace headway {
namespace HW_ISA {

class Baseline final {
 public:
  // Gives rows region.y0 to region.y1 of the image at 1/scale (1, 2, 4 or 8) to the sink. The file is `direct`.
  Outcome decode(const Jpeg& jpeg, const uint8_t* data, size_t size, int scale, Region region, RowSink& sink,
                 hw_stats& stats) {
    jpeg_ = &jpeg;
    side_ = 8 / scale;
    region_ = region;
    next_row_ = region.y0;
    if (!tables() || !plan()) return Outcome::declined;
    open(data, size);
    if (!index()) return Outcome::declined;
    for (int row = first_row_; row <= last_row_;) {
      const int rows = paired_ && row < last_row_ ? 2 : 1;
      if (!(rows == 2 ? decode_two_rows(row) : decode_row(row))) return Outcome::declined;
      for (const int end = row + rows; row < end; row++) {
        extend_edges(row);
        emit(row, sink);
      }
    }
    if (!ends_well()) return Outcome::declined;
    stats.bytes_used += used_;
    stats.pixels += uint64_t(last_column_ - first_column_ + 1) * uint64_t(last_row_ - first_row_ + 1) *
                    uint64_t(mcu_width_ * mcu_height_);
    return Outcome::ok;
  }

 private:
  static constexpr int BLOCKS = 10;  // of an MCU, at most
  static constexpr size_t PAD = 64;  // bytes beside a row of a plane

  struct Plane {
    uint8_t* pixels;  // of a ring of four strips of `rows` rows: two in the making, and what the one before left
    size_t stride;
    int rows, columns;  // of a strip
    int width, height;  // of the whole component, in samples
    int origin;         // sample of the component at column 0
    int h, v;
    int side;  // of a block
    uint8_t* row(int y) const { return pixels + size_t(y & (4 * rows - 1)) * stride; }
  };

  // A block of the MCU: its plane, its place there, its tables.
  struct Block {
    int plane, x, y;
    const HuffmanTable* dc;
    const HuffmanTable* ac;
    int dc_limit;  // beyond it the dequantised coefficient leaves what libjpeg's 16-bit arithmetic can hold
  };

  // Blocks that wait for their inverse DCT, in the layout of a group: [8 rows][LANES][8 columns].
  struct Group {
    alignas(64) int16_t memory[64 * LANES + 64] = {};  // and a place for what is not looked at
    uint8_t* out[LANES];
    size_t stride[LANES];
    int side[LANES];
    unsigned lanes = 0;  // that hold a block
    int pattern = 0;     // of quantisation tables
  };

  // One restart interval, or what is left of the file where there are none.
  struct Stream {
    Bits bits;
    int predicted[3];
    int interval, mcu;      // its number; the MCU that comes next
    Buffer<uint8_t> bytes;  // its own, without stuffing
    Group group;
  };

  bool tables() {
    for (int i = 0; i < jpeg_->components; i++) {
      const Component& c = jpeg_->component[i];
      if (!dc_[c.dc].build(jpeg_->dc[c.dc], false) || !ac_[c.ac].build(jpeg_->ac[c.ac], true)) return false;
    }
    return true;
  }

  // Which MCUs the region needs, the strips' memory, and the order of blocks and quantisation tables.
  bool plan() {
    const Jpeg& jpeg = *jpeg_;
    mcu_width_ = side_ * jpeg.h_max, mcu_height_ = side_ * jpeg.v_max;
    halved_x_ = jpeg.components == 3 && jpeg.component[1].h < jpeg.h_max;
    halved_y_ = jpeg.components == 3 && jpeg.component[1].v < jpeg.v_max;
    // Chroma that is halved both ways is transformed to twice the size in a smaller decode, as libjpeg does: that keeps
    // what the file has of it.
    const int chroma_side = halved_x_ && halved_y_ && side_ < 8 ? 2 * side_ : side_;
    if (chroma_side != side_) halved_x_ = halved_y_ = false;
    // A chroma sample covers two pixels and is mixed with its neighbours.
    int left = region_.x0, right = region_.x1 - 1, top = region_.y0, bottom = region_.y1 - 1;
    if (halved_x_) left = (left / 2 - 1) * 2, right = (right / 2 + 1) * 2;
    if (halved_y_) top = (top / 2 - 1) * 2, bottom = (bottom / 2 + 1) * 2;
    first_column_ = std::max(left, 0) / mcu_width_;
    first_row_ = std::max(top, 0) / mcu_height_;
    last_column_ = std::min(right / mcu_width_, jpeg.mcus_per_row - 1);
    last_row_ = std::min(bottom / mcu_height_, jpeg.mcu_rows - 1);
    if (region_.x0 < 0 || region_.y0 < 0 || first_column_ > last_column_ || first_row_ > last_row_) return false;
    int columns = last_column_ - first_column_ + 1;
    blocks_ = 0;
    size_t total = 0;
    for (int i = 0; i < jpeg.components; i++) {
      const Component& c = jpeg.component[i];
      Plane& p = plane_[i];
      p.h = c.h, p.v = c.v, p.side = i ? chroma_side : side_;
      p.rows = p.side * c.v, p.columns = columns * p.side * c.h;
      p.stride = (size_t(p.columns) + 3 * PAD) & ~size_t(63);
      p.origin = first_column_ * p.side * c.h;
      p.width = samples(jpeg.width, c.h * p.side, jpeg.h_max);
      p.height = samples(jpeg.height, c.v * p.side, jpeg.v_max);
      total += p.stride * size_t(4 * p.rows);
      const int dc_limit = 8191 / std::max<int>(1, jpeg.quant[c.quant][0]);
      for (int y = 0; y < c.v; y++)
        for (int x = 0; x < c.h; x++) block_[blocks_++] = {i, x, y, &dc_[c.dc], &ac_[c.ac], dc_limit};
    }
    uint8_t* memory = planes_.room(total + PAD);
    for (int i = 0; i < jpeg.components; i++) {
      plane_[i].pixels = memory + PAD;
      memory += plane_[i].stride * size_t(4 * plane_[i].rows);
    }
    chroma_[0] = upsampled_.room(2 * (size_t(2 * plane_[jpeg.components - 1].columns) + 4 * PAD));
    chroma_[1] = chroma_[0] + 2 * plane_[jpeg.components - 1].columns + 4 * int(PAD);
    for (int group = 0; group < blocks_; group++)  // the pattern of components in the lanes repeats at the latest then
      for (int lane = 0; lane < LANES; lane++) {
        int component = block_[(group * LANES + lane) % blocks_].plane;
        const uint16_t* quant = jpeg.quant[jpeg.component[component].quant];
        for (int k = 0; k < 64; k++) quant_[group][zigzag(k) + 8 * lane] = int16_t(quant[k]);
      }
    for (Stream& stream : stream_) {  // a file that was declined left coefficients there
      stream.group.lanes = 0, stream.group.pattern = 0;
      std::fill_n(stream.group.memory, 64 * LANES, int16_t(0));
    }
    return true;
  }

  // Samples of a component that has `samples` of them in an MCU of 8 `most` pixels.
  static int samples(int pixels, int samples, int most) {
    return int((int64_t(pixels) * samples + 8 * most - 1) / (8 * most));
  }

  void open(const uint8_t* data, size_t size) {
    begin_ = data + jpeg_->entropy;
    end_ = data + size;
    const size_t room = size_t(end_ - begin_) + 64 + BIT_SLACK;
    for (Stream& stream : stream_) stream.bytes.room(room);
    const int per_row = jpeg_->mcus_per_row;
    interval_ = jpeg_->restart ? jpeg_->restart : per_row * jpeg_->mcu_rows;
    // Then the row below begins with an interval too, and needs the same columns of it.
    paired_ = per_row % interval_ == 0;
    after_ = begin_;
    used_ = 0;
  }

  // Where each interval begins, as far as the region needs to know.
  bool index() {
    const int last = (last_row_ * jpeg_->mcus_per_row + last_column_) / interval_;
    starts_.clear();
    const uint8_t* at = begin_;
    for (int i = 0;; i++) {
      starts_.push_back(at);
      if (i == last) return true;
      at = find_marker(at, end_);
      if (end_ - at < 2 || at[1] != 0xD0 + (i & 7)) return false;
      at += 2;
    }
  }

  // Whether the file has its end marker, and before it nothing but what was not needed. One that is cut off is bad
  // whatever the region is.
  bool ends_well() const {
    const uint8_t* at = find_marker(after_, end_);
    while (end_ - at >= 2 && at[1] >= 0xD0 && at[1] <= 0xD7) at = find_marker(at + 2, end_);
    return end_ - at >= 2 && at[1] == 0xD9;
  }

  void open(Stream& stream, int interval) {
    const uint8_t* begin = starts_[size_t(interval)];
    uint8_t* out = stream.bytes.data();
    const uint8_t* end = unstuff(begin, end_, out);
    used_ += uint64_t(end - begin);
    after_ = std::max(after_, end);
    stream.bits.open(stream.bytes.data(), out);
    stream.interval = interval;
    stream.mcu = interval * interval_;
    std::fill_n(stream.predicted, 3, 0);
  }

  // The MCUs of a row that the region needs. Its last interval may reach into the next row.
  bool decode_row(int row) {
    Stream& stream = stream_[0];
    const int begin = row * jpeg_->mcus_per_row + first_column_, end = begin + last_column_ - first_column_ + 1;
    if (row == first_row_ || paired_) stream.interval = -1;
    for (int mcu = begin; mcu < end; mcu = stream.mcu) {
      if (mcu / interval_ != stream.interval) open(stream, mcu / interval_);
      if (!decode_mcus<false>(stream, mcu)) return false;
      if (!decode_mcus<true>(stream, std::min((stream.interval + 1) * interval_, end))) return false;
    }
    flush(stream.group);
    return true;
  }

  bool decode_two_rows(int row) {
    Stream &a = stream_[0], &b = stream_[1];
    const int per_row = jpeg_->mcus_per_row;
    const int begin = row * per_row + first_column_, end = begin + last_column_ - first_column_ + 1;
    for (int mcu = begin; mcu < end; mcu = a.mcu) {
      open(a, mcu / interval_);
      open(b, (mcu + per_row) / interval_);
      if (!decode_mcus<false>(a, b, mcu)) return false;
      if (!decode_mcus<true>(a, b, std::min((a.interval + 1) * interval_, end))) return false;
    }
    flush(a.group);
    flush(b.group);
    return true;
  }

  // MCUs of the open interval up to `end`; without STORE they are only passed over.
  template <bool STORE> bool decode_mcus(Stream& stream, int end) {
    for (; stream.mcu < end; stream.mcu++) {
      for (int i = 0; i < blocks_; i++) {
        if (!decode_block<STORE>(stream, block_[i], place(stream.group))) return false;
        if (STORE) add(stream.group, block_[i], stream.mcu);
      }
      if (stream.bits.overrun()) return false;
    }
    return true;
  }

  // As many of b as of a.
  template <bool STORE> bool decode_mcus(Stream& a, Stream& b, int end) {
    for (; a.mcu < end; a.mcu++, b.mcu++) {
      for (int i = 0; i < blocks_; i++) {
        if (!decode_blocks<STORE>(a, b, block_[i], place(a.group), place(b.group))) return false;
        if (STORE) add(a.group, block_[i], a.mcu), add(b.group, block_[i], b.mcu);
      }
      if (a.bits.overrun() || b.bits.overrun()) return false;
    }
    return true;
  }

  static int16_t* place(Group& group) { return group.memory + 8 * group.lanes; }

  // Notes where the block goes whose coefficients are in the group now.
  void add(Group& group, const Block& block, int mcu) {
    const Plane& plane = plane_[block.plane];
    const int row = mcu / jpeg_->mcus_per_row, column = mcu - row * jpeg_->mcus_per_row - first_column_;
    group.out[group.lanes] =
        plane.row((row * plane.v + block.y) * plane.side) + (column * plane.h + block.x) * plane.side;
    group.stride[group.lanes] = plane.stride;
    group.side[group.lanes] = plane.side;
    if (++group.lanes == LANES) flush(group);
  }

  // One block's coefficients, in the layout of a group; without STORE it is only passed over.
  template <bool STORE> bool decode_block(Stream& stream, const Block& block, int16_t* out) {
    Bits bits = stream.bits;
    if (!decode_dc<STORE>(stream, bits, block, out)) return false;
    uint32_t k = 0;
    const bool good = decode_ac<STORE>(*block.ac, bits, k, out);
    stream.bits = bits;
    return good;
  }

  template <bool STORE>
  bool decode_blocks(Stream& a, Stream& b, const Block& block, int16_t* out_a, int16_t* out_b) {
    Bits x = a.bits, y = b.bits;
    if (!decode_dc<STORE>(a, x, block, out_a) || !decode_dc<STORE>(b, y, block, out_b)) return false;
    const HuffmanTable& ac = *block.ac;
    uint32_t k = 0, l = 0;
    // Both below 63: the difference is negative.
    const auto both_go_on = [&] { return int((k - 63) & (l - 63)) < 0; };
    while (both_go_on()) {
      x.refill(), y.refill();
      for (int time = 0; time < 2 && both_go_on(); time++) {  // a refill serves for two symbols
        const Entry e = ac[x.top], f = ac[y.top];
        if (__builtin_expect((e | f) & LONG, 0)) {
          if (!symbol<STORE>(ac, x, k, out_a) || !symbol<STORE>(ac, y, l, out_b)) return false;
          break;
        }
        x.drop(int(e & 63)), y.drop(int(f & 63));
        k += e >> 8 & 255, l += f >> 8 & 255;
        if (STORE) out_a[zigzag(k)] = int16_t(e >> 16), out_b[zigzag(l)] = int16_t(f >> 16);
      }
    }
    const bool good = decode_ac<STORE>(ac, x, k, out_a) && decode_ac<STORE>(ac, y, l, out_b);
    a.bits = x, b.bits = y;
    return good;
  }

  template <bool STORE> static bool decode_dc(Stream& stream, Bits& bits, const Block& block, int16_t* out) {
    bits.refill();
    const Entry entry = (*block.dc)[bits.top];
    int value = int(entry) >> 16;
    if (__builtin_expect(entry & LONG, 0)) {
      int size;
      if (!long_symbol(*block.dc, entry, bits, size)) return false;
      value = size & 15 ? long_value(bits, size & 15) : 0;
    } else {
      bits.drop(int(entry & 63));
    }
    const int dc = stream.predicted[block.plane] += value;
    if (STORE) out[0] = int16_t(dc);
    return dc >= -block.dc_limit && dc <= block.dc_limit;
  }

  // The symbols from zigzag index k on; false where the code is impossible or a run goes too far.
  template <bool STORE> static bool decode_ac(const HuffmanTable& ac, Bits& bits, uint32_t& k, int16_t* out) {
    while (k < 63) {
      bits.refill();
      // A symbol of the table takes at most 11 bits, so a refill serves for two, and for a long one after the first.
      const Entry entry = ac[bits.top];
      if (__builtin_expect(!(entry & LONG), 1)) {
        bits.drop(int(entry & 63));
        k += entry >> 8 & 255;
        if (STORE) out[zigzag(k)] = int16_t(entry >> 16);
        if (k >= 63) break;
      }
      if (!symbol<STORE>(ac, bits, k, out)) return false;
    }
    return k == 63 || k >= END_OF_BLOCK;
  }

  // One symbol of any length; 31 bits are there.
  template <bool STORE> static bool symbol(const HuffmanTable& ac, Bits& bits, uint32_t& k, int16_t* out) {
    const Entry entry = ac[bits.top];
    int value = int(entry) >> 16;
    if (__builtin_expect(!(entry & LONG), 1)) {
      bits.drop(int(entry & 63));
      k += entry >> 8 & 255;
    } else {
      int symbol;
      if (!long_symbol(ac, entry, bits, symbol)) return false;
      const int size = symbol & 15;
      k += uint32_t(HuffmanTable::advance(symbol >> 4, size));
      value = size ? long_value(bits, size) : 0;
    }
    if (STORE) out[zigzag(k)] = int16_t(value);
    return true;
  }

  // A symbol whose coefficient, or whose code, does not fit into the lookup: at most 16 bits of code and 15 of value.
  static bool long_symbol(const HuffmanTable& table, Entry entry, Bits& bits, int& symbol) {
    int length = int(entry & 63);
    if (length) {
      int advance = int(entry >> 8 & 255);
      symbol = int(entry >> 16) | (advance == END_OF_BLOCK ? 0 : advance - 1) << 4;
    } else {
      length = table.long_code(bits.top, symbol);
      if (length > 16) return false;
    }
    bits.drop(length);
    return true;
  }

  static int long_value(Bits& bits, int size) {
    int value = extend(uint32_t(bits.top >> (64 - size)), size);
    bits.drop(size);
    return value;
  }

  // Pixels of the blocks that have gathered.
  void flush(Group& group) {
    if (!group.lanes) return;
    alignas(64) uint8_t unused[64];
    const int16_t* quant = quant_[group.pattern];
    bool any = false;  // blocks of 8 x 8 pixels; in a smaller decode not all have one size
    for (unsigned lane = 0; lane < LANES; lane++) {
      const bool whole = lane < group.lanes && group.side[lane] == 8;
      any = any || whole;
      if (lane < group.lanes && !whole)
        reduced_idct(group.side[lane], group.memory + 8 * lane, quant + 8 * lane, group.out[lane], group.stride[lane]);
      if (!whole) group.out[lane] = unused, group.stride[lane] = 8;
    }
    if (any) idct_8x8(group.memory, quant, group.out, group.stride);
    std::fill_n(group.memory, 64 * LANES, int16_t(0));
    group.pattern = group.lanes == LANES ? (group.pattern + 1) % blocks_ : 0;
    group.lanes = 0;
  }

  // Repeats the image's first and last chroma sample of each row, which is what interpolation finds beyond them.
  void extend_edges(int row) {
    if (!halved_x_) return;
    for (int i = 1; i < 3; i++) {
      const Plane& p = plane_[i];
      int last = p.width - 1 - p.origin;
      for (int y = 0; y < p.rows; y++) {
        uint8_t* line = p.row(row * p.rows + y);
        if (first_column_ == 0) line[-1] = line[0];
        if (last < p.columns) line[last + 1] = line[last];
      }
    }
  }

  // Hands on the rows that can be made now: the last one of a strip waits for chroma of the next.
  void emit(int row, RowSink& sink) {
    int limit = row == last_row_ ? region_.y1 : std::min(region_.y1, (row + 1) * mcu_height_ - int(halved_y_));
    const Plane& luma = plane_[0];
    int n = region_.x1 - region_.x0;
    for (; next_row_ < limit; next_row_++) {
      const uint8_t* y = luma.row(next_row_) + (region_.x0 - luma.origin);
      uint8_t* out = sink.row();
      if (jpeg_->components == 1) {
        std::memcpy(out, y, size_t(n));
      } else {
        ycc_to_rgbx(y, chroma_row(1), chroma_row(2), out, n);
      }
      sink.push();
    }
  }

  // Chroma of row next_row_, from column region_.x0 on.
  const uint8_t* chroma_row(int i) {
    const Plane& p = plane_[i];
    int begin = (halved_x_ ? region_.x0 / 2 : region_.x0) - p.origin;
    int count = halved_x_ ? (region_.x1 + 1) / 2 - region_.x0 / 2 : region_.x1 - region_.x0;
    if (!halved_x_ && !halved_y_) return p.row(next_row_) + begin;
    uint8_t* out = chroma_[i - 1];
    int at = halved_y_ ? next_row_ / 2 : next_row_;
    const uint8_t* near = p.row(at) + begin;
    if (!halved_y_) {
      upsample_h2v1(near, out, count);
      return out + (region_.x0 & 1);
    }
    bool below = next_row_ & 1;
    int other = std::min(std::max(at + (below ? 1 : -1), 0), p.height - 1);
    const uint8_t* far = p.row(other) + begin;
    if (!halved_x_) {
      upsample_h1v2(near, far, out, count, below ? 2 : 1);
      return out;
    }
    upsample_h2v2(near, far, out, count);
    return out + (region_.x0 & 1);
  }

  // Place of zigzag index k in the layout of a group: rows of all lanes. From 64 on (end of block, or a run too long):
  // a place that is not looked at.
  static int zigzag(uint32_t k) {
    static constexpr uint8_t natural[64] = {0,  1,  8,  16, 9,  2,  3,  10, 17, 24, 32, 25, 18, 11, 4,  5,
                                            12, 19, 26, 33, 40, 48, 41, 34, 27, 20, 13, 6,  7,  14, 21, 28,
                                            35, 42, 49, 56, 57, 50, 43, 36, 29, 22, 15, 23, 30, 37, 44, 51,
                                            58, 59, 52, 45, 38, 31, 39, 46, 53, 60, 61, 54, 47, 55, 62, 63};
    struct Table {
      uint16_t at[256];
      constexpr Table() : at() {
        for (int k = 0; k < 256; k++)
          at[k] = uint16_t(k < 64 ? natural[k] / 8 * 8 * LANES + natural[k] % 8 : 64 * LANES);
      }
    };
    static constexpr Table table;
    return table.at[k];
  }

  const Jpeg* jpeg_;
  int side_;  // of a block in pixels: 8, 4, 2 or 1
  Region region_;
  int next_row_;
  int mcu_width_, mcu_height_;
  bool halved_x_, halved_y_;
  int first_column_, last_column_, first_row_, last_row_;  // MCUs
  Plane plane_[3];
  Block block_[BLOCKS];
  int blocks_;
  HuffmanTable dc_[4], ac_[4];

  const uint8_t *begin_, *end_, *after_;  // the scan, the file's end, and how far the scan was read
  std::vector<const uint8_t*> starts_;
  int interval_;  // MCUs
  bool paired_;
  Stream stream_[2];
  uint64_t used_;

  alignas(64) int16_t quant_[BLOCKS][64 * LANES];

  Buffer<uint8_t> planes_, upsampled_;
  uint8_t* chroma_[2];
};

}  // namespace HW_ISA
}  // namespace headway
