// One step of an optimizer: parameters are cut into stretches that stay in a core's cache, and the threads take them in
// turn. A parameter of one stretch is done in one go. Of a larger one all stretches are summed first; its second pass
// begins with the stretch that was read last, and while the sums of the next parameter are begun, so that nobody waits.
#include <atomic>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "narrow.h"
#include "team.h"

namespace headway {
namespace {

constexpr int64_t kStretchBytes = 64 << 10;  // of each of two to four tensors

enum class Pass : uint8_t { both, first, second };  // a parameter without sums has the second only

struct Item {
  int32_t parameter;
  Pass pass;
  int64_t begin, count;
};

template <class T>
class Step final {
 public:
  Step(const hw_step& s, const Update<T>& update)
      : s_(s), narrow_(s, updates().bf16), rule_(make_rule<T>(s, update)), open_(size_t(s.n)) {
    std::vector<Item> waiting;
    for (int64_t i = 0; i < s.n; i++) {
      const int64_t stretches = stretches_of(i);
      const bool summed = rule_->prepare(i);
      if (stretches <= 1 || !summed) {
        for (int64_t k = 0; k < stretches; k++) items_.push_back(item(i, summed ? Pass::both : Pass::second, k));
        open_[size_t(i)].finished.store(true, std::memory_order_relaxed);
        continue;
      }
      open_[size_t(i)].sums = sums_.size();
      open_[size_t(i)].stretches = size_t(stretches);
      open_[size_t(i)].left.store(int32_t(stretches), std::memory_order_relaxed);
      sums_.resize(sums_.size() + size_t(stretches));
      for (int64_t k = 0; k < stretches; k++) {
        items_.push_back(item(i, Pass::first, k));
        if (k + 1 == int64_t(s.threads)) flush(waiting);
      }
      flush(waiting);
      for (int64_t k = stretches; k-- > 0;)
        waiting.push_back(item(i, Pass::second, k));
    }
    flush(waiting);
  }

  void run() {
    share(s_.team, s_.threads, int64_t(items_.size()), [&](int64_t k, int64_t) { work(items_[size_t(k)]); });
    for (int64_t i = 0; s_.count && i < s_.n; i++) ++*reinterpret_cast<float*>(s_.count[i]);
  }

 private:
  static constexpr int64_t kMost = kStretchBytes / int64_t(sizeof(T));

  struct Sums {
    double of[2];
  };

  struct Open {
    std::atomic<int32_t> left{0};
    std::atomic<bool> finished{false};
    size_t sums = 0, stretches = 0;  // where they begin, and how many
  };

  void flush(std::vector<Item>& waiting) {
    items_.insert(items_.end(), waiting.begin(), waiting.end());
    waiting.clear();
  }

  int64_t stretches_of(int64_t i) const { return (s_.elements[i] + kMost - 1) / kMost; }

  Item item(int64_t i, Pass pass, int64_t k) const {
    const int64_t left = s_.elements[i] - k * kMost;
    return {int32_t(i), pass, k * kMost, left < kMost ? left : kMost};
  }

  void work(const Item& item) {
    const int64_t i = item.parameter;
    Open& open = open_[size_t(i)];
    double sums[2] = {0, 0};
    if (item.pass == Pass::both) {
      first(item, sums);
      rule_->finish(i, sums);
      second(item, true);
    } else if (item.pass == Pass::second) {
      while (!open.finished.load(std::memory_order_acquire)) pause();
      second(item, open.stretches > 0);
    } else {
      first(item, sums_[open.sums + size_t(item.begin / kMost)].of);
      if (open.left.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
      for (size_t k = 0; k < open.stretches; k++)  // always in the same order
        for (int j = 0; j < 2; j++) sums[j] += sums_[open.sums + k].of[j];
      rule_->finish(i, sums);
      open.finished.store(true, std::memory_order_release);
    }
  }

  void first(const Item& item, double sums[2]) {
    if constexpr (std::is_same_v<T, float>)
      if (s_.key) return narrow_.first(*rule_, item.parameter, item.begin, item.count, sums);
    rule_->first(item.parameter, stretch(item.parameter, item.begin), item.count, sums);
  }

  void second(const Item& item, bool after_first) {
    if constexpr (std::is_same_v<T, float>)
      if (s_.key) return narrow_.second(*rule_, item.parameter, item.begin, item.count);
    rule_->second(item.parameter, stretch(item.parameter, item.begin), item.count, after_first);
  }

  static void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }

  Stretch<T> stretch(int64_t i, int64_t begin) const {
    const auto at = [&](const uint64_t* address) {
      return address ? reinterpret_cast<T*>(address[i]) + begin : nullptr;
    };
    return {at(s_.weight), at(s_.grad), at(s_.first), at(s_.second)};
  }

  const hw_step& s_;
  const Narrow narrow_;
  std::unique_ptr<Rule<T>> rule_;
  std::vector<Open> open_;
  std::vector<Sums> sums_;
  std::vector<Item> items_;
};

template <class T>
int32_t optimize(const hw_step& s, const Update<T>& update) {
  try {
    Step<T>(s, update).run();
    return 0;
  } catch (...) {  // no memory
    return -1;
  }
}

// Whether every parameter's array lies somewhere, aligned, and ends where addresses do.
bool is_good(const hw_step& s, const uint64_t* address, uint64_t bytes, bool single) {
  for (int64_t i = 0; address && i < s.n; i++) {
    const uint64_t most = (uint64_t(PTRDIFF_MAX) - bytes) / bytes, count = single ? 1 : uint64_t(s.elements[i]);
    if (s.elements[i] < 0 || count > most || address[i] % bytes) return false;
    if (count && (!address[i] || address[i] > UINT64_MAX - count * bytes)) return false;
  }
  return true;
}

bool is_good(const hw_step& s) {
  if (s.size != sizeof(hw_step) || s.rule > HW_LBSGD || s.type > HW_BF16 || s.n < 0 || s.n > INT32_MAX) return false;
  if (!s.options || !s.lr || (s.n && !(s.weight && s.grad && s.elements))) return false;
  if (!s.n) return true;
  if (s.key ? s.type == HW_FP64 || !s.count : s.type == HW_BF16) return false;
  const uint64_t scalar = s.type == HW_FP64 ? sizeof(double) : sizeof(float);
  const uint64_t bytes = s.type == HW_BF16 ? sizeof(uint16_t) : scalar;
  for (const uint64_t* array : {s.weight, s.grad})
    if (!is_good(s, array, bytes, false)) return false;
  for (const uint64_t* array : {s.first, s.second})
    if (!is_good(s, array, s.key ? sizeof(uint16_t) : bytes, false)) return false;
  if (!is_good(s, s.norm, scalar, true) || !is_good(s, s.count, sizeof(float), true)) return false;
  if (s.rule != HW_LARS && s.rule != HW_SIGNUM && !s.count) return false;
  switch (s.rule) {
    case HW_LARS: return s.adapt;
    case HW_LAMB: return s.adapt && s.first && s.second;
    case HW_NOVOGRAD: return s.first && s.norm;
    case HW_TRANSITION: return s.first && s.second;
    case HW_LBSGD: return s.second || s.options[2] == 1;
    default: return s.first;
  }
}

}  // namespace
}  // namespace headway

extern "C" int32_t hw_optimize(const hw_step* step) {
  using namespace headway;
  if (!step || !is_good(*step)) return -1;
  if (step->found_inf && *step->found_inf != 0) return 0;
  return step->type == HW_FP64 ? optimize(*step, updates().fp64) : optimize(*step, updates().fp32);
}
