// The C ABI of batches: arguments are checked, images are shared out over the pool, outcomes are written down.
#include <sys/types.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <vector>

#include <jconfig.h>

#include "crc32c.h"
#include "jpeg.h"
#include "pool.h"

struct hw_pool {
  headway::Pool pool;
};

namespace headway {
namespace {

// Runs of images are handed out, so that tiny ones do not make the threads meet at the counter: about a fifth of a
// millisecond of decoding (150 MB/s), or ten microseconds of copying.
constexpr uint64_t kRunBytes = 1 << 15;

// Where the images of a batch go, and what became of them.
struct Output {
  uint8_t* out;
  int64_t stride;
  size_t image_bytes;
  uint8_t* status;
};

// Shares out n images over the threads of a pool; work(worker, i, out, sums) does one of them.
template <class Work>
class Batch final : public Pool::Job {
 public:
  Batch(int64_t n, const uint64_t* length, uint64_t bytes_each, const Output& output, int threads, bool timed,
        Work work)
      : sums(timed ? size_t(threads) : 0),
        n_(n),
        run_(std::clamp<int64_t>(int64_t(kRunBytes / std::max<uint64_t>(bytes_each, 1)), 1,
                                 std::max<int64_t>(1, n / (8 * threads)))),
        output_(output),
        work_(work) {
    if (!length || run_ > 1) return;  // images are tiny: the last one ends with the others
    // The longest first, so that no thread begins one when the others are done.
    order_.resize(size_t(n));
    for (size_t i = 0; i < order_.size(); i++) order_[i] = {length[i], uint32_t(i)};
    std::sort(order_.begin(), order_.end(), [](const Entry& a, const Entry& b) {
      return a.length != b.length ? a.length > b.length : a.image < b.image;
    });
  }

  void take(Worker& worker, int thread) override {
    hw_stats mine{};
    hw_stats* timed = sums.empty() ? nullptr : &mine;
    int64_t failed = 0;
    for (int64_t first; (first = next_.fetch_add(run_, std::memory_order_relaxed)) < n_;)
      for (int64_t i = first; i < std::min(n_, first + run_); i++)
        failed += one(worker, order_.empty() ? i : order_[size_t(i)].image, timed);
    failed_ += failed;
    if (timed) sums[size_t(thread)] = mine;
  }

  int64_t failed() const { return failed_; }

  std::vector<hw_stats> sums;  // of each thread

 private:
  struct Entry {
    uint64_t length;
    uint32_t image;
  };

  bool one(Worker& worker, int64_t i, hw_stats* timed) {
    uint8_t* out = output_.out + i * output_.stride;
    Outcome outcome;
    try {
      outcome = work_(worker, i, out, timed);
    } catch (...) {  // memory that cannot be had
      outcome = Outcome::undecodable;
    }
    if (outcome == Outcome::declined) outcome = Outcome::foreign;  // by all: perhaps the reference knows it
    output_.status[i] = uint8_t(outcome);
    if (outcome == Outcome::ok) return false;
    std::memset(out, 0, output_.image_bytes);
    return true;
  }

  const int64_t n_, run_;
  const Output output_;
  const Work work_;
  std::vector<Entry> order_;
  std::atomic<int64_t> next_{0}, failed_{0};
};

template <class Work>
int64_t run(Pool& pool, int64_t n, const uint64_t* length, uint64_t bytes_each, const Output& output, hw_stats* stats,
            Work work) {
  if (stats) *stats = {};
  if (!n) return 0;
  try {
    Batch<Work> batch(n, length, bytes_each, output, pool.threads(), stats != nullptr, work);
    pool.run(batch);
    for (const hw_stats& part : batch.sums) {
      stats->ns_check += part.ns_check;
      stats->ns_decode += part.ns_decode;
      stats->ns_resample += part.ns_resample;
      stats->bytes += part.bytes;
      stats->bytes_used += part.bytes_used;
      stats->pixels += part.pixels;
      stats->direct += part.direct;
    }
    return batch.failed();
  } catch (...) {  // a forked child that cannot have its threads, or no memory for the order
    return -1;
  }
}

uint64_t mean(const uint64_t* values, int64_t n) {
  uint64_t total = 0;
  for (int64_t i = 0; i < n; i++) total += values[i];
  return n ? total / uint64_t(n) : 0;
}

const uint8_t* bytes_at(uint64_t address) { return reinterpret_cast<const uint8_t*>(address); }

// Sides above that of a JPEG are nobody's output.
bool output_is_good(int64_t n, uint32_t height, uint32_t width, uint32_t channels, int64_t stride, const uint8_t* out,
                    const uint8_t* status) {
  if (n < 0 || n > UINT32_MAX || (n && (!out || !status))) return false;
  if (height < 1 || width < 1 || height > UINT16_MAX || width > UINT16_MAX) return false;
  if ((channels != 1 && channels != 3) || stride < int64_t(height) * width * channels) return false;
  return !n || stride <= INT64_MAX / n;
}

// Whether every image that has bytes has an address.
bool no_null(int64_t n, const uint64_t* address, const uint64_t* length) {
  for (int64_t i = 0; i < n; i++)
    if (!address[i] && length[i]) return false;
  return true;
}

bool items_are_good(int64_t n, const hw_items& items) {
  if (n < 0 || (n && !(items.address && items.length && items.box))) return false;
  if (!no_null(n, items.address, items.length)) return false;
  for (int64_t i = 0; items.kind && i < n; i++)
    if (items.kind[i] > HW_RAW_PLANAR || (items.kind[i] != HW_JPEG && !items.shape)) return false;
  return true;
}

}  // namespace
}  // namespace headway

#define HW_TEXT_(token) #token
#define HW_TEXT(token) HW_TEXT_(token)

extern "C" {

uint32_t hw_abi(void) { return HW_ABI; }

const char* hw_features(void) {
  thread_local char text[64];
  std::snprintf(text, sizeof text, "%s, libjpeg-turbo " HW_TEXT(LIBJPEG_TURBO_VERSION), headway::isa());
  return text;
}

uint32_t hw_crc32c(const void* data, uint64_t length) { return data ? headway::crc32c(data, size_t(length)) : 0; }

hw_pool* hw_pool_create(int32_t threads, const int32_t* cpus, int32_t count) {
  if (threads < 1 || threads > headway::Pool::kMostThreads || count < 0 || (count && !cpus)) return nullptr;
  try {
    return new hw_pool{{threads, count ? std::vector<int>(cpus, cpus + count) : std::vector<int>()}};
  } catch (...) {
    return nullptr;
  }
}

void hw_pool_destroy(hw_pool* pool) { delete pool; }

int64_t hw_decode_batch(hw_pool* pool, int64_t n, const hw_items* items, const hw_spec* spec, uint8_t* out,
                        int64_t stride, uint8_t* status, hw_stats* stats) {
  using namespace headway;
  if (!pool || !items || !spec || spec->size != sizeof(hw_spec) || !items_are_good(n, *items) ||
      !output_is_good(n, spec->height, spec->width, spec->channels, stride, out, status))
    return -1;
  const Output output{out, stride, size_t(spec->height) * spec->width * spec->channels, status};
  const auto work = [&](Worker& worker, int64_t i, uint8_t* image, hw_stats* sums) {
    const bool check = items->crc && (!items->check || items->check[i]);
    const Item item{bytes_at(items->address[i]),
                    size_t(items->length[i]),
                    check ? items->crc + i : nullptr,
                    items->kind ? items->kind[i] : uint8_t(HW_JPEG),
                    items->shape ? items->shape + 3 * i : nullptr,
                    items->box + 4 * i,
                    Flip(items->flip ? items->flip[i] : uint8_t(0)),
                    image};
    return worker.work(item, *spec, sums);
  };
  return run(pool->pool, n, items->length, mean(items->length, n), output, stats, work);
}

int64_t hw_gather(hw_pool* pool, int64_t n, const uint64_t* address, const uint64_t* length, const uint32_t* crc,
                  const uint8_t* check, uint32_t kind, uint32_t height, uint32_t width, uint32_t channels,
                  const int16_t* shift, const uint8_t* flip, uint8_t* out, int64_t stride, uint8_t* status) {
  using namespace headway;
  if (!pool || (n && !(address && length)) || (kind != HW_RAW && kind != HW_RAW_PLANAR) ||
      !output_is_good(n, height, width, channels, stride, out, status) || !no_null(n, address, length))
    return -1;
  const Output output{out, stride, size_t(height) * width * channels, status};
  const uint32_t shape[3] = {height, width, channels};
  const auto work = [&](Worker& worker, int64_t i, uint8_t* image, hw_stats*) {
    const bool checked = crc && (!check || check[i]);
    const Item item{bytes_at(address[i]), size_t(length[i]), checked ? crc + i : nullptr, uint8_t(kind), shape,
                    nullptr, Flip(flip ? flip[i] : uint8_t(0)), image};
    return worker.copy(item, shift ? shift[2 * i] : 0, shift ? shift[2 * i + 1] : 0);
  };
  return run(pool->pool, n, nullptr, output.image_bytes, output, nullptr, work);
}

int32_t hw_probe(const void* data, uint64_t length, hw_info* info) {
  if (!data || !info) return HW_UNDECODABLE;
  return int32_t(headway::probe(static_cast<const uint8_t*>(data), size_t(length), *info));
}

}  // extern "C"
